"""Digests: of files, while they are written or afterwards, and the one digest that names a draft.

hashlib, never the sha256sum command: OpenSSL's SHA-NI code is many times as fast as coreutils'.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from eagle3pack.checkpoint.files import INDEX_FILE, PICKLE_INDEX_FILE, list_files, weight_pickles
from eagle3pack.checkpoint.header import read_header
from eagle3pack.checkpoint.opening import opened
from eagle3pack.errors import ConflictError

BLOCK_BYTES = 1 << 20


def ignore_bytes(count: int) -> None:
    """The progress callback of those who do not watch."""


def sha256_file(path: Path, on_bytes: Callable[[int], None] = ignore_bytes) -> str:
    """Hash a file in bounded memory.

    Args:
        path: the file.
        on_bytes: told how many more bytes were hashed, once a block.

    Returns:
        The sha256 in hexadecimal.

    Raises:
        InputError: it cannot be read.
        PermissionDenied: it may not be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    position = 0
    with opened(path) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := os.preadv(descriptor, [buffer], position):
            digest.update(buffer[:count])
            position += count
            on_bytes(count)
    return digest.hexdigest()


def header_sha256(path: Path) -> str:
    """The sha256 of a safetensors file's first 8 + N bytes, which name every tensor but no value.

    Raises:
        InputError: the file breaks the format.
        PermissionDenied: it may not be read.
    """
    data_start = read_header(path).data_start
    with opened(path) as descriptor:
        return hashlib.sha256(os.pread(descriptor, data_start, 0)).hexdigest()


def hash_files(paths: Sequence[Path], on_bytes: Callable[[int], None] = ignore_bytes) -> dict[Path, str]:
    """Hash several files side by side, one thread a file: hashlib lets other threads run.

    Args:
        paths: the files.
        on_bytes: told how many more bytes were hashed, from any thread, one call at a time.

    Raises:
        InputError: one cannot be read.
        PermissionDenied: one may not be read.
    """
    lock = threading.Lock()
    stopped = threading.Event()

    def report(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError
        with lock:
            on_bytes(count)

    with ThreadPoolExecutor(max_workers=min(len(paths), os.cpu_count() or 1) or 1) as threads:
        try:
            return dict(zip(paths, threads.map(lambda path: sha256_file(path, report), paths), strict=True))
        finally:
            stopped.set()  # after an error or Ctrl-C, threads end within a block, not within a file


class FollowingSha256:
    """Hashes a file right behind its writer, in a thread of its own: the bytes are still in memory.

    Used as a context, so that an error in the writer ends the thread too.

    Args:
        descriptor: of the file, open for reading as well.
        on_bytes: told how many more bytes were hashed; called from the thread.
    """

    def __init__(self, descriptor: int, on_bytes: Callable[[int], None] = ignore_bytes) -> None:
        self._descriptor = descriptor
        self._on_bytes = on_bytes
        self._cancelled = False
        self._ends: SimpleQueue[int | None] = SimpleQueue()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sha256")
        self._result = self._threads.submit(self._follow)

    def __enter__(self) -> FollowingSha256:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancelled = True
        self._ends.put(None)
        self._threads.shutdown()

    def advance(self, end: int) -> None:
        """Say that all bytes before an offset are in the file."""
        self._ends.put(end)

    def finish(self) -> str:
        """Wait until all that was written is hashed, and return the sha256 in hexadecimal."""
        self._ends.put(None)
        return self._result.result()

    def _follow(self) -> str:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(BLOCK_BYTES))
        position = 0
        for end in iter(self._ends.get, None):
            while position < end and not self._cancelled:
                count = os.preadv(self._descriptor, [buffer[: end - position]], position)
                if count == 0:
                    raise ConflictError("an output file became shorter while it was written")
                digest.update(buffer[:count])
                position += count
                self._on_bytes(count)
        return digest.hexdigest()


def draft_files(folder: Path) -> tuple[Path, ...]:
    """The files whose bytes make a draft what it is: config.json, the weights and their index.

    Readme, conversion record, reports, tokenizer and licence are not among them.

    Raises:
        InputError: there is no such folder.
        PermissionDenied: it may not be read.
    """
    names = list_files(folder)
    weights = [name for name in names if name.endswith(".safetensors")]
    index = INDEX_FILE
    if not weights:
        weights, index = weight_pickles(names), PICKLE_INDEX_FILE
    wanted = {"config.json", index, *weights}
    return tuple(folder / name for name in names if name in wanted)


def draft_digest(files: Iterable[tuple[str, int, str]]) -> str:
    """The digest that names a draft, whatever folder or hub it is in.

    Args:
        files: (path in the draft, size in bytes, sha256) of each of `draft_files`.

    Returns:
        The sha256 of the canonical JSON list of them, sorted by path.
    """
    listing = sorted([path, size, sha256] for path, size, sha256 in files)
    text = json.dumps(listing, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()

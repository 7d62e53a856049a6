"""SOURCE and TARGET as users write them, made into local files.

    FOLDER | hf:ORG/NAME[@REVISION] | ms:ORG/NAME[@REVISION]

A target may also be a config.json, or a bare ORG/NAME. Downloads go through the hubs' own clients and
into their own caches; of a target only what is asked for is fetched.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3pack.documents import read_json_object
from eagle3pack.draft.target import TargetSpec, bundled_target, read_target
from eagle3pack.errors import (
    Eagle3PackError,
    InputError,
    PermissionDenied,
    RefusedError,
    TransportError,
    UsageError,
)

Place = Literal["local", "hf", "ms"]

SILENCE_S = 30.0  # that a hub may take to answer
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
# What of a draft's folder is part of the model, apart from config.json, weights and their index.
COMPANION_PATTERNS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE*",
    "NOTICE*",
)
_MODEL_NAMES = ("config.json", "eagle3pack.json")
_MODEL_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class Location:
    """Where a model is, as the user wrote it.

    Attributes:
        place: this machine or a hub.
        name: a path, or ORG/NAME.
        revision: branch, tag or commit on a hub; None for its default.
    """

    place: Place
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        suffix = f"@{self.revision}" if self.revision else ""
        return self.name if self.place == "local" else f"{self.place}:{self.name}{suffix}"


@dataclass(frozen=True, slots=True)
class Source:
    """A draft whose files are on this machine.

    Attributes:
        location: where it came from.
        folder: where its files are now.
        revision: the commit they are of, where a hub told it.
    """

    location: Location
    folder: Path
    revision: str | None = None


def parse_location(text: str) -> Location:
    """Read FOLDER, hf:ORG/NAME[@REV] or ms:ORG/NAME[@REV].

    Raises:
        UsageError: a hub prefix without ORG/NAME behind it.
    """
    place, colon, rest = text.partition(":")
    if not colon or place not in ("hf", "ms"):
        return Location("local", text)
    name, at, revision = rest.partition("@")
    if not _REPO_ID.fullmatch(name) or ".." in name or (at and not revision):
        raise UsageError(
            "must be ORG/NAME, optionally followed by @REVISION",
            where=text,
            hint=f"For example {place}:org/model or {place}:org/model@v1.0.",
        )
    return Location("hf" if place == "hf" else "ms", name, revision or None)


def resolve_source(text: str) -> Source:
    """Bring a draft's files onto this machine.

    Raises:
        InputError: no such folder.
        UsageError, TransportError, PermissionDenied, RefusedError: see `parse_location` and `_download`.
    """
    location = parse_location(text)
    if location.place == "local":
        folder = Path(location.name)
        if not text or not _exists(folder):
            raise InputError(
                "no such folder", where=text, hint="For a model on a hub write hf:ORG/NAME or ms:ORG/NAME."
            )
        if not folder.is_dir():
            raise InputError("is a file, expected the folder that holds it", where=text)
        return Source(location, folder)
    patterns = ["config.json", "eagle3pack.json", "*.index.json", *WEIGHT_PATTERNS, *COMPANION_PATTERNS]
    return _download(location, patterns)


def resolve_target(text: str) -> TargetSpec:
    """Read what a draft must know of its target: a folder, a config.json, a hub id or a bundled shape.

    Raises:
        InputError: nothing is there, or its config.json is not one of a target.
        UsageError: it is a draft, or a file of weights.
    """
    location = parse_location(text)
    if location.place == "local":
        path = Path(location.name)
        if _exists(path):
            path = path / "config.json" if path.is_dir() else path
            return read_target(path, name=text)
        if not _REPO_ID.fullmatch(text):
            raise InputError(
                "no such folder or config.json", where=text, hint="For a model on a hub write hf:ORG/NAME."
            )
        bundled = bundled_target(text)
        if bundled is not None:
            return bundled
        location = Location("hf", text)
    source = _download(location, ["config.json"])
    return read_target(source.folder / "config.json", name=location.name, revision=source.revision)


def resolve_target_weights(text: str, tensor_names: tuple[str, ...]) -> Path | None:
    """A folder with those files of a target that hold the named tensors.

    Args:
        text: the target as the user wrote it.
        tensor_names: names as the target's files spell them; unknown ones are ignored.

    Returns:
        The folder, or None where only a config is at hand.
    """
    location = parse_location(text)
    if location.place == "local":
        folder = Path(location.name)
        if folder.is_dir():
            return folder if any(folder.glob("*.safetensors")) else None
        if _exists(folder) or not _REPO_ID.fullmatch(text):
            return None
        location = Location("hf", text)
    index = _download(location, ["*.index.json"]).folder / "model.safetensors.index.json"
    if not index.exists():
        return _download(location, ["*.safetensors"]).folder
    weight_map = read_json_object(index).get("weight_map")
    wanted = {weight_map[name] for name in tensor_names if name in weight_map} if weight_map else set()
    return _download(location, sorted(wanted)).folder if wanted else None


def require_no_model_file(path: Path, models: Iterable[str], where: str) -> None:
    """Raise where a file would be written over one of a model, or among its files as if it were one.

    By name, so that a file that is not there yet, such as an index, is kept free too.

    Args:
        path: of the file.
        models: as the user wrote them.
        where: the option that names the file.

    Raises:
        UsageError: it would.
    """
    if path.name not in _MODEL_NAMES and not path.name.endswith(_MODEL_SUFFIXES):
        return
    for model in models:
        location = parse_location(model)
        if location.place != "local":
            continue
        place = Path(location.name)
        folder = place if os.path.lexists(place) and place.is_dir() else place.parent
        if os.path.realpath(path.parent) == os.path.realpath(folder):
            raise UsageError(
                f"is a file of the model {model}; it is not overwritten",
                where=where,
                hint="Give another name.",
            )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a symlink loop, a name too long, a folder that may not be searched
        raise InputError(f"cannot be opened ({error.strerror})", where=str(path)) from None


def _download(location: Location, patterns: list[str]) -> Source:
    """Fetch the files that match from a hub, into that hub client's own cache.

    Raises:
        TransportError: offline, or the connection broke.
        PermissionDenied: a private or gated repository and no token that opens it.
        RefusedError: no such repository or revision, or any other refusal.
    """
    try:
        fetch = _from_hugging_face if location.place == "hf" else _from_modelscope
        folder = _in_a_thread(fetch, location, patterns)
    except Eagle3PackError:
        raise
    except Exception as error:
        raise _explain(location, error) from error
    commit = folder.name if re.fullmatch(r"[0-9a-f]{40}", folder.name) else None
    return Source(location, folder, commit or location.revision)


def _in_a_thread(
    fetch: Callable[[Location, list[str]], Path], location: Location, patterns: list[str]
) -> Path:
    """Fetch in a thread: by itself a client makes Ctrl-C wait until its own threads have all they fetch."""
    from concurrent.futures import Future

    fetched: Future[Path] = Future()

    def run() -> None:
        try:
            fetched.set_result(fetch(location, patterns))
        except BaseException as error:
            fetched.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)  # a longer wait may miss the signal: the kernel hands it to any thread
    return fetched.result()


def _from_hugging_face(location: Location, patterns: list[str]) -> Path:
    from huggingface_hub import get_session, snapshot_download

    hooks = get_session().event_hooks["request"]
    if _limit_silence not in hooks:
        hooks.append(_limit_silence)
    return Path(snapshot_download(location.name, revision=location.revision, allow_patterns=patterns))


def _limit_silence(request: Any) -> None:
    """Give a request that would wait for ever (huggingface_hub's default) an end.

    Where a firewall drops packets in silence, that is every request.
    """
    limits = request.extensions["timeout"]
    request.extensions["timeout"] = {
        phase: SILENCE_S if limit is None else limit for phase, limit in limits.items()
    }


def _from_modelscope(location: Location, patterns: list[str]) -> Path:
    import logging

    from modelscope_hub import HubApi

    logging.getLogger("modelscope_hub").setLevel(logging.ERROR)  # its retries are not the user's concern
    return Path(
        HubApi().download_repo(location.name, "model", revision=location.revision, allow_patterns=patterns)
    )


def _explain(location: Location, error: Exception) -> Eagle3PackError:
    """Our error for whatever a hub client raised, by the names of its classes.

    The clients' exception trees differ between their major versions, and none of them may be imported
    just to be compared with.
    """
    names = {cls.__name__ for cls in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(
        error, "status_code", None
    )
    where = str(location)
    login = "`hf auth login`" if location.place == "hf" else "`modelscope login`"
    if names & {"GatedRepoError", "AuthenticationError", "PermissionDeniedError"} or status in (401, 403):
        return PermissionDenied(
            "the hub asks for a token that may read it", where=where, hint=f"Run {login} first."
        )
    if (
        names & {"RepositoryNotFoundError", "RevisionNotFoundError", "NotExistError", "NotFoundError"}
        or status == 404
    ):
        return RefusedError(
            "no such repository or revision, or it is private",
            where=where,
            hint=f"Check the spelling; for a private repository run {login} first.",
        )
    broken = {"TransportError", "NetworkError", "StorageError"}  # httpx; modelscope_hub
    broken |= {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}  # huggingface_hub
    if names & broken or (isinstance(error, OSError) and "HfHubHTTPError" not in names):
        return TransportError(
            "could not be fetched: no connection to the hub, and the files are not in its cache",
            where=where,
            hint="Run it again with a network, or give a local folder.",
        )
    if status == 429 or (isinstance(status, int) and status >= 500):
        return TransportError(f"the hub answered {status}", where=where, hint="Run it again in a while.")
    return RefusedError(f"the hub client failed: {_first_line(error)}", where=where)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def known_sha256(path: Path) -> str | None:
    """The sha256 of a file that the Hugging Face cache stored under that name, without reading it."""
    blob = Path(os.path.realpath(path))
    return blob.name if blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name) else None

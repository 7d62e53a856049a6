"""An output folder appears complete or not at all, whatever happens on the way."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.checkpoint import folder as folder_module
from eagle3pack.checkpoint.folder import new_folder, require_free, require_outside, require_separate
from eagle3pack.errors import ConflictError, PermissionDenied, TransportError, UsageError


def make_draft(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()
    }


def write(out: Path, text: str, *, overwrite: bool = False) -> None:
    with new_folder(out, overwrite=overwrite) as folder:
        (folder / "config.json").write_text(text)


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "some" / "where" / "out"
    with new_folder(out, overwrite=False) as folder:
        (folder / "config.json").write_text("{}")
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not out.exists()
        assert folder.parent == out.parent
    assert contents(tmp_path) == {"some/where/out/config.json": "{}", "some/where/out/sub/file": "x"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_error_leaves_nothing_behind(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(tmp_path / "some" / "where" / "out", overwrite=False) as folder:
        (folder / "config.json").write_text("{}")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_parents_that_were_there_stay(tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    with pytest.raises(ValueError), new_folder(tmp_path / "some" / "where" / "out", overwrite=False):
        raise ValueError
    assert list(tmp_path.iterdir()) == [tmp_path / "some"]
    assert list((tmp_path / "some").iterdir()) == []


def test_the_folders_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "out", "{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


def test_everything_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    really = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "out", "{}")
    assert synced == ["config.json", ".out.eagle3pack", tmp_path.name]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_a_folder_that_cannot_be_synced_is_an_error_only_where_that_means_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    if code == errno.EIO:
        with pytest.raises(TransportError):
            write(tmp_path / "out", "{}")
    else:
        write(tmp_path / "out", "{}")


# OUT exists


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    make_draft(tmp_path / "out", "old")
    with pytest.raises(ConflictError, match="exists") as caught:
        write(tmp_path / "out", "new")
    assert "--overwrite" in caught.value.hint
    assert contents(tmp_path) == {"out/config.json": "old"}


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_existing_file_is_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ConflictError, match="no folder"):
        write(tmp_path / "out", "new", overwrite=overwrite)
    assert contents(tmp_path) == {"out": "mine"}


def test_overwriting_a_folder_that_is_no_draft_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("mine")
    with pytest.raises(ConflictError, match="no draft"):
        write(tmp_path / "home", "new", overwrite=True)
    assert contents(tmp_path) == {"home/letters": "mine"}


@pytest.mark.parametrize("other", ["diary.txt", "ckpts/step.safetensors", "LICENSE.pdf"])
def test_overwriting_a_draft_with_other_things_in_it_is_refused(tmp_path: Path, other: str) -> None:
    make_draft(tmp_path / "out", "old")
    (tmp_path / "out" / other).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / other).write_text("mine")
    with pytest.raises(ConflictError, match=rf"no conversion writes \({other.split('/')[0]}\)"):
        write(tmp_path / "out", "new", overwrite=True)
    assert contents(tmp_path) == {"out/config.json": "old", f"out/{other}": "mine"}
    if other.startswith("LICENSE"):
        require_free(tmp_path / "out", overwrite=True, beside=("LICENSE*",))


def test_a_place_that_may_not_be_written_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(PermissionDenied, match="may not be written"):
        require_free(tmp_path / "some" / "where", overwrite=False)


def test_what_lies_in_out_would_be_lost(tmp_path: Path) -> None:
    make_draft(tmp_path / "out", "x")
    (tmp_path / "link").symlink_to("out")
    for path in ("out", "out/c.cal", "link/new/c.cal"):
        with pytest.raises(UsageError, match=r"^OUT .*(is|holds) a thing \("):
            require_outside(tmp_path / path, tmp_path / "out", "a thing", hint="")
    require_outside(tmp_path / "out-2", tmp_path / "out", "a thing", hint="")
    with pytest.raises(UsageError, match=r"is a thing"):  # neither exists yet
        require_outside(tmp_path / "new", tmp_path / "new", "a thing", hint="")


def test_a_folder_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    with (
        pytest.raises(ConflictError, match="exists"),
        new_folder(tmp_path / "out", overwrite=False) as folder,
    ):
        (folder / "config.json").write_text("new")
        make_draft(tmp_path / "out", "theirs")
    assert contents(tmp_path) == {"out/config.json": "theirs"}


def test_a_folder_that_appears_at_the_last_moment_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = folder_module.os.path.lexists
    monkeypatch.setattr(folder_module.os.path, "lexists", lambda path: really(path) and path.name != "out")
    make_draft(tmp_path / "out", "theirs")
    with pytest.raises(ConflictError, match="appeared"):
        write(tmp_path / "out", "new")
    assert contents(tmp_path) == {"out/config.json": "theirs"}


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing a folder."""
    if request.param == "two renames":
        monkeypatch.setattr(folder_module, "exchange", lambda *_: False)
    return str(request.param)


def test_overwriting_replaces_the_whole_folder(tmp_path: Path, swap: str) -> None:
    make_draft(tmp_path / "out", "old")
    (tmp_path / "out" / "stale.safetensors").write_text("x")
    write(tmp_path / "out", "new", overwrite=True)
    assert contents(tmp_path) == {"out/config.json": "new"}
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_overwriting_an_empty_or_missing_folder_is_fine(tmp_path: Path, swap: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", "new", overwrite=True)
    write(tmp_path / "missing", "new", overwrite=True)
    assert contents(tmp_path) == {"empty/config.json": "new", "missing/config.json": "new"}


def test_overwriting_through_a_symlink_replaces_what_it_points_to(tmp_path: Path, swap: str) -> None:
    make_draft(tmp_path / "disk" / "real", "old")
    (tmp_path / "link").symlink_to("disk/real")
    write(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert contents(tmp_path) == {"disk/real/config.json": "new"}


def test_an_error_while_overwriting_keeps_the_old_folder(tmp_path: Path, swap: str) -> None:
    make_draft(tmp_path / "out", "old")
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out", overwrite=True) as folder:
        (folder / "config.json").write_text("new")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {"out/config.json": "old"}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_swap_that_fails_half_way_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    make_draft(tmp_path / "out", "old")
    really = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == ".out.eagle3pack":
            raise error
        return really(path, target)

    monkeypatch.setattr(folder_module, "exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((TransportError, KeyboardInterrupt)):
        write(tmp_path / "out", "new", overwrite=True)
    assert contents(tmp_path) == {"out/config.json": "old"}


def test_a_swap_that_was_killed_half_way_is_undone_by_the_next_run(tmp_path: Path) -> None:
    make_draft(tmp_path / ".out.eagle3pack-old", "old")
    make_draft(tmp_path / ".out.eagle3pack", "half")
    with pytest.raises(ConflictError, match="exists"):
        write(tmp_path / "out", "new")
    assert contents(tmp_path / "out") == {"config.json": "old"}
    write(tmp_path / "out", "new", overwrite=True)
    assert contents(tmp_path) == {"out/config.json": "new"}


# Other runs


def test_the_leftover_of_a_killed_run_is_removed(tmp_path: Path) -> None:
    make_draft(tmp_path / ".out.eagle3pack", "half")
    write(tmp_path / "out", "new")
    assert contents(tmp_path) == {"out/config.json": "new"}


def test_two_runs_do_not_write_the_same_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out", overwrite=False) as first:
        (first / "config.json").write_text("first")
        with pytest.raises(ConflictError, match="written by another run"):
            write(tmp_path / "out", "second")
    assert contents(tmp_path) == {"out/config.json": "first"}


@pytest.mark.parametrize("moment", ["before mkdir", "before the lock", "after the lock"])
def test_two_runs_that_begin_at_once_do_not_write_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another run comes in between two steps of ours and has the folder."""
    theirs = tmp_path / ".out.eagle3pack"

    def lock(descriptor: int, _: int) -> None:
        if moment == "before the lock":
            raise BlockingIOError
        theirs.rmdir()  # it took ours for a leftover
        make_draft(theirs, "theirs")

    monkeypatch.setattr(fcntl, "flock", lock)
    if moment == "before mkdir":
        monkeypatch.setattr(Path, "mkdir", refuse(errno.EEXIST))
        monkeypatch.setattr(folder_module, "_parents", lambda _: nullcontext())
    with pytest.raises(ConflictError, match="another run"):
        write(tmp_path / "out", "new")
    assert not (tmp_path / "out").exists()
    if moment == "after the lock":
        assert contents(theirs) == {"config.json": "theirs"}


def test_a_leftover_whose_lock_cannot_be_asked_for_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    write(tmp_path / "out", "new")
    make_draft(tmp_path / ".other.eagle3pack", "perhaps still being written")
    with pytest.raises(ConflictError, match="another run") as caught:
        write(tmp_path / "other", "new")
    assert str(tmp_path / ".other.eagle3pack") in caught.value.hint
    assert (tmp_path / ".other.eagle3pack" / "config.json").exists()


# What the system may say


def refuse(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("code", "error"),
    {
        errno.EACCES: PermissionDenied,
        errno.EPERM: PermissionDenied,
        errno.EROFS: PermissionDenied,
        errno.ENOSPC: TransportError,
        errno.EDQUOT: TransportError,
        errno.EFBIG: TransportError,
        errno.EIO: TransportError,
        errno.ENAMETOOLONG: UsageError,
        errno.EINVAL: OSError,  # a fault of ours is not put in a user's words
    }.items(),
)
def test_what_the_system_says_has_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    monkeypatch.setattr(Path, "mkdir", refuse(code))
    with pytest.raises(error):
        write(tmp_path / "out", "new")
    monkeypatch.undo()
    with pytest.raises(error), new_folder(tmp_path / "out", overwrite=False):
        raise OSError(code, os.strerror(code))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_says_what_is_needed(tmp_path: Path) -> None:
    with (
        pytest.raises(TransportError, match=r"6,227,247,088 bytes are needed and [\d,]+ are free") as caught,
        new_folder(tmp_path / "some" / "out", overwrite=False, nbytes=6_227_247_088),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "nothing was left behind" in caught.value.problem
    assert caught.value.exit_code == 7


@pytest.mark.parametrize("out", ["n" * 250, "file/out", "file/some/out", "loop/out"])
def test_a_place_where_no_folder_can_be_is_a_matter_of_usage(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError):
        write(tmp_path / out, "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


# The source and OUT


def test_folders_that_lie_apart_are_fine(tmp_path: Path) -> None:
    make_draft(tmp_path / "source", "x")
    make_draft(tmp_path / "source-2", "x")
    for out in ("out", "source-gqa", "some/where", "source-2"):
        require_separate(tmp_path / "source", tmp_path / out)


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("source", "is the source folder"),
        ("source/", "is the source folder"),
        ("other/../source", "is the source folder"),
        ("link", "is the source folder"),
        ("source/out", "lies in the source folder"),
        ("source/some/where", "lies in the source folder"),
        ("link/out", "lies in the source folder"),
        (".", "holds the source"),
        ("..", "holds the source"),
        ("blobs", "holds the source"),
    ],
)
def test_folders_that_do_not_lie_apart_are_refused(tmp_path: Path, out: str, reason: str) -> None:
    make_draft(tmp_path / "top" / "source", "x")
    (tmp_path / "top" / "link").symlink_to("source")
    make_draft(tmp_path / "top" / "blobs", "x")
    (tmp_path / "top" / "blobs" / "0123").write_text("x")
    (tmp_path / "top" / "source" / "model.safetensors").symlink_to("../blobs/0123")
    with pytest.raises(UsageError, match=reason):
        require_separate(tmp_path / "top" / "source", tmp_path / "top" / out)


# Real processes, real disks

WRITE = """
import os, pathlib, resource, sys
from eagle3pack.checkpoint.files import open_checkpoint
from eagle3pack.checkpoint.folder import new_folder
from eagle3pack.checkpoint.writer import PlannedTensor, plan_files, write_file
from eagle3pack.errors import Eagle3PackError

source, out = map(pathlib.Path, sys.argv[1:3])
limit, computed = int(sys.argv[3]), sys.argv[4:]
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

def compute(tensor):
    print("computing", flush=True)
    sys.stdin.readline()
    yield bytes(tensor.nbytes)

entries = open_checkpoint(source).tensors.values()
tensors = [PlannedTensor(e.name, e.dtype, e.shape, None if e.name in computed else e) for e in entries]
(file,) = plan_files(tensors)
try:
    with new_folder(out, overwrite=False, nbytes=file.nbytes) as folder:
        write_file(file, folder, compute)
except Eagle3PackError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    from tests.checkpoint.samples import random_tensor, write_weights

    tensors = {"a": random_tensor("U8", (3_000_000,)), "b": random_tensor("U8", (3_000_000,))}
    write_weights(tmp_path / "source" / "model.safetensors", tensors)
    return tmp_path / "source"


def run(source: Path, out: Path, limit: int = 0, *computed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WRITE, str(source), str(out), str(limit), *computed]
    return subprocess.run(command, input="\n" * 9, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("limit", [1_000, 2_000_000, 5_999_000])
@pytest.mark.parametrize("computed", [(), ("a", "b")])
def test_a_limit_on_file_sizes_leaves_nothing_behind(
    source: Path, tmp_path: Path, limit: int, computed: tuple[str, ...]
) -> None:
    process = run(source, tmp_path / "parent" / "out", limit, *computed)
    assert process.returncode == 7, process
    assert "bytes is more than may be written" in process.stdout
    assert "computing" not in process.stdout, "a full disk shows before the work"
    assert not (tmp_path / "parent").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("computed", [(), ("a", "b")])
def test_a_full_disk_leaves_nothing_behind(source: Path, small_disk: Path, computed: tuple[str, ...]) -> None:
    process = run(source, small_disk / "out", 0, *computed)
    assert process.returncode == 7, process
    assert "6,00" in process.stdout and "are free" in process.stdout
    assert list(small_disk.iterdir()) == []


def test_another_file_system_is_written_across(source: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert run(source, small_disk / "out").returncode == 0
    written = (small_disk / "out" / "model.safetensors").read_bytes()
    assert written[-6_000_000:] == (source / "model.safetensors").read_bytes()[-6_000_000:]


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_is_never_taken_for_output(
    source: Path, tmp_path: Path, signal_: signal.Signals
) -> None:
    out = tmp_path / "parent" / "out"
    command = [sys.executable, "-c", WRITE, str(source), str(out), "0", "b"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        assert [path.name for path in out.parent.iterdir()] == [".out.eagle3pack"]
        with pytest.raises(ConflictError, match="another run"):
            write(out, "new")
        process.send_signal(signal_)
        process.wait(timeout=30)
    if signal_ == signal.SIGINT:
        assert not out.parent.exists()
    else:
        assert [path.name for path in out.parent.iterdir()] == [".out.eagle3pack"]
    assert run(source, out).returncode == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_file_system_that_shares_blocks_shares_them(tmp_path: Path, kind: str) -> None:
    from tests.checkpoint.samples import random_tensor, write_weights

    image, mount = tmp_path / "image", tmp_path / "disk"
    image.touch()
    os.truncate(image, 512 << 20)
    mount.mkdir()
    for command in (["mkfs." + kind, "-q", str(image)], ["mount", "-o", "loop", str(image), str(mount)]):
        try:
            subprocess.run(command, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip(f"{kind} cannot be made and mounted here")
    try:
        tensors = {name: random_tensor("U8", (16 << 20,)) for name in "abc"}
        write_weights(mount / "source" / "model.safetensors", tensors)
        os.sync()
        before = os.statvfs(mount)
        assert run(mount / "source", mount / "out", 0, "b").returncode == 0
        os.sync()
        time.sleep(0.1)
        used = (before.f_bfree - os.statvfs(mount).f_bfree) * before.f_frsize
        assert used < (24 << 20), "16 MB are computed, 32 MB shared"
        assert run(mount / "source", tmp_path / "out", 0, "b").returncode == 0
        here, there = (folder / "out" / "model.safetensors" for folder in (mount, tmp_path))
        assert here.read_bytes() == there.read_bytes()
    finally:
        subprocess.run(["umount", str(mount)], check=True)

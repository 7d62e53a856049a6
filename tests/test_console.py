from __future__ import annotations

import os
import pty
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from eagle3pack import __version__, console
from eagle3pack.console import format_bytes, format_seconds, table
from tests.cli import Cli
from tests.tiny import write_draft


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (6_604_734_448, "6.6 GB"),
        (999_999, "1 MB"),
        (5e15, "5e+03 TB"),
    ],
)
def test_bytes_are_written_as_disks_count_them(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_durations_are_said_as_people_say_them() -> None:
    assert [format_seconds(s) for s in (3.6, 99, 100, 5999, 12_240)] == [
        "4 s",
        "99 s",
        "2 min",
        "100 min",
        "3.4 h",
    ]


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with console.progress("calibrating", 4000, unit="tokens") as advance:
        for _ in range(35):
            now += 1
            advance(100)
    assert capsys.readouterr().err.splitlines() == [
        "calibrating: 1,500 of 4,000, 100 tokens/s, 25 s left",
        "calibrating: 3,000 of 4,000, 100 tokens/s, 10 s left",
    ]
    with console.progress("converting", 6_000_000_000) as advance:
        now += 20
        advance(2_000_000_000)
    assert capsys.readouterr().err == "converting: 2 GB of 6 GB, 100 MB/s, 40 s left\n"


def test_a_slow_start_tells_nothing_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with console.progress("calibrating", 300, unit="tokens") as advance:
        now += 100
        advance(1)
        for _ in range(16):
            now += 1
            advance(10)
    assert capsys.readouterr().err.splitlines()[-1] == "calibrating: 151 of 300, 10 tokens/s, 15 s left"


def test_what_takes_an_hour_is_told_less_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with console.progress("healing", 10_000, unit="steps") as advance:
        for _ in range(3600):
            now += 1
            advance(1)
    assert 30 < len(capsys.readouterr().err.splitlines()) < 60


def test_a_table_aligns_numbers_right_and_words_left() -> None:
    assert table([("name", "1.5"), ("x", "12.25")], indent="") == "name    1.5\nx     12.25"


def test_errors_are_one_line_and_a_hint(cli: Cli, tmp_path: Path) -> None:
    result = cli("convert", tmp_path / "none", tmp_path / "out", "--num-kv-heads", 2)
    lines = result.err.splitlines()
    assert lines[0].startswith("error: ") and lines[1].startswith("hint: ") and len(lines) == 2
    assert result.out == ""


def test_quiet_says_nothing_and_version_is_the_packages(cli: Cli, tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    result = cli("convert", source, tmp_path / "gqa", "--num-kv-heads", 2, "-q")
    assert (result.code, result.out, result.err) == (0, "", "")
    version = cli("--version").out
    assert version.startswith(f"eagle3pack {__version__}\n")
    assert f"\ntorch {metadata.version('torch')}\n" in version


@pytest.mark.parametrize(
    "arguments", ["--help", "verify draft --quick", "convert draft gqa --num-kv-heads 2 --json"]
)
def test_a_stdout_that_takes_nothing_is_one_error(arguments: str, tmp_path: Path) -> None:
    write_draft(tmp_path / "draft")
    command = [sys.executable, "-m", "eagle3pack", *arguments.split()]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)

    error, hint = result.stderr.splitlines()[-2:]
    assert result.returncode == 7
    assert error == "error: stdout: cannot be written (No space left on device)"
    assert hint.startswith("hint: ") and "Traceback" not in result.stderr


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    write_draft(tmp_path / "draft")
    command = f"{sys.executable} -m eagle3pack verify draft --quick -v | true"
    result = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True)

    assert result.stderr == ""


def test_a_terminal_is_shown_a_bar_with_rate_and_a_pipe_is_not(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "mha")
    command = [sys.executable, "-m", "eagle3pack", "convert", str(source), "--num-kv-heads", "2"]
    piped = subprocess.run([*command, str(tmp_path / "one")], capture_output=True, text=True, check=True)
    assert "%" not in piped.stderr
    ours, theirs = pty.openpty()
    with subprocess.Popen([*command, str(tmp_path / "two")], stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                block = os.read(ours, 4096)
            except OSError:  # the terminal's other side is closed
                break
            if not block:
                break
            shown += block
    os.close(ours)
    assert process.returncode == 0
    assert b"converting" in shown and b"100%" in shown and b"B/s" in shown

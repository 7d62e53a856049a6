"""Ctrl-C at a moment of each phase: exit code 130, one line, nothing half-written, nothing still running.

A moment is a function of the program that is held up as it begins, until the signal arrives.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.publish.hubs.server import Fault
from tests.test_sources import Hubs, hubs  # noqa: F401  a fixture
from tests.tiny import draft_tensors, native_config, write_draft
from tests.verify.smoke.support import write_speaking_target

HELD_UP = """
import importlib, sys, threading, time
module, _, path = sys.argv.pop(1).partition(":")
owner = importlib.import_module(module)
*owners, name = path.split(".")
for each in owners:
    owner = getattr(owner, each)
original = getattr(owner, name)
def held_up(*args, **kwargs):
    print("held up", flush=True)
    time.sleep(60 if threading.current_thread() is threading.main_thread() else 1)
    return original(*args, **kwargs)
setattr(owner, name, held_up)
from eagle3pack.cli import main
main()
"""
CONVERT = "convert draft gqa --num-kv-heads 2"
VERIFY = "verify draft --target target --report new.json"
MOMENTS = {
    "reading": (CONVERT, "eagle3pack.convert.command:open_checkpoint"),
    "asking what is shared": (
        f"{CONVERT} --target target --strip-shared",
        "eagle3pack.convert.command:shared_with_target",
    ),
    "merging": (f"{CONVERT} --method als", "eagle3pack.convert.merging.compute:Merging.compute"),
    "copying": (CONVERT, "eagle3pack.checkpoint.writer:copy_range"),
    "hashing, in a thread": (CONVERT, "eagle3pack.checkpoint.digest:FollowingSha256._follow"),
    "proving": (CONVERT, "eagle3pack.convert.command:prove"),
    "handing off": (
        f"{CONVERT} --target target --retrain-with torchspec retrain",
        "eagle3pack.convert.command:write_hand_off",
    ),
    "recording answers": (
        f"{CONVERT} --target target --method als --calibrate-with prompts.txt --save-calibration c",
        "eagle3pack.engine.draft_model:DraftModel.forward",
    ),
    "reading values": (VERIFY, "eagle3pack.verify.scan:iter_blocks"),
    "mending": (f"{VERIFY} --engine none --fix mended", "eagle3pack.verify.mend:write_file"),
    "loading the target": (VERIFY, "eagle3pack.verify.smoke.reference:load_target"),
    "speculating": (f"{VERIFY} --prompts prompts.txt", "eagle3pack.engine.draft_model:DraftModel.forward"),
    "writing the report": (f"{VERIFY} --engine none", "eagle3pack.verify.command:write_whole"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with something to mend, its target, and prompts."""
    root = tmp_path_factory.mktemp("interrupted")
    raw = native_config(norm_before_residual=None)
    tensors = draft_tensors(raw)
    del tensors["embed_tokens.weight"]  # a random one is no embedding of the target
    write_draft(root / "draft", raw, tensors=tensors)
    (root / "target").mkdir()
    write_speaking_target(root / "target")
    (root / "prompts.txt").write_text("w5 w6 w7\n")
    (root / "tmp").mkdir()
    return root


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_command_leaves_nothing(moment: str, folder: Path) -> None:
    arguments, function = MOMENTS[moment]
    before = sorted(folder.rglob("*"))
    process = subprocess.Popen(
        [sys.executable, "-c", HELD_UP, function, *arguments.split()],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    while (line := process.stdout.readline()) not in ("held up\n", ""):
        pass
    assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, messages = process.communicate(timeout=30)
    assert time.monotonic() - started < 20
    assert process.returncode == 130, messages
    assert messages.splitlines()[-1] == "error: interrupted; nothing half-written is left"
    assert "Traceback" not in messages
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(ProcessLookupError):  # no process of its group is left
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("place", ["hf", "ms"])
def test_a_download_is_not_waited_for(place: str, hubs: Hubs) -> None:  # noqa: F811
    answering = threading.Event()

    def answer_slowly() -> None:
        process.send_signal(signal.SIGINT)
        answering.wait(30)

    for hub, path in ((hubs.hf, "/storage/"), (hubs.ms, "/repo$")):
        hub.faults.append(Fault("GET", path, act=answer_slowly))
    process = subprocess.Popen(
        [sys.executable, "-m", "eagle3pack", *f"convert {place}:org/draft gqa --num-kv-heads 2".split()],
        cwd=hubs.root,
        env=os.environ | hubs.env,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, messages = process.communicate(timeout=20)
    answering.set()
    assert process.returncode == 130, messages
    assert messages.splitlines()[-1] == "error: interrupted; nothing half-written is left"
    assert "Traceback" not in messages
    assert not (hubs.root / "gqa").exists()

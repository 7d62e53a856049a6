"""What vLLM's own loader makes of the corpus, recorded and held beside what verify says.

The recording is vllm_outcomes.json; with EAGLE3PACK_RECORD=1 the marked test writes it anew.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.verify.drafts import GOOD, Draft, write_target
from tests.verify.faults import FAULTS, Fault

RECORDED = Path(__file__).with_name("vllm_outcomes.json")
LOADER = Path(__file__).with_name("vllm_loader.py")


def name_of(fault: Fault) -> str:
    return f"{fault.row} {fault.name}"


def corpus() -> dict[str, Draft]:
    """Every draft by name."""
    good = {f"good: {name}": build() for name, build in GOOD.items()}
    return good | {name_of(fault): fault.make() for fault in FAULTS}


def recorded() -> dict[str, dict[str, str]]:
    """What was recorded, by name of the draft."""
    outcomes: dict[str, dict[str, str]] = json.loads(RECORDED.read_text("utf-8"))["outcomes"]
    return outcomes


# What vLLM refuses here for a reason that does not hold elsewhere: the made-up class is unknown to
# transformers too, whose backend would run a real one.
NO_ERROR_OF_OURS = {"#18 a target that vLLM has no class for"}


def test_whatever_vllm_refuses_is_an_error_here() -> None:
    refused = {
        name: found["message"]
        for name, found in recorded().items()
        if found["outcome"] != "loads" and name not in NO_ERROR_OF_OURS
    }
    silent = {
        name_of(fault): refused[name_of(fault)]
        for fault in FAULTS
        if name_of(fault) in refused and not fault.errors
    }
    assert silent == {}


def test_whatever_is_good_here_loads_in_vllm() -> None:
    refused = {name: found for name, found in recorded().items() if found["outcome"] != "loads"}
    assert {name for name in refused if name.startswith("good: ")} == set()


@pytest.mark.vllm
def test_the_recording_is_what_vllm_does(tmp_path: Path) -> None:
    python = os.environ.get("EAGLE3PACK_VLLM_PYTHON")
    if not python:
        pytest.skip("EAGLE3PACK_VLLM_PYTHON names no Python with vLLM")
    cases = []
    for i, (name, draft) in enumerate(corpus().items()):
        folder = tmp_path / str(i)
        draft.write(folder / "draft")
        write_target(folder / "target", draft.target)
        cases.append({"name": name, "draft": str(folder / "draft"), "target": str(folder / "target")})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [python, str(LOADER), str(tmp_path / "cases.json")],
        capture_output=True,
        text=True,
        check=True,
        timeout=1800,
    )
    outcomes = {}
    for line in done.stdout.splitlines():
        found = json.loads(line)
        message = found["message"].replace(str(tmp_path), "...")
        outcomes[found["name"]] = {"outcome": found["outcome"], "message": message}
    if os.environ.get("EAGLE3PACK_RECORD"):
        version = json.loads(RECORDED.read_text("utf-8"))["vllm"]
        RECORDED.write_text(json.dumps({"vllm": version, "outcomes": outcomes}, indent=1) + "\n")
    assert {n: o["outcome"] for n, o in outcomes.items()} == {n: o["outcome"] for n, o in recorded().items()}

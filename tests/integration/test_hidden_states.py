"""Real vLLM hands out hidden states, and a calibration from them is the one of the target in this process.

Both run in float32, so that greedy text is the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle3pack.convert import calibrate
from eagle3pack.convert.calibration_sources.feature_files import from_safetensors
from eagle3pack.convert.calibration_sources.server import wait_for
from eagle3pack.convert.command import ConvertOptions, run_convert
from eagle3pack.convert.merging.calibration import Calibration, read_calibration
from eagle3pack.engine.prompts import shipped_prompts
from tests.convert.test_command import NoProgress
from tests.integration.real_models import DRAFT, smollm2_target, vllm_command

pytestmark = pytest.mark.vllm

MAX_TOKENS = 48
NUM_PROMPTS = 8
START_TIMEOUT_S = 600
LAYERS = [2, 15, 27, 30]  # those of the draft, and the last, as speculators asks for them
SPECULATION = {
    "method": "extract_hidden_states",
    "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a float32 one."""
    folder = tmp_path_factory.mktemp("target") / "smollm2"
    shutil.copytree(smollm2_target(), folder, copy_function=os.symlink)
    config = json.loads((folder / "config.json").read_text()) | {"torch_dtype": "float32", "dtype": "float32"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def endpoint(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A vLLM with the command line that the documentation prints, but for the CPU build's connector."""
    out = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "cpu_hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(out / "states")},
    }
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "2048"]
    arguments += ["--dtype", "float32"]  # auto would make bfloat16 of it
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with (out / "vllm.log").open("w") as log:
        server = subprocess.Popen(
            [
                *shlex.split(vllm_command()),
                "serve",
                str(target),
                "--speculative-config",
                json.dumps(SPECULATION),
                "--kv-transfer-config",
                json.dumps(transfer),
                *arguments,
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not serves(url):
            assert server.poll() is None and time.monotonic() < deadline, (out / "vllm.log").read_text()[
                -3000:
            ]
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=60)


def last_lines(log: Path) -> str:
    return log.read_text()[-3000:]


def serves(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_a_real_vllm_gives_what_the_target_in_this_process_gives(
    target: Path, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(calibrate, "MAX_TOKENS", MAX_TOKENS)
    prompts = tmp_path / "prompts.jsonl"
    asked = [{"turns": prompt.turns} for prompt in shipped_prompts().prompts[:NUM_PROMPTS]]
    prompts.write_text("\n".join(map(json.dumps, asked)))

    def calibration(name: str, url: str | None) -> Calibration:
        options = ConvertOptions(
            4,
            str(target),
            method="svd",
            calibrate_with=str(prompts),
            endpoint=url,
            save_calibration=tmp_path / name,
            dry_run=True,
        )
        run_convert(str(DRAFT), str(tmp_path / "gqa"), options, say=print, progress=NoProgress())
        return read_calibration(tmp_path / name)

    found, lived = calibration("found", endpoint), calibration("lived", None)
    assert found.document["source"]["engine"].startswith("vllm 0.")
    print(found.document["generation"], lived.document["generation"])
    difference = float((found.second_moment - lived.second_moment).norm() / lived.second_moment.norm())
    same = 0
    for a, b in zip(found.stretches, lived.stretches, strict=True):
        if torch.equal(a.token_ids, b.token_ids) and torch.equal(a.positions, b.positions):  # type: ignore[arg-type]
            same += 1
            assert float((a.hidden.float() - b.hidden.float()).norm() / b.hidden.float().norm()) < 0.01
    print(f"{same} of {len(found.stretches)} texts alike, second moments {difference:.2g} apart")
    assert same >= 0.8 * len(found.stretches)  # kernels round differently, and a tie may fall the other way
    assert difference < 0.02


def test_the_state_at_a_token_is_the_one_that_writes_the_next(target: Path, endpoint: str) -> None:
    """Which states are of which token: the last layer's, normed and times the head, give the text back."""
    body = {
        "model": str(target),
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 24,
        "temperature": 0,
        "return_token_ids": True,
        "kv_transfer_params": {"include_output_tokens": True},
    }
    request = urllib.request.Request(
        f"{endpoint}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        given = json.load(response)
    prompt, output = given["prompt_token_ids"], given["choices"][0]["token_ids"]
    path = Path(given["kv_transfer_params"]["hidden_states_path"])
    asyncio.run(wait_for(path))
    features = from_safetensors(path)
    assert features.token_ids.tolist() == [*prompt, *output][:-1]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    last = features.states.unflatten(1, (len(LAYERS), -1))[:, -1]
    with torch.inference_mode():
        written = model.lm_head(model.model.norm(last)).argmax(-1)
    assert written[len(prompt) - 1 :].tolist() == output

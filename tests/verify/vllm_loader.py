"""Show drafts to vLLM's own loader and tell what it makes of each; run by the Python of a vLLM.

    python vllm_loader.py CASES.json        [{"name": ..., "draft": FOLDER, "target": FOLDER}, ...]

One JSON line a case on stdout: outcome `loads`, `refuses` or `fails at the first token`, and the message.
Stands alone: it imports neither this project nor its tests.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(path: str) -> None:
    """Load every case in turn."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to stderr
    import torch

    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda *args: None  # there is no accelerator to empty
    torch.accelerator.synchronize = lambda *args: None
    cases = json.loads(Path(path).read_text())
    for case in cases:
        outcome, message = load(case["draft"], case["target"])
        out.write(json.dumps({"name": case["name"], "outcome": outcome, "message": message}) + "\n")
        out.flush()


def load(draft: str, target: str) -> tuple[str, str]:
    """What vLLM makes of a draft."""
    import torch
    from vllm.config import set_current_vllm_config

    try:
        config = engine_config(draft, target)
    except Exception as error:
        return "refuses", describe(error)
    with set_current_vllm_config(config):
        connect()
        try:
            model = load_model(config)
        except Exception as error:
            return "refuses", describe(error)
        try:
            width = config.speculative_config.draft_model_config.hf_config.hidden_size
            with torch.inference_mode():
                model.compute_logits(torch.zeros(2, width, dtype=torch.bfloat16))
        except Exception as error:
            return "fails at the first token", describe(error)
    return "loads", ""


def engine_config(draft: str, target: str) -> Any:
    """vLLM's configuration of both models."""
    from vllm.engine.arg_utils import EngineArgs

    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": 3}
    return EngineArgs(
        model=target,
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
        dtype="bfloat16",
        speculative_config=speculative,
    ).create_engine_config()


def load_model(config: Any) -> Any:
    """The draft, by vLLM's loader."""
    from vllm.model_executor.model_loader import get_model

    config.compilation_config.static_forward_context.clear()
    return get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)


_connected = False


def connect() -> None:
    """A process group of one, which the parallel layers ask for."""
    global _connected
    if _connected:
        return
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    init_distributed_environment(1, 0, "tcp://127.0.0.1:29531", 0, "gloo")
    initialize_model_parallel(1, 1)
    _connected = True


def describe(error: BaseException) -> str:
    """The kind of an error and its first telling line, without paths."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if type(error).__name__ == "ValidationError" and len(lines) > 1:
        lines = [line for line in lines if line.startswith("Value error")] or lines[1:]
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}"[:200].rstrip(": ")


if __name__ == "__main__":
    main(sys.argv[1])

"""What the tests of the smoke test share: a fake vLLM, a scripted engine, a look at processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3pack.engine.counters import Counters, total
from eagle3pack.sources import Location
from eagle3pack.verify.smoke.installation import Installation
from eagle3pack.verify.smoke.launch import EngineOptions
from eagle3pack.verify.smoke.protocol import Completion, Conversation, EngineFacts, Sampling
from eagle3pack.verify.smoke.vllm import Limits, VllmServer
from tests.tiny import target_config

FAKE = Path(__file__).with_name("fake_vllm.py")
FAKE_INSTALLATION = Installation((sys.executable, str(FAKE), "serve"), "0.32.0", None, counts_requests=True)
WORDS = [f"w{i}" for i in range(96)]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}w3"


def fake_command(folder: Path) -> Path:
    """An executable called vllm that is the fake one."""
    script = folder / "vllm"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return script


def fake_server(
    folder: Path,
    *,
    draft: Path | None = Path("/a/draft"),
    installation: Installation = FAKE_INSTALLATION,
    limits: Limits = Limits(start_s=20, request_s=20),  # noqa: B008
    say: Callable[[str], None] = lambda text: None,
) -> VllmServer:
    """A server on the fake vLLM, not started; its log is in the folder."""
    return VllmServer(
        installation,
        Location("local", "/a/target"),
        draft,
        EngineOptions(),
        tensor_parallel_size=1,
        num_speculative_tokens=3,
        limits=limits,
        log_path=folder / "vllm.log",
        say=say,
    )


def write_speaking_target(folder: Path) -> Path:
    """A random target with a tokenizer of 96 words, for the engine in this process."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    (folder / "config.json").write_text(json.dumps(target_config(torch_dtype="float32")))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * 3 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def processes(state: Path) -> list[int]:
    """The processes of the fake vLLM that still run."""
    pids = [int(pid) for name in ("pid", "workers") for pid in (state / name).read_text().split()]
    return [pid for pid in pids if runs(pid)]


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], object], timeout_s: float = 10) -> bool:
    """Wait until something holds; whether it does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def environment(**changes: str) -> dict[str, str]:
    """Ours, changed."""
    return {**os.environ, **changes}


class ScriptedEngine:
    """An engine whose answers are a function of the prompt; counts as vLLM does.

    Args:
        accepted: accepted tokens of each draft, for a question's first turn.
        k: speculative tokens; 0 for a baseline.
        counts_requests: whether completions carry counters.
    """

    def __init__(self, accepted: Callable[[str], int], *, k: int = 3, counts_requests: bool = True) -> None:
        self.accepted = accepted
        self.k = k
        self.counts_requests = counts_requests
        self.counters = Counters(0, 0, 0, (0,) * k, 0)
        self.asked: list[tuple[Conversation, Sampling]] = []

    def start(self) -> EngineFacts:
        return scripted_facts(self.k)

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        max_concurrency: int,
        on_answers: Callable[[int], None] = lambda count: None,
    ) -> list[tuple[Completion, ...]]:
        answers = []
        for conversation in conversations:
            self.asked.append((conversation, sampling))
            turns = conversation.turns or ("tokens",)
            answers.append(tuple(self._answer(turn, sampling) for turn in turns))
            on_answers(len(answers[-1]))
        return answers

    def _answer(self, turn: str, sampling: Sampling) -> Completion:
        accepted = self.accepted(turn) if self.k else 0
        drafts = (sampling.max_tokens - 1) // (accepted + 1) if self.k else 0
        counters = Counters(
            drafts,
            drafts * self.k,
            drafts * accepted,
            tuple(drafts if i < accepted else 0 for i in range(self.k)),
            sampling.max_tokens,
        )
        self.counters = total([self.counters, counters])
        tokens = tuple(range(sampling.max_tokens))
        if sampling.stop_token_ids:
            return Completion("", (0,), (1, 2), 1, counters if self.k else None)
        return Completion(
            " ".join(map(str, tokens)),
            tokens,
            (1, 2),
            len(tokens),
            counters if self.k and self.counts_requests else None,
        )

    def read_counters(self) -> Counters | None:
        return self.counters if self.k else None

    def stop(self) -> None:
        pass


def scripted_facts(k: int = 3, *, max_model_len: int | None = 4096) -> EngineFacts:
    """Facts of an engine that does not exist."""
    return EngineFacts(
        name="vllm",
        version="0.32.0",
        runner="V1",
        backend="CPU_ATTN",
        device="cpu",
        tensor_parallel_size=1,
        tp_source="measured",
        num_speculative_tokens=k,
        max_model_len=max_model_len,
        enforce_eager=True,
        dtype="float32",
        command=("vllm", "serve", "/a/target"),
    )

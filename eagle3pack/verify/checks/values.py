"""T10 and T13 to T17: what the values of norms, embedding and head show; every check here streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from eagle3pack.verify.check import Check, Finding, Undecided, check, not_applicable
from eagle3pack.verify.checks.vocabulary import is_absolute
from eagle3pack.verify.context import Context

if TYPE_CHECKING:
    from eagle3pack.checkpoint.header import TensorEntry
    from eagle3pack.verify.values import Array

# A trained head holds no two equal rows; a full vocabulary may hold padding and tokens never seen.
MAX_COPIES_REDUCED = 0.01
MAX_COPIES_FULL = 0.10
SAMPLED_ROWS = 64
# Cosines of 64 unrelated rows of 64 or more values average below 0.1 with near certainty (they are spread
# around 0 by at most 1/8); rows that were trained from the target's start at 1.
UNRELATED = 0.1
RELATED = 0.3


@check(
    "T10",
    "no norm is untouched or turned around",
    severity="warning",
    streams=True,
    reason="A norm of exact ones was never loaded; a mean far from one makes every later value too small or "
    "large.",
    source="vLLM 0.32 layers/layernorm.py: RMSNorm begins as ones",
)
def norms_were_trained(context: Context) -> Iterator[Finding]:
    for facts in context.scan.tensors.values():
        if (
            facts.is_float
            and len(facts.shape) == 1
            and facts.logical.endswith("norm.weight")
            and facts.is_constant
        ):
            yield Finding(
                f"every value of {facts.name} is {facts.first:g}",
                "Check that training loaded and saved it.",
                file=facts.path.name,
                tensor=facts.name,
                found=facts.first,
            )


@check(
    "T13",
    "embed_tokens is the target's",
    streams=True,
    reason="An equal one is shared at load. One rounded differently costs its size again; a random one "
    "(exported without a target) costs the acceptance.",
    source="github.com/lightseekorg/TorchSpec/issues/38; github.com/vllm-project/vllm/pull/28549",
    severity="warning",
)
def embedding_is_the_targets(context: Context) -> Iterator[Finding]:
    mine = context.tensors.get("embed_tokens.weight")
    if mine is None:
        raise not_applicable("the draft has no embedding of its own: engines share the target's")
    theirs = context.target_weights.embedding
    if theirs is None:
        raise Undecided("the target's embedding is not at hand")
    if mine.shape != theirs.shape:
        raise Undecided("the embeddings have different shapes (T11, T12, C18)")
    facts = context.scan.embedding
    if facts is not None and facts.differing_rows == 0:
        return
    from eagle3pack.verify.target_weights import read_rows, sample_rows
    from eagle3pack.verify.values import FLOATS, cosine

    if mine.dtype not in FLOATS:
        raise Undecided(f"the embedding is {mine.dtype}")
    rows = sample_rows(mine.shape[0], SAMPLED_ROWS)
    similarity = float(cosine(read_rows(mine, rows), read_rows(theirs, rows)).mean())
    how = "stored as another dtype" if facts is None else f"{facts.differing_rows:,} rows differ"
    if similarity < UNRELATED:
        yield Finding(
            f"embed_tokens has nothing to do with the target's (mean cosine {similarity:.3f} on {len(rows)} "
            "rows)",
            "Leave it out, so that engines share the target's, unless it was trained.",
            tensor=mine.name,
            found=round(similarity, 4),
            expected=1.0,
            severity="error",
            producer_bug="TorchSpec: a random embedding, exported without the target",
        )
    else:
        yield Finding(
            f"embed_tokens is not the target's bit for bit ({how}, mean cosine {similarity:.4f}"
            + (f", largest difference {facts.max_difference:.3g}" if facts is not None else "")
            + f"): it costs {mine.nbytes:,} bytes more",
            "Leave it out if it was not trained; engines then share the target's.",
            tensor=mine.name,
            found=round(similarity, 4),
            expected=1.0,
        )


@check(
    "T14",
    "the rows of lm_head are about as long as the target's",
    severity="warning",
    streams=True,
    reason="Heads begin as the target's rows. Rows of another size by far come from another matrix, or from "
    "none.",
    source="speculators models/eagle3: lm_head is initialised from the target's",
)
def head_has_the_targets_scale(context: Context) -> Iterator[Finding]:
    head, theirs, rows, mapped = _paired_rows(context)
    import numpy as np

    from eagle3pack.verify.target_weights import read_rows

    mine = np.linalg.norm(np.nan_to_num(read_rows(head, rows)), axis=1)
    other = np.linalg.norm(np.nan_to_num(read_rows(theirs, mapped)), axis=1)
    ratio = float(np.median(mine / np.maximum(other, 1e-30)))
    if not 1 / 16 < ratio < 16:
        yield Finding(
            f"the rows of lm_head are {ratio:.3g} times as long as the target's",
            "Check where this head came from.",
            tensor=head.name,
            found=round(ratio, 6),
        )


@check(
    "T15",
    "the rows of lm_head differ from each other",
    streams=True,
    reason="TorchSpec's --prune-vocab indexes lm_head with offsets where it needs ids: few distinct rows "
    "remain, nothing fails and acceptance collapses.",
    source="TorchSpec tools/convert_to_hf.py _save_with_vocab_pruning at 6f21829 (measured)",
)
def head_rows_differ(context: Context) -> Iterator[Finding]:
    facts = context.scan.lm_head
    if facts is None:
        raise not_applicable("the draft has no lm_head of floats")
    if not facts.copies or context.scan.tensors["lm_head.weight"].is_constant:  # F12
        return
    share = facts.copies / facts.rows
    full = facts.rows == context.config.vocab_size
    pruned_with_offsets = _distinct_offsets(context) == facts.distinct
    yield Finding(
        f"{facts.copies:,} of {facts.rows:,} rows of lm_head are copies of another"
        + (f", such as {facts.example[1]} of {facts.example[0]}" if facts.example else "")
        + (", and there are as many distinct rows as offsets in d2t" if pruned_with_offsets else ""),
        "Prune the vocabulary again with lm_head[arange + d2t]."
        if pruned_with_offsets
        else "Export the head again; rows that no training touched may be equal.",
        tensor=context.tensors["lm_head.weight"].name,
        found=facts.distinct,
        expected=facts.rows,
        severity="error" if share > (MAX_COPIES_FULL if full else MAX_COPIES_REDUCED) else "warning",
        producer_bug="TorchSpec: lm_head pruned with offsets in place of ids"
        if pruned_with_offsets
        else None,
    )


def _distinct_offsets(context: Context) -> int | None:
    import numpy as np

    d2t = context.scan.d2t
    return None if d2t is None else len(np.unique(d2t))


@check(
    "T16",
    "each row of lm_head is that of its own token",
    streams=True,
    reason="A head whose rows were relabelled proposes wrong tokens with confidence. Row i must look like "
    "the target's row i + d2t[i] more than like any other.",
    source="github.com/sgl-project/SpecForge/pull/534; TorchSpec at 6f21829",
)
def head_rows_are_labelled_right(context: Context) -> Iterator[Finding]:
    head, theirs, rows, mapped = _paired_rows(context)
    from eagle3pack.verify.target_weights import read_rows
    from eagle3pack.verify.values import cosine

    mine = read_rows(head, rows)
    right = float(cosine(mine, read_rows(theirs, mapped)).mean())
    if right >= RELATED:
        return
    found = _nearest_rows(theirs, mine)
    best = float(cosine(mine, read_rows(theirs, found)).mean())
    if best < max(2 * RELATED, right + RELATED):
        raise Undecided(
            f"lm_head resembles no rows of the target's (mean cosine {right:.2f}): it was trained from "
            "scratch or far"
        )
    yield Finding(
        f"the rows of lm_head look like other tokens' than their own: mean cosine {right:.2f} with the rows "
        f"that d2t names, {best:.2f} with the nearest, such as row {rows[0]} with token {found[0]} (d2t "
        f"names {mapped[0]})",
        "Use the d2t and t2d that the head was trained with.",
        tensor=head.name,
        found=round(right, 4),
        expected=round(best, 4),
        producer_bug="SpecForge: d2t made anew from other data",
    )


def _paired_rows(context: Context) -> tuple[TensorEntry, TensorEntry, Array, Array]:
    """Sampled rows of the draft's head and the target's rows that d2t gives them."""
    head = context.tensors.get("lm_head.weight")
    if head is None:
        raise not_applicable("the draft has no head of its own")
    theirs = context.target_weights.head
    if theirs is None:
        raise Undecided("the target's head is not at hand")
    equal_rows = context.scan.lm_head
    if equal_rows is None or head.shape[1:] != theirs.shape[1:]:
        raise Undecided("the heads are of different width")
    if equal_rows.copies > MAX_COPIES_FULL * equal_rows.rows:
        raise Undecided("many rows of lm_head are copies (T15)")
    from eagle3pack.verify.target_weights import sample_rows

    rows = sample_rows(head.shape[0], SAMPLED_ROWS)
    d2t = context.scan.d2t
    if d2t is not None and len(d2t) != head.shape[0]:
        raise Undecided("d2t has another length than lm_head (V03)")
    if d2t is not None and (
        is_absolute(context, d2t) or not (context.config.has_full_vocabulary or d2t.any())
    ):
        raise Undecided("d2t is wrong itself (V06, V08)")
    if d2t is None and head.shape[0] != context.config.vocab_size:
        raise Undecided("there is no d2t (V01)")
    mapped = rows if d2t is None else rows + d2t[rows]
    if len(rows) == 0 or mapped.min() < 0 or mapped.max() >= theirs.shape[0]:
        raise Undecided("d2t leads out of the target's vocabulary (V04, V06)")
    return head, theirs, rows, mapped


def _nearest_rows(theirs: TensorEntry, mine: Array) -> Array:
    """For each sampled row, the target's row with the largest cosine; one pass in bounded memory."""
    import numpy as np

    from eagle3pack.checkpoint.reading import iter_blocks
    from eagle3pack.verify.values import to_float32

    row_bytes = theirs.nbytes // theirs.shape[0]
    best = np.full(len(mine), -np.inf, np.float32)
    which = np.zeros(len(mine), np.int64)
    position = 0
    mine = np.nan_to_num(mine)
    for block in iter_blocks(theirs, max((4 << 20) // row_bytes, 1) * row_bytes):
        rows = np.nan_to_num(to_float32(block, theirs.dtype).reshape(-1, theirs.shape[1]))
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        scores = mine @ rows.T
        here = scores.argmax(axis=1)
        values = scores[np.arange(len(mine)), here]
        better = values > best
        best[better], which[better] = values[better], here[better] + position
        position += len(rows)
    return which


@check(
    "T17",
    "lm_head is stored on its own",
    severity="note",
    reason="A head stored apart in another dtype than the rest is cast at load.",
    source="vLLM 0.32 model_loader/weight_utils.py",
)
def head_dtype(context: Context) -> Iterator[Finding]:
    head, fc = context.tensors.get("lm_head.weight"), context.tensors.get("fc.weight")
    if head is not None and fc is not None and head.dtype != fc.dtype:
        yield Finding(
            f"lm_head is {head.dtype}, fc is {fc.dtype}", "Export all weights in one dtype.", tensor=head.name
        )


CHECKS: tuple[Check, ...] = (
    norms_were_trained,
    embedding_is_the_targets,
    head_has_the_targets_scale,
    head_rows_differ,
    head_rows_are_labelled_right,
    head_dtype,
)

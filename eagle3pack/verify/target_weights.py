"""The two matrices of a target that a draft is held against: its embedding and its head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.checkpoint.reading import read_part
from eagle3pack.verify.check import Undecided
from eagle3pack.verify.values import FLOATS, Array, to_float32
from eagle3pack.verify.weights import find_weight_files, read_headers

if TYPE_CHECKING:
    from eagle3pack.verify.context import Context

# Where targets keep them: text models, and the language models inside multimodal ones.
EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "transformer.wte.weight",
    "backbone.embeddings.weight",
)
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What of the target's weights is at hand.

    Attributes:
        embedding: [V, Ht], or None.
        head: [V, Ht], the embedding where the target ties them, or None.
    """

    embedding: TensorEntry | None
    head: TensorEntry | None


def open_target_weights(context: Context) -> TargetWeights:
    """Find embedding and head among the target's files.

    Raises:
        Undecided: the target's weights are not on this machine.
    """
    target = context.target
    folder = context.target_weights_folder(EMBEDDING_NAMES + HEAD_NAMES)
    if folder is None:
        raise Undecided(f"the weights of {target.name} are not at hand")
    headers = read_headers(find_weight_files(folder))
    by_name = {entry.name: entry for header in headers.headers for entry in header.tensors}
    shape = (target.vocab_size, target.hidden_size)
    embedding = _find(by_name, EMBEDDING_NAMES, shape)
    head = _find(by_name, HEAD_NAMES, shape)
    if head is None and target.tie_word_embeddings:
        head = embedding
    if embedding is None and head is None:
        raise Undecided(f"neither embedding nor head of {target.name} is in {folder.name}")
    return TargetWeights(embedding, head)


def _find(
    tensors: Mapping[str, TensorEntry], names: tuple[str, ...], shape: tuple[int, int]
) -> TensorEntry | None:
    for name in names:
        entry = tensors.get(name)
        if entry is not None and entry.shape == shape and entry.dtype in FLOATS:
            return entry
    return None


def read_rows(entry: TensorEntry, rows: Array) -> Array:
    """Some rows of a matrix as float32, shape (len(rows), columns)."""
    row_bytes = entry.nbytes // entry.shape[0]
    out = np.empty((len(rows), entry.shape[1]), np.float32)
    for i, row in enumerate(rows):
        out[i] = to_float32(read_part(entry, int(row) * row_bytes, row_bytes), entry.dtype)
    return out


def sample_rows(count: int, wanted: int) -> Array:
    """Row numbers spread evenly over a matrix, the same every time."""
    return np.unique(np.linspace(0, count - 1, min(count, wanted)).astype(np.int64))

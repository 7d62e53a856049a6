"""Which source heads share one key/value head.

Engines map query head h to key/value head h // (N / K). Any partition into equal groups is reached by
permuting query heads and o_proj's columns, which changes no output and no config.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from eagle3pack.convert.merging.metrics import Metric
from eagle3pack.documents import MAX_JSON_BYTES, describe, read_file
from eagle3pack.errors import InputError, UsageError

Groups = tuple[tuple[int, ...], ...]

SWAP_STARTS = 50  # random starts beside the contiguous one, as in arXiv:2412.20677's search, seeded


def contiguous(num_heads: int, num_groups: int) -> Groups:
    """Neighbours share: the partition of the published recipe."""
    size = num_heads // num_groups
    return tuple(tuple(range(start, start + size)) for start in range(0, num_heads, size))


def read_groups(path: Path, num_heads: int, num_groups: int) -> Groups:
    """The groups that a JSON file lists: [[0, 3], [1, 2]].

    Raises:
        UsageError: there is no such file.
        InputError: it holds something else, or no partition of all heads into equal groups.
    """
    if not path.is_file():
        raise UsageError(
            f"{str(path)!r} is none of contiguous, similarity and auto, nor a file", where="--grouping"
        )
    try:
        groups = json.loads(read_file(path, most=MAX_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InputError(f"is not valid JSON ({reason})", where=str(path)) from None
    if not isinstance(groups, list) or not all(
        isinstance(group, list) and all(type(head) is int for head in group) for group in groups
    ):
        raise InputError(
            f"holds {describe(groups)}, expected lists of key/value heads such as [[0, 3], [1, 2]]",
            where=str(path),
        )
    return checked(groups, num_heads, num_groups, where=str(path))


def checked(
    groups: Sequence[Sequence[int]], num_heads: int, num_groups: int, *, where: str = "grouping"
) -> Groups:
    """Groups that a user gave, sorted.

    Raises:
        InputError: not a partition of all heads into equal groups.
    """
    size = num_heads // num_groups
    if len(groups) != num_groups or any(len(group) != size for group in groups):
        found = " + ".join(str(len(group)) for group in groups)
        raise InputError(f"expected {num_groups} groups of {size} heads, found {found}", where=where)
    named = sorted(head for group in groups for head in group)
    if named != list(range(num_heads)):
        raise InputError(f"expected every head 0 to {num_heads - 1} exactly once", where=where)
    return _sorted(groups)


def key_similarity(keys: Tensor, energy: Tensor, metric: Metric) -> Tensor:
    """How much of two heads' keys one shared key could hold.

    Args:
        keys: canonical rows, shape (K, D, In).
        energy: of the queries by pair, shape (K, D / 2), float64.
        metric: of the input.

    Returns:
        Squared weighted correlation summed over pairs, cosine-normalised, shape (K, K).
    """
    count, d, _ = keys.shape
    total = torch.zeros(count, count, dtype=torch.float64)
    for pair in range(d // 2):
        gram = metric.gram(torch.cat([keys[:, pair], keys[:, d // 2 + pair]]))
        rr, ri = gram[:count, :count], gram[:count, count:]
        ir, ii = gram[count:, :count], gram[count:, count:]
        total += energy[:, pair, None] * energy[:, pair] * ((rr + ii).square() + (ri - ir).square())
    return _cosine(total)


def value_similarity(values: Tensor, metric: Metric) -> Tensor:
    """How much of two heads' outputs one shared value could hold.

    Args:
        values: rows that were weighted by the root of o_proj's second moment, shape (K, D, In).
        metric: of the input.

    Returns:
        Squared norms of cross moments, cosine-normalised, shape (K, K).
    """
    rows = values.flatten(0, 1)
    count, d, _ = values.shape
    norms = [metric.inner(head, rows).reshape(d, count, d).square().sum((0, 2)) for head in values]
    return _cosine(torch.stack(norms))


def _cosine(similarity: Tensor) -> Tensor:
    size = similarity.diagonal().clamp_min(0).sqrt()
    inverse = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 0.0)  # a dead head fits anywhere
    similarity = inverse[:, None] * similarity * inverse
    return (similarity + similarity.T) / 2


def similar(similarity: Tensor, num_groups: int) -> Groups:
    """Equal groups with the largest similarity inside, by best swaps from many starts.

    Args:
        similarity: symmetric, shape (heads, heads).
        num_groups: divides the number of heads.

    Returns:
        The best local optimum found; the contiguous partition wins ties. Deterministic.
    """
    heads = len(similarity)
    size = heads // num_groups
    generator = random.Random(0)
    starts = [torch.arange(heads) // size]
    for _ in range(SWAP_STARTS):
        order = list(range(heads))
        generator.shuffle(order)
        labels = torch.empty(heads, dtype=torch.int64)
        labels[torch.tensor(order)] = torch.arange(heads) // size
        starts.append(labels)
    best, best_score = starts[0], -torch.inf
    for start in starts:
        labels = _swapped(similarity.double(), start, num_groups)
        score = float((similarity * (labels[:, None] == labels)).sum())
        if score > best_score + 1e-12 * abs(score):
            best, best_score = labels, score
    return _sorted([[h for h in range(heads) if best[h] == g] for g in range(num_groups)])


def _swapped(similarity: Tensor, labels: Tensor, num_groups: int) -> Tensor:
    """Swap the best pair of heads between groups until no swap helps."""
    heads = torch.arange(len(labels))
    while True:
        members = torch.nn.functional.one_hot(labels, num_groups).to(similarity.dtype)
        inside = similarity @ members - similarity.diagonal()[:, None] * members  # without oneself
        own = inside[heads, labels]
        there = inside[:, labels]  # head a's similarity to the group of b
        gain = there + there.T - own[:, None] - own - 2 * similarity
        gain[labels[:, None] == labels] = -torch.inf
        at = int(gain.argmax())
        a, b = divmod(at, len(labels))
        if not gain[a, b] > 1e-12 * similarity.abs().sum():
            return labels
        labels = labels.clone()
        labels[a], labels[b] = labels[b].clone(), labels[a].clone()


def _sorted(groups: Sequence[Sequence[int]]) -> Groups:
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def query_order(groups: Groups, queries_per_head: int) -> Tensor:
    """Old index of every query head in its new place, int64, shape (N,)."""
    sources = torch.tensor([head for group in groups for head in group])
    return (sources[:, None] * queries_per_head + torch.arange(queries_per_head)).flatten()

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.convert.merging.grouping import checked, contiguous, query_order, similar
from eagle3pack.errors import InputError


def inside(similarity: torch.Tensor, groups: tuple[tuple[int, ...], ...]) -> float:
    return sum(float(similarity[a, b]) for group in groups for a, b in combinations(group, 2))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), shape=st.sampled_from([(6, 2), (6, 3), (8, 2), (8, 4)]))
def test_the_swap_search_finds_the_best_balanced_partition_of_few_heads(
    seed: int, shape: tuple[int, int]
) -> None:
    heads, count = shape
    random = torch.rand(heads, heads, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    similarity = random + random.T

    def partitions(left: tuple[int, ...]):  # type: ignore[no-untyped-def]
        if not left:
            yield ()
            return
        for rest in combinations(left[1:], heads // count - 1):
            group = (left[0], *rest)
            for others in partitions(tuple(h for h in left if h not in group)):
                yield (group, *others)

    best = max(inside(similarity, groups) for groups in partitions(tuple(range(heads))))
    found = similar(similarity, count)
    assert inside(similarity, found) == pytest.approx(best)
    assert found == checked(found, heads, count)


def test_equal_heads_stay_neighbours() -> None:
    assert similar(torch.ones(8, 8), 2) == contiguous(8, 2)


def test_sixty_four_heads_come_back_from_a_planted_partition() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    labels = torch.empty(64, dtype=torch.int64)
    labels[order] = torch.arange(64) // 16
    planted = (labels[:, None] == labels).double()
    noise = torch.rand(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = similar(planted + 0.4 * (noise + noise.T), 4)
    assert all(len({int(labels[h]) for h in group}) == 1 for group in found)


def test_query_heads_follow_their_key_value_heads() -> None:
    assert query_order(((0, 2), (1, 3)), 1).tolist() == [0, 2, 1, 3]
    assert query_order(((0, 2), (1, 3)), 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_groups_that_are_no_equal_partition_are_refused() -> None:
    assert checked([[3, 1], [2, 0]], 4, 2) == ((0, 2), (1, 3))
    for groups in ([[0, 1], [2, 2]], [[0, 1], [2, 4]], [[0, 1, 2], [3]], [[0, 1, 2, 3]]):
        with pytest.raises(InputError, match="grouping"):
            checked(groups, 4, 2)

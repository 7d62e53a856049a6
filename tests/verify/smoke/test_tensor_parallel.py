"""How many ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.errors import UsageError
from eagle3pack.verify.smoke.tensor_parallel import HeadCounts, choose_size, fitting_sizes, misfit

M3 = (HeadCounts("target", 64, 4), HeadCounts("draft", 64, 64))
SMOLLM2 = (HeadCounts("target", 9, 3), HeadCounts("draft", 16, 16))


@pytest.mark.parametrize("key_value", [1, 2, 4, 8, 12, 16, 20])
def test_key_value_heads_that_fit_four_ranks(key_value: int) -> None:
    assert not misfit(HeadCounts("draft", 240, key_value), 4)


@pytest.mark.parametrize("key_value", [3, 5, 6, 7, 9, 10])
def test_key_value_heads_that_do_not(key_value: int) -> None:
    assert "neither divide by 4 nor into it" in misfit(HeadCounts("draft", 1260 * 4, key_value), 4)


def test_the_published_size_is_the_default_and_needs_no_note() -> None:
    for gpus in (None, 4, 8):
        choice = choose_size(None, M3, visible_gpus=gpus, cpu_build=False)
        assert (choice.size, choice.note) == (4, "")


@pytest.mark.parametrize(("gpus", "size"), [(3, 2), (2, 2), (1, 1), (0, 1)])
def test_only_the_default_is_lowered_to_the_gpus(gpus: int, size: int) -> None:
    choice = choose_size(None, M3, visible_gpus=gpus, cpu_build=False)
    assert choice.size == size
    assert "instead of 4" in choice.note
    with pytest.raises(UsageError, match="4 ranks need as many GPUs"):
        choose_size(4, M3, visible_gpus=gpus, cpu_build=False)


def test_only_the_default_is_lowered_to_the_heads() -> None:
    choice = choose_size(None, SMOLLM2, visible_gpus=8, cpu_build=False)
    assert choice.size == 1
    assert "the target's 9 query heads do not divide by 4" in choice.note
    with pytest.raises(UsageError, match="9 query heads") as caught:
        choose_size(4, SMOLLM2, visible_gpus=8, cpu_build=False)
    assert caught.value.exit_code == 2
    assert caught.value.hint == "Sizes that fit: 1."


def test_a_cpu_build_defaults_to_one_rank_and_runs_as_many_as_asked() -> None:
    choice = choose_size(None, M3, visible_gpus=None, cpu_build=True)
    assert choice.size == 1
    assert "CPU build" in choice.note
    assert choose_size(4, M3, visible_gpus=None, cpu_build=True).size == 4


@settings(deadline=None, max_examples=200)
@given(
    key_value=st.integers(1, 64),
    group=st.integers(1, 8),
    gpus=st.one_of(st.none(), st.integers(0, 8)),
    cpu_build=st.booleans(),
)
def test_a_chosen_size_always_fits(key_value: int, group: int, gpus: int | None, cpu_build: bool) -> None:
    models = (HeadCounts("target", key_value * group, key_value),)
    choice = choose_size(None, models, visible_gpus=gpus, cpu_build=cpu_build)
    assert choice.size in fitting_sizes(models, 4)
    assert bool(choice.note) == (choice.size != 4)

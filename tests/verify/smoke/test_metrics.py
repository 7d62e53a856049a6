"""Counters out of vLLM's /metrics, and the published table out of counters."""

from __future__ import annotations

import pytest

from eagle3pack.engine.counters import (
    Counters,
    draft_accept_rate,
    mean_accepted_length,
    per_position_accept_rate,
)
from eagle3pack.verify.smoke.metrics import difference, from_histogram, parse_metrics

# As vLLM 0.32 wrote it, shortened; two engines behind one server.
EXPOSITION = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="smoke"} 1500.0
vllm:generation_tokens_total{engine="1",model_name="smoke"} 63.0
# HELP vllm:generation_tokens_created Number of generation tokens processed.
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="smoke"} 1.79e+09
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="smoke"} 1021.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="smoke"} 48.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="smoke"} 1.7960621376819868e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="smoke"} 3063.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="smoke"} 144.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="smoke"} 461.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="smoke"} 22.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smoke",position="0"} 342.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smoke",position="1"} 95.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smoke",position="2"} 24.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="smoke",position="2"} 22.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="smoke",position="0"} 1.79e+09
"""


def test_counters_carry_total_and_one_series_a_position() -> None:
    assert parse_metrics(EXPOSITION) == Counters(1069, 3207, 483, (342, 95, 46), 1563)


def test_without_speculation_there_are_no_counters() -> None:
    assert parse_metrics('vllm:generation_tokens_total{engine="0"} 12.0\n') is None
    assert parse_metrics("") is None


def test_what_is_no_exposition_is_an_error() -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_metrics("<html>not metrics</html>\n")


def test_the_difference_of_a_warm_server() -> None:
    before = Counters(100, 300, 50, (40, 10, 0), 200)
    after = Counters(130, 390, 80, (60, 15, 5), 260)
    assert difference(after, before) == Counters(30, 90, 30, (20, 5, 5), 60)


def test_positions_that_were_not_there_before_count_from_zero() -> None:
    assert difference(Counters(2, 6, 2, (1, 1), 4), Counters(0, 0, 0, (), 0)).accepted_per_position == (1, 1)


def test_a_histogram_of_one_request() -> None:
    # vLLM's own numbers for one request of 64 tokens: its mean acceptance length was 1.4651
    counters = from_histogram([27, 12, 4, 0], 129, 64)
    assert counters == Counters(43, 129, 20, (16, 4, 0), 64)
    assert mean_accepted_length(counters) == pytest.approx(1.4651162790697674)
    assert draft_accept_rate(counters) == pytest.approx(0.15503875968992248)


@pytest.mark.parametrize(
    ("per_position", "length", "rate"),
    [
        ((0.745, 0.537, 0.387), 2.668, 0.5562),  # MiniMax-M3, GQA draft, MT-Bench
        ((0.719, 0.500, 0.342), 2.561, 0.5204),  # the same, SPEED-Bench
    ],
)
def test_the_published_table_follows_from_the_definitions(
    per_position: tuple[float, ...], length: float, rate: float
) -> None:
    drafts = 100_000
    accepted = tuple(round(share * drafts) for share in per_position)
    counters = Counters(drafts, 3 * drafts, sum(accepted), accepted, 0)
    assert mean_accepted_length(counters) == pytest.approx(length, abs=0.0016)
    assert draft_accept_rate(counters) == pytest.approx(rate, abs=0.0006)
    assert per_position_accept_rate(counters) == pytest.approx(per_position)

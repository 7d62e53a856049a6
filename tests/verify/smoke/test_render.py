"""A run as text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle3pack.verify.smoke.render import bar, render_run

RUN = {
    "engine": {"name": "vllm", "version": "0.32.0", "device": "cuda"},
    "dataset": {"name": "mt_bench", "n_prompts": 64, "n_requests": 128},
    "target": {"dtype": "bfloat16"},
    "tensor_parallel_size": 4,
    "num_speculative_tokens": 3,
    "mean_accepted_length": 2.668,
    "mean_accepted_length_interval": {"low": 2.6, "high": 2.74, "level": 0.95, "over": "prompts", "n": 64},
    "draft_accept_rate": 0.5562,
    "draft_accept_rate_interval": None,
    "drafts": 20000,
    "draft_tokens": 60000,
    "accepted_tokens": 33372,
    "output_tokens": 53372,
    "wall_s": 100.0,
    "per_position_accept_rate": [0.745, 0.537, 0.387],
    "per_category": [],
    "probes": [{"name": "burst", "status": "failed", "message": "2 of 32 answers are empty"}],
    "baseline": {"output_tokens": 53000, "wall_s": 190.0},
    "speedup": 1.913,
    "agreement": {
        "compared": 128,
        "identical": 127,
        "divergences": [{"prompt": 4, "turn": 1, "position": 31}],
    },
    "against": {
        "mean_accepted_length": 2.698,
        "per_position_accept_rate": [0.75, 0.541, 0.407],
        "draft": {"source": "hf:org/mha"},
    },
    "retention": 0.982,
    "retention_interval": None,
}


def test_the_whole_of_it() -> None:
    assert render_run(RUN) == "\n".join(
        [
            "smoke test  vllm 0.32.0 · TP 4 · cuda · bfloat16 · k = 3 · mt_bench: 64 prompts, 128 answers",
            "  mean accepted length         2.668   2.600 to 2.740  (95%, over 64 prompts)",
            "  draft accept rate           55.62%",
            "  counted               20000 drafts   60000 draft tokens, 33372 accepted",
            "  output                53372 tokens   533.7 tokens/s",
            "  position 1                   0.745   ██████████████████████▍         against 0.750",
            "  position 2                   0.537   ████████████████▏               against 0.541",
            "  position 3                   0.387   ███████████▋                    against 0.407",
            "  speed-up                     1.91x   278.9 tokens/s without the draft",
            "  same greedy answers     127 of 128   first difference: prompt 5, turn 2, after 31 tokens",
            "  against                      2.698   hf:org/mha",
            "  retention                    0.982",
            "  probe burst                 FAILED   2 of 32 answers are empty",
        ]
    )


def test_nothing_drafted() -> None:
    run = RUN | {"mean_accepted_length": None, "per_position_accept_rate": None, "baseline": None}
    assert "  nothing was drafted" in render_run(run | {"against": None}).splitlines()


@given(st.floats(0, 1), st.integers(1, 60))
def test_a_bar_is_as_long_as_its_share(share: float, cells: int) -> None:
    text = bar(share, cells)
    assert len(text) == cells
    assert abs(text.count("█") - share * cells) <= 1


def test_bars_at_both_ends() -> None:
    assert bar(0, 4) == "    "
    assert bar(1, 4) == "████"
    assert bar(1.5, 2) == "██"

"""vLLM's speculative counters as its Prometheus endpoint exposes them.

Source: vLLM 0.32 v1/spec_decode/metrics.py; prometheus_client adds `_total` to a counter's name, and
positions are one series each. A server with several engines has one set a engine; they are summed.
"""

from __future__ import annotations

from eagle3pack.engine.counters import Counters

_DRAFTS = "vllm:spec_decode_num_drafts"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
_ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_OUTPUT_TOKENS = "vllm:generation_tokens"


def parse_metrics(text: str) -> Counters | None:
    """Read the counters; None where there are none, which means that speculation is off.

    Raises:
        ValueError: the text is not in the Prometheus format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if name == _ACCEPTED_PER_POSITION and "position" in sample.labels:
                position = int(sample.labels["position"])
                per_position[position] = per_position.get(position, 0) + sample.value
            else:
                sums[name] = sums.get(name, 0) + sample.value
    if _DRAFTS not in sums:
        return None
    return Counters(
        drafts=round(sums[_DRAFTS]),
        draft_tokens=round(sums.get(_DRAFT_TOKENS, 0)),
        accepted_tokens=round(sums.get(_ACCEPTED, 0)),
        accepted_per_position=tuple(
            round(per_position.get(i, 0)) for i in range(max(per_position, default=-1) + 1)
        ),
        output_tokens=round(sums.get(_OUTPUT_TOKENS, 0)),
    )


def difference(after: Counters, before: Counters) -> Counters:
    """What was counted in between."""
    return Counters(
        drafts=after.drafts - before.drafts,
        draft_tokens=after.draft_tokens - before.draft_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        accepted_per_position=tuple(
            now - then
            for now, then in zip(
                after.accepted_per_position,
                before.accepted_per_position + (0,) * len(after.accepted_per_position),
                strict=False,
            )
        ),
        output_tokens=after.output_tokens - before.output_tokens,
    )


def from_histogram(histogram: list[int], draft_tokens: int, output_tokens: int) -> Counters:
    """The counters of one request from how often 0, 1, 2, ... of its draft tokens were accepted."""
    return Counters(
        drafts=sum(histogram),
        draft_tokens=draft_tokens,
        accepted_tokens=sum(count * times for count, times in enumerate(histogram)),
        accepted_per_position=tuple(sum(histogram[i + 1 :]) for i in range(len(histogram) - 1)),
        output_tokens=output_tokens,
    )

"""Free text: no number and no claim without a source."""

from __future__ import annotations

from decimal import Decimal

import pytest

from eagle3pack.errors import InputError
from eagle3pack.publish.ledger import Document, Ledger, require_sources
from eagle3pack.publish.prose import bind_text

REPORT = Document("report.json", "a" * 64, {"runs": [{"length": Decimal("2.668"), "name": "MT-Bench"}]})


def bind(written: str) -> tuple[str, Ledger]:
    ledger = Ledger()
    return require_sources(bind_text(written, {"report.json": REPORT}, ledger, where="summary")), ledger


@pytest.mark.parametrize(
    "written",
    [
        "An EAGLE3 draft for MiniMax-M3 on H200, trained with TorchSpec.",
        "See arXiv:2503.01840 and https://example.org/2024/12.",
        "用 TorchSpec 训练的 EAGLE3 草稿。",
        "Qwen3-8B and Llama-3.1 are other targets; v1.2 is another version.",
    ],
)
def test_names_are_no_numbers(written: str) -> None:
    assert bind(written)[0] == written


@pytest.mark.parametrize(
    "written",
    [
        "Accepts 2.7 tokens.",
        "An accept rate of 83%.",
        "Runs 3x as fast.",
        "Trained on 80GB cards.",
        "接受长度 2.7。",
        "接受长度２。",
        "pass@1",
        "Released 2026-01-02.",
    ],
)
def test_numbers_need_a_source(written: str) -> None:
    with pytest.raises(InputError, match="without a source"):
        bind(written)


@pytest.mark.parametrize(
    "written",
    [
        "Up to the longest answers.",
        "It is lossless.",
        "State-of-the-art drafting.",
        "Generation becomes twice as quick.",
        "A speedup for everyone.",
        "无损加速。",
        "速度翻倍。",
    ],
)
def test_claims_need_a_source(written: str) -> None:
    with pytest.raises(InputError, match="without a source"):
        bind(written)


@pytest.mark.parametrize("written", ["A draft {{ unclosed", "of {{ report.json }}", "with braces }}"])
def test_braces_that_are_no_reference_are_refused(written: str) -> None:
    with pytest.raises(InputError, match="which is no reference"):
        bind(written)


def test_a_reference_is_a_source() -> None:
    text, ledger = bind("Up to {{ report.json#/runs/0/length }} tokens on {{report.json#/runs/0/name}}.")
    assert text == "Up to 2.668 tokens on MT-Bench."
    assert [(e.text, e.sources[0].pointer) for e in ledger.entries] == [
        ("2.668", "/runs/0/length"),
        ("MT-Bench", "/runs/0/name"),
    ]


def test_a_reference_covers_its_own_sentence_only() -> None:
    with pytest.raises(InputError, match="lossless"):
        bind("It yields {{ report.json#/runs/0/length }} tokens. It is lossless.")


@pytest.mark.parametrize(
    "reference", ["{{ report.json#/runs/1/length }}", "{{ other.json#/a }}", "{{ report.json#/runs }}"]
)
def test_a_reference_to_nothing_is_refused(reference: str) -> None:
    with pytest.raises(InputError, match="summary"):
        bind(f"It yields {reference} tokens.")


def test_html_is_refused() -> None:
    with pytest.raises(InputError, match="HTML"):
        bind("<!-- eagle3pack:card -->")


def test_a_digit_that_slips_through_is_caught_at_the_end() -> None:
    with pytest.raises(InputError, match="has no source"):
        require_sources("The draft has 3 layers.")

"""Reports that may not be quoted: of other bytes, cut, or contradicting their own counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.errors import InputError
from eagle3pack.publish.ledger import Document, json_document
from eagle3pack.publish.reports import Verdict, check_run, read_reports
from tests.publish import inputs
from tests.tiny import write_draft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("reports") / "draft")


def judge(folder: Path, tmp_path: Path, *documents: dict[str, Any]) -> Verdict:
    paths = [inputs.write_report(tmp_path / f"{i}.json", document) for i, document in enumerate(documents)]
    return read_reports(paths, inputs.digest_of(folder))[1]


def test_a_measured_report_is_enough(folder: Path, tmp_path: Path) -> None:
    assert judge(folder, tmp_path, inputs.report(folder)) == Verdict("", ())


def test_several_reports_of_one_draft(folder: Path, tmp_path: Path) -> None:
    static = inputs.report(folder, [], smoke={"status": "not_run", "reason": "no GPU", "runs": []})
    assert judge(folder, tmp_path, static, inputs.report(folder)) == Verdict("", ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_accepted_length": 2.968}, "mean_accepted_length 2.968"),
        ({"draft_accept_rate": 0.9}, "draft_accept_rate"),
        ({"per_position_accept_rate": [0.745, 0.537, 0.487]}, "states 2 0.487"),
        ({"per_position_accept_rate": [0.745, 0.537]}, "other positions"),
        ({"accepted_tokens": 1700}, "contradict"),
        ({"accepted_per_position": [1745, -463, 387]}, None),
        ({"drafts": 0}, "no drafts"),
    ],
)
def test_rates_must_follow_from_counters(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(InputError, match=message):
        judge(folder, tmp_path, inputs.report(folder, [inputs.run(**changes)]))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(1000, 5000))
def test_rates_that_follow_from_counters_are_taken(accepted: list[int], drafts: int) -> None:
    accepted.sort(reverse=True)
    run = inputs.run(
        drafts=drafts,
        draft_tokens=drafts * len(accepted),
        accepted_tokens=sum(accepted),
        accepted_per_position=accepted,
        num_speculative_tokens=len(accepted),
        mean_accepted_length=1 + sum(accepted) / drafts,
        draft_accept_rate=sum(accepted) / (drafts * len(accepted)),
        per_position_accept_rate=[count / drafts for count in accepted],
    )
    check_run(Document("report.json", "0" * 64, run).root, where="run")


def quoted(text: str) -> None:
    document = json_document("report.json", b"%s" % text.encode())
    check_run(document.root, where="run")


def quotation(length: str, rate: str, positions: str) -> str:
    return (
        '{"origin": "quoted", "source_url": "https://example.org", "num_speculative_tokens": 3,'
        f'"mean_accepted_length": {length}, "draft_accept_rate": {rate},'
        f'"per_position_accept_rate": {positions}}}'
    )


@pytest.mark.parametrize(
    ("length", "rate", "positions"),
    [
        ("2.668", "0.5562", "[0.745, 0.537, 0.387]"),  # the published figures, rounded as they are
        ("2.561", "0.5204", "[0.719, 0.500, 0.342]"),
        ("2.7", "0.56", "null"),
        ("2.698", "null", "null"),
    ],
)
def test_quoted_rates_agree_to_their_printed_digits(length: str, rate: str, positions: str) -> None:
    quoted(quotation(length, rate, positions))


@pytest.mark.parametrize(
    ("length", "rate", "positions"),
    [
        ("2.658", "0.5562", "[0.745, 0.537, 0.387]"),
        ("2.668", "0.5662", "[0.745, 0.537, 0.387]"),
        ("2.668", "0.5562", "[0.745, 0.537, 0.397]"),
        ("4.668", "null", "null"),
        ("null", "null", "null"),
    ],
)
def test_quoted_rates_that_disagree_are_refused(length: str, rate: str, positions: str) -> None:
    with pytest.raises(InputError, match="quotes"):
        quoted(quotation(length, rate, positions))


def test_a_quotation_needs_its_source_and_no_counters(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="source_url"):
        judge(folder, tmp_path, inputs.report(folder, [inputs.quoted(source_url=None)]))
    with pytest.raises(InputError, match="counters must be null"):
        judge(folder, tmp_path, inputs.report(folder, [inputs.quoted(drafts=5)]))


def test_quotations_alone_verify_nothing(folder: Path, tmp_path: Path) -> None:
    verdict = judge(folder, tmp_path, inputs.report(folder, [inputs.quoted()]))
    assert verdict.unverified == ("no engine ran this draft",)


def test_a_report_of_other_bytes(folder: Path, tmp_path: Path) -> None:
    document = inputs.report(folder)
    document["draft"]["digest"] = "0" * 64
    with pytest.raises(InputError, match="is about the draft 000000000000"):
        judge(folder, tmp_path, document)


def test_a_run_of_another_draft(folder: Path, tmp_path: Path) -> None:
    other = inputs.run(draft={"source": "other", "digest": "1" * 64})
    with pytest.raises(InputError, match="another draft"):
        judge(folder, tmp_path, inputs.report(folder, [other]))


def test_a_quick_report_only_renders(folder: Path, tmp_path: Path) -> None:
    document = inputs.report(folder, complete=False)
    document["draft"]["digest"] = None
    assert "not made from all bytes" in judge(folder, tmp_path, document).only_rendering


def test_a_failed_check_needs_a_reason(folder: Path, tmp_path: Path) -> None:
    document = inputs.report(folder, passed=False, checks=[inputs.failed_check("error")])
    document["summary"]["errors"] = 1
    assert "checks failed" in judge(folder, tmp_path, document).unverified[0]


def test_failures_that_were_cut_out_are_noticed(folder: Path, tmp_path: Path) -> None:
    document = inputs.report(folder)
    document["summary"]["errors"] = 1
    with pytest.raises(InputError, match="but lists 0"):
        judge(folder, tmp_path, document)


def test_a_pass_with_a_failed_check_is_refused(folder: Path, tmp_path: Path) -> None:
    document = inputs.report(folder, checks=[inputs.failed_check("error")])
    document["summary"]["errors"] = 1
    with pytest.raises(InputError, match="says that it passed"):
        judge(folder, tmp_path, document)


@pytest.mark.parametrize("status", ["not_run", "failed"])
def test_a_smoke_test_that_did_not_pass(folder: Path, tmp_path: Path, status: str) -> None:
    document = inputs.report(folder, [], smoke={"status": status, "reason": "no GPU", "runs": []})
    assert "no GPU" in "".join(judge(folder, tmp_path, document).unverified)

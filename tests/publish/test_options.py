"""What the command line refuses before anything is read or sent."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.errors import UsageError
from eagle3pack.publish import command
from tests.publish import inputs
from tests.publish.conftest import HF, Place


@pytest.mark.parametrize(
    ("options", "to", "message"),
    [
        ((), ("org/tiny",), "hf:ORG/NAME"),
        ((), (), "no destination"),
        ((), (HF, "hf:org/other"), "two repositories"),
        (("--offline",), (HF,), "--dry-run"),
        (("--pr", "--tag", "v1"), (HF,), "pull request"),
        (("--lang", "fr"), (HF,), "fr"),
        (("--allow-unverified", " "), (HF,), "reason"),
        (("--no-report",), (HF,), "no report"),
        (("--report", "nowhere.json"), (HF,), "nowhere.json: is no file"),
        (("--config", "nowhere.yaml"), (HF,), "nowhere.yaml"),
        ((), ("hf:org/ti--ny",), "no name that a hub takes"),
        ((), ("ms:org/tiny.git",), "no name that a hub takes"),
        ((), ("hf:Org/Target",), "is the target itself"),
        ((), ("ms:org/target-ms",), "is the target itself"),
        (("--tag", ""), (HF,), "no name of a tag"),
        (("--tag", "v 1"), (HF,), "no name of a tag"),
        (("--tag", "v1..2"), (HF,), "no name of a tag"),
        (("--check-card", "--tag", "v1"), (HF,), "--tag is for publishing"),
        (("--check-card", "--replace-card"), (HF,), "--replace-card is for publishing"),
        (("--render-to", "draft/cards", "--dry-run"), (HF,), "is in the draft's folder"),
        (("--receipt", "report.json"), (HF,), "would be overwritten"),
        (("--receipt", "draft/../publish.yaml"), (HF,), "would be overwritten"),
        (("--receipt", "draft/config.json"), (HF,), "would be overwritten"),
        (("--report", "report.json", "--report", "report.json"), (HF,), "given before"),
    ],
)
def test_it_is_refused(place: Place, options: tuple[str, ...], to: tuple[str, ...], message: str) -> None:
    outcome = place.publish(*options, to=to)
    assert outcome.code in (2, 3) and message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not place.hf.log


def test_without_a_settings_file(place: Place) -> None:
    (place.root / "publish.yaml").unlink()
    outcome = place.publish(to=(HF,))
    assert outcome.code == 2 and "publish.yaml" in outcome.stderr


@pytest.mark.parametrize("text", ["", "- a list", "name: [", "name: x\nlicence: mit\n"])
def test_settings_that_cannot_be_read(place: Place, text: str) -> None:
    (place.root / "publish.yaml").write_text(text)
    outcome = place.publish(to=(HF,))
    assert outcome.code == 3 and "publish.yaml" in outcome.stderr


def test_a_draft_that_no_engine_ran_needs_a_reason(place: Place) -> None:
    place.rewrite_report(smoke={"status": "not_run", "reason": "no GPU here", "runs": []})
    outcome = place.publish(to=(HF,))
    assert outcome.code == 3 and "no GPU here" in outcome.stderr
    assert place.publish("--allow-unverified", "measured elsewhere", to=(HF,)).code == 0
    card = place.content(place.hf)["README.md"].decode()
    assert "Published all the same because: measured elsewhere" in card
    assert "- No acceptance was measured." in card


def test_a_report_of_other_bytes_is_refused(place: Place) -> None:
    config = place.draft / "config.json"
    config.write_text(config.read_text() + "\n")
    outcome = place.publish(to=(HF,))
    assert outcome.code == 3 and "verify" in outcome.stderr
    assert not place.hf.log


def test_help_has_an_example(place: Place) -> None:
    outcome = place.runner.run(["publish", "--help"], cwd=place.root, env={})
    assert outcome.code == 0 and "eagle3pack publish ./draft-gqa" in outcome.stdout
    assert "publish.yaml holds at least name, license and target" in outcome.stdout


def test_paths_in_a_report_are_pointed_out(place: Place) -> None:
    report = inputs.report(place.draft)
    report["draft"]["source"] = "/home/someone/draft"
    inputs.write_report(place.root / "report.json", report)
    outcome = place.publish("--dry-run", "--offline", to=(HF,))
    assert outcome.code == 0 and "/home/someone/draft" in outcome.stderr


def test_json_is_all_that_stands_on_stdout(place: Place) -> None:
    outcome = place.publish("--json")
    assert outcome.code == 0
    assert outcome.document["receipt"]["hubs"][0]["status"] == "done"
    assert outcome.document["cards"][0]["figures"]


def test_a_receipt_that_cannot_be_written_stops_it_before_anything_is_sent(place: Place) -> None:
    outcome = place.publish("--receipt", "nowhere/receipt.json")
    assert outcome.code == 4 and "--receipt" in outcome.stderr
    assert not place.hf_commits and not place.ms_commits


def test_a_broken_receipt_is_only_a_hint(place: Place) -> None:
    for text in ("{", "[]", '{"hubs": [3]}'):
        (place.root / "receipt.json").write_text(text)
        assert place.publish(to=(HF,)).code == 0


@pytest.mark.parametrize("name", ["publish.yaml", "report.json"])
def test_secrets_beside_the_draft_are_refused_too(place: Place, name: str) -> None:
    path, secret = place.root / name, "hf_" + "s" * 34
    if name == "publish.yaml":
        path.write_text(path.read_text() + f"citation: {secret}\n")
    else:
        run = inputs.run(command=f"HF_TOKEN={secret} eagle3pack verify draft")
        inputs.write_report(path, inputs.report(place.draft, [run]))
    outcome = place.publish(to=(HF,))
    assert outcome.code == 3 and name in outcome.stderr and secret not in outcome.stderr
    assert not place.hf.log


class TestWithoutMatplotlib:
    """The chart is left out, which is said, unless publish.yaml asks for it."""

    @pytest.fixture(autouse=True)
    def without(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command, "can_draw", lambda: False)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.chdir(place.root)

    def publish(self, chart: str, **options: Any) -> list[str]:
        Path("publish.yaml").write_text(inputs.SETTINGS.replace("chart: false\n", chart))
        said: list[str] = []
        around = command.Surroundings(
            say=said.append,
            warn=said.append,
            progress=lambda label, total: nullcontext(lambda count: None),
            confirm=None,
            format_bytes=str,
        )
        asked = command.PublishOptions((HF,), (Path("report.json"),), dry_run=True, offline=True)
        command.run_publish(Path("draft"), replace(asked, **options), around)
        return said

    def test_the_card_has_none_and_that_is_said(self) -> None:
        said = self.publish("", render_to=Path("cards"))
        assert "no chart: matplotlib is not installed" in "".join(said)
        assert "acceptance.svg" not in Path("cards/hf/README.md").read_text()
        assert not Path("cards/hf/acceptance.svg").exists()

    def test_a_chart_that_was_asked_for_is_an_error(self) -> None:
        with pytest.raises(UsageError, match="matplotlib"):
            self.publish("chart: true\n")

    @pytest.mark.parametrize("drawn", [True, False])
    def test_a_card_from_a_machine_with_it_is_still_ours(self, place: Place, drawn: bool) -> None:
        Path("publish.yaml").write_text(inputs.SETTINGS.replace("chart: false\n", ""))
        if drawn:
            assert place.publish("--dry-run", "--offline", "--render-to", "cards", to=(HF,)).code == 0
            assert "acceptance.svg" in Path("cards/hf/README.md").read_text()
        else:
            self.publish("", render_to=Path("cards"))
        Path("draft/README.md").write_bytes(Path("cards/hf/README.md").read_bytes())
        self.publish("", dry_run=False, check_card=True)
        assert place.publish("--check-card", to=(HF,)).code == 0


def test_quiet_says_nothing_where_all_is_well(place: Place) -> None:
    outcome = place.publish("--dry-run", "--offline", "-q", to=(HF,))

    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")

"""The card: the same inputs give the same bytes, and every value on it is bound."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3pack.errors import InputError
from eagle3pack.publish.card import CardInputs, render_card
from eagle3pack.publish.facts import read_facts
from eagle3pack.publish.folder import read_folder
from eagle3pack.publish.hub import HubKind
from eagle3pack.publish.ledger import Document
from eagle3pack.publish.marker import is_ours
from tests.publish import inputs
from tests.tiny import write_draft

SETTINGS: dict[str, Any] = {
    "name": "tiny-eagle3",
    "license": "mit",
    "target": {"huggingface": "org/target", "modelscope": "org/target-ms"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("card") / "draft")


def document(name: str, value: Any) -> Document:
    return Document(name, hashlib.sha256(json.dumps(value).encode()).hexdigest(), value)


def card_inputs(folder: Path, *reports: dict[str, Any], **settings: Any) -> CardInputs:
    documents = [
        document("report.json" if i == 0 else f"report-{i + 1}.json", value)
        for i, value in enumerate(reports or [inputs.report(folder)])
    ]
    given = document("publish.yaml", SETTINGS | settings)
    return CardInputs(read_facts(read_folder(folder)), given, tuple(documents))


def card(folder: Path, *reports: dict[str, Any], kind: HubKind = "hf", **settings: Any) -> str:
    return render_card(card_inputs(folder, *reports, **settings), kind, "org/tiny", ["en"]).text


def front_matter(text: str) -> dict[str, Any]:
    meta: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return meta


def test_the_same_inputs_give_the_same_bytes(folder: Path) -> None:
    assert card(folder) == card(folder)


def test_it_says_what_it_is_and_what_was_measured(folder: Path) -> None:
    text = card(folder)
    assert "It is not a standalone model." in text
    assert "| MT-Bench | 64 | 2.669 | 55.63 % | 0.745 | 0.537 | 0.387 |" in text
    assert "vLLM 0.32.0, FLASH\\_ATTN" in text or "vLLM 0.32.0, FLASH_ATTN" in text
    assert "| SGLang | not tested | not tested |" in text
    assert "- Not tested with SGLang." in text
    assert '"num_speculative_tokens": 3}' in text and "--speculative-num-draft-tokens 4" in text
    assert "vllm serve org/target --tensor-parallel-size 4" in text


def test_every_number_is_in_the_ledger_with_a_pointer_that_holds(folder: Path) -> None:
    made = card_inputs(folder)
    rendered = render_card(made, "hf", "org/tiny", ["en"])
    known = {d.name: d for d in (made.facts, made.settings, *made.reports)}
    looked_up = 0
    for entry in rendered.ledger.entries:
        for source in entry.sources:
            if source.document in known:
                assert source.sha256 == known[source.document].sha256
                if source.pointer:
                    known[source.document].at(source.pointer)
                    looked_up += 1
    assert looked_up > 40
    written = {entry.text for entry in rendered.ledger.entries}
    assert {"2.669", "55.63 %", "0.745", "64", "16"} <= written


def test_both_languages_bind_the_same_values(folder: Path) -> None:
    made = card_inputs(folder)
    english, chinese = (render_card(made, "hf", "org/tiny", [code]).ledger for code in ("en", "zh"))

    def sources(ledger: Any) -> set[Any]:
        return {source for entry in ledger.entries for source in entry.sources}

    assert sources(english) == sources(chinese)


def test_the_hub_decides_the_language(folder: Path) -> None:
    made = card_inputs(folder)
    assert "## Limitations" in render_card(made, "hf", "org/tiny").text
    assert "## 局限性" in render_card(made, "ms", "org/tiny").text
    both = render_card(made, "hf", "org/tiny", ["en", "zh"]).text
    assert both.index("## Limitations") < both.index("## 局限性")
    assert front_matter(both) == front_matter(render_card(made, "hf", "org/tiny").text)


def test_front_matter_for_hugging_face(folder: Path) -> None:
    from huggingface_hub import ModelCard

    text = card(folder, language=["en"], datasets={"huggingface": ["org/data"], "modelscope": ["x/y"]})
    meta = ModelCard(text).data.to_dict()
    assert meta["base_model"] == ["org/target"] and meta["base_model_relation"] == "finetune"
    assert meta["pipeline_tag"] == "text-generation" and meta["license"] == "mit"
    assert {"eagle3", "speculative-decoding", "draft-model", "vllm", "eagle3pack"} <= set(meta["tags"])
    assert "sglang" not in meta["tags"] and "library_name" not in meta
    assert meta["datasets"] == ["org/data"]
    [result] = ModelCard(text).data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == (
        "acceptance_length",
        2.669,
        "MT-Bench",
    )


def test_front_matter_for_modelscope(folder: Path) -> None:
    meta = front_matter(card(folder, kind="ms", license="apache-2.0"))
    assert meta["license"] == "Apache License 2.0"
    assert meta["base_model"] == ["org/target-ms"]
    assert meta["tasks"] == ["text-generation"] and meta["frameworks"] == ["pytorch"]
    assert "model-index" not in meta and "datasets" not in meta


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"license": "MIT"}, "no known id"),
        ({"license": "other"}, "license_name"),
        ({"target": {"huggingface": "/models/target"}}, "no ORG/NAME"),
        ({"target": {"huggingface": "org/a--b"}}, "no ORG/NAME"),
        ({"language": ["english"]}, None),
        ({"datasets": {"huggingface": ["./data"]}}, "no ORG/NAME"),
    ],
)
def test_metadata_that_a_hub_would_refuse(
    folder: Path, settings: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(InputError, match=message):
        card(folder, **settings)


def test_modelscope_needs_its_own_name_of_the_target(folder: Path) -> None:
    with pytest.raises(InputError, match=r"target\.modelscope"):
        card(folder, kind="ms", target={"huggingface": "org/target"})


class TestResults:
    def test_a_speed_up_needs_a_baseline(self, folder: Path) -> None:
        assert "Speed-up" not in card(folder)
        text = card(folder, inputs.report(folder, [inputs.run(baseline=inputs.baseline())]))
        assert "| Speed-up |" in text and "2.00x" in text

    def test_a_baseline_under_other_conditions_is_refused(self, folder: Path) -> None:
        base = inputs.baseline(max_concurrency=1)
        with pytest.raises(InputError, match="max_concurrency"):
            card(folder, inputs.report(folder, [inputs.run(baseline=base)]))

    def test_a_stated_speed_up_must_follow(self, folder: Path) -> None:
        run = inputs.run(baseline=inputs.baseline(), speedup=3.0)
        with pytest.raises(InputError, match=r"speed-up of 3\.0"):
            card(folder, inputs.report(folder, [run]))

    def test_a_draft_that_slows_down_says_so(self, folder: Path) -> None:
        run = inputs.run(baseline=inputs.baseline(wall_s=10.0))
        text = card(folder, inputs.report(folder, [run]))
        assert "On MT-Bench the target is slower with the draft than without: 0.80x." in text

    def test_every_data_set_is_shown(self, folder: Path) -> None:
        names = ["MT-Bench", "GSM8K", "HumanEval"]
        runs = [inputs.run(dataset=inputs.RUN["dataset"] | {"name": name}) for name in names]
        text = card(folder, inputs.report(folder, runs[:2]), inputs.report(folder, runs[2:]))
        assert all(f"| {name} | 64 |" in text for name in names)

    def test_other_conditions_make_another_table(self, folder: Path) -> None:
        runs = [inputs.run(), inputs.run(max_concurrency=1)]
        text = card(folder, inputs.report(folder, runs))
        assert text.count("| Data set |") == 2 and "concurrency 1:" in text

    def test_a_quotation_is_labelled(self, folder: Path) -> None:
        text = card(folder, inputs.report(folder, [inputs.run(), inputs.quoted()]))
        assert "**Quoted from** <https://example.org/card>, not measured by eagle3pack." in text

    def test_few_prompts_are_a_caution(self, folder: Path) -> None:
        few = inputs.run(dataset=inputs.RUN["dataset"] | {"n_prompts": 8})
        assert "MT-Bench: 8 prompts only" in card(folder, inputs.report(folder, [few]))

    def test_agreement_with_the_target_alone(self, folder: Path) -> None:
        agreement = {"compared": 128, "identical": 126, "share": 126 / 128, "divergences": []}
        text = card(folder, inputs.report(folder, [inputs.run(agreement=agreement)]))
        assert "MT-Bench: 126 of 128 greedy answers are token for token those without the draft." in text

    def test_another_draft_beside_it(self, folder: Path) -> None:
        against = inputs.quoted(mean_accepted_length=2.698, draft_accept_rate=0.566)
        against["per_position_accept_rate"] = None
        text = card(folder, inputs.report(folder, [inputs.run(against=against)]))
        assert "| 2.698 | 98.3 % |" in text or "| 2.70 | 98.3 % |" in text


def test_failed_checks_are_shown(folder: Path) -> None:
    report = inputs.report(folder, checks=[inputs.failed_check("warning")])
    report["summary"]["warnings"] = 1
    assert "- Check A01 failed (warning): 8 heads do not divide by 3." in card(folder, report)


def test_the_reason_for_missing_verification_is_shown(folder: Path) -> None:
    made = card_inputs(folder)
    unverified = CardInputs(
        made.facts, made.settings, made.reports, None, ("no engine ran this draft",), "no GPU with 80 GB here"
    )
    text = render_card(unverified, "hf", "org/tiny").text
    assert "> **Not fully verified.** no engine ran this draft" in text
    assert "Published all the same because: no GPU with 80 GB here" in text


def test_names_from_a_report_cannot_break_the_layout(folder: Path) -> None:
    name = "evil | name\n\n## Heading <script> `code`"
    run = inputs.run(dataset=inputs.RUN["dataset"] | {"name": name})
    text = card(folder, inputs.report(folder, [run]))
    assert "\n## Heading" not in text and "<script>" not in text.split("---\n")[2]
    assert r"evil \| name ## Heading \<script\> \`code\`" in text


def test_the_marker_tells_an_edited_card(folder: Path) -> None:
    text = card(folder)
    assert is_ours(text) and is_ours(text.replace("\n", "\r\n"))
    assert not is_ours(text.replace("2.669", "2.969"))
    assert not is_ours("# Mine\n")


class TestConversion:
    def record(self, folder: Path, **changes: Any) -> Document:
        sha256 = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        errors = {"key_value_head": 0, "k_relative_error": [0.5, 0.7], "v_relative_error": [0.8, 0.9]}
        value = {
            "tool": {"name": "eagle3pack", "version": "0.1.0"},
            "source": {"place": "hf", "id": "org/mha", "revision": None},
            "method": {"name": "procrustes", "parameters": {}},
            "heads": {
                "num_attention_heads": 8,
                "num_key_value_heads_before": 8,
                "num_key_value_heads_after": 4,
            },
            "layers": [{"layer": 0, "groups": [errors]}],
            "output": {"files": [{"path": "model.safetensors", "size": 1, "sha256": sha256}]},
            "mends": [],
        }
        return document("eagle3pack.json", value | changes)

    def render(self, folder: Path, record: Document, **settings: Any) -> str:
        made = card_inputs(folder, **settings)
        return render_card(CardInputs(made.facts, made.settings, made.reports, record), "hf", "org/tiny").text

    def test_method_heads_and_errors(self, folder: Path) -> None:
        text = self.render(folder, self.record(folder))
        assert "method `procrustes`: 8 to 4 key/value heads, from `org/mha`" in text
        assert "| 0 | 0 | 0.6000 | 0.8500 |" in text
        assert "the draft was not trained again" in text

    def test_weights_that_were_trained_since(self, folder: Path) -> None:
        changed = {"files": [{"path": "model.safetensors", "size": 1, "sha256": "0" * 64}]}
        record = self.record(folder, output=changed)
        with pytest.raises(InputError, match=r"eagle3pack\.json"):
            self.render(folder, record)
        text = self.render(folder, record, conversion={"retrained": True})
        assert "The draft was trained again after its heads had been merged." in text

    def test_a_retraining_that_did_not_happen(self, folder: Path) -> None:
        with pytest.raises(InputError, match="retrained"):
            self.render(folder, self.record(folder), conversion={"retrained": True})


def test_the_published_card_is_what_the_example_renders(tmp_path: Path) -> None:
    """examples/minimax-m3 holds the published figures and the rendered result."""
    from eagle3pack.publish.command import PublishOptions, Surroundings, run_publish

    example = Path(__file__).parents[2] / "examples" / "minimax-m3"
    around = Surroundings(
        say=lambda text: None,
        warn=lambda text: None,
        progress=_no_progress,
        confirm=None,
        format_bytes=str,
    )
    options = PublishOptions(
        to=("hf:Inferact/MiniMax-M3-EAGLE3-GQA", "ms:Inferact/MiniMax-M3-EAGLE3-GQA"),
        report=(example / "report.json",),
        config=example / "publish.yaml",
        dry_run=True,
        offline=True,
        render_to=tmp_path,
    )
    run_publish(example / "draft", options, around)
    for kind in ("hf", "ms"):
        rendered = (tmp_path / kind / "README.md").read_text()
        assert rendered == (example / "rendered" / kind / "README.md").read_text()
        assert "| MT-Bench | 64 | 2.668 | 55.62 % | 0.745 | 0.537 | 0.387 |" in rendered
        assert "| SPEED-Bench qualitative | 64 | 2.561 | 52.04 % | 0.719 | 0.500 | 0.342 |" in rendered
    options = dataclasses.replace(options, dry_run=False, offline=False, yes=True)
    with pytest.raises(InputError, match="cannot be published"):
        run_publish(example / "draft", options, around)


def test_the_chart_is_deterministic_and_readable(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    from eagle3pack.publish.chart import GROUND, draw_chart
    from eagle3pack.publish.reports import smoke_runs

    runs = smoke_runs(card_inputs(folder, inputs.report(folder, [inputs.run(), inputs.quoted()])).reports)
    first, second = draw_chart(runs), draw_chart(runs)
    assert first == second
    drawn = first.decode()
    assert GROUND in drawn and "0.745" in drawn and "(quoted)" in drawn
    assert not re.search(r"dc:date|\b20\d\d-\d\d-\d\d", drawn)


def _no_progress(label: str, total: int) -> Any:
    from contextlib import nullcontext

    return nullcontext(lambda count: None)

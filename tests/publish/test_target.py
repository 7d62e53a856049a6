"""The target on the card is the one that was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from eagle3pack.errors import InputError
from eagle3pack.publish.ledger import Document
from eagle3pack.publish.target import require_shape, require_target
from tests.publish import inputs
from tests.publish.conftest import HF, MS, Place

DIGEST = "9d" * 32


def report_on(target: str, **facts: Any) -> Document:
    value = {"target": {"id": target, "config_sha256": DIGEST} | facts, "smoke": {"runs": []}}
    return Document("report.json", "0" * 64, value)


def settings(**target: Any) -> Document:
    names = {"huggingface": "org/target", "modelscope": "org/target-ms"}
    return Document("publish.yaml", "0" * 64, {"target": names | target})


@pytest.mark.parametrize("target", ["org/target", "hf:Org/Target", "hf:org/target@abc", "ms:org/target-ms"])
def test_either_hubs_name_is_the_target(target: str) -> None:
    require_target([report_on(target)], settings())


@pytest.mark.parametrize("target", ["hf:org/other", "org/other"])
def test_another_target_is_refused(target: str) -> None:
    with pytest.raises(InputError, match=r"org/other, but publish\.yaml names org/target"):
        require_target([report_on(target)], settings())


@pytest.mark.parametrize("name", ["hf:org/other", "ms:org/other"])
def test_no_statement_makes_another_repository_the_target(name: str) -> None:
    with pytest.raises(InputError, match="org/other"):
        require_target([report_on(name)], settings(measured_as=DIGEST))
    with pytest.raises(InputError, match="org/other"):
        require_target([report_on("org/other", revision="abc")], settings(measured_as=DIGEST))


@pytest.mark.parametrize("path", [".cache/target", "/models/target", "models/target", "target"])
@pytest.mark.parametrize("by", ["digest", "path", "list"])
def test_a_path_needs_a_statement(path: str, by: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if not path.startswith("/"):
        (tmp_path / path).mkdir(parents=True)
    with pytest.raises(InputError, match=re.escape(path)) as refused:
        require_target([report_on(path)], settings())
    assert f'measured_as: "{DIGEST}"' in refused.value.hint
    stated = {"digest": DIGEST, "path": path + "/", "list": [DIGEST]}[by]
    require_target([report_on(path)], settings(measured_as=stated))


def test_runs_are_held_against_the_names_too() -> None:
    report = report_on("org/target")
    report.value["smoke"]["runs"] = [
        {"origin": "measured", "target": {"id": "org/target"}, "against": {"target": {"id": "/models/x"}}}
    ]
    with pytest.raises(InputError, match="/models/x"):
        require_target([report], settings())


def test_a_quotation_names_a_repository() -> None:
    report = report_on("org/target")
    report.value["smoke"]["runs"] = [{"origin": "quoted", "target": {"id": "/models/x"}}]
    with pytest.raises(InputError, match="/models/x"):
        require_target([report], settings(measured_as="/models/x"))


def test_a_statement_that_fits_no_report_is_refused() -> None:
    with pytest.raises(InputError, match="measured_as"):
        require_target([report_on("org/target")], settings(measured_as=DIGEST))


@pytest.mark.parametrize(
    ("hidden", "vocab", "said"), [(576, 128256, "hidden states"), (4096, 49152, "vocab")]
)
def test_a_known_shape_that_the_draft_does_not_fit(hidden: int, vocab: int, said: str) -> None:
    facts = Document("facts", "0" * 64, {"target_hidden_size": hidden, "vocab_size": vocab})
    with pytest.raises(InputError, match=said):
        require_shape(facts, settings(huggingface="meta-llama/Llama-3.1-8B-Instruct"))


def test_a_known_shape_that_fits() -> None:
    facts = Document("facts", "0" * 64, {"target_hidden_size": 4096, "vocab_size": 128256})
    require_shape(facts, settings(huggingface="meta-llama/Llama-3.1-8B-Instruct"))


def test_the_line_of_the_error_mends_it_and_the_card_tells_of_the_copy(place: Place) -> None:
    copy = inputs.RUN["target"] | {"id": "/models/copy", "revision": None, "config_sha256": DIGEST}
    report = inputs.report(place.draft, [inputs.run(target=copy)])
    report["target"] |= {"id": "/models/copy", "revision": None, "config_sha256": DIGEST}
    inputs.write_report(place.root / "report.json", report)
    words = ("--dry-run", "--offline", "--render-to", "cards")
    refused = place.publish(*words)
    assert refused.code == 3 and "/models/copy" in refused.stderr
    line = refused.stderr.splitlines()[-1]
    path = place.root / "publish.yaml"
    path.write_text(path.read_text().replace("target:\n", f"target:\n{line}\n"))
    assert place.publish(*words, to=(HF, MS)).code == 0
    card = (place.root / "cards" / "hf" / "README.md").read_text()
    assert "bfloat16, measured on a local copy" in card
    assert (
        f"whose config.json has sha256 `{DIGEST}`, in bfloat16; that it is `org/target` is declared" in card
    )
    assert f"`{DIGEST}`" in (place.root / "cards" / "ms" / "README.md").read_text()

"""publish.yaml: every problem at once, the misspelt key first, and where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3pack.errors import InputError
from eagle3pack.publish.settings import read_settings

SOUND = "name: tiny\nlicense: mit\ntarget:\n  huggingface: org/target\n"


def refusal(tmp_path: Path, text: str) -> InputError:
    path = tmp_path / "publish.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        read_settings(path)
    return refused.value


def test_a_sound_one(tmp_path: Path) -> None:
    path = tmp_path / "publish.yaml"
    path.write_text(SOUND)
    assert read_settings(path).value["target"] == {"huggingface": "org/target"}


def test_the_documented_example_is_sound(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "publishing.md").read_text("utf-8")
    path = tmp_path / "publish.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0], "utf-8")
    assert read_settings(path).value["training"]["facts"] == {"samples": 1200000}


def test_a_misspelt_key_comes_first_with_the_one_that_was_meant(tmp_path: Path) -> None:
    error = refusal(tmp_path, SOUND.replace("license", "licence"))
    assert error.problem == "licence is no key; did you mean license?"
    assert "name, license," in error.hint and "docs/publishing.md" in error.hint
    assert "schemas/" not in str(error) + error.hint


def test_every_problem_at_once(tmp_path: Path) -> None:
    text = (
        "licence: mit\nname: 5\ntarget: {hugginface: org/target, modelscope: nowhere}\n"
        "summary: {zh: 草稿}\ntraining: {text: Up to twice as fast}\nlimitations: [Trained on 3 samples]\n"
    )
    lines = refusal(tmp_path, text).problem.splitlines()
    assert lines[0] == "has these problems"
    assert [line.strip() for line in lines[1:3]] == [
        "licence is no key; did you mean license?",
        "target.hugginface is no key; did you mean huggingface?",
    ]
    rest = "\n".join(lines[3:])
    for part in (
        "name: 5",
        "summary must be a text",
        "training.text: claims",
        "limitations.0: has the number",
    ):
        assert part in rest
    assert "target.modelscope: 'nowhere'" in rest and "missing" not in rest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: tiny\nlicense: [mit\n", "line 3, column 1"),
        ("name: tiny\n\tlicense: mit\n", "line 2, column 1"),
        ("name: a: b\n", "line 1, column 8"),
        (SOUND + "name: other\n", "line 5, column 1: the key 'name' stands twice"),
        (SOUND + "  huggingface: org/other\n", "line 5, column 3: the key 'huggingface' stands twice"),
    ],
)
def test_broken_yaml_is_found_by_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text).problem


@pytest.mark.parametrize("text", [SOUND + "created: 2026-13-99\n", "name: \x00\n"])
def test_yaml_that_the_reader_chokes_on(tmp_path: Path, text: str) -> None:
    assert "YAML" in refusal(tmp_path, text).problem


def test_a_license_name_that_no_hub_would_show(tmp_path: Path) -> None:
    assert "license_name" in refusal(tmp_path, SOUND + "license_name: mine\n").problem


def test_one_that_is_nested_too_deeply(tmp_path: Path) -> None:
    assert refusal(tmp_path, "name: " + "[" * 5000).problem == "is nested too deeply"

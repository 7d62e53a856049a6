"""Prompt files of the field's forms, and the set that ships."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3pack.engine.prompts import Prompt, parse_prompts, read_prompts, shipped_prompts
from eagle3pack.errors import InputError, PermissionDenied, UsageError


def parsed(text: str, suffix: str = ".jsonl") -> tuple[Prompt, ...]:
    return parse_prompts(text.encode(), name="set", where="file", suffix=suffix).prompts


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            {"question_id": 81, "category": "writing", "turns": ["a", "b"]},  # MT-Bench
            Prompt(("a", "b"), "writing"),
        ),
        ({"question_id": 1, "category": "qa", "turns": ["a"], "reference": ["x"]}, Prompt(("a",), "qa")),
        (  # SPEED-Bench
            {
                "question_id": "x",
                "category": "coding",
                "sub_category": "c",
                "turns": ["a"],
                "multiturn": False,
            },
            Prompt(("a",), "coding"),
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "x"},
                    {"role": "user", "content": "b"},
                ]
            },
            Prompt(("a", "b")),
        ),
        ({"prompt": "a", "category": None}, Prompt(("a",))),
        ({"instruction": "a"}, Prompt(("a",))),
        ({"token_ids": [1, 2], "category": "raw"}, Prompt((), "raw", (1, 2))),
        ("a", Prompt(("a",))),
    ],
)
def test_each_form_is_read_as_lines_and_as_a_list(item: Any, expected: Prompt) -> None:
    assert parsed(json.dumps(item)) == (expected,)
    assert parsed(json.dumps([item, item], indent=1)) == (expected, expected)


def test_text_is_one_prompt_a_line() -> None:
    assert parsed("  first \n\n第二个\r\n", ".txt") == (Prompt(("first",)), Prompt(("第二个",)))


def test_line_separators_inside_strings_do_not_end_a_line() -> None:
    assert parsed('{"prompt": "a\u2028b\u0085c"}\n') == (Prompt(("a\u2028b\u0085c",)),)


def test_a_byte_order_mark_is_no_part_of_the_first_prompt() -> None:
    assert parsed("\ufeffhello\n", ".txt") == (Prompt(("hello",)),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no prompt"),
        ("[]", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": ', "file, line 2: is not valid JSON"),
        ('{"prompt": "a"}\n3', "file, line 2: is neither"),
        ('["a", null]', "file, item 2: is neither"),
        ('{"turns": []}', "empty turn"),
        ('{"turns": ["a", 3]}', "no text"),
        ('{"prompt": "  "}', "empty turn"),
        ('{"answer": "a"}', "has neither turns nor messages .* it has answer"),
        ('{"turns": 5}', "file, line 1: turns is 5, expected a list"),
        ('{"messages": "a"}', 'messages is "a", expected a list'),
        ('{"prompt": "a", "category": 3}', "category is no text"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "role 'system'"),
        ('{"messages": [{"content": "a"}]}', "without a role"),
        ('{"token_ids": [1, -2]}', "no list of token ids"),
        ('{"token_ids": []}', "no list of token ids"),
        ('{"token_ids": [true]}', "no list of token ids"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_what_is_no_prompt_is_one_clear_error(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parsed(text)


@pytest.mark.parametrize(
    ("data", "problem"), [(b"PAR1\x00", "Parquet"), (b"\xff\xfe", r"not UTF-8 text \(byte 0\)")]
)
def test_other_files_are_refused(data: bytes, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        parse_prompts(data, name="set", where="file", suffix=".jsonl")


def test_a_file_gives_its_name_and_digest(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.write_text('{"turns": ["a"]}\n')

    prompts = read_prompts(path)

    assert (prompts.name, prompts.sha256) == ("question", hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(InputError, match="does not exist"):
        read_prompts(tmp_path / "other")
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "question.jsonl"
    path.touch(mode=0)

    with pytest.raises(PermissionDenied):
        read_prompts(path)


def test_selecting_keeps_the_order() -> None:
    lines = [{"prompt": str(i), "category": "ab"[i % 2]} for i in range(6)]
    prompts = parse_prompts(json.dumps(lines).encode(), name="set", where="file", suffix=".json")

    assert prompts.categories == ("a", "b")
    assert [p.turns[0] for p in prompts.select(limit=4).prompts] == ["0", "1", "2", "3"]
    assert [p.turns[0] for p in prompts.select(limit=2, categories=["b"]).prompts] == ["1", "3"]
    assert prompts.select().prompts == prompts.prompts
    with pytest.raises(UsageError, match="no category 'c'; it has a, b"):
        prompts.select(categories=["a", "c"])


def test_the_shipped_set_is_what_the_documentation_says() -> None:
    prompts = shipped_prompts().prompts

    assert len(prompts) == 32
    assert len(shipped_prompts().categories) == 8
    assert {sum(p.category == c for p in prompts) for c in shipped_prompts().categories} == {4}
    assert sum(len(p.turns) == 2 for p in prompts) >= 8
    chinese = sum(any("一" <= letter <= "鿿" for letter in p.turns[0]) for p in prompts)
    assert 8 <= chinese <= 16
    assert len({p.turns for p in prompts}) == 32


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_any_text_survives_json_lines(texts: list[str]) -> None:
    lines = "\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts)
    if any(not text.strip() for text in texts):
        with pytest.raises(InputError):
            parsed(lines)
    else:
        assert parsed(lines) == tuple(Prompt((text,)) for text in texts)


def test_mt_bench_as_published() -> None:
    path = os.environ.get("EAGLE3PACK_MT_BENCH")
    if not path:
        pytest.skip("EAGLE3PACK_MT_BENCH names no question.jsonl")
    prompts = read_prompts(Path(path))

    assert len(prompts.prompts) == 80
    assert {len(prompt.turns) for prompt in prompts.prompts} == {2}
    assert len(prompts.categories) == 8

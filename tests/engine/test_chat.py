"""Chat templates and tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3pack.engine.chat import Chat, load_chat
from eagle3pack.errors import InputError

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["<unk>", "<end>", "<user>", "<assistant>", "hello", "there", "again", "who"]


def chat(folder: Path, template: str | None = TEMPLATE) -> Chat:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>", "<user>", "<assistant>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<unk>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_chat(folder)


def test_turns_and_answers_go_through_the_template(tmp_path: Path) -> None:
    words = chat(tmp_path)

    def spelled(token_ids: list[int]) -> str:
        return " ".join(WORDS[i] for i in token_ids)

    assert spelled(words.prompt(["hello there"])) == "<user> hello there <end> <assistant>"
    assert spelled(words.prompt(["hello", "who"], ["again"])) == (
        "<user> hello <end> <assistant> again <end> <user> who <end> <assistant>"
    )
    assert words.stop_ids == {1}
    assert words.text([4, 5, 1]) == "hello there"


def test_a_target_without_a_template_is_given_the_texts(tmp_path: Path) -> None:
    words = chat(tmp_path, template=None)

    assert [WORDS[i] for i in words.prompt(["hello", "who"], ["again"])] == ["hello", "again", "who"]


def test_a_template_that_fails_is_one_clear_error(tmp_path: Path) -> None:
    words = chat(tmp_path, template="{{ raise_exception('not today') }}")

    with pytest.raises(InputError, match=r"chat template fails .*not today"):
        words.prompt(["hello"])


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot load a tokenizer"):
        load_chat(tmp_path)

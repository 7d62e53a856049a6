"""The target's tokenizer and chat template: conversations to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3pack.errors import InputError


class Chat:
    """The tokenizer of a target.

    Args:
        tokenizer: of transformers.
        where: its folder, for messages.
    """

    def __init__(self, tokenizer: Any, where: str) -> None:
        self._tokenizer = tokenizer
        self._where = where

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokenizer's own end token, which engines obey beside the model's."""
        return (
            frozenset() if self._tokenizer.eos_token_id is None else frozenset({self._tokenizer.eos_token_id})
        )

    def prompt(self, turns: Sequence[str], answers: Sequence[str] = ()) -> list[int]:
        """The token ids that ask for the answer to the last turn.

        Args:
            turns: the user's messages so far.
            answers: the target's answers to all but the last.

        Raises:
            InputError: the template refuses them; a target without a template is given the texts as they
                are, one paragraph each.
        """
        if self._tokenizer.chat_template is None:
            texts = [text for pair in zip(turns, answers, strict=False) for text in pair]
            return list(self._tokenizer("\n\n".join([*texts, turns[-1]]))["input_ids"])
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"the chat template fails ({error})", where=self._where) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, special tokens left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def load_chat(folder: Path) -> Chat:
    """Load the tokenizer in a target's folder.

    Raises:
        InputError: there is none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"transformers cannot load a tokenizer from here ({first})",
            where=str(folder),
            hint="The target's folder needs its tokenizer files beside the weights.",
        ) from error
    return Chat(tokenizer, str(folder))

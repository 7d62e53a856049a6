"""Prompt files: MT-Bench, Spec-Bench and SPEED-Bench questions, chat messages, plain lists; and our own set.

A file is JSON Lines, a JSON list, or text with one prompt a line. An object in it is one of

    {"turns": ["...", "..."], "category": "..."}        MT-Bench, Spec-Bench, SPEED-Bench
    {"messages": [{"role": "user", "content": "..."}]}  the user's part; the target answers itself
    {"prompt": "..."}                                   also under question, instruction, text, input
    {"token_ids": [1, 2, 3]}                            also under prompt_token_ids; no chat template

and a bare string is a prompt. The second turn of a question is asked after the target's own answer to
the first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from eagle3pack.documents import describe, read_file
from eagle3pack.errors import InputError, UsageError

SHIPPED_NAME = "eagle3pack prompts"
_TEXT_KEYS = ("prompt", "question", "instruction", "text", "input")
_TOKEN_KEYS = ("token_ids", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, one message after another.

    Attributes:
        turns: the messages; empty where the prompt is tokens.
        category: or "" where the file has none.
        token_ids: a prompt that is tokens already.
    """

    turns: tuple[str, ...]
    category: str = ""
    token_ids: tuple[int, ...] = ()

    @property
    def num_answers(self) -> int:
        """One a message; one for tokens."""
        return len(self.turns) or 1


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of one file.

    Attributes:
        name: the file's stem.
        sha256: of its bytes.
        prompts: in the file's order.
    """

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        """Every category, in order of appearance."""
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts if prompt.category))

    def select(self, *, limit: int | None = None, categories: Sequence[str] = ()) -> PromptSet:
        """Keep the first prompts of some categories.

        Args:
            limit: prompts at most; None for all.
            categories: those to keep; empty for all.

        Raises:
            UsageError: a category that no prompt has.
        """
        unknown = [category for category in categories if category not in self.categories]
        if unknown:
            known = ", ".join(self.categories) or "none"
            raise UsageError(
                f"{self.name} has no category {unknown[0]!r}; it has {known}", where="--category"
            )
        kept = [prompt for prompt in self.prompts if not categories or prompt.category in categories]
        return PromptSet(self.name, self.sha256, tuple(kept[:limit]))


def rounds(turns: Sequence[int]) -> Iterator[list[int]]:
    """Hold conversations side by side: for every turn, the places of those that go on to it.

    Args:
        turns: that each conversation has.
    """
    for turn in range(max(turns, default=0)):
        yield [place for place, count in enumerate(turns) if turn < count]


def shipped_prompts() -> PromptSet:
    """The prompts that come with this package: 32 in 8 categories, English and Chinese."""
    data = (resources.files("eagle3pack.engine") / "data" / "prompts.jsonl").read_bytes()
    return parse_prompts(data, name=SHIPPED_NAME, where="prompts.jsonl", suffix=".jsonl")


def read_prompts(path: Path) -> PromptSet:
    """Read a prompt file.

    Raises:
        InputError: it does not exist, is of no known form, or holds no prompt; the line is named.
        PermissionDenied: it may not be read.
    """
    return parse_prompts(read_file(path), name=path.stem, where=str(path), suffix=path.suffix.lower())


def parse_prompts(data: bytes, *, name: str, where: str, suffix: str) -> PromptSet:
    """Parse the bytes of a prompt file.

    Args:
        data: UTF-8, with or without a byte order mark.
        name: of the set.
        where: the file, for messages.
        suffix: ".txt" for text; anything else is JSON or JSON Lines, told apart by the first character.

    Raises:
        InputError: it is of no known form, or holds no prompt.
    """
    if data.startswith(b"PAR1"):
        raise InputError(
            "is a Parquet file", where=where, hint="Export it as JSON Lines with a `turns` column."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})", where=where) from None
    if suffix == ".txt":
        prompts = [Prompt((line.strip(),)) for line in text.splitlines() if line.strip()]
    elif text.lstrip().startswith("["):
        prompts = [_prompt(item, place) for item, place in _list_items(text, where)]
    else:
        prompts = [_prompt(item, place) for item, place in _lines(text, where)]
    if not prompts:
        raise InputError("holds no prompt", where=where)
    return PromptSet(name, hashlib.sha256(data).hexdigest(), tuple(prompts))


def _list_items(text: str, where: str) -> Iterable[tuple[Any, str]]:
    for number, item in enumerate(_json(text, where), 1):
        yield item, f"{where}, item {number}"


def _lines(text: str, where: str) -> Iterable[tuple[Any, str]]:
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would cut at separators inside strings
        if line.strip():
            place = f"{where}, line {number}"
            yield _json(line, place), place


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"is not valid JSON ({error})", where=where, hint="Prompts as plain lines go into a .txt file."
        ) from None


def _prompt(item: Any, where: str) -> Prompt:
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        raise InputError("is neither a text nor an object", where=where)
    category = item.get("category")
    if category is not None and not isinstance(category, str):
        raise InputError("category is no text", where=where)
    token_ids = next((item[key] for key in _TOKEN_KEYS if key in item), None)
    if token_ids is not None:
        return Prompt((), category or "", _token_ids(token_ids, where))
    turns = _turns(item, where)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InputError("holds an empty turn, or one that is no text", where=where)
    return Prompt(tuple(turns), category or "")


def _turns(item: Mapping[str, Any], where: str) -> list[Any]:
    if isinstance(item.get("turns"), list):
        return list(item["turns"])
    if isinstance(item.get("messages"), list):
        return _user_messages(item["messages"], where)
    for key in _TEXT_KEYS:
        if key in item:
            return [item[key]]
    for key in ("turns", "messages"):
        if key in item:
            raise InputError(f"{key} is {describe(item[key])}, expected a list", where=where)
    raise InputError(
        f"has neither turns nor messages nor {', '.join(_TEXT_KEYS)}; it has {', '.join(item) or 'nothing'}",
        where=where,
    )


def _user_messages(messages: Sequence[Any], where: str) -> list[Any]:
    if not all(isinstance(message, dict) and "role" in message for message in messages):
        raise InputError("messages holds something without a role", where=where)
    roles = {message["role"] for message in messages}
    if not roles <= {"user", "assistant"}:
        foreign = sorted(map(str, roles - {"user", "assistant"}))[0]
        raise InputError(f"messages has the role {foreign!r}; only a user's part can be asked", where=where)
    return [message.get("content") for message in messages if message["role"] == "user"]


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    if not whole or not value or min(value) < 0:
        raise InputError("token_ids is no list of token ids", where=where)
    return tuple(value)

"""Typed reading of JSON objects: one error for every value that is not what it must be.

Every message names the file, the key with its path, the value found and what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3pack.errors import InputError, PermissionDenied

MAX_JSON_BYTES = 64 << 20  # an index of 100,000 tensors is under 16 MB; more is not a config


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold one object.

    Raises:
        InputError: missing, too large, not UTF-8, not JSON, a key twice, or not an object.
        PermissionDenied: the file may not be read.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise InputError(f"is {size:,} bytes, more than any JSON file of a draft", where=str(path))
        data = path.read_bytes()
    except FileNotFoundError:
        raise InputError("does not exist", where=str(path)) from None
    except PermissionError:
        raise PermissionDenied("may not be read", where=str(path), hint="Check the file's mode.") from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", where=str(path)) from None
    return parse_json_object(data, where=str(path))


def parse_json_object(data: bytes, *, where: str) -> dict[str, Any]:
    """Parse bytes that must be one JSON object in UTF-8, every key once.

    Raises:
        InputError: they are not.
    """
    if data.startswith(b"version https://git-lfs"):
        raise InputError(
            "is a Git LFS pointer, not the file itself",
            where=where,
            hint="Run `git lfs pull` in that repository.",
        )
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})", where=where) from None
    except RecursionError:
        raise InputError("is nested too deeply to be a config", where=where) from None
    except ValueError as error:  # json.JSONDecodeError is one
        raise InputError(f"is not valid JSON ({error})", where=where) from None
    if not isinstance(value, dict):
        raise InputError(f"must hold a JSON object, found {describe(value)}", where=where)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return found


def describe(value: object) -> str:
    """A JSON value in a message: its text, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to one JSON object.

    Attributes:
        values: the object.
        where: its file, as messages show it.
        path: the dotted path of this object inside the file, ending in a dot, or "".
    """

    values: Mapping[str, Any]
    where: str
    path: str = ""

    def wrong(self, key: str, expected: str) -> InputError:
        """The error for a key whose value is not what it must be."""
        name = f"{self.path}{key}"
        if key not in self.values:
            return InputError(f"{name} is missing, expected {expected}", where=self.where)
        return InputError(f"{name} is {describe(self.values[key])}, expected {expected}", where=self.where)

    def has(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; without a default, required."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum or value > 2**53:
            raise self.wrong(key, f"a whole number, at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.wrong(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false; absent or null gives the default."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of texts; absent or null gives none."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of texts")
        return tuple(value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in value
        ):
            raise self.wrong(key, "a list of whole numbers")
        return tuple(value)

    def object(self, key: str) -> Fields:
        """A nested object; absent or null gives an empty one."""
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(value, self.where, f"{self.path}{key}.")

"""Typed reading of JSON objects: one error for every value that is not what it must be.

Every message names the file, the key with its path, the value found and what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3pack.documents import describe
from eagle3pack.errors import InputError


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

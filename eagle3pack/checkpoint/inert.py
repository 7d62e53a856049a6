"""Reading a pickle without running what it asks for.

A pickle is a small program: it names classes and functions, and calls them. Here every name that a file
may use stands for an inert record that only keeps what it was given, and any other name is an error. No
class of the file's library is imported, and nothing in the file can be executed.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle3pack.errors import InputError


class Inert:
    """Stands for whatever object a pickle makes.

    Attributes:
        kind: the name in the pickle.
        arguments: what it was called with.
        state: what it was to be filled with; None where nothing was.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """A value of the state by name; None where it has none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Unpickler(pickle.Unpickler):
    """Reads a pickle in which only some names may stand.

    Args:
        data: the pickle.
        names: (module, name) -> what stands for it; see `inert`.
        where: the file, for messages.
    """

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any], where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._names = names
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name.

        Raises:
            InputError: it is not one that such a file needs.
        """
        if (module, name) not in self._names:
            raise InputError(
                f"asks for {module}.{name}, which no saved weights need; nothing in it was run",
                where=self._where,
                hint="Use a file of an origin that you trust.",
            )
        return self._names[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """A reference to what lies outside the pickle, as it stands there."""
        return pid


def inert(name: str) -> type[Inert]:
    """A class whose objects keep what a pickle gives them, under its name there."""

    class Named(Inert):
        __slots__ = ()

        def __new__(cls, *arguments: Any) -> Named:
            made = super().__new__(cls)
            Inert.__init__(made, name, arguments)
            return made

        def __init__(self, *arguments: Any) -> None: ...

    return Named


def read_inert(data: bytes, names: Mapping[tuple[str, str], Any], path: Path) -> Any:
    """Read a pickle; see `Unpickler`.

    Raises:
        InputError: it is damaged, or asks for something that it may not have.
    """
    load: Callable[[], Any] = Unpickler(data, names, str(path)).load
    try:
        return load()
    except InputError:
        raise
    except Exception as error:  # a damaged pickle is a damaged program: it can raise anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"is damaged ({reason})", where=str(path), hint="Copy it again.") from None

"""Small files: reading JSON that must hold an object, holding it against `schemas/`, writing one whole.

jsonschema is imported only when a document is held against a schema: it costs more than Click does.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3pack.errors import InputError, PermissionDenied, TransportError

MAX_JSON_BYTES = 64 << 20  # an index of 100,000 tensors is under 16 MB; more is not a config
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(frozen=True, slots=True)
class SchemaProblem:
    """One place where a document breaks its schema.

    Attributes:
        path: dotted path of the value, "" for the document itself.
        message: what is wrong, as jsonschema says it.
        keyword: the schema keyword that failed ("type", "required", ...).
    """

    path: str
    message: str
    keyword: str


def load_schema(name: str) -> dict[str, Any]:
    """Load `schemas/NAME.schema.json`, from a wheel or an editable install."""
    # By path: importlib.resources would cost a tenth of the time that `verify --quick` may take.
    text = (Path(__file__).with_name("schemas") / f"{name}.schema.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def schema_problems(document: Mapping[str, Any], name: str, definition: str = "") -> list[SchemaProblem]:
    """Hold a document against a schema, or against one of its `$defs`.

    Returns:
        Every problem, by path; none where the document is valid.
    """
    from jsonschema import Draft202012Validator

    schema = load_schema(name)
    if definition:
        schema = {"$ref": f"#/$defs/{definition}", "$defs": schema["$defs"]}
    problems = [
        SchemaProblem(".".join(map(str, error.absolute_path)), error.message, str(error.validator))
        for error in Draft202012Validator(schema).iter_errors(document)
    ]
    return sorted(problems, key=lambda problem: (problem.path, problem.message))


def require_valid(document: Mapping[str, Any], name: str, *, where: str) -> None:
    """Raise for the first problem of a document.

    Raises:
        InputError: the document breaks `schemas/NAME.schema.json`.
    """
    for problem in schema_problems(document, name):
        raise InputError(
            f"{problem.path or 'the document'}: {problem.message}",
            where=where,
            hint=f"It must follow schemas/{name}.schema.json.",
        )


def to_json(document: Mapping[str, Any]) -> str:
    """A document as it is written to disk: indented, lists of numbers on one line, a final newline.

    Bytes of a file's name that are no UTF-8 become question marks: JSON has no other place for them.
    """
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    text = text.encode("utf-8", "replace").decode("utf-8")
    # A raw newline cannot stand inside a JSON string, so that this touches no text.
    return (
        re.sub(r'\[\n\s+([^\[\]{}"]*?)\n\s*\]', lambda list_: f"[{' '.join(list_[1].split())}]", text) + "\n"
    )


def read_file(path: Path, *, most: int | None = None) -> bytes:
    """Read a small file whole.

    Args:
        path: the file.
        most: bytes that it may have.

    Raises:
        InputError: missing, too large, or the disk fails.
        PermissionDenied: the file may not be read.
    """
    try:
        size = path.stat().st_size
        if most is not None and size > most:
            raise InputError(f"is {size:,} bytes, expected at most {most:,}", where=str(path))
        return path.read_bytes()
    except FileNotFoundError:
        raise InputError("does not exist", where=str(path)) from None
    except PermissionError:
        raise PermissionDenied("may not be read", where=str(path), hint="Check the file's mode.") from None
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror or error})", where=str(path)) from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold one object.

    Raises:
        InputError: missing, too large, not UTF-8, not JSON, a key twice, or not an object.
        PermissionDenied: the file may not be read.
    """
    return parse_json_object(read_file(path, most=MAX_JSON_BYTES), where=str(path))


def parse_json_object(data: bytes, *, where: str, finite: bool = False) -> dict[str, Any]:
    """Parse bytes that must be one JSON object in UTF-8, every key once.

    Args:
        data: the bytes.
        where: they are from.
        finite: refuse NaN and Infinity. RFC 8259 has neither, but Python writes them, and configs of
            hybrid targets hold them (time_step_limit).

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
        number = _finite if finite else float
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=number, parse_float=number
        )
    except UnicodeDecodeError as error:
        raise InputError(f"is not UTF-8 text (byte {error.start})", where=where) from None
    except RecursionError:
        raise InputError("is nested too deeply", where=where) from None
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


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number that JSON can hold")
    return number


def describe(value: object) -> str:
    """A JSON value in a message: its text, cut to a readable length."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def write_whole(path: Path, content: bytes, *, hint: str) -> None:
    """Write a file whole or not at all; one that is there stays until then.

    Args:
        path: of the file.
        content: of the file.
        hint: where else it could go, for the error.

    Raises:
        PermissionDenied: it cannot be written there.
        TransportError: the disk is full, or broken.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        kind = TransportError if error.errno in _OF_THE_DISK else PermissionDenied
        raise kind(f"cannot be written ({error.strerror})", where=str(path), hint=hint) from None
    finally:
        with suppress(OSError):  # a name that is too long cannot be unlinked either
            temporary.unlink(missing_ok=True)

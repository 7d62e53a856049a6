"""The JSON documents that the commands hand to each other, held against `schemas/`.

jsonschema is imported only when a document is held against a schema: it costs more than Click does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from eagle3pack.errors import InputError


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
    text = (resources.files("eagle3pack") / "schemas" / f"{name}.schema.json").read_text("utf-8")
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
    """A document as it is written to disk: indented, keys in their order, a final newline."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

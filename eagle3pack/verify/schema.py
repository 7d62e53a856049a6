"""Hold a config against a JSON Schema and say in plain sentences what is wrong.

jsonschema's import alone costs more than `verify --quick` may; a config's schema uses few keywords, and
these are read here. A test holds both to the same answers.

Source: JSON Schema 2020-12, https://json-schema.org/draft/2020-12.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3pack.documents import describe

KEYWORDS = frozenset(
    [
        *("$schema", "$defs", "$ref", "title", "description", "type", "const", "enum", "format"),
        *("required", "properties", "items", "minItems", "allOf", "anyOf", "if", "then", "else"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    ]
)
_NAMES = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "null": "null",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One value that breaks the schema.

    Attributes:
        path: keys from the top; for a missing key, its own path.
        keyword: the schema keyword that failed.
        message: one sentence, which begins with the key.
        found: the value; None where it is missing.
    """

    path: tuple[str, ...]
    keyword: str
    message: str
    found: Any = None


def problems(value: Any, schema: Mapping[str, Any]) -> Iterator[Problem]:
    """Every place where a document breaks a schema; a document may be named twice for one value."""
    yield from _problems(value, schema, schema, ())


def without_key(document: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """A copy without the key at a path; whole where there is none, or a list is on the way."""
    copy: dict[str, Any] = dict(document)
    key, *rest = path
    inner = copy.get(key)
    if not rest:
        copy.pop(key, None)
    elif isinstance(inner, dict):
        copy[key] = without_key(inner, tuple(rest))
    return copy


def _problems(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[Problem]:
    if "$ref" in schema:
        yield from _problems(value, _resolve(schema["$ref"], root), root, path)
    problem = _own_problem(value, schema, path)
    if problem is not None:
        yield problem
        return  # a value of the wrong kind has no parts worth naming
    if isinstance(value, dict):
        for key in schema.get("required", ()):
            if key not in value:
                yield Problem((*path, key), "required", f"{'.'.join((*path, key))} is missing")
        for key, sub in schema.get("properties", {}).items():
            if key in value:
                yield from _problems(value[key], sub, root, (*path, key))
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            yield from _problems(item, schema["items"], root, (*path, str(i)))
    for sub in schema.get("allOf", ()):
        yield from _problems(value, sub, root, path)
    if "if" in schema:
        branch = "then" if _holds(value, schema["if"], root) else "else"
        yield from _problems(value, schema.get(branch, {}), root, path)


def _holds(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    if any(True for _ in _problems(value, schema, root, ())):
        return False
    return "anyOf" not in schema or any(_holds(value, sub, root) for sub in schema["anyOf"])


def _own_problem(value: Any, schema: Mapping[str, Any], path: tuple[str, ...]) -> Problem | None:
    """What is wrong with the value itself, its parts aside."""
    keyword = _broken_keyword(value, schema)
    if keyword is None:
        return None
    name = ".".join(path) or "the config"
    return Problem(path, keyword, f"{name} is {describe(value)}, expected {_expected(schema)}", value)


def _broken_keyword(value: Any, schema: Mapping[str, Any]) -> str | None:
    if "type" in schema and not any(_is(value, kind) for kind in _types(schema)):
        return "type"
    if "const" in schema and value != schema["const"]:
        return "const"
    if "enum" in schema and value not in schema["enum"]:
        return "enum"
    if isinstance(value, list) and len(value) < schema.get("minItems", 0):
        return "minItems"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not value >= schema.get("minimum", value):
            return "minimum"
        if not value <= schema.get("maximum", value):
            return "maximum"
        if "exclusiveMinimum" in schema and not value > schema["exclusiveMinimum"]:
            return "exclusiveMinimum"
        if "exclusiveMaximum" in schema and not value < schema["exclusiveMaximum"]:
            return "exclusiveMaximum"
    return None


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "number":
        return isinstance(value, (int, float))
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "null": type(None)}
    return kind in kinds and isinstance(value, kinds[kind])


def _types(schema: Mapping[str, Any]) -> list[str]:
    kinds = schema["type"]
    return kinds if isinstance(kinds, list) else [kinds]


def _expected(schema: Mapping[str, Any]) -> str:
    if "const" in schema:
        return describe(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(describe, schema["enum"]))
    text = " or ".join(_NAMES[kind] for kind in _types(schema)) if "type" in schema else "another value"
    if "minimum" in schema:
        text += f", at least {schema['minimum']}"
    if "exclusiveMinimum" in schema:
        text += f", greater than {schema['exclusiveMinimum']}"
    if "exclusiveMaximum" in schema:
        text += f", less than {schema['exclusiveMaximum']}"
    if "minItems" in schema:
        text += f" of at least {schema['minItems']}"
    return text


def _resolve(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    node: Any = root
    for key in reference.removeprefix("#/").split("/"):
        node = node[key]
    return node  # type: ignore[no-any-return]

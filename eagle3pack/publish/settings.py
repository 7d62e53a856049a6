"""publish.yaml: what people know and no measurement tells. Names, license, training, free text."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3pack.documents import SchemaProblem, load_schema, schema_problems
from eagle3pack.errors import InputError
from eagle3pack.publish.guards import require_no_secrets
from eagle3pack.publish.ledger import Document
from eagle3pack.publish.metadata import declared_problems
from eagle3pack.publish.prose import require_bound

if TYPE_CHECKING:
    import yaml

NAME = "publish.yaml"
TEXTS = ("summary", "intended_use", "training/text", "data/text", "conversion/text", "limitations")
EXPLAINED = "docs/publishing.md explains every key."


def read_settings(path: Path) -> Document:
    """Read and check publish.yaml.

    Raises:
        InputError: it cannot be read, is no YAML, or breaks schemas/publish.schema.json; with every problem.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", where=str(path), hint="Name it with --config."
        ) from None
    value = _parse(content, str(path))
    if not isinstance(value, dict):
        raise InputError(
            "holds no keys", where=str(path), hint=f"At least name, license and target. {EXPLAINED}"
        )
    unknown, others = _schema_problems(value)
    problems = [*unknown, *others, *_content_problems(value)]
    if problems:
        hint = f"The keys are {', '.join(_properties(()))}. " if unknown else ""
        listed = problems[0] if len(problems) == 1 else "\n".join(["has these problems", *problems])
        raise InputError(listed.replace("\n", "\n  "), where=str(path), hint=hint + EXPLAINED)
    require_no_secrets(content, where=str(path))
    return Document(NAME, hashlib.sha256(content).hexdigest(), value)


def _parse(content: bytes, where: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML in which a key stands once; yaml itself would take the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(content, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = error.problem or error.context or "it cannot be read"
        raise InputError(f"is no YAML that is understood ({place}{what})", where=where) from None
    except RecursionError:
        raise InputError("is nested too deeply", where=where) from None
    except (yaml.YAMLError, ValueError) as error:  # not UTF-8; a date that is none
        raise InputError(f"is no YAML ({str(error).splitlines()[0]})", where=where) from None


def _schema_problems(value: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Unknown keys, which mostly are misspelt ones, and everything else."""
    found = schema_problems(value, "publish")
    unknown, meant = [], set()
    for problem in found:
        if problem.keyword == "additionalProperties":
            path = tuple(filter(None, problem.path.split(".")))
            known = _properties(path)
            for key in _at(value, path):
                if key in known:
                    continue
                near = difflib.get_close_matches(str(key), known, n=1)
                meant |= {(*path, name) for name in near}
                name = ".".join(map(str, (*path, key)))
                unknown.append(f"{name} is no key" + (f"; did you mean {near[0]}?" if near else ""))
    others = [_say(problem) for problem in found if problem.keyword != "additionalProperties"]
    expected = {f"{'.'.join(path)} is missing" for path in meant}
    return unknown, [text for text in others if text not in expected]


def _say(problem: SchemaProblem) -> str:
    if problem.keyword == "required" and (key := re.match(r"'(\w+)'", problem.message)):
        return f"{'.'.join(filter(None, (problem.path, key[1])))} is missing"
    if problem.keyword == "oneOf" and problem.path.split(".")[-1] != "measured_as":
        return f"{problem.path} must be a text, or a text for each language: en, which is needed, and zh"
    return f"{problem.path}: {problem.message}"


def _content_problems(value: Mapping[str, Any]) -> list[str]:
    """What the card would refuse later, one at a time."""
    problems = declared_problems(value)
    for where, text in _texts(value):
        try:
            require_bound(text, where=where)
        except InputError as error:
            problems.append(f"{error} ({error.hint})" if error.hint else str(error))
    return problems


def _texts(value: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path in TEXTS:
        found = _at(value, path.split("/"))
        each = found if isinstance(found, list) else [found]
        for i, text in enumerate(each):
            where = f"{path}/{i}" if isinstance(found, list) else path
            for written in text.values() if isinstance(text, dict) else [text]:
                if isinstance(written, str):
                    yield where.replace("/", "."), written


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _properties(path: Sequence[str]) -> list[str]:
    """The keys that the schema knows at a place."""
    schema = load_schema("publish")
    for key in path:
        schema = schema["properties"][key]
    return list(schema["properties"])

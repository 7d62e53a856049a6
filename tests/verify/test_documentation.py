"""The pages about the checks are those that the code makes, and the code is complete."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3pack.documents import load_schema
from eagle3pack.verify.check import ENGINES, Check
from eagle3pack.verify.checks import FAMILIES, LEFT_OUT, all_checks
from eagle3pack.verify.schema import KEYWORDS

ROOT = Path(__file__).resolve().parents[2]


def test_the_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/document_checks.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_ids_are_unique_and_of_their_family() -> None:
    ids = [check.id for check in all_checks()]
    assert len(ids) == len(set(ids))
    assert not set(ids) & set(LEFT_OUT)
    letters = {family: {check.id[0] for check in checks} for family, checks in FAMILIES.items()}
    assert all(len(found) == 1 for found in letters.values()), letters


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_every_check_says_why_and_whence(check: Check) -> None:
    assert check.title and not check.title.endswith(".")
    assert check.reason.endswith(".")
    assert re.search(r"\w", check.source)
    assert set(check.engines) <= set(ENGINES)


def _keywords(schema: object) -> set[str]:
    """Keywords of a schema and its subschemas; names of properties and definitions are none."""
    if isinstance(schema, list):
        return {word for item in schema for word in _keywords(item)}
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for key, value in schema.items():
        if key in ("properties", "$defs") and isinstance(value, dict):
            found |= {word for sub in value.values() for word in _keywords(sub)}
        elif key not in ("const", "enum", "required", "type"):
            found |= _keywords(value)
    return found


def test_the_schema_of_drafts_uses_only_keywords_that_are_read() -> None:
    schema = load_schema("draft-config")
    for name in ("canonical", "strict_layer_ids"):  # held by jsonschema, in convert's tests
        del schema["$defs"][name]
    assert _keywords(schema) <= KEYWORDS

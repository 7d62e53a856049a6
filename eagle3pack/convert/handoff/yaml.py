"""A run configuration in YAML: two levels, every value as JSON, which YAML reads the same way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def render_yaml(document: Mapping[str, Any], comment: str) -> str:
    """Render sections of settings; a section or setting that is None is left out.

    Args:
        document: settings, or sections of settings.
        comment: the first line.
    """
    lines = [f"# {comment}"]
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines.append(f"{key}:")
            lines += [f"  {name}: {_json(item)}" for name, item in value.items() if item is not None]
        elif value is not None:
            lines.append(f"{key}: {_json(value)}")
    return "\n".join(lines) + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

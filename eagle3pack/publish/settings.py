"""publish.yaml: what people know and no measurement tells. Names, license, training, free text."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from eagle3pack.documents import require_valid
from eagle3pack.errors import InputError
from eagle3pack.publish.guards import require_no_secrets
from eagle3pack.publish.ledger import Document

NAME = "publish.yaml"


def read_settings(path: Path) -> Document:
    """Read and check publish.yaml.

    Raises:
        InputError: it cannot be read, is no YAML, or breaks schemas/publish.schema.json.
    """
    import yaml

    try:
        content = path.read_bytes()
        value: Any = yaml.safe_load(content)
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", where=str(path), hint="Name it with --config."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"is no YAML ({first})", where=str(path)) from None
    if not isinstance(value, dict):
        raise InputError("holds no keys", where=str(path))
    require_valid(value, "publish", where=str(path))
    require_no_secrets(content, where=str(path))
    return Document(NAME, hashlib.sha256(content).hexdigest(), value)

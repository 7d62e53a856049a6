"""eagle3pack.json: the record of a conversion, for people, `verify` and `publish`.

Schema: schemas/conversion.schema.json. Nothing in it is volatile but one timestamp, which
SOURCE_DATE_EPOCH fixes (https://reproducible-builds.org/specs/source-date-epoch/).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eagle3pack import __version__
from eagle3pack.checkpoint.digest import draft_digest
from eagle3pack.convert.plan import Plan
from eagle3pack.convert.pooling import GroupError
from eagle3pack.errors import UsageError
from eagle3pack.sources import Source

RECORD_NAME = "eagle3pack.json"
SCHEMA = "eagle3pack/conversion/1"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A weight file of the source, as far as it is known without reading it whole.

    Attributes:
        path: relative to the source folder.
        size: bytes.
        header_sha256: of a safetensors file's length and JSON header; None for a pickle.
        sha256: of the file, where it is known.
    """

    path: str
    size: int
    header_sha256: str | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the output that belongs to the draft's digest.

    Attributes:
        path: relative to the output folder.
        size: bytes.
        sha256: None where hashing was turned off.
    """

    path: str
    size: int
    sha256: str | None


def build_record(
    plan: Plan,
    source: Source,
    source_files: Sequence[SourceFile],
    previous: Mapping[str, Any] | None,
    output_files: Sequence[OutputFile],
    errors: Mapping[str, Sequence[GroupError]],
    libraries: Mapping[str, str],
) -> dict[str, Any]:
    """The record as a JSON document; pure but for the clock.

    Args:
        plan: what was done.
        source: where it came from.
        source_files: its weight files.
        previous: the record that the source itself carried.
        output_files: config.json, weights and index.
        errors: name in the output -> the error of each group.
        libraries: name -> version of what computed the values.
    """
    before, after = plan.before.num_key_value_heads, plan.after.num_key_value_heads
    group = before // after
    local = source.location.place == "local"
    digests = [(file.path, file.size, file.sha256) for file in output_files if file.sha256 is not None]
    return {
        "schema": SCHEMA,
        "created": timestamp(),
        "tool": {"name": "eagle3pack", "version": __version__},
        "libraries": {"python": platform.python_version(), **libraries},
        "source": {
            "place": source.location.place,
            "id": source.folder.resolve().name if local else source.location.name,
            "revision": source.revision,
            "files": [asdict(file) for file in source_files],
            "previous": previous,
        },
        "method": {"name": plan.request.method if plan.pooled else "copy", "parameters": {}},
        "heads": {
            "num_attention_heads": plan.before.num_attention_heads,
            "num_key_value_heads_before": before,
            "num_key_value_heads_after": after,
            "head_map": [list(range(g * group, (g + 1) * group)) for g in range(after)],
        },
        "changed_tensors": list(plan.changed_tensors),
        "renamed_tensors": dict(plan.renamed),
        "dropped_tensors": [
            {"name": name, "reason": dropped.reason, "bytes": dropped.nbytes}
            for name, dropped in plan.dropped.items()
        ],
        "layers": _layers(plan, errors),
        "output": {
            "files": [asdict(file) for file in output_files],
            "draft_digest": draft_digest(digests) if len(digests) == len(output_files) else None,
        },
        "mends": [],
    }


def _layers(plan: Plan, errors: Mapping[str, Sequence[GroupError]]) -> list[dict[str, Any]]:
    layers: dict[int, dict[str, Sequence[GroupError]]] = {}
    for name, pooled in plan.pooled.items():
        if not pooled.is_bias:
            layers.setdefault(pooled.layer, {})[pooled.projection] = errors[name]
    return [
        {
            "layer": layer,
            "groups": [
                {"key_value_head": g, "k_relative_error": list(k.heads), "v_relative_error": list(v.heads)}
                for g, (k, v) in enumerate(zip(of["k"], of["v"], strict=True))
            ],
        }
        for layer, of in sorted(layers.items())
    ]


def timestamp() -> str:
    """Now in UTC, or the time that SOURCE_DATE_EPOCH gives.

    Raises:
        UsageError: SOURCE_DATE_EPOCH is no time.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        now = datetime.fromtimestamp(int(epoch), timezone.utc) if epoch else datetime.now(timezone.utc)
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"{epoch!r} is no number of seconds since 1970", where="SOURCE_DATE_EPOCH") from None
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def relative_name(path: Path, folder: Path) -> str:
    """A file's path below its folder, with forward slashes."""
    return path.relative_to(folder).as_posix()

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
from eagle3pack.convert.compute import Computation
from eagle3pack.convert.plan import Plan
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


@dataclass(frozen=True, slots=True)
class Proof:
    """What --prove compared with the source, every byte of it.

    Attributes:
        tensors: that no method changed.
        bytes: of them.
    """

    tensors: int
    bytes: int


def build_record(
    plan: Plan,
    source: Source,
    source_files: Sequence[SourceFile],
    previous: Mapping[str, Any] | None,
    output_files: Sequence[OutputFile],
    computation: Computation,
    calibration: Mapping[str, Any] | None = None,
    proof: Proof | None = None,
) -> dict[str, Any]:
    """The record as a JSON document; pure but for the clock.

    Args:
        plan: what was done.
        source: where it came from.
        source_files: its weight files.
        previous: the record that the source itself carried.
        output_files: config.json, weights and index.
        computation: what made the new values; carried out.
        calibration: the document of the calibration that was used.
        proof: that unchanged tensors are the source's, where it was asked for.
    """
    local = source.location.place == "local"
    digests = [(file.path, file.size, file.sha256) for file in output_files if file.sha256 is not None]
    return {
        "schema": SCHEMA,
        "created": timestamp(),
        "tool": {"name": "eagle3pack", "version": __version__},
        "libraries": {
            "python": platform.python_version(),
            **(computation.libraries() if plan.computed else {}),
        },
        "source": {
            "place": source.location.place,
            "id": source.folder.resolve().name if local else source.location.name,
            "revision": source.revision,
            "files": [asdict(file) for file in source_files],
            "previous": previous,
        },
        "method": {"name": plan.method, "parameters": _parameters(plan, calibration)},
        "heads": {
            "num_attention_heads": plan.before.num_attention_heads,
            "num_key_value_heads_before": plan.before.num_key_value_heads,
            "num_key_value_heads_after": plan.after.num_key_value_heads,
        },
        "changed_tensors": list(plan.changed_tensors),
        "renamed_tensors": dict(plan.renamed),
        "dropped_tensors": [
            {"name": name, "reason": dropped.reason, "bytes": dropped.nbytes}
            for name, dropped in plan.dropped.items()
        ],
        "layers": [
            {"layer": result.layer, "head_map": [list(heads) for heads in result.head_map], **result.record}
            for result in (computation.results() if plan.computed else ())
        ],
        "output": {
            "files": [asdict(file) for file in output_files],
            "draft_digest": draft_digest(digests) if len(digests) == len(output_files) else None,
        },
        "mends": [],
        **({"assumed_aux_hidden_state_layer_ids": list(plan.assumed_layers)} if plan.assumed_layers else {}),
        **({"proved": asdict(proof)} if proof else {}),
    }


def _parameters(plan: Plan, calibration: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings of a closed-form method; pooling has none. Paths of files stay out of the record."""
    if not plan.computed or plan.request.only_pools:
        return {}
    parameters = asdict(plan.request.closed_form)
    if parameters["grouping"] not in ("contiguous", "similarity", "auto"):
        parameters["grouping"] = "explicit"
    return {**parameters, "calibration": None if calibration is None else dict(calibration)}


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

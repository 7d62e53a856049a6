"""receipt.json: what was published where, written after every step.

A record for people and a hint for the next run; the truth is what the hubs list. It names no folder of
this machine and no account.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eagle3pack import __version__
from eagle3pack.documents import require_valid, to_json
from eagle3pack.errors import Eagle3PackError, PermissionDenied
from eagle3pack.publish.folder import DraftFolder
from eagle3pack.publish.hub import Hub, redact
from eagle3pack.publish.plan import HubPlan

SCHEMA = "eagle3pack/receipt/1"


class Receipt:
    """The record of one run.

    Args:
        path: where it is written; None keeps it in memory.
        folder: the draft.
        reports: name and sha256 of each report.
    """

    def __init__(self, path: Path | None, folder: DraftFolder, reports: Sequence[tuple[str, str]]) -> None:
        self._path = path
        self._hubs: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "tool": {"name": "eagle3pack", "version": __version__},
            "started": _now(),
            "finished": None,
            "draft": {
                "digest": folder.digest,
                "files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in folder.files],
            },
            "reports": [{"name": name, "sha256": sha256} for name, sha256 in reports],
            "hubs": [],
        }

    def planned(self, plan: HubPlan) -> None:
        """A hub's part begins."""
        entry = {
            "hub": plan.hub.kind,
            "endpoint": plan.hub.endpoint,
            "repo_id": plan.hub.repo_id,
            "branch": plan.hub.branch,
            "status": "planned",
            "head_before": plan.state.head if plan.state else None,
            "visibility": "public" if plan.state and plan.state.public else "private",
            "hub_template_sha256": None,
            "commit": None,
            "url": None,
            "tag": None,
            "attempts": 0,
            "sent": [f.path for f in plan.changes],
            "verified_at": None,
            "error": None,
        }
        if plan.state is None and plan.hub.kind == "ms" and plan.wishes.public:
            entry["visibility"] = "public"
        self._hubs[_key(plan.hub)] = entry
        self.document["hubs"].append(entry)
        self._write()

    def step(self, hub: Hub, status: str, **facts: Any) -> None:
        """A step was done."""
        self._hubs[_key(hub)].update(facts, status=status)
        self._write()

    def verified(self, hub: Hub) -> None:
        """The hub's listing equals what was sent."""
        self.step(hub, "verified", verified_at=_now())

    def failed(self, hub: Hub, error: Eagle3PackError) -> None:
        """A hub's part ended early."""
        self.step(hub, "failed", error=redact(str(error)))

    def finish(self) -> None:
        """The run is over."""
        self.document["finished"] = _now()
        self._write()

    def _write(self) -> None:
        require_valid(self.document, "receipt", where="receipt")
        if self._path is None:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(to_json(self.document), "utf-8")
            temporary.replace(self._path)
        except OSError as error:
            raise PermissionDenied(
                f"the receipt cannot be written ({error.strerror})",
                where=str(self._path),
                hint="Name another place with --receipt.",
            ) from error


def hub_template_sha256(path: Path | None, hub: Hub) -> str | None:
    """The README that the hub itself wrote when an earlier run created the repository."""
    for entry in _earlier_hubs(path):
        if (entry.get("hub"), entry.get("endpoint"), entry.get("repo_id")) == _key(hub):
            found = entry.get("hub_template_sha256")
            return found if isinstance(found, str) else None
    return None


def _earlier_hubs(path: Path | None) -> list[Mapping[str, Any]]:
    """Entries of an earlier receipt; none where it cannot be read, as it is only a hint."""
    try:
        document = json.loads(path.read_text("utf-8")) if path else {}
    except (OSError, ValueError):
        return []
    hubs = document.get("hubs") if isinstance(document, dict) else None
    return [entry for entry in hubs or [] if isinstance(entry, dict)]


def _key(hub: Hub) -> tuple[str, str, str]:
    return (hub.kind, hub.endpoint, hub.repo_id)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

"""receipt.json: what was published where, written after every step.

A record for people and a hint for the next run; the truth is what the hubs list. It names no folder of
this machine and no account.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from eagle3pack import __version__
from eagle3pack.documents import require_valid, schema_problems, to_json, write_whole
from eagle3pack.errors import Eagle3PackError
from eagle3pack.publish.folder import DraftFolder
from eagle3pack.publish.hub import Hub, redact
from eagle3pack.publish.plan import HubPlan

SCHEMA = "eagle3pack/receipt/1"
HubKey = tuple[str, str, str]  # hub, endpoint, repository


class Receipt:
    """The record of one run.

    Args:
        path: where it is written.
        folder: the draft.
        reports: name and sha256 of each report.
        warn: told when it can no longer be written; that ends no run that has begun.

    Raises:
        PermissionDenied, TransportError: it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        folder: DraftFolder,
        reports: Sequence[tuple[str, str]],
        warn: Callable[[str], None],
    ) -> None:
        self._path: Path | None = path
        self._warn = warn
        self._templates = hub_templates(path)
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
        self._replace(path)

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
            "hub_template_sha256": self._templates.get(_key(plan.hub)),
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
        if self._path is None:
            return
        try:
            self._replace(self._path)
        except Eagle3PackError as error:
            self._warn(f"the receipt is not written any more: {error}")
            self._path = None

    def _replace(self, path: Path) -> None:
        require_valid(self.document, "receipt", where="receipt")
        hint = "Make room there, or name another place with --receipt."
        write_whole(path, to_json(self.document).encode("utf-8"), hint=hint)


def hub_templates(path: Path) -> dict[HubKey, str]:
    """READMEs that a hub itself wrote when an earlier run created the repository, by their sha256.

    Nothing where the earlier receipt cannot be read: it is only a hint.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or schema_problems(document, "receipt"):
        return {}
    return {
        (hub["hub"], hub["endpoint"], hub["repo_id"]): hub["hub_template_sha256"]
        for hub in document["hubs"]
        if hub["hub_template_sha256"]
    }


def _key(hub: Hub) -> HubKey:
    return (hub.kind, hub.endpoint, hub.repo_id)


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

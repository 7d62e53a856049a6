"""What publishing would do on a hub: read what is there, compare, decide. Nothing is written here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3pack.errors import ConflictError, RefusedError, UsageError
from eagle3pack.publish.hub import HUB_NAMES, Hub, PublishedFile, RemoteState
from eagle3pack.publish.marker import is_ours

CARD = "README.md"
WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line asks of every hub.

    Attributes:
        public: the repository is readable by anyone at the end.
        tag: to be set on the commit, or None.
        replace_card: overwrite a README that this tool did not write.
        prune: delete remote weight files that are not part of this draft, in the same commit.
        license_id: of the repository, in the hub's own spelling.
    """

    public: bool = False
    tag: str | None = None
    replace_card: bool = False
    prune: bool = False
    license_id: str = "other"


@dataclass(frozen=True, slots=True)
class HubPlan:
    """What is to happen on one hub.

    Attributes:
        hub: the repository.
        files: everything that it is to hold at the end; without the card where a foreign one is kept.
        state: as it was read; None where the repository does not exist.
        changes: the files that have to be sent.
        deletes: remote paths that go in the same commit.
        extra: remote paths that are left alone.
        keeps_card: a README stays that this tool did not write.
        tag: to be created; None where there is none or it is there already.
        wishes: what was asked.
        account: who publishes; "" in a dry run.
    """

    hub: Hub
    files: tuple[PublishedFile, ...]
    state: RemoteState | None
    changes: tuple[PublishedFile, ...]
    deletes: tuple[str, ...]
    extra: tuple[str, ...]
    keeps_card: bool
    tag: str | None
    wishes: Wishes
    account: str

    @property
    def changes_nothing(self) -> bool:
        """The hub holds all of it already."""
        return self.state is not None and not (
            self.changes or self.deletes or self.tag or (self.wishes.public and not self.state.public)
        )

    @property
    def bytes_to_send(self) -> int:
        """Size of the files that differ, at most what will be sent."""
        return sum(file.size for file in self.changes)

    def as_text(self, format_bytes: Callable[[float], str]) -> str:
        """The plan for a reader."""
        lines = [f"{HUB_NAMES[self.hub.kind]}: {self.hub.url} ({self._visibility()})"]
        if self.changes_nothing:
            lines.append(f"  unchanged: all {len(self.files)} files are there")
        for file in self.changes:
            sign = "~" if self.state and file.path in self.state.files else "+"
            lines.append(f"  {sign} {file.path}  {format_bytes(file.size)}  sha256 {file.sha256[:12]}")
        same = len(self.files) - len(self.changes)
        if same and not self.changes_nothing:
            lines.append(f"  = {same} files are there already")
        lines += [f"  - {path}" for path in self.deletes]
        if self.keeps_card:
            lines.append(f"  ! {CARD} was not written by this tool and is kept (--replace-card replaces it)")
        if self.extra:
            lines.append(f"  . left alone: {', '.join(self.extra)}")
        if self.tag:
            lines.append(f"  tag {self.tag}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The plan for a program."""
        return {
            "hub": self.hub.kind,
            "endpoint": self.hub.endpoint,
            "repo_id": self.hub.repo_id,
            "url": self.hub.url,
            "exists": self.state is not None,
            "visibility": self._visibility(),
            "unchanged": self.changes_nothing,
            "changes": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in self.changes],
            "deletes": list(self.deletes),
            "left_alone": list(self.extra),
            "keeps_card": self.keeps_card,
            "tag": self.tag,
        }

    def _visibility(self) -> str:
        if self.state is None:
            return f"new, {'public' if self.wishes.public else 'private'}"
        if self.state.public:
            return "public"
        return "private, then public" if self.wishes.public else "private"


def plan_hub(
    hub: Hub,
    files: Sequence[PublishedFile],
    wishes: Wishes,
    *,
    hub_template_sha256: str | None = None,
    dry_run: bool = False,
) -> HubPlan:
    """Read a hub and say what would change.

    Args:
        hub: the repository.
        files: what it is to hold, the card among them.
        wishes: what was asked.
        hub_template_sha256: of a README that the hub itself wrote when we created the repository.
        dry_run: nothing will follow, so that no login is needed.

    Raises:
        ConflictError: the tag names something else, or foreign weights would be loaded along.
        RefusedError: the hub refuses the card, or cannot do what was asked.
        UsageError: a pull request to a repository that does not exist.
        PermissionDenied: nobody is logged in.
        TransportError: the hub cannot be read.
    """
    account = "" if dry_run else hub.require_login()
    state = hub.read_state()
    if state is None and hub.proposes:
        raise UsageError("there is no repository to propose to", where=hub.url, hint="Publish without --pr.")
    if state is not None and wishes.public and not state.public and hub.kind == "ms":
        hub.make_public()  # refuses, and better now than after the commit
    card = next(file for file in files if file.path == CARD)
    keeps_card = state is not None and _keeps_card(hub, state, card, wishes, hub_template_sha256)
    wanted = tuple(file for file in files if not (keeps_card and file.path == CARD))
    changes = tuple(state.lacks(wanted)) if state else wanted
    if any(file.path == CARD for file in changes):
        _require_card_accepted(hub, card)
    extra = sorted(set(state.files) - {file.path for file in files} - {".gitattributes"}) if state else []
    deletes = [path for path in extra if path.endswith(WEIGHT_ENDINGS)]
    if deletes and not wishes.prune:
        raise ConflictError(
            f"holds weights of another draft ({', '.join(deletes)}), which engines would load too",
            where=hub.url,
            hint="Publish with --prune to delete them in the same commit.",
        )
    tag = wishes.tag if wishes.tag and not _tag_is_set(hub, wishes.tag, wanted, state) else None
    return HubPlan(
        hub=hub,
        files=wanted,
        state=state,
        changes=changes,
        deletes=tuple(deletes),
        extra=tuple(path for path in extra if path not in deletes),
        keeps_card=keeps_card,
        tag=tag,
        wishes=wishes,
        account=account,
    )


def _keeps_card(
    hub: Hub, state: RemoteState, card: PublishedFile, wishes: Wishes, hub_template_sha256: str | None
) -> bool:
    """A README is there that someone wrote: not this tool, nor the hub when it made the repository."""
    present = state.files.get(CARD)
    if present is None or present.holds(card) or wishes.replace_card:
        return False
    if hub_template_sha256 and present.sha256 == hub_template_sha256:
        return False
    return not is_ours(hub.read_text(CARD, state.head))


def _require_card_accepted(hub: Hub, card: PublishedFile) -> None:
    """Ask before anything is sent: the clients' own check comes after the blobs."""
    problems = hub.card_problems(card.local.read_text("utf-8"))
    if problems:
        raise RefusedError(f"the hub refuses the card: {'; '.join(problems)}", where=hub.url)


def _tag_is_set(hub: Hub, tag: str, files: tuple[PublishedFile, ...], state: RemoteState | None) -> bool:
    """The tag is there and names exactly these files.

    Raises:
        ConflictError: it names others; clients would keep the old target without a word.
    """
    if state is None or tag not in hub.tags():
        return False
    tagged = hub.read_state(tag)
    if tagged is None or tagged.lacks(files):
        raise ConflictError(
            f"the tag {tag} exists and names other files", where=hub.url, hint="Choose another tag."
        )
    return True

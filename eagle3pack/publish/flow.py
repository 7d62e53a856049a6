"""Publishing, step by step: blobs to every hub, then one commit on each, verified by remote hashes.

A lost answer, a 5xx or a 412 says nothing about whether a commit was made. The remote listing does: it is
read and compared, and only where nothing moved is the commit sent again. Nothing here depends on the receipt,
so that a run that was killed is finished by the same command.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from eagle3pack.errors import ConflictError, Eagle3PackError, MismatchError, PartialError, TransportError
from eagle3pack.publish.folder import DraftFolder
from eagle3pack.publish.hub import (
    HUB_NAMES,
    Commit,
    Hub,
    MovedError,
    PublishedFile,
    RemoteState,
    UnsettledError,
)
from eagle3pack.publish.plan import CARD, HubPlan
from eagle3pack.publish.receipt import Receipt

ATTEMPTS = 5
FIRST_WAIT_S = 2.0  # doubled every time
LONGEST_WAIT_S = 120.0
VERIFY_ATTEMPTS = 3  # a listing may lag behind its commit

_T = TypeVar("_T")
Say = Callable[[str], None]
Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


def publish_everywhere(
    plans: Sequence[HubPlan],
    folder: DraftFolder,
    receipt: Receipt,
    *,
    failed: Sequence[tuple[str, Eagle3PackError]] = (),
    say: Say,
    progress: Progress,
) -> None:
    """Carry the plans out.

    Args:
        plans: one a hub.
        folder: the draft, to notice when it changes under us.
        receipt: is told every step.
        failed: hubs that could not even be read, with their errors.
        say: tells the user what happens.
        progress: shows the upload.

    Raises:
        PartialError: one hub has it all and another does not.
        Eagle3PackError: no hub has it; the error of the first that failed.
    """
    failures = list(failed)
    ready = []
    for plan in plans:
        try:
            ready.append(_bring_blobs(plan, receipt, say, progress))
        except Eagle3PackError as error:
            failures.append((_name(plan.hub), error))
            receipt.failed(plan.hub, error)
    folder.require_unchanged()
    done = []
    for plan in ready:
        try:
            _finish(plan, receipt, say)
            done.append(_name(plan.hub))
        except Eagle3PackError as error:
            failures.append((_name(plan.hub), error))
            receipt.failed(plan.hub, error)
    receipt.finish()
    if failures and done:
        raise PartialError(
            f"{', '.join(done)} has it, but " + "; ".join(f"{name}: {error}" for name, error in failures),
            hint=failures[0][1].hint or "Run the same command again: only what is missing is sent.",
        )
    if failures:
        for name, other in failures[1:]:
            say(f"{name}: {other}")
        raise failures[0][1]


def _name(hub: Hub) -> str:
    return HUB_NAMES[hub.kind]


def _bring_blobs(plan: HubPlan, receipt: Receipt, say: Say, progress: Progress) -> HubPlan:
    """Create the repository if need be and send what it lacks; nobody sees any of it yet."""
    receipt.planned(plan)
    if plan.state is None:
        plan = _create(plan, receipt, say)
    if not plan.changes:
        return plan
    total = plan.bytes_to_send if plan.hub.kind == "ms" else 0  # huggingface_hub shows its own bars
    with progress(f"Uploading to {_name(plan.hub)}", total) as on_bytes:
        _patiently(lambda: plan.hub.upload_blobs(list(plan.changes), on_bytes), say)
    receipt.step(plan.hub, "uploaded")
    return plan


def _create(plan: HubPlan, receipt: Receipt, say: Say) -> HubPlan:
    hub = plan.hub
    say(f"Creating {hub.url} ({'public' if plan.wishes.public and hub.kind == 'ms' else 'private'})")
    _patiently(lambda: hub.create(public=plan.wishes.public, license_id=plan.wishes.license_id), say)
    state = _patiently(hub.read_state, say)
    if state is None:
        raise MismatchError("the repository was created, but cannot be read", where=hub.url)
    template = state.files.get(CARD)
    receipt.step(hub, "created", hub_template_sha256=template.sha256 if template else None)
    return replace(plan, state=state, changes=tuple(state.lacks(plan.files)))


def _finish(plan: HubPlan, receipt: Receipt, say: Say) -> None:
    """Commit, verify, tag, show."""
    hub, state = plan.hub, plan.state
    assert state is not None
    if plan.changes or plan.deletes:
        commit, attempts = _commit(plan, state, say)
        receipt.step(hub, "committed", commit=commit.id or commit.revision, url=commit.url, attempts=attempts)
        say(f"Committed: {commit.url}")
        _verify(hub, commit.revision, plan, say)
        receipt.verified(hub)
    else:
        commit = Commit(state.head if hub.kind == "hf" else hub.branch, hub.url, state.head)
        receipt.step(hub, "unchanged", commit=commit.id, url=hub.url)
    if plan.tag:
        _tag(plan, commit, say)
        receipt.step(hub, "tagged", tag=plan.tag)
    if plan.wishes.public and not state.public:
        _patiently(hub.make_public, say)
        receipt.step(hub, "shown", visibility="public")
    receipt.step(hub, "done" if plan.changes or plan.deletes else "unchanged")


def _commit(plan: HubPlan, parent: RemoteState, say: Say) -> tuple[Commit, int]:
    """One commit, whatever happens to its answer; and the number of attempts."""
    hub, message = plan.hub, f"Publish {plan.hub.repo_id.split('/')[1]} with eagle3pack"
    if hub.proposes and (open_one := _find_proposal(plan)):
        return open_one, 0
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return hub.commit(list(plan.changes), list(plan.deletes), message, parent), attempt
        except (UnsettledError, MovedError) as error:
            last = error
        if landed := _settle(plan, parent, last, say):
            return landed, attempt
        if attempt < ATTEMPTS:
            _wait(attempt, last, say)
    if isinstance(last, MovedError):
        raise ConflictError(
            last.problem + ", though the branch never moved",
            where=hub.url,
            hint="The token may be for pull requests only: try --pr, or a token with write access.",
        )
    raise last


def _settle(
    plan: HubPlan, parent: RemoteState, error: UnsettledError | MovedError, say: Say
) -> Commit | None:
    """What a commit without a clear answer came to: the commit, or None where nothing happened.

    Raises:
        ConflictError: someone else committed.
    """
    hub = plan.hub
    if hub.proposes:
        return _find_proposal(plan)
    now = _patiently(hub.read_state, say)
    if now is None or now.head == parent.head:
        return None
    if not now.lacks(plan.files) and not set(plan.deletes) & set(now.files):
        say("The answer was lost, but the commit had been made.")
        revision = now.head if hub.kind == "hf" else hub.branch
        return Commit(revision, hub.commit_url(revision), now.head)
    raise ConflictError(
        "someone else committed meanwhile; nothing was overwritten",
        where=hub.url,
        hint="Look at what changed there, then run again.",
    ) from error


def _find_proposal(plan: HubPlan) -> Commit | None:
    """An open pull request that holds exactly these files."""
    for proposal in plan.hub.proposals():
        state = plan.hub.read_state(proposal.revision)
        if state is not None and not state.lacks(plan.files):
            return proposal
    return None


def _verify(hub: Hub, revision: str, plan: HubPlan, say: Say) -> None:
    """Compare what the hub lists with what was sent.

    Raises:
        MismatchError: they differ.
    """
    wrong: list[PublishedFile] = list(plan.files)
    for attempt in range(1, VERIFY_ATTEMPTS + 1):
        state = _patiently(lambda: hub.read_state(revision), say)
        wrong = state.lacks(plan.files) if state else list(plan.files)
        if not wrong:
            return
        if attempt < VERIFY_ATTEMPTS:
            time.sleep(FIRST_WAIT_S * attempt)
    raise MismatchError(
        f"after the commit, {', '.join(file.path for file in wrong)} is not there or has other bytes",
        where=hub.url,
        hint="Run again; if it stays so, delete the repository's broken files on its page.",
    )


def _tag(plan: HubPlan, commit: Commit, say: Say) -> None:
    assert plan.tag is not None
    hub, tag = plan.hub, plan.tag
    for attempt in range(1, ATTEMPTS + 1):
        try:
            hub.create_tag(tag, commit.revision)
            return
        except (UnsettledError, MovedError) as error:
            last = error
        if tag in _patiently(hub.tags, say):
            state = hub.read_state(tag)
            if state is not None and not state.lacks(plan.files):
                return
            raise ConflictError(f"the tag {tag} names other files", where=hub.url, hint="Choose another tag.")
        if attempt < ATTEMPTS:
            _wait(attempt, last, say)
    raise last


def _patiently(act: Callable[[], _T], say: Say) -> _T:
    """Repeat what may safely be repeated, a few times."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return act()
        except UnsettledError as error:
            if attempt == ATTEMPTS:
                raise
            _wait(attempt, error, say)
    raise AssertionError("unreachable")


def _wait(attempt: int, error: TransportError | ConflictError, say: Say) -> None:
    asked = getattr(error, "retry_after_s", 0.0)
    wait_s = min(max(asked, FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.8, 1.2)), LONGEST_WAIT_S)
    say(f"{error.problem}; trying again in {wait_s:.0f} s")
    time.sleep(wait_s)

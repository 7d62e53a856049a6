"""Which target was measured, and that it is the one that publish.yaml names.

A report tells a target's hub id, or a path on the machine where it was measured. A path says nothing of
what lay there, so that publish.yaml has to state it: `target.measured_as`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from eagle3pack.draft.target import bundled_target
from eagle3pack.errors import InputError, UsageError
from eagle3pack.publish.hub import HubKind
from eagle3pack.publish.ledger import Document, Node

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)


def require_target(reports: Sequence[Document], settings: Document) -> None:
    """Refuse reports on another target than the card names, and on a path that nobody said is that target.

    Raises:
        InputError: the names differ, a local copy is not stated, or a statement fits no report.
    """
    used: set[str] = set()
    for report in reports:
        for target, quoted in _targets(report.root):
            if not _is_named(target, settings):
                used.add(_require_stated(target, settings, report.name, quoted))
    unused = [entry for entry in _stated(settings) if entry not in used]
    if unused and reports:
        raise InputError(
            f"target.measured_as {unused[0]!r} is no target of the reports",
            where=settings.name,
            hint="Write the sha256 of the target's config.json, or its path, as the report has it.",
        )


def require_another_repository(destinations: Sequence[tuple[HubKind, str]], settings: Document) -> None:
    """Refuse to publish a draft into the repository of its target.

    Raises:
        UsageError: it was asked for.
    """
    for kind, repo_id in destinations:
        target = settings.value["target"].get("huggingface" if kind == "hf" else "modelscope", "")
        if repo_id.casefold() == target.casefold():
            raise UsageError(
                f"{kind}:{repo_id} is the target itself",
                where="--to",
                hint="A draft has a repository of its own.",
            )


def require_shape(facts: Document, settings: Document) -> None:
    """Refuse a draft that cannot have been made for the named target, where its shape is known.

    Raises:
        InputError: the width or the vocabulary differs.
    """
    for name in settings.value["target"].values():
        known = bundled_target(name) if isinstance(name, str) else None
        if known is None:
            continue
        for what, found, expected in (
            ("hidden states", facts.value["target_hidden_size"], known.hidden_size),
            ("a vocabulary", facts.value["vocab_size"], known.vocab_size),
        ):
            if found != expected:
                raise InputError(
                    f"names the target {name} with {what} of {expected}, but the draft is made for {found}",
                    where=settings.name,
                    hint="Write the target that the draft was trained for.",
                )


def local_copies(reports: Sequence[Document], settings: Document) -> list[Node]:
    """Targets that were measured under a path and not a hub id, each once; those of runs first."""
    found: dict[tuple[object, ...], Node] = {}
    for report in reports:
        runs = [target for target, _ in _targets(report.root)][1:]
        for target in runs or [report.root.target]:
            if target and not _is_named(target, settings):
                key = (target.config_sha256.raw, target.dtype.raw, target.quantization.raw)
                found.setdefault(key, target)
    return list(found.values())


def is_local_copy(target: Node, settings: Document) -> bool:
    """A path stands where a hub id could."""
    return bool(target) and not _is_named(target, settings)


def _targets(report: Node) -> Iterator[tuple[Node, bool]]:
    """The target of the checks, if there was one, and those of all measurements; whether each is quoted."""
    yield report.target, False
    for run in report.smoke.runs:
        for part in (run, run.baseline, run.against):
            if part.target:
                yield part.target, part.origin.raw == "quoted"


def _is_named(target: Node, settings: Document) -> bool:
    names = {str(settings.value["target"].get(hub)).casefold() for hub in ("huggingface", "modelscope")}
    return not target or _bare(str(target.id.raw)).casefold() in names


def _bare(name: str) -> str:
    return re.sub(r"^(?:hf|ms):|@[^@]*$", "", name)


def _stated(settings: Document) -> list[str]:
    entries = settings.value["target"].get("measured_as", [])
    return [entries] if isinstance(entries, str) else list(entries)


def _require_stated(target: Node, settings: Document, report: str, quoted: bool) -> str:
    """The entry of target.measured_as that speaks for this path."""
    name, digest = str(target.id.raw), target.config_sha256.raw
    for entry in _stated(settings):
        if not (quoted or _is_of_hub(target)) and (entry == digest or _same_path(entry, name)):
            return entry
    names = [str(settings.value["target"][hub]) for hub in ("huggingface", "modelscope")
             if hub in settings.value["target"]]  # fmt: skip
    named = " or ".join(dict.fromkeys(names))
    if quoted or _is_of_hub(target) or (_HUB_ID.fullmatch(name) and not Path(name).exists()):
        hint = "Write the names of the target that was measured."
        if not (quoted or _is_of_hub(target)):
            hint += f" If {name} was a folder that holds {named}, add under target: {_line(target)}"
        raise InputError(
            f"is about the target {name}, but publish.yaml names {named}", where=report, hint=hint
        )
    raise InputError(
        f"was made with the target in {name}, a path that does not say that it is {named}",
        where=report,
        hint=f"If it is a copy of {named}, add this line under target: in publish.yaml:\n  {_line(target)}",
    )


def _line(target: Node) -> str:
    return f'measured_as: "{target.config_sha256.raw or target.id.raw}"'


def _is_of_hub(target: Node) -> bool:
    """The report itself shows that this name is a hub's."""
    return bool(re.match(r"(?:hf|ms):", str(target.id.raw)) or target.revision.raw or target.bundled_from.raw)


def _same_path(entry: str, name: str) -> bool:
    return PurePosixPath(entry) == PurePosixPath(name)

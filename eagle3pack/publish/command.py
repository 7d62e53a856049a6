"""`eagle3pack publish`: check, render, plan, and then publish."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3pack.documents import read_file, read_json_object
from eagle3pack.errors import Eagle3PackError, InputError, TransportError, UsageError
from eagle3pack.publish import licenses, settings
from eagle3pack.publish.card import LANGUAGES, Card, CardInputs, render_card
from eagle3pack.publish.chart import can_draw
from eagle3pack.publish.conversion import RECORD
from eagle3pack.publish.facts import read_facts
from eagle3pack.publish.flow import Progress, Say, publish_everywhere
from eagle3pack.publish.folder import DraftFolder, read_folder, total_bytes
from eagle3pack.publish.hub import HUB_NAMES, Hub, HubKind
from eagle3pack.publish.ledger import Document, read_document
from eagle3pack.publish.metadata import HUB_ID
from eagle3pack.publish.plan import CARD, HubPlan, Wishes, plan_hub
from eagle3pack.publish.receipt import Receipt, hub_templates
from eagle3pack.publish.reports import Verdict, read_reports, require_written
from eagle3pack.publish.staging import Staged, stage
from eagle3pack.publish.target import require_another_repository, require_shape, require_target

SENDING = ("public", "tag", "pr", "prune", "replace_card")
# Of what git takes for a reference, what needs no quoting anywhere.
_TAG = re.compile(r"(?!.*(?:\.\.|\.lock$|\.$))[A-Za-z0-9_][\w.+-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """What the command line asked for; see its help."""

    to: tuple[str, ...]
    report: tuple[Path, ...] = ()
    config: Path | None = None
    dry_run: bool = False
    offline: bool = False
    yes: bool = False
    public: bool = False
    tag: str | None = None
    pr: bool = False
    replace_card: bool = False
    prune: bool = False
    lang: str | None = None
    check_card: bool = False
    allow_unverified: str | None = None
    receipt: Path = Path("receipt.json")
    render_to: Path | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """How the command talks to a person.

    Attributes:
        say: tells something.
        warn: tells what should not be overlooked.
        progress: shows how far a long step is.
        confirm: asks yes or no; None where there is nobody to ask.
        format_bytes: writes a size.
        show_progress: clients may draw their own bars.
    """

    say: Say
    warn: Say
    progress: Progress
    confirm: Callable[[str], bool] | None
    format_bytes: Callable[[float], str]
    show_progress: bool = False


@dataclass(slots=True)
class PublishResult:
    """What came out.

    Attributes:
        lines: for a person, last of all the addresses of the commits.
        document: for a program.
    """

    lines: list[str] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)


def run_publish(folder: Path, options: PublishOptions, around: Surroundings) -> PublishResult:
    """Publish a draft, or do as much of it as was asked.

    Args:
        folder: the draft that was verified.
        options: of the command line.
        around: the person at the terminal.

    Raises:
        Eagle3PackError: with the exit code of what went wrong.
    """
    destinations = _destinations(options)
    languages = _languages(options.lang)
    _require_sense(options, destinations, around)
    _require_render_apart(options, folder)
    config = options.config or _find_settings(folder)
    declared = settings.read_settings(config)
    require_another_repository(destinations, declared)
    with around.progress("Hashing", total_bytes(folder)) as on_bytes:
        draft = read_folder(folder, on_bytes)
    _require_receipt_apart(options, config, draft)
    inputs, verdict = _card_inputs(draft, declared, options)
    renders_only = options.check_card or (options.offline and options.dry_run)
    if verdict.only_rendering and not renders_only:
        raise InputError(
            f"cannot be published: {verdict.only_rendering}",
            where=str(folder),
            hint="Verify the whole folder; --offline --dry-run only renders the card.",
        )
    if options.allow_unverified and not verdict.unverified:
        around.warn("--allow-unverified is not needed: the draft is verified; the reason is not shown")
    if verdict.only_rendering:
        around.warn(f"this can only be rendered: {verdict.only_rendering}")
    beside = {settings.NAME: config}
    beside |= {report.name: path for report, path in zip(inputs.reports, options.report, strict=True)}
    with _staging_folder(options.render_to) as root:
        staged = stage(root, draft, inputs, beside, destinations, languages)
        if options.check_card:
            cards = [(each.kind, each.card) for each in staged]
            if "chart" not in declared.value and inputs.has_rates:  # drawn or not where it was published
                other = replace(inputs, draws_chart=not inputs.draws_chart)
                cards += [(kind, render_card(other, kind, name, languages)) for kind, name in destinations]
            return _compare_card(folder, cards)
        if inputs.has_rates and "chart" not in declared.value and not inputs.draws_chart:
            around.warn(
                "the card has no chart: matplotlib is not installed (pip install 'eagle3pack[chart]'); "
                "chart: false in publish.yaml silences this"
            )
        _tell_what_shows(draft, inputs, around)
        result = PublishResult(document=_describe(draft, staged, options))
        if options.offline:
            result.lines = [f"{HUB_NAMES[s.kind]}: {len(s.files)} files, nothing sent" for s in staged]
            if options.render_to:
                result.lines += [str(s.card_path) for s in staged]
            return result
        _publish(draft, inputs, staged, options, around, result)
    return result


def _publish(
    draft: DraftFolder,
    inputs: CardInputs,
    staged: Sequence[Staged],
    options: PublishOptions,
    around: Surroundings,
    result: PublishResult,
) -> None:
    """Plan on every hub, ask, and carry out."""
    plans, failed = _plan(staged, inputs, options, around)
    for plan in plans:
        around.say(plan.as_text(around.format_bytes))
    result.document["hubs"] = [plan.as_json() for plan in plans]
    if failed and not plans:
        raise TransportError(
            "; ".join(f"{name}: {error}" for name, error in failed), hint=_when_to_plan(options)
        )
    for name, error in failed:
        around.warn(f"{name}: {error}")
    if options.dry_run:
        result.lines = ["Nothing was sent: this was a dry run."]
        return
    busy = [plan for plan in plans if not plan.changes_nothing]
    if busy and not options.yes and not (around.confirm and around.confirm("Publish this?")):
        raise UsageError("not confirmed; nothing was sent", hint="Answer yes, or give --yes.")
    reports = [(report.name, report.sha256) for report in inputs.reports]
    receipt = Receipt(options.receipt, draft, reports, around.warn)
    try:
        publish_everywhere(plans, draft, receipt, failed=failed, say=around.say, progress=around.progress)
    finally:
        result.document["receipt"] = receipt.document
    result.lines = [str(entry["url"]) for entry in receipt.document["hubs"]]


def _plan(
    staged: Sequence[Staged], inputs: CardInputs, options: PublishOptions, around: Surroundings
) -> tuple[list[HubPlan], list[tuple[str, Eagle3PackError]]]:
    """A plan for each hub that answers; what a person has to mend ends the run before anything is sent."""
    templates = hub_templates(options.receipt)
    plans: list[HubPlan] = []
    failed: list[tuple[str, Eagle3PackError]] = []
    for each in staged:
        try:
            hub = _connect(each.kind, each.repo_id, options, around)
            wishes = Wishes(
                public=options.public,
                tag=options.tag,
                replace_card=options.replace_card,
                prune=options.prune,
                license_id=licenses.modelscope_api(inputs.settings.value["license"]),
            )
            template = templates.get((hub.kind, hub.endpoint, hub.repo_id))
            plans.append(
                plan_hub(hub, each.files, wishes, hub_template_sha256=template, dry_run=options.dry_run)
            )
        except TransportError as error:
            failed.append((HUB_NAMES[each.kind], error))
    return plans, failed


def _when_to_plan(options: PublishOptions) -> str:
    again = "Run it again with a network" + (", or add --offline to render alone" if options.dry_run else "")
    return f"{again}; nothing was sent."


def _connect(kind: HubKind, repo_id: str, options: PublishOptions, around: Surroundings) -> Hub:
    if kind == "hf":
        from eagle3pack.publish.huggingface import HuggingFace

        return HuggingFace(repo_id, pull_request=options.pr, show_progress=around.show_progress)
    from eagle3pack.publish.modelscope import ModelScope

    return ModelScope(repo_id)


def _destinations(options: PublishOptions) -> list[tuple[HubKind, str]]:
    found: dict[HubKind, str] = {}
    for text in options.to:
        match = re.fullmatch(r"(hf|ms):([\w.-]+/[\w.-]+)", text, re.ASCII)
        if not match:
            raise UsageError(f"{text!r} is no hf:ORG/NAME or ms:ORG/NAME", where="--to")
        if not HUB_ID.fullmatch(match[2]) or match[2].endswith(".git"):
            raise UsageError(f"{match[2]!r} is no name that a hub takes", where="--to")
        kind: HubKind = "hf" if match[1] == "hf" else "ms"
        if found.setdefault(kind, match[2]) != match[2]:
            raise UsageError(f"names two repositories on {HUB_NAMES[kind]}", where="--to")
    if not found:
        raise UsageError("no destination", hint="Name one: --to hf:ORG/NAME --to ms:ORG/NAME.")
    return list(found.items())


def _languages(text: str | None) -> list[str]:
    languages = [part.strip() for part in text.split(",")] if text else []
    for language in languages:
        if language not in LANGUAGES:
            raise UsageError(f"{language!r} is none of {', '.join(LANGUAGES)}", where="--lang")
    return list(dict.fromkeys(languages))


def _require_sense(
    options: PublishOptions, destinations: Sequence[tuple[HubKind, str]], around: Surroundings
) -> None:
    """Refuse what cannot be done before anything is read."""
    if options.pr and any(kind == "ms" for kind, _ in destinations):
        raise UsageError("ModelScope has no pull requests", where="--pr", hint="Publish there separately.")
    if options.pr and (options.tag or options.public):
        raise UsageError("a pull request is not tagged and shows nothing", where="--pr")
    if options.offline and not (options.dry_run or options.check_card):
        raise UsageError("--offline only renders and checks", hint="Add --dry-run.")
    if options.allow_unverified is not None and not options.allow_unverified.strip():
        raise UsageError("needs a reason; the card shows it", where="--allow-unverified")
    if not options.report and options.allow_unverified is None:
        raise UsageError("no report", hint="Give --report, as written by `eagle3pack verify`.")
    for report in options.report:  # the weights are hashed first, which may take minutes
        if not report.is_file():
            raise InputError("is no file", where=str(report), hint="`eagle3pack verify --report` writes it.")
    if options.tag is not None and not _TAG.fullmatch(options.tag):
        raise UsageError(f"{options.tag!r} is no name of a tag", where="--tag", hint="For example v1.0.")
    sends = [name for name in SENDING if getattr(options, name)]
    if options.check_card and sends:
        option = "--" + sends[0].replace("_", "-")
        raise UsageError(f"{option} is for publishing; --check-card only compares", where="--check-card")
    asks = not (options.yes or options.dry_run or options.offline or options.check_card)
    if asks and around.confirm is None:
        raise UsageError("there is no terminal to ask on", hint="Look with --dry-run, then give --yes.")


def _require_render_apart(options: PublishOptions, folder: Path) -> None:
    """Refuse to render into the draft's folder: the next run would find a stranger there."""
    if options.render_to is not None and options.render_to.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{options.render_to} is in the draft's folder", where="--render-to", hint="Name another folder."
        )


def _require_receipt_apart(options: PublishOptions, config: Path, draft: DraftFolder) -> None:
    """Refuse to write the receipt over what is published."""
    receipt = options.receipt.resolve()
    for path in (*options.report, config, *(file.local for file in draft.files)):
        if path.resolve() == receipt:
            raise UsageError(f"{path} would be overwritten", where="--receipt", hint="Name another file.")


def _find_settings(folder: Path) -> Path:
    for path in (Path(settings.NAME), folder / settings.NAME):
        if path.is_file():
            return path
    raise UsageError(f"there is no {settings.NAME} here or in the folder", hint="Name it with --config.")


def _card_inputs(
    draft: DraftFolder, declared: Document, options: PublishOptions
) -> tuple[CardInputs, Verdict]:
    """Read everything that the card is made from, and judge it.

    Raises:
        InputError: it does not fit together, or its verification is not complete and no reason was given.
    """
    facts = read_facts(draft)
    record = None
    if (path := draft.path / RECORD).is_file():
        require_written(read_json_object(path), "conversion", where=str(path), by="convert")
        record = read_document(RECORD, path)
    reports, verdict = read_reports(options.report, draft.digest)
    require_shape(facts, declared)
    require_target(reports, declared)
    reason = (options.allow_unverified or "").strip()
    if verdict.unverified and not reason:
        raise InputError(
            f"was not verified: {'; '.join(verdict.unverified)}",
            where=str(draft.path),
            hint="Verify it with an engine, or give --allow-unverified REASON, which the card shows.",
        )
    if not verdict.unverified:
        reason = ""
    return CardInputs(facts, declared, reports, record, verdict.unverified, reason, can_draw()), verdict


@contextmanager
def _staging_folder(wanted: Path | None) -> Iterator[Path]:
    if wanted is not None:
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="eagle3pack-publish-") as root:
        yield Path(root)


def _compare_card(folder: Path, cards: Sequence[tuple[HubKind, Card]]) -> PublishResult:
    """Hold the README in the folder against what would be rendered, the likeliest first.

    Raises:
        InputError: they differ.
    """
    path = folder / CARD
    found = read_file(path)
    for kind, card in cards:
        if found == card.text.encode("utf-8"):
            return PublishResult(
                [f"{path} is what {HUB_NAMES[kind]} gets from these inputs"],
                {"card": CARD, "same": True, "hub": kind},
            )
    want = cards[0][1].text.splitlines()
    have = found.decode("utf-8", errors="replace").splitlines()
    line = next((i for i, pair in enumerate(zip(have, want, strict=False)) if pair[0] != pair[1]), None)
    if line is None:
        line = min(len(have), len(want))
    got = have[line][:100] if line < len(have) else "the end of the file"
    expected = want[line][:100] if line < len(want) else "the end of the file"
    raise InputError(
        f"line {line + 1} is {got!r}, but rendering gives {expected!r}",
        where=str(path),
        hint="Someone edited the card, or its inputs changed.",
    )


def _tell_what_shows(draft: DraftFolder, inputs: CardInputs, around: Surroundings) -> None:
    """Say what stays behind, and which names of this machine do not."""
    if draft.left_out:
        around.say(f"Left out, as no part of a published draft: {', '.join(draft.left_out)}")
    for report in inputs.reports:
        root = report.root
        for node in (root.draft["source"], root.target.id, *(run.command for run in root.smoke.runs)):
            if found := re.search(r"(?:^|[\s='\"])(/[\w.-]+/[^\s'\"]*)", str(node.raw or "")):
                around.warn(f"{report.name} will show a path of this machine: {found[1]}")
                break


def _describe(draft: DraftFolder, staged: Sequence[Staged], options: PublishOptions) -> dict[str, Any]:
    return {
        "dry_run": options.dry_run,
        "draft_digest": draft.digest,
        "left_out": list(draft.left_out),
        "cards": [
            {
                "hub": each.kind,
                "repo_id": each.repo_id,
                "path": str(each.card_path) if options.render_to else None,
                "sha256": next(file.sha256 for file in each.files if file.path == CARD),
                "files": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in each.files],
                "figures": each.card.ledger.as_json(),
            }
            for each in staged
        ],
        "hubs": [],
    }

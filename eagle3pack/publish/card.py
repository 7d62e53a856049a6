"""The model card: a pure function of the draft's facts, the reports, the conversion record and publish.yaml.

The same inputs give the same bytes. Templates lay out; every value in them is bound (see ledger.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from eagle3pack import __version__
from eagle3pack.errors import InputError
from eagle3pack.publish.conversion import conversion_view
from eagle3pack.publish.hub import HubKind
from eagle3pack.publish.ledger import (
    Bound,
    Document,
    Ledger,
    Node,
    Source,
    billions,
    bound,
    code,
    escaped,
    gigabytes,
    plain,
    require_sources,
    text,
)
from eagle3pack.publish.marker import signed
from eagle3pack.publish.metadata import front_matter, require_valid_metadata, to_yaml
from eagle3pack.publish.prose import bind_text
from eagle3pack.publish.reports import smoke_runs
from eagle3pack.publish.results import Group, group_results
from eagle3pack.publish.target import is_local_copy, local_copies

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.runtime import Context

LANGUAGES = ("en", "zh")
DEFAULT_LANGUAGE: Mapping[HubKind, str] = {"hf": "en", "ms": "zh"}
CHART = "acceptance.svg"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
FEW_PROMPTS = 20


@dataclass(frozen=True, slots=True)
class CardInputs:
    """Everything that a card is made from.

    Attributes:
        facts: of the folder.
        settings: publish.yaml.
        reports: in the order given.
        record: eagle3pack.json, if the draft has one.
        unverified: what is missing in the verification.
        reason: why it is published all the same; "" where nothing is missing.
        draws_chart: a chart can be drawn; where publish.yaml asks for one, it must be.
    """

    facts: Document
    settings: Document
    reports: tuple[Document, ...]
    record: Document | None = None
    unverified: tuple[str, ...] = ()
    reason: str = ""
    draws_chart: bool = True

    @property
    def has_rates(self) -> bool:
        """There is something to draw."""
        return any(run.per_position_accept_rate for run in smoke_runs(self.reports))

    @property
    def has_chart(self) -> bool:
        """The card shows a chart: there are rates by position, and publish.yaml does not decline it."""
        return self.has_rates and bool(self.settings.value.get("chart", self.draws_chart))

    def digest(self, kind: HubKind, repo_id: str, languages: Sequence[str]) -> str:
        """One digest of all of it."""
        documents = [self.facts, self.settings, *self.reports, *([self.record] if self.record else [])]
        value = [
            __version__,
            kind,
            repo_id,
            list(languages),
            self.reason,
            [[document.name, document.sha256] for document in documents],
        ]
        return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Card:
    """A rendered card and where its values come from."""

    text: str
    ledger: Ledger


def render_card(inputs: CardInputs, kind: HubKind, repo_id: str, languages: Sequence[str] = ()) -> Card:
    """Render the card for one hub.

    Args:
        inputs: what it is made from.
        kind: the hub.
        repo_id: of this repository there.
        languages: "en", "zh" or both, in order; the hub's own by default.

    Raises:
        InputError: a text or number without a source, or metadata that the hub would refuse.
    """
    languages = tuple(languages) or (DEFAULT_LANGUAGE[kind],)
    ledger = Ledger()
    groups = group_results(smoke_runs(inputs.reports))
    meta = front_matter(kind, inputs.settings, inputs.facts, groups, ledger)
    parts = [_render(inputs, kind, repo_id, language, groups, ledger) for language in languages]
    body = to_yaml(meta) + "\n" + "\n\n---\n\n".join(part.strip() for part in parts) + "\n"
    require_valid_metadata(meta, kind, body)
    return Card(signed(body, inputs.digest(kind, repo_id, languages)), ledger)


def _render(
    inputs: CardInputs,
    kind: HubKind,
    repo_id: str,
    language: str,
    groups: list[Group],
    ledger: Ledger,
) -> str:
    context = _context(inputs, kind, repo_id, language, groups, ledger)
    marked = template(language).render(context)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", require_sources(marked)))


@cache
def template(language: str) -> Template:
    """The compiled template of a language; whatever it prints goes through the ledger in its context."""
    return _environment().get_template(f"card.{language}.md")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context

    @pass_context
    def write(context: Context, value: object) -> str:
        ledger: Ledger = context["ledger"]
        return ledger.write(value)

    environment = Environment(
        loader=PackageLoader("eagle3pack.publish"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # Markdown; escaped() and code() do it
        finalize=write,
    )
    environment.filters |= {
        "text": text,
        "code": code,
        "plain": plain,
        "billions": billions,
        "label": lambda node, key: bound(escaped(key), node),
        "url": _url,
        "block": _block,
        "code_name": lambda name: f"`{name}`",
    }
    return environment


def _context(
    inputs: CardInputs, kind: HubKind, repo_id: str, language: str, groups: list[Group], ledger: Ledger
) -> dict[str, Any]:
    facts, settings = inputs.facts.root, inputs.settings.root
    documents = {d.name: d for d in (inputs.settings, *inputs.reports)}
    first = _example_run(groups)
    k = first.num_speculative_tokens if first is not None else None
    results = [result for group in groups for result in group.results]
    weights = [file["size"] for file in facts.files if str(file.path.raw).endswith(".safetensors")]

    def prose(path: str) -> str:
        node = inputs.settings.at(f"/{path}")
        written = node.raw if isinstance(node.raw, str) else node.raw.get(language, node.raw["en"])
        return bind_text(written, documents, ledger, where=f"publish.yaml: {path}")

    return {
        "ledger": ledger,
        "y": settings,
        "f": facts,
        "hub": kind,
        "repo_id": repo_id,
        "target": settings.target["huggingface" if kind == "hf" else "modelscope"],
        "measured_target": first.target if first is not None else None,
        "is_local_copy": first is not None and is_local_copy(first.target, inputs.settings),
        "local_copies": local_copies(inputs.reports, inputs.settings),
        "reason": _given(inputs.reason) if inputs.reason else "",
        "unverified": _unverified(inputs),
        "shrink": bound(f"{facts.kv_cache_shrink.raw}x", facts.kv_cache_shrink)
        if facts.kv_cache_shrink.raw > 1
        else "",
        "shrink_number": facts.kv_cache_shrink,
        "weight_size": gigabytes(weights) if weights else "",
        "engines": _engines(inputs, groups),
        "untested": [name for key, name in ENGINES.items() if not _ran(groups, key)],
        "tested": lambda key: _ran(groups, key),
        "k": k,
        "speculative_config": _speculative_config(inputs, repo_id, k),
        "k_plus": bound(str(k.raw + 1), k) if k else "",
        "tp": first.tensor_parallel_size if first is not None else None,
        "groups": groups,
        "slow": [result for result in results if result.slower],
        "small": [r for r in results if (r.run.dataset.n_prompts.raw or FEW_PROMPTS) < FEW_PROMPTS],
        "failed": _failed_checks(inputs.reports),
        "chart": CHART if inputs.has_chart else "",
        "conversion": conversion_view(inputs.record, inputs.facts, inputs.settings),
        "reports": inputs.reports,
        "settings": inputs.settings,
        "sha_of": lambda document: Bound(
            f"`{document.sha256}`", (Source(document.name, document.sha256, ""),)
        ),
        "tool_version": _tool_version(),
        "ordinal": lambda group, i: bound(str(i + 1), group.run.per_position_accept_rate),
        "sampling": _sampling,
        "engine_name": _engine_name,
        "prose": prose,
    }


def _example_run(groups: list[Group]) -> Node | None:
    """The run whose settings the quick start repeats: of an engine that serves, if there is one."""
    served = [group.run for group in groups if group.run.engine.name.raw in ENGINES]
    return next(iter(served or [group.run for group in groups]), None)


def _speculative_config(inputs: CardInputs, repo_id: str, k: Node | None) -> Bound:
    """What vLLM is given: as verify advised it for this draft, with this repository and the measured k."""
    advised = next((r.root.serving.speculative_config for r in inputs.reports if r.root.serving), None)
    config: dict[str, Any] = json.loads(advised.raw) if advised is not None else {"method": "eagle3"}
    config["model"] = repo_id
    config["num_speculative_tokens"] = k.raw if k else config.get("num_speculative_tokens", "K")
    order = dict.fromkeys(["method", "model", "num_speculative_tokens"]) | config
    written = json.dumps(order, ensure_ascii=False).replace("'", "")
    return bound(written, *(node for node in (advised, k) if node is not None))


def _engines(inputs: CardInputs, groups: list[Group]) -> list[dict[str, Any]]:
    """A row for each engine that ran, and one for each known one that did not."""
    failed = {r.name for r in inputs.reports if r.root.smoke.status.raw == "failed"}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for group in groups:
        engine = group.run.engine
        result = "quoted" if group.quoted else "passed"
        if group.run.source.document in failed:
            result = "failed"
        key = (str(engine.name.raw), str(engine.version.raw))
        rows[key] = {"name": _engine_name(engine), "version": engine.version, "result": result}
    ran = {name for name, _ in rows}
    untested = [
        {"name": name, "version": None, "result": "none"} for key, name in ENGINES.items() if key not in ran
    ]
    return [*rows.values(), *untested]


def _engine_name(engine: Node) -> Bound:
    """The engine as people write it."""
    return bound(ENGINES.get(str(engine.name.raw), escaped(engine.name.raw)), engine.name)


def _ran(groups: list[Group], engine: str) -> bool:
    """Somebody ran the draft in the engine, here or where it is quoted from."""
    return any(group.run.engine.name.raw == engine for group in groups)


def _failed_checks(reports: Sequence[Document]) -> list[Node]:
    found: dict[tuple[str, str], Node] = {}
    for report in reports:
        for check in report.root.checks:
            if check.status.raw == "failed":
                found.setdefault((check.id.raw, check.message.raw), check)
    return list(found.values())


def _unverified(inputs: CardInputs) -> Bound:
    sources = tuple(Source(report.name, report.sha256, "/smoke") for report in inputs.reports)
    return Bound("; ".join(map(escaped, inputs.unverified)), sources)


def _given(reason: str) -> Bound:
    sha256 = hashlib.sha256(reason.encode()).hexdigest()
    return Bound(escaped(reason), (Source("the command line", sha256, "/allow-unverified"),))


def _tool_version() -> Bound:
    sha256 = hashlib.sha256(__version__.encode()).hexdigest()
    return Bound(__version__, (Source("eagle3pack", sha256, "/version"),))


def _sampling(run: Node, chinese: bool) -> Bound:
    sampling = run.sampling
    if sampling.temperature.raw == 0:
        return bound("贪心解码" if chinese else "greedy", sampling.temperature)
    top_p = f", top-p {sampling.top_p.raw}" if sampling.top_p.raw is not None else ""
    word = "温度" if chinese else "temperature"
    return bound(f"{word} {sampling.temperature.raw}{top_p}", sampling.temperature, sampling.top_p)


def _url(node: Node) -> Bound:
    address = str(node.raw)
    if not re.fullmatch(r"(https?://)?[^\s<>()\[\]`\"']+", address):
        raise InputError(f"{address!r} is no address", where=node.source.document)
    return bound(address, node)


def _block(node: Node) -> Bound:
    return bound(str(node.raw).replace("```", "'''").strip(), node)

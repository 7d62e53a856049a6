"""The front matter of a card for each hub, and the rules that each hub checks it by, offline.

Sources: huggingface/hub-docs (model cards), the answers of /api/validate-yaml in public issues, and
ModelScope's documentation of model cards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3pack.errors import InputError
from eagle3pack.publish import licenses
from eagle3pack.publish.hub import HUB_NAMES, HubKind
from eagle3pack.publish.ledger import Document, Ledger
from eagle3pack.publish.results import Group

HUB_ID = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<![.-])", re.ASCII)
RELATIONS = ("adapter", "merge", "quantized", "finetune")
ENGINE_TAGS = ("vllm", "sglang")
SHORTEST_MODELSCOPE_CARD = 200  # characters; shorter ones are hidden from its search


def front_matter(
    kind: HubKind, settings: Document, facts: Document, groups: Sequence[Group], ledger: Ledger
) -> dict[str, Any]:
    """The metadata of a card, in the order in which it is written.

    Args:
        kind: the hub; names and spellings differ.
        settings: publish.yaml.
        facts: of the folder.
        groups: the results, for model-index.
        ledger: is told the figures.

    Raises:
        InputError: publish.yaml does not name the target on this hub.
    """
    given: Mapping[str, Any] = settings.value
    target = given["target"].get("huggingface" if kind == "hf" else "modelscope")
    if not target:
        raise InputError(
            f"target.{'huggingface' if kind == 'hf' else 'modelscope'} is missing: names differ between hubs",
            where=settings.name,
        )
    tags = ["eagle3", "speculative-decoding", "draft-model", *_ran_in(groups), *given.get("tags", [])]
    tags.append("eagle3pack")
    meta: dict[str, Any] = {"license": given["license"]}
    if kind == "ms":
        meta["license"] = licenses.modelscope_card(given["license"])
    for key in ("license_name", "license_link"):
        if key in given:
            meta[key] = given[key]
    if given.get("language"):
        meta["language"] = list(given["language"])
    meta |= {"base_model": [target], "base_model_relation": "finetune"}
    if kind == "ms":
        meta |= {"tasks": ["text-generation"], "frameworks": ["pytorch"], "domain": ["nlp"]}
    meta["pipeline_tag"] = "text-generation"
    if facts.value["dialect"] == "speculators":
        meta["library_name"] = "speculators"
    meta["tags"] = list(dict.fromkeys(tags))
    if datasets := given.get("datasets", {}).get("huggingface" if kind == "hf" else "modelscope"):
        meta["datasets"] = list(datasets)
    if kind == "hf" and (results := _model_index(groups, ledger)):
        meta["model-index"] = [{"name": given["name"], "results": results}]
    return meta


def to_yaml(meta: Mapping[str, Any]) -> str:
    """The metadata between its two lines of dashes."""
    import yaml

    body = yaml.safe_dump(
        dict(meta), sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000
    )
    return f"---\n{body}---\n"


def metadata_problems(meta: Mapping[str, Any], kind: HubKind, card: str = "") -> list[str]:
    """What a hub would refuse, or silently misread, in a card.

    Args:
        meta: the front matter.
        kind: the hub.
        card: the whole card; its length matters on ModelScope.
    """
    problems = [*_license_problems(meta, kind), *_id_problems(meta)]
    if meta.get("base_model_relation") not in RELATIONS:
        problems.append(f"base_model_relation is none of {', '.join(RELATIONS)}")
    if meta.get("library_name") == "transformers":
        problems.append("library_name transformers makes the hub show that the draft is served alone")
    for key in ("tags", "language", "datasets", "tasks", "frameworks"):
        values = meta.get(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
            problems.append(f"{key} is no list of words")
    for code in meta.get("language") or []:
        if not re.fullmatch(r"[a-z]{2,3}", str(code)):
            problems.append(f"language {code!r} is no ISO 639 code")
    problems += _model_index_problems(meta.get("model-index"))
    if kind == "ms":
        problems += [f"{key} is missing" for key in ("tasks", "frameworks") if not meta.get(key)]
        if card and len(card) <= SHORTEST_MODELSCOPE_CARD:
            problems.append("the card is so short that ModelScope hides it from search")
    return problems


def declared_problems(given: Mapping[str, Any]) -> list[str]:
    """What no hub would take of publish.yaml; values of a wrong type are passed over."""
    problems = _license_problems(given, "hf") if isinstance(given.get("license"), str) else []
    if given.get("license_name") and given.get("license") != "other":
        problems.append("license_name goes with license: other alone; a hub would not show it")
    target = given.get("target")
    for hub in ("huggingface", "modelscope"):
        name = target.get(hub) if isinstance(target, dict) else None
        if isinstance(name, str) and not HUB_ID.fullmatch(name):
            problems.append(f"target.{hub}: {name!r} is no ORG/NAME of a hub")
    return problems


def require_valid_metadata(meta: Mapping[str, Any], kind: HubKind, card: str) -> None:
    """Refuse a card that its hub would refuse.

    Raises:
        InputError: with the first problem.
    """
    for problem in metadata_problems(meta, kind, card):
        raise InputError(problem, where=f"the card for {HUB_NAMES[kind]}", hint="Change publish.yaml.")


def _ran_in(groups: Sequence[Group]) -> list[str]:
    """Engines that a measured run proves; a tag is a claim too."""
    ran = [str(group.run.engine.name.raw) for group in groups if not group.quoted]
    return [name for name in ENGINE_TAGS if name in ran]


def _model_index(groups: Sequence[Group], ledger: Ledger) -> list[dict[str, Any]]:
    results = []
    for group in groups:
        for result in group.results:
            ledger.write(result.length)
            k = group.run.num_speculative_tokens.raw
            entry: dict[str, Any] = {
                "task": {"type": "text-generation", "name": "Speculative decoding"},
                "dataset": {
                    "type": re.sub(r"[^a-z0-9]+", "-", str(result.run.dataset.name.raw).lower()).strip("-"),
                    "name": str(result.run.dataset.name.raw),
                },
                "metrics": [
                    {
                        "type": "acceptance_length",
                        "value": float(result.length.text),
                        "name": f"Mean accepted length, {k} speculative tokens",
                    }
                ],
            }
            if group.quoted:
                entry["source"] = {"name": "quoted", "url": str(group.run.source_url.raw)}
            else:
                name = result.run.source.document
                entry["source"] = {"name": name, "url": name}
            results.append(entry)
    return results


def _license_problems(meta: Mapping[str, Any], kind: HubKind) -> list[str]:
    license_id = meta.get("license")
    spelled = {licenses.modelscope_card(known): known for known in licenses.HUGGING_FACE}
    known = spelled.get(str(license_id)) if kind == "ms" else license_id
    if known not in licenses.HUGGING_FACE:
        return [f"license {license_id!r} is no known id; write other, with license_name and license_link"]
    if known == "other" and not (meta.get("license_name") and meta.get("license_link")):
        return ["license other needs license_name and license_link"]
    return []


def _id_problems(meta: Mapping[str, Any]) -> list[str]:
    problems = []
    for key in ("base_model", "datasets"):
        for name in meta.get(key) or []:
            if not isinstance(name, str) or not HUB_ID.fullmatch(name):
                problems.append(f"{key} {name!r} is no ORG/NAME of a hub")
            elif key == "base_model" and Path(name).exists():
                problems.append(f"{key} {name!r} is a folder here, not a name on the hub")
    return problems


def _model_index_problems(index: Any) -> list[str]:
    """Nulls and numbers in places for strings, which Hugging Face refuses."""
    problems = []
    for result in [result for model in index or [] for result in model.get("results", [])]:
        if not result.get("task", {}).get("type"):
            problems.append("model-index has a result without task.type")
        dataset = result.get("dataset", {})
        for key in ("type", "name", "config", "split", "revision"):
            if (key in dataset or key in ("type", "name")) and not (
                isinstance(dataset.get(key), str) and dataset[key]
            ):
                problems.append(f"model-index: dataset.{key} is {dataset.get(key)!r}, not a word")
        for metric in result.get("metrics") or [{}]:
            if not metric.get("type") or metric.get("value") is None:
                problems.append("model-index has a metric without type or value")
    return problems

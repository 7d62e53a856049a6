"""The generated files of each hub's repository, in a folder of their own, never in the draft's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3pack.documents import read_file, write_whole
from eagle3pack.errors import PermissionDenied
from eagle3pack.publish.card import CHART, Card, CardInputs, render_card
from eagle3pack.publish.chart import draw_chart
from eagle3pack.publish.folder import DraftFolder, published_file
from eagle3pack.publish.guards import require_distinct_names, require_no_secrets, require_sizes
from eagle3pack.publish.hub import HubKind, PublishedFile
from eagle3pack.publish.plan import CARD
from eagle3pack.publish.reports import smoke_runs

# What ModelScope's own pipeline asks for; harmless there, of no use on Hugging Face.
CONFIGURATION = {"framework": "pytorch", "task": "text-generation"}
_ELSEWHERE = "Make room there, or name another folder with --render-to."


@dataclass(frozen=True, slots=True)
class Staged:
    """What one hub is to hold.

    Attributes:
        kind: the hub.
        repo_id: the repository there.
        card: as rendered.
        card_path: where it stands now.
        files: everything, sorted by path: the draft's and the generated.
    """

    kind: HubKind
    repo_id: str
    card: Card
    card_path: Path
    files: tuple[PublishedFile, ...]


def stage(
    root: Path,
    folder: DraftFolder,
    inputs: CardInputs,
    sources: Mapping[str, Path],
    destinations: Sequence[tuple[HubKind, str]],
    languages: Sequence[str],
) -> list[Staged]:
    """Render the card for every hub and write what goes with it.

    Args:
        root: an existing folder; each hub gets a folder in it.
        folder: the draft.
        inputs: of the card.
        sources: local files that are published beside the draft, by their name in the repository.
        destinations: hubs and repositories.
        languages: of the card; each hub's own by default.

    Raises:
        InputError: the card cannot be rendered honestly, or a file may not be published.
        PermissionDenied, TransportError: the folder cannot be written.
    """
    contents = {name: read_file(path) for name, path in sources.items()}
    if inputs.has_chart:
        contents[CHART] = draw_chart(smoke_runs(inputs.reports))
    return [
        _stage_one(root / kind, folder, inputs, contents, kind, repo_id, languages)
        for kind, repo_id in destinations
    ]


def _stage_one(
    place: Path,
    folder: DraftFolder,
    inputs: CardInputs,
    shared: Mapping[str, bytes],
    kind: HubKind,
    repo_id: str,
    languages: Sequence[str],
) -> Staged:
    card = render_card(inputs, kind, repo_id, languages)
    contents = {CARD: card.text.encode("utf-8"), **shared}
    if kind == "ms":
        contents["configuration.json"] = json.dumps(CONFIGURATION, indent=2).encode() + b"\n"
    require_distinct_names([*contents, *(file.path for file in folder.files)])
    generated = []
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"the folder cannot be made ({error.strerror})"
        raise PermissionDenied(problem, where=str(place), hint=_ELSEWHERE) from None
    for name, content in contents.items():
        require_no_secrets(content, where=f"{name} of the {kind} repository")
        write_whole(place / name, content, hint=_ELSEWHERE)
        generated.append(published_file(name, place / name))
    files = tuple(sorted([*folder.files, *generated], key=lambda file: file.path))
    require_sizes(files, [kind])
    return Staged(kind, repo_id, card, place / CARD, files)

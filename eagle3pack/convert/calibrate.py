"""Where a conversion gets its calibration from: a file, or texts that the draft speculates on."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle3pack import __version__
from eagle3pack.convert.plan import Plan
from eagle3pack.convert.record import timestamp
from eagle3pack.engine.endpoint import server_url
from eagle3pack.errors import InputError, UsageError
from eagle3pack.sources import Location, Source, parse_location, resolve_source

if TYPE_CHECKING:
    from eagle3pack.convert.calibration_sources.recording import Opened
    from eagle3pack.convert.merging.calibration import Calibration
    from eagle3pack.engine.prompts import PromptSet

SHIPPED = "shipped"  # stands for the prompts that come with this package
MAX_TOKENS = 256  # of an answer
FEWEST_ACCEPTED = 0.05  # tokens a draft: below it, something does not go together


class Progress(Protocol):
    """(label, total) -> a context that yields the function to advance it."""

    def __call__(
        self, label: str, total: int, *, unit: str = "B"
    ) -> AbstractContextManager[Callable[[int], None]]: ...


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Of the command line.

    Attributes:
        files: calibrations that were made before, to be put together.
        prompts: to calibrate with: a file, or "shipped".
        endpoint: a server that answers the prompts.
        features: a folder of hidden-state files to calibrate from.
        tokens: of answers in all; None until there is enough.
        save: where to keep a calibration made here.
        target: as on the command line.
    """

    files: tuple[Path, ...] = ()
    prompts: str | None = None
    endpoint: str | None = None
    features: Path | None = None
    tokens: int | None = None
    save: Path | None = None
    target: str | None = None

    @property
    def where(self) -> str:
        """The option that a calibration comes from; empty where none is asked for."""
        return next(iter(self._given()), "")

    @property
    def wanted(self) -> bool:
        """A calibration is asked for."""
        return bool(self.where)

    @property
    def made(self) -> bool:
        """It is made here, so that the draft runs."""
        return self.prompts is not None or self.features is not None

    def _given(self) -> list[str]:
        given = {
            "--calibration": self.files or None,
            "--calibrate-with": self.prompts,
            "--calibrate-from": self.features,
        }
        return [option for option, value in given.items() if value is not None]

    def require_sensible(self) -> None:
        """Refuse contradictions before anything is read.

        Raises:
            UsageError: of them.
        """
        if len(given := self._given()) > 1:
            raise UsageError(f"give one of them, not {len(given)}", where=" and ".join(given))
        for option, value in (("--save-calibration", self.save), ("--calibration-tokens", self.tokens)):
            if value is not None and not self.made:
                raise UsageError(
                    "nothing is calibrated", where=option, hint="Give --calibrate-with or --calibrate-from."
                )
        if self.features is not None and not self.features.is_dir():
            raise UsageError(f"{self.features} is no folder", where="--calibrate-from")
        if self.endpoint is not None and self.prompts is None:
            raise UsageError(
                "a server answers prompts, and none are given",
                where="--endpoint",
                hint="Give --calibrate-with: a file of prompts, or the word shipped.",
            )
        if self.endpoint is not None:
            server_url(self.endpoint)
        if self.prompts is not None and self.target is None and self.endpoint is None:
            raise UsageError(
                "needs the target's weights, or a server that has them",
                where="--calibrate-with",
                hint="Give --target, or --endpoint.",
            )


def find_calibration(
    options: CalibrationOptions,
    plan: Plan,
    source: Source,
    *,
    say: Callable[[str], None],
    progress: Progress,
) -> Calibration | None:
    """Read or make the calibration that a conversion asks for.

    Args:
        options: where from.
        plan: what will be merged.
        source: the draft.
        say: told how many tokens were seen and how many more would help.
        progress: of the tokens.

    Raises:
        UsageError: the method or the draft has no use for one.
        InputError: the file is broken or of another draft; or target, draft and prompts do not go together.
    """
    if not options.wanted:
        return None
    where = options.where
    if plan.request.only_pools:
        raise UsageError(
            f"{plan.request.method} looks at no activations", where=where, hint="Take --method als."
        )
    if not plan.computed:
        raise UsageError(
            f"the draft has {plan.before.num_key_value_heads} key/value heads already; none are merged",
            where=where,
            hint="Leave it out, or give a smaller --num-kv-heads.",
        )
    if plan.before.num_hidden_layers != 1:
        raise UsageError(
            f"tells what the first layer reads, and this draft has {plan.before.num_hidden_layers}",
            where=where,
            hint="Convert it without calibration.",
        )
    if not options.files:
        return _made(options, plan, source, say, progress)
    from eagle3pack.convert.merging.calibration import (
        attention_digest,
        merge_calibrations,
        read_calibration,
        require_same_draft,
    )

    calibrations = [read_calibration(path) for path in options.files]
    digest = attention_digest(plan.sources)
    for path, calibration in zip(options.files, calibrations, strict=True):
        require_same_draft(calibration, plan.before, digest, where=str(path))
    calibration = merge_calibrations(calibrations)
    _tell(calibration, plan, say)
    return calibration


def _made(
    options: CalibrationOptions, plan: Plan, draft: Source, say: Callable[[str], None], progress: Progress
) -> Calibration:
    """Record what the draft's attention reads."""
    from eagle3pack.convert.calibration_sources.recording import (
        NUM_SPECULATIVE_TOKENS,
        plan_extent,
        record,
    )
    from eagle3pack.convert.merging.calibration import write_calibration
    from eagle3pack.convert.merging.capture import ENOUGH_PER_DIMENSION, MOST_ACTIVATIONS
    from eagle3pack.engine.counters import mean_accepted_length

    width = plan.before.num_attention_heads * plan.before.head_dim
    most = min(MOST_ACTIVATIONS, ENOUGH_PER_DIMENSION * width * 10 // 9)  # a tenth is held out
    opened = _open(options, plan, draft, say)
    extent = plan_extent(opened.source.answers, MAX_TOKENS, options.tokens, most)
    with progress("calibrating", extent.tokens, unit="tokens") as on_tokens:
        recorder, counters, count = record(opened.source, extent, most, on_tokens)
    length = mean_accepted_length(counters)
    if length is None:
        raise InputError(
            "no text has an answer of two tokens or more, so that nothing is drafted", where=options.where
        )
    about = {
        **opened.about,
        "draft": {"id": _id(draft.location, draft.folder)},
        "generation": {
            **opened.about["generation"],
            "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
            "max_tokens": extent.max_tokens,
            "output_tokens": counters.output_tokens,
            "mean_accepted_length": length,
        },
    }
    calibration = assemble(recorder, plan, about)
    say(
        f"calibration: {counters.output_tokens:,} tokens of answers in {count:,} of {len(extent.order):,} "
        f"conversations; the draft's mean accepted length is {length:.3f} with {NUM_SPECULATIVE_TOKENS} "
        "speculative tokens"
    )
    if length < 1 + FEWEST_ACCEPTED:
        say(
            "calibration: warning: the draft proposes next to nothing right; are these texts and states of "
            "its own target, and of the auxiliary layers that it was trained on?"
        )
    _tell(calibration, plan, say)
    if options.save is not None:
        write_calibration(calibration, options.save)
        say(f"calibration: kept in {options.save}")
    return calibration


def _open(options: CalibrationOptions, plan: Plan, draft: Source, say: Callable[[str], None]) -> Opened:
    """The source of texts that the options name."""
    target_id = None
    if options.target is not None:
        location = parse_location(options.target)
        target_id = _id(location, Path(location.name))
    if options.features is not None:
        from eagle3pack.convert.calibration_sources.files import open_files

        return open_files(options.features, draft.folder, plan.before, options.target, target_id, say)
    assert options.prompts is not None
    prompts = _prompts(options.prompts)
    who = "the target" if options.endpoint is None else f"the server at {options.endpoint}"
    count = len(prompts.prompts)
    say(f"calibrating: {who} answers {count} prompt{'s' if count != 1 else ''} of {prompts.name}")
    if options.endpoint is not None:
        from eagle3pack.convert.calibration_sources.server import open_server

        return open_server(options.endpoint, draft.folder, plan.before, options.target, target_id, prompts)
    from eagle3pack.convert.calibration_sources.in_process import open_in_process

    assert options.target is not None and target_id is not None
    return open_in_process(_target_folder(options.target), target_id, draft.folder, prompts)


def assemble(recorder: Any, plan: Plan, about: Mapping[str, Any]) -> Calibration:
    """A calibration from what was recorded.

    Args:
        recorder: a `capture.Recorder` that has heard all passes.
        plan: the draft's tensors and config.
        about: target, draft (its id), prompts and generation, as in the schema.
    """
    import torch

    from eagle3pack.convert.merging.attention import from_matrices
    from eagle3pack.convert.merging.calibration import SCHEMA, Calibration, attention_digest
    from eagle3pack.convert.merging.capture import attention_by_distance
    from eagle3pack.convert.merging.compute import attention_tensors, load
    from eagle3pack.convert.merging.rotary import rope_spec

    config = plan.before
    stretches = recorder.stretches()
    second_moment, mean = recorder.averages()
    held_out = sum(len(s.positions) for s in stretches if s.held_out)
    tokens = {
        "moments": recorder.num_moments,
        "activations": sum(len(s.positions) for s in stretches) - held_out,
        "held_out": held_out,
        "distances": 0,
        "by_step": recorder.by_step,
    }
    document = {
        "schema": SCHEMA,
        "created": timestamp(),
        "tool": {"name": "eagle3pack", "version": __version__},
        "libraries": {"python": platform.python_version(), "torch": str(torch.__version__)},
        **about,
        "draft": {
            **about["draft"],
            "attention_sha256": attention_digest(plan.sources),
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "hidden_size": config.hidden_size,
        },
        "tokens": tokens,
    }
    calibration = Calibration(document, second_moment, mean, None, stretches)
    spec = rope_spec(config.rope, config.head_dim, config.max_position_embeddings)
    if spec.frequencies is None:
        return calibration
    norm = load(plan.sources["layers.0.hidden_norm.weight"])
    moments = calibration.moments(norm, config.rms_norm_eps)
    weights = from_matrices(attention_tensors(plan, 0), config.head_dim).to(torch.float32)
    mass, tokens["distances"] = attention_by_distance(weights, spec, moments.samples or moments.held_out)
    return Calibration(document, second_moment, mean, mass, stretches)


def _tell(calibration: Calibration, plan: Plan, say: Callable[[str], None]) -> None:
    """How many tokens there are, and how many more the refit wants."""
    from eagle3pack.convert.merging.capture import ENOUGH_PER_DIMENSION

    tokens = calibration.document["tokens"]
    width = plan.before.num_attention_heads * plan.before.head_dim
    seen = sum(tokens["by_step"])
    more = ENOUGH_PER_DIMENSION * width - tokens["activations"]
    advice = f"about {more:,} more would help" if more > 0 else "more would not help"
    say(
        f"calibration: {seen:,} draft inputs seen, {tokens['activations']:,} kept for the refit of o_proj "
        f"({tokens['activations'] / width:.1f} a dimension; {advice}), {tokens['held_out']:,} held out"
    )


def _prompts(text: str) -> PromptSet:
    from eagle3pack.engine.prompts import read_prompts, shipped_prompts

    return shipped_prompts() if text == SHIPPED else read_prompts(Path(text))


def _target_folder(text: str) -> Path:
    """The target's files on this machine; a bare ORG/NAME that is no folder is a repository."""
    location = parse_location(text)
    path = Path(location.name)
    if location.place != "local" or path.is_dir():
        return resolve_source(text).folder
    if path.is_file() or text.count("/") != 1 or text.startswith((".", "/")):
        raise UsageError(
            "calibration runs the target, and this is no folder with its weights",
            where=text,
            hint="Give --target the folder, or hf:ORG/NAME.",
        )
    return resolve_source(f"hf:{text}").folder


def _id(location: Location, folder: Path) -> str:
    """ORG/NAME on a hub, or a folder's own name: never a path."""
    is_here = location.place == "local" and folder.exists()
    return folder.resolve().name if is_here else location.name

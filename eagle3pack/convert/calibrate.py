"""Where a conversion gets its calibration from: a file, or target and draft at work in this process."""

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
from eagle3pack.errors import UsageError
from eagle3pack.sources import Location, Source, parse_location, resolve_source

if TYPE_CHECKING:
    import torch

    from eagle3pack.convert.merging.calibration import Calibration
    from eagle3pack.engine.prompts import PromptSet

SHIPPED = "shipped"  # stands for the prompts that come with this package
MAX_TOKENS = 256
NUM_SPECULATIVE_TOKENS = 3
BATCH_SIZE = 16


class Progress(Protocol):
    """(label, total) -> a context that yields the function to advance it."""

    def __call__(
        self, label: str, total: int, *, unit: str = "B"
    ) -> AbstractContextManager[Callable[[int], None]]: ...


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Of the command line.

    Attributes:
        file: a calibration that was made before.
        prompts: to calibrate with: a file, or "shipped".
        save: where to keep a calibration made here.
        target: as on the command line.
    """

    file: Path | None = None
    prompts: str | None = None
    save: Path | None = None
    target: str | None = None

    @property
    def wanted(self) -> bool:
        """A calibration is asked for."""
        return self.file is not None or self.prompts is not None

    def require_sensible(self) -> None:
        """Refuse contradictions before anything is read.

        Raises:
            UsageError: of them.
        """
        if self.file is not None and self.prompts is not None:
            raise UsageError("give either a file or prompts to make one with", where="--calibration")
        if self.save is not None and self.prompts is None:
            raise UsageError(
                "nothing is calibrated", where="--save-calibration", hint="Give --calibrate-with."
            )
        if self.save is not None and not self.save.absolute().parent.is_dir():
            raise UsageError(f"the folder of {self.save} does not exist", where="--save-calibration")
        if self.prompts is not None and self.target is None:
            raise UsageError("needs the target's weights", where="--calibrate-with", hint="Give --target.")


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
    where = "--calibration" if options.file else "--calibrate-with"
    if plan.request.only_pools:
        raise UsageError(
            f"{plan.request.method} looks at no activations", where=where, hint="Take --method als."
        )
    if not plan.computed:
        raise UsageError("the draft has that many key/value heads already", where=where)
    if plan.before.num_hidden_layers != 1:
        raise UsageError(
            f"tells what the first layer reads, and this draft has {plan.before.num_hidden_layers}",
            where=where,
            hint="Convert it without calibration.",
        )
    if options.file is None:
        return _made(options, plan, source, say, progress)
    from eagle3pack.convert.merging.calibration import attention_digest, read_calibration, require_same_draft

    calibration = read_calibration(options.file)
    require_same_draft(calibration, plan.before, attention_digest(plan.sources), where=str(options.file))
    _tell(calibration, plan, say)
    return calibration


def _made(
    options: CalibrationOptions, plan: Plan, source: Source, say: Callable[[str], None], progress: Progress
) -> Calibration:
    """Run target and draft over the prompts."""
    import torch

    from eagle3pack.convert.merging.calibration import write_calibration
    from eagle3pack.convert.merging.capture import ENOUGH_PER_DIMENSION, MOST_ACTIVATIONS, record_speculation
    from eagle3pack.engine.chat import load_chat
    from eagle3pack.engine.generation import Settings
    from eagle3pack.engine.loading import load_draft
    from eagle3pack.engine.target import load_target

    assert options.prompts is not None and options.target is not None
    prompts = _prompts(options.prompts)
    folder = _target_folder(options.target)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say(f"calibrating: the target answers {len(prompts.prompts)} prompts of {prompts.name}")
    target = load_target(folder, dtype=_served_dtype(folder, device), device=device)
    chat = load_chat(folder)
    draft = load_draft(source.folder, target=target)
    settings = Settings(
        max_tokens=MAX_TOKENS,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        batch_size=BATCH_SIZE,
        stop_ids=chat.stop_ids,
    )
    width = plan.before.num_attention_heads * plan.before.head_dim
    num_answers = sum(len(prompt.turns) or 1 for prompt in prompts.prompts)
    with progress("calibrating", num_answers * MAX_TOKENS, unit="tokens") as on_tokens:
        recorder = record_speculation(
            target,
            draft,
            chat,
            prompts.prompts,
            settings,
            most=min(MOST_ACTIVATIONS, ENOUGH_PER_DIMENSION * width * 10 // 9),  # a tenth is held out
            on_tokens=on_tokens,
        )
    about = {
        "target": {"id": _id(parse_location(options.target), folder)},
        "draft": {"id": _id(source.location, source.folder)},
        "prompts": [{"name": prompts.name, "sha256": prompts.sha256, "num_prompts": len(prompts.prompts)}],
        "generation": {
            "num_speculative_tokens": settings.num_speculative_tokens,
            "max_tokens": settings.max_tokens,
            "dtype": str(target.dtype).removeprefix("torch."),
        },
    }
    calibration = assemble(recorder, plan, about)
    _tell(calibration, plan, say)
    if options.save is not None:
        write_calibration(calibration, options.save)
        say(f"calibration: kept in {options.save}")
    return calibration


def _served_dtype(folder: Path, device: str) -> torch.dtype:
    """The weights' own, as engines serve them; a CPU computes float16 as float32."""
    import torch

    from eagle3pack.draft.target import read_target

    own = {"float32": torch.float32, "float16": torch.float16}.get(
        read_target(folder).dtype or "", torch.bfloat16
    )
    return torch.float32 if own == torch.float16 and device == "cpu" else own


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
    return folder.resolve().name if location.place == "local" else location.name

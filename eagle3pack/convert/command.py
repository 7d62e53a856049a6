"""`eagle3pack convert` as one function: read, examine, plan, write, prove, record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3pack.checkpoint.digest import header_sha256, sha256_file
from eagle3pack.checkpoint.distributed import model_folder
from eagle3pack.checkpoint.files import Checkpoint, open_checkpoint
from eagle3pack.checkpoint.folder import new_folder, require_free, require_separate
from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.convert.calibrate import CalibrationOptions, Progress, find_calibration
from eagle3pack.convert.compute import Computation, require_mergeable, start_computation
from eagle3pack.convert.examine import (
    shared_with_target,
    taken_from_target,
    target_names,
    vocabulary_map_is_identity,
)
from eagle3pack.convert.execute import copy_companions, prove, write_output
from eagle3pack.convert.handoff.command import plan_hand_off, require_place, write_hand_off
from eagle3pack.convert.places import require_places_apart
from eagle3pack.convert.plan import (
    POOLING,
    ClosedForm,
    Examined,
    Layout,
    Method,
    MetricName,
    Plan,
    RefitName,
    Request,
    plan_conversion,
)
from eagle3pack.convert.record import RECORD_NAME, SourceFile, build_record, relative_name
from eagle3pack.convert.requirements import choose_key_value_heads, require_convertible, require_target
from eagle3pack.convert.summary import MERGED_WARNING, POOLED_WARNING, Summary, measure
from eagle3pack.documents import read_json_object, to_json
from eagle3pack.draft.config import DraftConfig, parse_draft_config
from eagle3pack.draft.target import TargetSpec, default_aux_layer_ids
from eagle3pack.errors import InputError, UsageError
from eagle3pack.sources import (
    COMPANION_PATTERNS,
    Source,
    known_sha256,
    resolve_source,
    resolve_target,
    resolve_target_weights,
)


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of the command, named as on the command line."""

    num_kv_heads: int | None = None
    target: str | None = None
    method: Method = "mean"
    metric: MetricName | None = None
    refit_output: RefitName | None = None
    grouping: str = "contiguous"
    max_distance: int | None = None
    calibration: tuple[Path, ...] = ()
    calibrate_with: str | None = None
    endpoint: str | None = None
    calibrate_from: Path | None = None
    calibration_tokens: int | None = None
    save_calibration: Path | None = None
    heal: int | None = None
    heal_state: Path | None = None
    canonical: bool = False
    layout: Layout = "keep"
    strip_shared: bool = False
    shard_size: int = 5_000_000_000
    overwrite: bool = False
    hash_source: bool = False
    prove: bool = False
    dry_run: bool = False
    no_hash: bool = False
    draft_config: str | None = None
    retrain_with: tuple[str, Path] | None = None


def run_convert(
    source_text: str,
    out_text: str,
    options: ConvertOptions,
    *,
    say: Callable[[str], None],
    progress: Progress,
) -> Summary:
    """Convert a draft.

    Args:
        source_text: SOURCE as the user wrote it.
        out_text: the folder to make.
        options: see `eagle3pack convert --help`.
        say: for messages while it works.
        progress: of long parts.

    Raises:
        Eagle3PackError: any of them; nothing is left behind.
    """
    if options.strip_shared and options.target is None:
        raise UsageError("needs the target to compare with", where="--strip-shared", hint="Give --target.")
    _require_options_that_count(options)
    calibrated = _calibration_options(options)
    out = Path(out_text)
    if not options.dry_run:  # before a long download, not after it
        require_free(out, overwrite=options.overwrite, beside=COMPANION_PATTERNS)
    require_places_apart(source_text, out, options)
    target = resolve_target(options.target) if options.target else None
    if target is not None and target.bundled:
        say(f"target {target.name}: using the shape that came with this package ({target.bundled_from})")
    source = resolve_source(source_text)
    require_separate(source.folder, out)
    if options.retrain_with:
        require_place(*options.retrain_with, source.folder, out)
    config_path = _config_path(source.folder, options.draft_config)
    config = parse_draft_config(read_json_object(config_path), where=str(config_path))
    checkpoint = open_checkpoint(source.folder, pickles=True)
    if calibrated.made:
        _require_safetensors(checkpoint, config, calibrated.where)
    request = Request(
        num_key_value_heads=choose_key_value_heads(
            config, options.num_kv_heads, target.num_key_value_heads if target else None
        ),
        method=options.method,
        closed_form=ClosedForm(
            options.metric or ("calibration" if calibrated.wanted else "identity"),
            options.refit_output,
            options.grouping,
            options.max_distance,
            options.heal or 0,
        ),
        layout=options.layout,
        canonical=options.canonical,
        shard_bytes=options.shard_size,
    )
    if target is not None:
        require_target(config, target)
    examined, not_stripped = _examine(config, checkpoint, target, options, progress)
    plan = plan_conversion(config, checkpoint, request, examined)
    before, after = measure(checkpoint, plan)
    summary = Summary(
        plan,
        source_text,
        out_text,
        False,
        before,
        after,
        not_stripped,
        warnings=tuple(_warnings(plan, target)),
        hand_off=(
            plan_hand_off(*options.retrain_with, plan, target, options.target)
            if options.retrain_with
            else None
        ),
    )
    if plan.computed and not request.only_pools:
        require_mergeable(plan, calibrated.wanted)
    calibration = find_calibration(calibrated, plan, source, say=say, progress=progress)
    computation = start_computation(
        plan,
        say,
        calibration,
        shared=None if calibration is None else _shared(plan, target, options),
        trains=not options.dry_run,
        heal_state=options.heal_state,
    )
    if options.dry_run:
        summary = replace(summary, warnings=(*_occupied(out, options.overwrite), *summary.warnings))
        return _try(summary, computation)
    document = None if calibration is None else calibration.document
    return _write(summary, computation, document, source, config_path, checkpoint, out, options, progress)


def _require_options_that_count(options: ConvertOptions) -> None:
    """Refuse settings that the chosen method would not look at: silence would pass for consent."""
    if options.method in ("svd", "als") and options.refit_output == "none":
        raise UsageError(
            f"--method {options.method} chooses a basis for the values that o_proj has to follow",
            where="--refit-output none",
            hint="Leave it out, or give --method procrustes.",
        )
    if options.method not in POOLING:
        return
    given = {
        "--metric": options.metric is not None and options.heal is None,
        "--refit-output": options.refit_output is not None,
        "--grouping": options.grouping != "contiguous",
        "--max-distance": options.max_distance is not None,
    }
    for option, is_given in given.items():
        if is_given:
            raise UsageError(
                f"--method {options.method} pools contiguous groups and takes no such setting",
                where=option,
                hint="Leave it out, or give --method als (or svd, procrustes).",
            )


def _calibration_options(options: ConvertOptions) -> CalibrationOptions:
    """Where a calibration comes from; refuses what contradicts itself or needs one."""
    found = CalibrationOptions(
        files=options.calibration,
        prompts=options.calibrate_with,
        endpoint=options.endpoint,
        features=options.calibrate_from,
        tokens=options.calibration_tokens,
        save=options.save_calibration,
        target=options.target,
    )
    found.require_sensible()
    asking = {
        "--metric calibration": options.metric == "calibration",
        "--refit-output ridge": options.refit_output == "ridge",
        "--grouping auto": options.grouping == "auto",
        "--heal": options.heal is not None,
    }
    for option, asked in asking.items():
        if asked and not found.wanted:
            raise UsageError(
                "needs a calibration",
                where=option,
                hint="Give --calibration, --calibrate-with or --calibrate-from.",
            )
    if options.heal_state is not None and options.heal is None:
        raise UsageError("nothing is trained", where="--heal-state", hint="Give --heal.")
    return found


def _require_safetensors(checkpoint: Checkpoint, config: DraftConfig, where: str) -> None:
    """Refuse to calibrate with a draft that the engine cannot load, before the target answers anything."""
    if any(header.data_start == 0 for header in checkpoint.headers):
        raise UsageError(
            "runs the draft, which must be in safetensors for that",
            where=where,
            hint=f"Convert it with --num-kv-heads {config.num_key_value_heads} first, which keeps its heads, "
            "and then convert the result.",
        )


def _config_path(folder: Path, given: str | None) -> Path:
    path = Path(given) if given else folder / "config.json"
    if not given and not path.exists() and model_folder(folder):
        raise InputError(
            "has no config.json, as trainers save none",
            where=str(folder),
            hint="Give --draft-config: the JSON that the training run's model.draft_model_config names.",
        )
    return path


def _examine(
    config: DraftConfig,
    checkpoint: Checkpoint,
    target: TargetSpec | None,
    options: ConvertOptions,
    progress: Progress,
) -> tuple[Examined, dict[str, str]]:
    """Read what the plan depends on, and why what --strip-shared named stays."""
    names = require_convertible(config, checkpoint)
    equal: dict[str, str] = {}
    different: dict[str, str] = {}
    if options.strip_shared and target is not None and options.target is not None:
        wanted = target_names(target)
        folder = resolve_target_weights(
            options.target, tuple(name for all_ in wanted.values() for name in all_)
        )
        if folder is None:
            raise UsageError(
                "only the target's config is at hand, not its weights",
                where="--strip-shared",
                hint="Give --target a folder with weights, or hf:ORG/NAME.",
            )
        total = sum(checkpoint.tensors[names[name]].nbytes for name in wanted if name in names)
        with progress("comparing with the target", total) as on_bytes:
            equal, different = shared_with_target(config, checkpoint, names, target, folder, on_bytes)
    return (
        Examined(
            vocabulary_map_is_identity=vocabulary_map_is_identity(checkpoint, names),
            shared_with_target=equal,
            aux_hidden_state_layer_ids=default_aux_layer_ids(target.num_hidden_layers) if target else None,
        ),
        different,
    )


def _shared(plan: Plan, target: TargetSpec | None, options: ConvertOptions) -> Mapping[str, TensorEntry]:
    """What the draft takes from its target, if that is at hand: a figure of a report is worth no download."""
    if (
        target is None
        or options.target is None
        or {"embed_tokens.weight", "lm_head.weight"} <= set(plan.sources)
    ):
        return {}
    ran = options.calibrate_with or options.calibrate_from  # then it is in the cache
    if not (Path(options.target).is_dir() or ran):
        return {}
    names = tuple(name for all_ in target_names(target).values() for name in all_)
    folder = resolve_target_weights(options.target, names)
    if folder is None or not any(folder.glob("*.safetensors")):
        return {}
    return taken_from_target(plan.before, plan.sources, target, folder)


def _try(summary: Summary, computation: Computation) -> Summary:
    """A dry run: closed-form methods are carried out, so that the summary tells what they would keep."""
    plan = summary.plan
    if plan.request.only_pools or not plan.computed:
        return summary
    for planned in (tensor for file in plan.files for tensor in file.tensors if tensor.name in plan.computed):
        for _ in computation.compute(planned):
            pass
    return _with_results(summary, computation)


def _with_results(summary: Summary, computation: Computation) -> Summary:
    notes = [f"layer {result.layer}: {note}" for result in computation.results() for note in result.notes]
    return replace(summary, quality=computation.quality(), warnings=(*summary.warnings, *notes))


def _write(
    summary: Summary,
    computation: Computation,
    calibration: Mapping[str, Any] | None,
    source: Source,
    config_path: Path,
    checkpoint: Checkpoint,
    out: Path,
    options: ConvertOptions,
    progress: Progress,
) -> Summary:
    plan = summary.plan
    source_files = _source_files(source, checkpoint, hash_all=options.hash_source)
    with new_folder(
        out, overwrite=options.overwrite, nbytes=plan.output_bytes, beside=COMPANION_PATTERNS
    ) as folder:
        with progress("converting", plan.output_bytes) as on_bytes:
            files = write_output(
                plan, computation, config_path, folder, on_bytes=on_bytes, hashing=not options.no_hash
            )
        copied = copy_companions(source.folder, folder, COMPANION_PATTERNS)
        proof = prove(plan, folder, every_byte=options.prove)
        previous = _previous_record(source.folder)
        record = build_record(plan, source, source_files, previous, files, computation, calibration, proof)
        (folder / RECORD_NAME).write_text(to_json(record), "utf-8")
        if hand_off := summary.hand_off:
            with progress(f"writing for {hand_off.framework}", plan.output_bytes) as on_bytes:
                written = write_hand_off(hand_off, folder, plan, on_bytes)
            summary = replace(summary, hand_off=replace(hand_off, written=written))
    digest = record["output"]["draft_digest"]
    summary = replace(summary, written=True, copied_files=tuple(copied), digest=digest, proof=proof)
    return _with_results(summary, computation) if plan.computed else summary


def _source_files(source: Source, checkpoint: Checkpoint, *, hash_all: bool) -> list[SourceFile]:
    return [
        SourceFile(
            relative_name(header.path, source.folder),
            header.file_bytes,
            None if header.data_start == 0 else header_sha256(header.path),
            sha256_file(header.path) if hash_all else known_sha256(header.path),
        )
        for header in checkpoint.headers
    ]


def _previous_record(folder: Path) -> Mapping[str, Any] | None:
    path = folder / RECORD_NAME
    return read_json_object(path) if path.exists() else None


def _occupied(out: Path, overwrite: bool) -> Iterator[str]:
    if out.exists() and not overwrite:
        yield f"OUT {out} exists: without --dry-run this needs --overwrite"


def _warnings(plan: Plan, target: TargetSpec | None) -> Iterator[str]:
    if plan.computed:
        yield POOLED_WARNING if plan.request.only_pools else MERGED_WARNING
    if plan.assumed_layers:
        yield (
            "the source's config names no auxiliary layers: the target's default "
            f"{list(plan.assumed_layers)} was written, which is a guess; they must be those that the draft "
            "was trained on"
        )
    if plan.unknown:
        yield f"not tensors of an EAGLE3 draft, kept as they are: {', '.join(plan.unknown)}"
    if target is None:
        return
    if plan.before.vocab_size != target.vocab_size:
        yield (
            f"the draft's vocab_size is {plan.before.vocab_size}, that of {target.name} is "
            f"{target.vocab_size}: is that the target that the draft was trained for?"
        )

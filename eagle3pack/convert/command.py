"""`eagle3pack convert` as one function: read, examine, plan, write, prove, record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3pack.checkpoint.digest import header_sha256, sha256_file
from eagle3pack.checkpoint.files import Checkpoint, open_checkpoint
from eagle3pack.checkpoint.folder import new_folder, require_free, require_separate
from eagle3pack.convert.examine import shared_with_target, target_names, vocabulary_map_is_identity
from eagle3pack.convert.execute import copy_companions, prove, write_output
from eagle3pack.convert.plan import (
    Examined,
    Layout,
    Method,
    Plan,
    Request,
    choose_key_value_heads,
    plan_conversion,
    require_convertible,
)
from eagle3pack.convert.pooling import GroupError
from eagle3pack.convert.record import RECORD_NAME, SourceFile, build_record, relative_name
from eagle3pack.convert.summary import RETRAIN_WARNING, Summary, measure
from eagle3pack.documents import read_json_object, to_json
from eagle3pack.draft.config import DraftConfig, parse_draft_config
from eagle3pack.draft.target import TargetSpec, default_aux_layer_ids
from eagle3pack.errors import UsageError
from eagle3pack.sources import (
    COMPANION_PATTERNS,
    Source,
    known_sha256,
    resolve_source,
    resolve_target,
    resolve_target_weights,
)

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of the command, named as on the command line."""

    num_kv_heads: int | None = None
    target: str | None = None
    method: Method = "mean"
    canonical: bool = False
    layout: Layout = "keep"
    strip_shared: bool = False
    shard_size: int = 5_000_000_000
    overwrite: bool = False
    hash_source: bool = False
    prove: bool = False
    dry_run: bool = False
    no_hash: bool = False


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
        progress: (label, total bytes) -> a context that yields the function to advance it.

    Raises:
        Eagle3PackError: any of them; nothing is left behind.
    """
    if options.strip_shared and options.target is None:
        raise UsageError("needs the target to compare with", where="--strip-shared", hint="Give --target.")
    out = Path(out_text)
    if not options.dry_run:
        require_free(out, overwrite=options.overwrite)  # before a long download, not after it
    target = resolve_target(options.target) if options.target else None
    if target is not None and target.bundled:
        say(f"target {target.name}: using the shape that came with this package ({target.bundled_from})")
    source = resolve_source(source_text)
    require_separate(source.folder, out)
    config_path = source.folder / "config.json"
    config = parse_draft_config(read_json_object(config_path), where=str(config_path))
    checkpoint = open_checkpoint(source.folder, pickles=True)
    request = Request(
        num_key_value_heads=choose_key_value_heads(
            config, options.num_kv_heads, target.num_key_value_heads if target else None
        ),
        method=options.method,
        layout=options.layout,
        canonical=options.canonical,
        shard_bytes=options.shard_size,
    )
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
    )
    if options.dry_run:
        return summary
    return _write(summary, source, checkpoint, out, options, progress)


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


def _write(
    summary: Summary,
    source: Source,
    checkpoint: Checkpoint,
    out: Path,
    options: ConvertOptions,
    progress: Progress,
) -> Summary:
    plan = summary.plan
    source_files = _source_files(source, checkpoint, hash_all=options.hash_source)
    with new_folder(out, overwrite=options.overwrite, nbytes=plan.output_bytes) as folder:
        with progress("converting", plan.output_bytes) as on_bytes:
            written = write_output(
                plan, source.folder, folder, on_bytes=on_bytes, hashing=not options.no_hash
            )
        copied = copy_companions(source.folder, folder, COMPANION_PATTERNS)
        prove(plan, folder, every_byte=options.prove)
        record = build_record(
            plan,
            source,
            source_files,
            _previous_record(source.folder),
            written.files,
            written.errors,
            _libraries(plan),
        )
        (folder / RECORD_NAME).write_text(to_json(record), "utf-8")
    return replace(
        summary,
        written=True,
        copied_files=tuple(copied),
        digest=record["output"]["draft_digest"],
        group_errors=_mean_errors(plan, written.errors),
    )


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


def _libraries(plan: Plan) -> dict[str, str]:
    if not plan.pooled:
        return {}
    import numpy as np

    return {"numpy": np.__version__}


def _mean_errors(plan: Plan, errors: Mapping[str, tuple[GroupError, ...]]) -> dict[str, float] | None:
    """The mean over all heads of the relative errors of K and of V."""
    means = {}
    for projection in ("k", "v"):
        values = [
            error
            for name, groups in errors.items()
            if plan.pooled[name].projection == projection and not plan.pooled[name].is_bias
            for group in groups
            for error in group.heads
            if error is not None
        ]
        if values:
            means[projection.upper()] = sum(values) / len(values)
    return means or None


def _warnings(plan: Plan, target: TargetSpec | None) -> Iterator[str]:
    if plan.pooled:
        yield RETRAIN_WARNING
    if plan.unknown:
        yield f"not tensors of an EAGLE3 draft, kept as they are: {', '.join(plan.unknown)}"
    if target is None:
        return
    width = plan.before.target_hidden_size
    if width != target.hidden_size:
        yield f"the draft reads hidden states of {width}, the target {target.name} gives {target.hidden_size}"
    if plan.before.vocab_size != target.vocab_size:
        yield (
            f"the draft's vocab_size is {plan.before.vocab_size}, that of the target {target.name} "
            f"is {target.vocab_size}"
        )

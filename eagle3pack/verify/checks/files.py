"""F: the files themselves, before anything in them is believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eagle3pack.verify.check import Check, DropIndex, Finding, SetFormat, Undecided, check
from eagle3pack.verify.context import CONFIG_NAME, Context
from eagle3pack.verify.weights import INDEX_NAME, SINGLE_NAME

_JUNK_PREFIXES = ("optimizer", "training_state", "rng_state", "scheduler", "trainer_state", "global_step")
_JUNK_SUFFIXES = (".tmp", ".lock", ".incomplete", ".pyc", ".swp", ".part", "~")
_JUNK_NAMES = frozenset({".git", ".cache", ".env", "__pycache__", ".ms_upload_cache", ".ipynb_checkpoints"})


@check(
    "F01",
    "config.json is one JSON object in UTF-8",
    reason="Every engine stops here; vLLM says `Invalid repository ID or local directory specified`.",
    source="vLLM 0.32 transformers_utils/config.py (measured)",
)
def config_is_readable(context: Context) -> Iterator[Finding]:
    try:
        _ = context.raw
    except Undecided as answer:
        yield Finding(
            answer.reason,
            "Copy config.json from the export of the draft.",
            file=CONFIG_NAME,
        )


@check(
    "F02",
    "the weights are one model.safetensors, or an index with all its shards and no other",
    reason="A missing shard is missing tensors, which vLLM fills with uninitialised memory; a stale one is "
    "loaded after the right one and wins.",
    source="vLLM 0.32 model_executor/model_loader/default_loader.py; speculators convert: "
    "`Sharded checkpoint detected`",
)
def one_weight_source(context: Context) -> Iterator[Finding]:
    files = context.files
    if files.index_problem:
        yield Finding(
            f"the index {files.index_problem}", "Write the index again, or one file.", file=INDEX_NAME
        )
    if files.index_is_stale:
        yield Finding(
            f"{INDEX_NAME} names not one file that is here: {SINGLE_NAME} holds the weights",
            f"Delete the index; or, if {SINGLE_NAME} is the stale one, get the shards.",
            file=INDEX_NAME,
            mends=(DropIndex(INDEX_NAME),),
        )
        return
    if files.has_single and files.has_index:
        yield Finding(
            f"both {SINGLE_NAME} and {INDEX_NAME} are here, and engines differ in which they take",
            "Delete the one that is stale.",
            file=INDEX_NAME,
        )
    for name in files.missing:
        yield Finding(
            f"the index names {name}, which is not here", "Download or export it again.", file=INDEX_NAME
        )
    for name in files.orphans:
        if name != SINGLE_NAME:
            yield Finding(
                f"{name} belongs to nothing, yet engines that load every safetensors file load it too",
                "Delete it, or name it in the index.",
                file=name,
            )
    if not files.used and not files.missing and not files.pickles and not files.index_problem:
        yield Finding("there are no weights", f"Put {SINGLE_NAME} beside config.json.", file=SINGLE_NAME)
    elif files.used and not files.has_single and not files.has_index:
        names = [path.name for path in files.used]
        yield Finding(
            f"the weights are {', '.join(names)}, a name that vLLM finds and transformers does not",
            f"Rename it to {SINGLE_NAME}." if len(names) == 1 else f"Write {INDEX_NAME}.",
            file=names[0],
            severity="warning",
        )


@check(
    "F03",
    "there are safetensors weights, not only a pickle",
    reason="A pickle runs code when it is loaded; hub scanners block it, speculators and llama.cpp refuse "
    "it.",
    source="huggingface.co/docs/hub/security-pickle",
)
def not_only_pickle(context: Context) -> Iterator[Finding]:
    if context.files.pickles and not context.files.used and not context.files.missing:
        yield Finding(
            f"the only weights are {', '.join(context.files.pickles)}",
            f"Run `eagle3pack convert SOURCE OUT --num-kv-heads {_own_heads(context)}`, which reads it "
            "without running its code and writes safetensors.",
            file=context.files.pickles[0],
        )


def _own_heads(context: Context) -> str:
    """The draft's own key/value heads: a conversion to as many changes no value."""
    try:
        return str(context.config.num_key_value_heads)
    except Undecided:
        return "N"


@check(
    "F04",
    "no pickle lies beside the safetensors weights",
    severity="warning",
    reason="The reference implementation reads pytorch_model.bin first: after a conversion that is the old "
    "draft.",
    source="SafeAILab/EAGLE eagle/model/ea_model.py",
)
def no_pickle_beside(context: Context) -> Iterator[Finding]:
    if context.files.used:
        for name in context.files.pickles:
            yield Finding(
                f"{name} lies beside the safetensors weights and some loaders prefer it",
                "Delete it, unless it holds the very same tensors.",
                file=name,
            )


@check(
    "F05",
    "every safetensors header is sound and covers its file",
    reason="A truncated download or a Git LFS pointer fails in every engine, with a message about something "
    "else.",
    source="github.com/huggingface/safetensors, Format",
)
def headers_are_sound(context: Context) -> Iterator[Finding]:
    for name, problem in context.headers.problems.items():
        fix = context.headers.hints[name] or "Download or export it again."
        yield Finding(f"the weight file {problem}", fix, file=name)


@check(
    "F06",
    "the metadata says `format: pt`",
    severity="warning",
    reason="transformers refuses a file without it; TorchSpec writes only its own version.",
    source="transformers modeling_utils.load_state_dict; TorchSpec tools/convert_to_hf.py",
)
def metadata_format(context: Context) -> Iterator[Finding]:
    for header in context.headers.headers:
        found = header.metadata.get("format")
        if found != "pt":
            yield Finding(
                f"the metadata gives the format as {found!r}"
                if found
                else "the metadata does not give the format",
                "Write {'format': 'pt'} into the header's metadata.",
                file=header.path.name,
                found=found,
                expected="pt",
                mends=(SetFormat(header.path.name),),
                producer_bug="TorchSpec: only its own version in the metadata"
                if "torchspec_version" in header.metadata
                else None,
            )


@check(
    "F07",
    "the index agrees with its shards",
    severity="warning",
    reason="Hubs show a wrong size, and a loader that looks a tensor up finds it missing.",
    source="transformers utils/hub.get_checkpoint_shard_files",
)
def index_agrees(context: Context) -> Iterator[Finding]:
    index = context.files.index
    if index is None or not context.files.has_index:
        return
    weight_map = index["weight_map"]
    held = {entry.name: header.path.name for header in context.headers.headers for entry in header.tensors}
    if context.headers.problems or context.files.missing:
        raise Undecided("not every shard can be read (F02, F05)")
    for name, file in weight_map.items():
        if name not in held:
            yield Finding(
                f"the index names {name} in {file}, which does not hold it",
                "Write the index again.",
                file=INDEX_NAME,
                tensor=name,
                severity="error",
            )
        elif held[name] != file:
            yield Finding(
                f"the index looks for {name} in {file}, it is in {held[name]}",
                "Write the index again.",
                file=INDEX_NAME,
                tensor=name,
                found=file,
                expected=held[name],
            )
    for name in held:
        if name not in weight_map:
            yield Finding(
                f"{name} is in {held[name]} but not in the index",
                "Write the index again.",
                file=INDEX_NAME,
                tensor=name,
            )
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(entry.nbytes for header in context.headers.headers for entry in header.tensors)
    if total != actual:
        yield Finding(
            "the index gives a total size that is not that of its tensors",
            "Write the index again.",
            file=INDEX_NAME,
            key="metadata.total_size",
            found=total,
            expected=actual,
        )


@check(
    "F08",
    "no tensor is there twice under two spellings",
    engines=("vllm", "sglang", "tensorrt-llm"),
    reason="`midlayer.` and `layers.0.` are one layer to an engine: vLLM 0.32 silently keeps the copy that "
    "comes last in the file.",
    source="vLLM 0.32 model_executor/models/llama_eagle3.py load_weights (measured)",
)
def no_double_tensors(context: Context) -> Iterator[Finding]:
    for logical, places in context.headers.duplicates.items():
        names = ", ".join(f"{name} ({file})" for file, name in places)
        yield Finding(
            f"{logical} is there {len(places)} times: {names}",
            "Keep the one that was trained and delete the other.",
            file=places[-1][0],
            tensor=places[-1][1],
        )


@check(
    "F09",
    "no quantisation or adapter file is left over",
    severity="warning",
    reason="vLLM reads hf_quant_config.json as the draft's quantisation; an adapter is not applied at all.",
    source="github.com/vllm-project/vllm/pull/25883; Model-Optimizer hf_spec_export.py",
)
def no_leftover_sidecars(context: Context) -> Iterator[Finding]:
    declared = isinstance(context.raw.get("quantization_config"), dict)
    for name in ("hf_quant_config.json", "adapter_config.json", "adapter_model.safetensors"):
        if (context.folder / name).is_file() and not (name == "hf_quant_config.json" and declared):
            yield Finding(
                f"{name} is here but config.json declares nothing of the kind",
                "Delete it, or declare the quantisation.",
                file=name,
            )


@check(
    "F10",
    "nothing is in the folder that should not be published",
    severity="warning",
    reason="Training states, caches and links that lead elsewhere are published along, or break the upload.",
    source="huggingface.co/docs/huggingface_hub/guides/upload",
)
def nothing_stray(context: Context) -> Iterator[Finding]:
    is_hub_cache = context.folder.parent.name == "snapshots"  # the hub's cache is made of links
    try:
        paths = sorted(context.folder.iterdir())
    except OSError:
        return
    for path in paths:
        name = path.name
        if path.is_symlink() and not is_hub_cache and _leads_out(path):
            yield Finding(
                f"{name} is a link to a file outside the folder",
                "Replace it with the file itself.",
                file=name,
            )
        lower = name.lower()
        if (
            name in _JUNK_NAMES
            or lower.startswith(_JUNK_PREFIXES)
            or lower.endswith(_JUNK_SUFFIXES)
            or lower == "training_args.bin"
        ):
            yield Finding(f"{name} is no part of a draft", "Delete it, or move it elsewhere.", file=name)


def _leads_out(path: Path) -> bool:
    try:
        return path.resolve().parent != path.parent.resolve()
    except (OSError, RuntimeError):
        return True


CHECKS: tuple[Check, ...] = (
    config_is_readable,
    one_weight_source,
    not_only_pickle,
    no_pickle_beside,
    headers_are_sound,
    metadata_format,
    index_agrees,
    no_double_tensors,
    no_leftover_sidecars,
    nothing_stray,
)

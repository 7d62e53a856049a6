"""What the checks look at: a draft, its target and the engines, each part read when first asked for.

A part that cannot be had raises `Undecided` with the reason, every time it is asked for, so that a check
is written as if all its parts were there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from eagle3pack.checkpoint.header import TensorEntry
from eagle3pack.documents import read_json_object
from eagle3pack.draft.config import DraftConfig, parse_draft_config
from eagle3pack.draft.fields import Fields
from eagle3pack.draft.target import TargetSpec, default_aux_layer_ids
from eagle3pack.draft.tensors import TensorSpec, expected_tensors, layer_of
from eagle3pack.errors import Eagle3PackError
from eagle3pack.verify.check import DEFAULT_ENGINES, Check, Engine, Finding, Undecided, not_applicable
from eagle3pack.verify.weights import Headers, WeightFiles, find_weight_files, read_headers

if TYPE_CHECKING:
    from eagle3pack.verify.scan import Scan
    from eagle3pack.verify.target_weights import TargetWeights

CONFIG_NAME = "config.json"
RECORD_NAME = "eagle3pack.json"

Value = TypeVar("Value")


class Part(Generic[Value]):
    """A property computed once, whose `Undecided` is kept like a value."""

    def __init__(self, compute: Callable[[Context], Value]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__
        self.name = compute.__name__

    @overload
    def __get__(self, context: None, owner: type[Context]) -> Part[Value]: ...
    @overload
    def __get__(self, context: Context, owner: type[Context]) -> Value: ...
    def __get__(self, context: Context | None, owner: type[Context]) -> Value | Part[Value]:
        if context is None:
            return self
        if self.name not in context.parts:
            try:
                context.parts[self.name] = self.compute(context)
            except Undecided as answer:
                context.parts[self.name] = answer
        value = context.parts[self.name]
        if isinstance(value, Undecided):
            raise Undecided(value.reason, value.status)
        return value  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked of the static checks.

    Attributes:
        engines: whose rules count; those of others become notes.
        engines_named: the user named them, so a loud refusal of a dialect counts too.
        tensor_parallel_size: None where the user named none.
        quick: leave out every check that reads values.
        on_bytes: told of every block that was read and scanned.
    """

    engines: tuple[Engine, ...] = DEFAULT_ENGINES
    engines_named: bool = False
    tensor_parallel_size: int | None = None
    quick: bool = False
    on_bytes: Callable[[int], None] = field(default=lambda count: None, compare=False)


class Context:
    """A draft under examination.

    Args:
        folder: of the draft.
        options: what was asked for.
        target: its target, or None.
        target_text: the target as the user wrote it; its weights and tokenizer are looked for there.
        target_reason: why there is no target.
        draft_name: the draft as the user named it, without a hub's prefix.
    """

    def __init__(
        self,
        folder: Path,
        options: Options | None = None,
        *,
        target: TargetSpec | None = None,
        target_text: str | None = None,
        target_reason: str = "no target was given",
        draft_name: str = "",
    ) -> None:
        self.folder = folder
        self.draft_name = draft_name or str(folder)
        self.options = options or Options()
        self.parts: dict[str, Any] = {}
        self._target = target
        self._target_text = target_text
        self._target_reason = target_reason

    def of_copy(self, folder: Path) -> Context:
        """The same question about a copy of the draft."""
        options = replace(self.options, on_bytes=lambda count: None)
        return Context(
            folder,
            options,
            target=self._target,
            target_text=self._target_text,
            target_reason=self._target_reason,
            draft_name=self.draft_name,
        )

    def rate(self, check: Check, finding: Finding) -> Finding:
        """Settle the severity of a finding for the engines that were asked for."""
        severity = finding.severity or check.severity
        engines = finding.engines or check.engines
        if engines and not set(engines) & set(self.options.engines):
            severity = "note"
        elif finding.only_if_named and severity == "error" and not self.options.engines_named:
            severity = "warning"
        return replace(finding, severity=severity, engines=engines)

    @Part
    def raw(self) -> Mapping[str, Any]:
        """config.json."""
        try:
            return read_json_object(self.folder / CONFIG_NAME)
        except Eagle3PackError as error:
            raise Undecided(f"config.json {error.problem}") from None

    @Part
    def is_speculators(self) -> bool:
        """The config is in the speculators format, or tries to be."""
        return "speculators_model_type" in self.raw or "transformer_layer_config" in self.raw

    @Part
    def top(self) -> Fields:
        """The config's top level."""
        return Fields(self.raw, CONFIG_NAME)

    @Part
    def layer(self) -> Fields:
        """Where the config keeps the decoder layer's shape."""
        if not self.is_speculators:
            return self.top
        if not isinstance(self.raw.get("transformer_layer_config"), dict):
            raise Undecided("config.json has no transformer_layer_config (C01)")
        return self.top.object("transformer_layer_config")

    @Part
    def layer_path(self) -> tuple[str, ...]:
        """The keys that lead to `layer`."""
        return ("transformer_layer_config",) if self.is_speculators else ()

    @Part
    def eagle(self) -> Fields:
        """eagle_config; empty where it is absent or no object."""
        value = self.raw.get("eagle_config")
        return Fields(value if isinstance(value, dict) else {}, CONFIG_NAME, "eagle_config.")

    @Part
    def config(self) -> DraftConfig:
        """The config as the domain sees it."""
        try:
            return parse_draft_config(self.raw, where=CONFIG_NAME)
        except Eagle3PackError as error:
            raise Undecided(f"the draft's shape is unknown, since {error}") from None

    @Part
    def files(self) -> WeightFiles:
        """Which files hold the weights."""
        return find_weight_files(self.folder)

    @Part
    def headers(self) -> Headers:
        """What the headers say; those that cannot be read are left out."""
        return read_headers(self.files)

    @Part
    def tensors(self) -> Mapping[str, TensorEntry]:
        """Logical name -> tensor, where every header could be read."""
        if not self.files.used:
            raise Undecided("there are no safetensors weights (F02, F03)")
        if self.headers.problems:
            raise Undecided(f"the header of {next(iter(self.headers.problems))} cannot be read (F05)")
        return self.headers.tensors

    @Part
    def num_layers_in_file(self) -> int:
        """Decoder layers that the weights hold."""
        return len({layer for name in self.tensors if (layer := layer_of(name)) is not None})

    @Part
    def expected(self) -> Mapping[str, TensorSpec]:
        """What the config makes engines expect, for the layers that the file holds."""
        layers = min(self.config.num_hidden_layers, self.num_layers_in_file)  # C06 tells where they differ
        return expected_tensors(replace(self.config, num_hidden_layers=layers))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor by its logical name; None where it is absent."""
        entry = self.tensors.get(name)
        return None if entry is None else entry.shape

    def rows(self, name: str) -> int | None:
        """The first axis of a matrix; None where the tensor is absent or no matrix."""
        shape = self.shape(name)
        return shape[0] if shape is not None and len(shape) == 2 else None

    def columns(self, name: str) -> int | None:
        """The second axis of a matrix; None where the tensor is absent or no matrix."""
        shape = self.shape(name)
        return shape[1] if shape is not None and len(shape) == 2 else None

    @Part
    def scan(self) -> Scan:
        """What one read of every weight file found: digests and values."""
        if self.options.quick:
            raise Undecided("--quick reads no values", "not_run")
        if not self.files.used:
            raise Undecided("there are no safetensors weights (F02, F03)")
        from eagle3pack.verify.scan import scan_draft

        try:
            return scan_draft(self)
        except Eagle3PackError as error:
            raise Undecided(f"the weights could not be read: {error}") from None

    @Part
    def target(self) -> TargetSpec:
        """What the draft must know of its target."""
        if self._target is None:
            raise Undecided(self._target_reason)
        return self._target

    @property
    def has_target(self) -> bool:
        """A target is known."""
        return self._target is not None

    @Part
    def target_folder(self) -> Path | None:
        """The target's own folder, where the user gave one; else None."""
        folder = Path(self._target_text) if self._target_text else None
        return folder if folder is not None and folder.is_dir() else None

    def target_weights_folder(self, names: tuple[str, ...]) -> Path | None:
        """A folder with the target's files that hold some tensors; a hub's are fetched.

        Raises:
            Undecided: they cannot be had.
        """
        if self._target_text is None or self.target.bundled:
            return None
        from eagle3pack.sources import resolve_target_weights

        try:
            return resolve_target_weights(self._target_text, names)
        except Eagle3PackError as error:
            raise Undecided(f"the weights of {self.target.name} cannot be had: {error.problem}") from None

    @Part
    def target_weights(self) -> TargetWeights:
        """Embedding and head of the target, where they can be had."""
        if self.options.quick:
            raise Undecided("--quick reads no values", "not_run")
        from eagle3pack.verify.target_weights import open_target_weights

        return open_target_weights(self)

    @Part
    def default_aux_ids(self) -> tuple[int, int, int]:
        """The auxiliary layers that engines take where they find none."""
        return default_aux_layer_ids(self.target.num_hidden_layers)

    @Part
    def record(self) -> Mapping[str, Any]:
        """eagle3pack.json."""
        path = self.folder / RECORD_NAME
        if not path.is_file():
            raise not_applicable("the draft carries no conversion record")
        try:
            return read_json_object(path)
        except Eagle3PackError as error:
            raise Undecided(f"eagle3pack.json {error.problem} (M00)") from None

"""The target: any causal language model that transformers loads, with the states a draft is fed.

Auxiliary hidden states count as vLLM does: id k is the residual stream after k layers, so 0 is the
embedding and the number of layers is the last layer's output before the final norm.

Source: vLLM 0.32 model_executor/models/interfaces.py (default ids), model_executor/models/llama.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec, default_aux_layer_ids, read_target
from eagle3pack.engine.kv_cache import KeyValueCache, attention_mask
from eagle3pack.errors import InputError, UsageError

# What transformers raises for a config, a weight file or an architecture that it cannot load.
_LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    ImportError,
    RuntimeError,
    AttributeError,
    TypeError,
    SafetensorError,
)


class TargetOutput(NamedTuple):
    """What one forward yields.

    Attributes:
        logits: (B, kept, V), at the kept tokens only.
        states: what the draft is fed, (B, T, A * Ht), or the final normed state where no layer was asked for.
    """

    logits: Tensor
    states: Tensor


class Target:
    """A loaded target.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        spec: what its config.json says.
        stop_ids: tokens that end a text.
    """

    def __init__(self, model: Any, spec: TargetSpec, stop_ids: frozenset[int]) -> None:
        self.model = model
        self.spec = spec
        self.stop_ids = stop_ids
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()
        self._layers = _decoder_layers(model, spec)
        self._cache_keyword = (  # transformers 5.24 renamed it
            "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        )
        self._mask_kinds = _mask_kinds(spec)
        self._captured: dict[int, Tensor] = {}
        self._final: Tensor | None = None
        self._kept: slice = slice(None)
        self._head.register_forward_pre_hook(self._before_head)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.aux_layer_ids: tuple[int, ...] = ()

    @property
    def embedding_weight(self) -> Tensor:
        """Token embeddings, (V, Ht)."""
        return self._embedding.weight  # type: ignore[return-value]

    @property
    def head_weight(self) -> Tensor:
        """Weight of the head, (V, Ht)."""
        return self._head.weight  # type: ignore[return-value]

    @property
    def max_position(self) -> int:
        """Positions that the target is made for; 0 where its config does not say."""
        return self.spec.max_position_embeddings or 0

    def capture_for(self, config: DraftConfig, *, where: str) -> None:
        """Capture, from now on, the states that a draft is fed.

        Ids are sorted and made unique, as vLLM does, whatever order the config has them in.

        Raises:
            InputError: an id that the target does not have, or states that do not fit the draft's fc.
        """
        ids = config.aux_hidden_state_layer_ids or default_aux_layer_ids(len(self._layers))
        chosen = tuple(sorted(set(ids))) if config.use_aux_hidden_state else ()
        outside = [k for k in chosen if not 0 <= k <= len(self._layers)]
        if outside:
            raise InputError(
                f"auxiliary layer {outside[0]} does not exist: the target has {len(self._layers)} layers",
                where=where,
                hint="Is this the target the draft was trained for?",
            )
        if chosen and len(chosen) != config.num_aux_hidden_states:
            raise InputError(
                f"fc takes {config.num_aux_hidden_states} auxiliary hidden states, but the layers are "
                f"{list(chosen)}",
                where=where,
            )
        if config.target_hidden_size != self.spec.hidden_size:
            raise InputError(
                f"the draft is made for a target of hidden size {config.target_hidden_size}, this one has "
                f"{self.spec.hidden_size}",
                where=where,
            )
        self.capture(chosen)

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Capture the states after these many layers, from now on; none means the final normed state."""
        for hook in self._hooks:
            hook.remove()
        self.aux_layer_ids = tuple(layer_ids)
        self._hooks = [self._hook(layer_id) for layer_id in self.aux_layer_ids]

    def new_cache(self, num_rows: int) -> KeyValueCache:
        """An empty cache for this target."""
        return KeyValueCache(num_rows, self.device)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, cache: KeyValueCache, kept: slice = slice(None)
    ) -> TargetOutput:
        """Read tokens.

        Args:
            token_ids: (B, T).
            positions: what `cache.at` returned for them, (B, T).
            cache: of this target.
            kept: the tokens whose logits are wanted.
        """
        self._kept = kept
        output = self.model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=self._mask(positions, cache.length),
            use_cache=True,
            **{self._cache_keyword: _CacheOfTransformers(cache)},
        )
        if self.aux_layer_ids:
            states = torch.cat([self._captured.pop(k) for k in self.aux_layer_ids], dim=-1)
        else:
            states = self._final  # type: ignore[assignment]
        self._final, self._kept = None, slice(None)
        return TargetOutput(output.logits, states)

    def _mask(self, positions: Tensor, length: int) -> Any:
        masks = {
            kind: attention_mask(positions, length, self.dtype, window)
            for kind, window in self._mask_kinds.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _before_head(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._final = inputs[0]
        return (inputs[0][:, self._kept], *inputs[1:])

    def _hook(self, layer_id: int) -> torch.utils.hooks.RemovableHandle:
        if layer_id == len(self._layers):

            def after_last(_: nn.Module, __: Any, output: Any) -> None:
                # transformers 4 wraps a layer's output in a tuple
                self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

            return self._layers[-1].register_forward_hook(after_last)

        def before(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            self._captured[layer_id] = inputs[0] if inputs else keywords["hidden_states"]

        return self._layers[layer_id].register_forward_pre_hook(before, with_kwargs=True)


class _CacheOfTransformers:
    """The few methods of a transformers cache that a model calls when mask and positions are given."""

    is_compileable = False

    def __init__(self, cache: KeyValueCache) -> None:
        self._cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write and read one layer."""
        return self._cache.update(key_states, value_states, layer_idx)

    def get_seq_length(self, *_: Any) -> int:
        """Tokens before the new ones; only models that also take positions ask, and ignore it."""
        return 0


def load_target(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Target:
    """Load a target from a local folder.

    Args:
        folder: config.json, safetensors weights and tokenizer, as transformers writes them.
        dtype: to compute in.
        device: "cpu" or one GPU.

    Raises:
        InputError: transformers cannot load it, weights are missing, or its layers keep a state that
            cannot take back rejected tokens.
        UsageError: it does not fit into memory.
    """
    spec = read_target(folder)
    _mask_kinds(spec)  # refuse before the weights are read
    if not any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        raise InputError(
            "holds no weights of the target",
            where=str(folder),
            hint="Give a folder with its weights, or hf:ORG/NAME.",
        )
    model = _load_model(folder, dtype, device)
    stop_ids = model.generation_config.eos_token_id
    if isinstance(stop_ids, int):
        stop_ids = [stop_ids]
    return Target(model, spec, frozenset(stop_ids or ()) | frozenset(spec.eos_token_ids))


def _load_model(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    loader: Any = AutoModelForCausalLM  # its stubs know nothing of output_loading_info
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model, info = loader.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        model = model.to(device).eval()
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _does_not_fit(folder, error) from None
    except _LOADING_ERRORS as error:
        if isinstance(error, RuntimeError) and "alloc" in str(error):
            raise _does_not_fit(folder, error) from None  # what the CPU allocator raises
        raise InputError(
            f"transformers cannot load this target ({_first_line(error)})",
            where=str(folder),
            hint="If vLLM can serve it, run the smoke test with --engine vllm.",
        ) from error
    if info["missing_keys"]:
        raise InputError(
            f"{len(info['missing_keys'])} weights are missing, {min(info['missing_keys'])} among them",
            where=str(folder),
            hint="transformers would fill them with random numbers.",
        )
    return model.requires_grad_(False)


def _does_not_fit(folder: Path, error: BaseException) -> UsageError:
    return UsageError(
        f"the target does not fit into memory ({_first_line(error)})",
        where=str(folder),
        hint="Run it in bfloat16 (--dtype), or with --engine vllm and --tensor-parallel-size.",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _decoder_layers(model: Any, spec: TargetSpec) -> nn.ModuleList:
    """The decoder layers, whatever the model calls them."""
    decoder = model.get_decoder()
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == spec.num_hidden_layers:
            return module
    raise InputError(
        f"{type(model).__name__} has no list of {spec.num_hidden_layers} decoder layers to take states from",
        where=spec.name,
        hint="Run the smoke test with --engine vllm.",
    )


def _mask_kinds(spec: TargetSpec) -> dict[str, int | None]:
    """The masks that the target's layers read, each with its sliding window.

    Raises:
        InputError: a kind of layer whose state cannot be cut back to the accepted tokens.
    """
    foreign = sorted(set(spec.attention_kinds) - {"full", "sliding", "mla"})
    if foreign:
        raise InputError(
            f"the target has {foreign[0]} attention layers, which the reference engine does not run",
            where=spec.name,
            hint="Run the smoke test with --engine vllm.",
        )
    window = spec.text.get("sliding_window")
    if "sliding" not in spec.attention_kinds or not isinstance(window, int):
        return {"full_attention": None}
    if spec.attention_kinds == ("sliding",):
        return {"sliding_attention": window}
    return {"full_attention": None, "sliding_attention": window}

"""What a draft costs to serve beside its target, and how to start it: plain arithmetic on both shapes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from eagle3pack.draft.config import DraftConfig
from eagle3pack.draft.target import TargetSpec
from eagle3pack.verify.check import Undecided
from eagle3pack.verify.context import Context

KV_DTYPE_BYTES = 2  # engines keep the KV cache in bfloat16 or float16 unless told otherwise
CANDIDATE_SIZES = (1, 2, 4, 8, 16)
DEFAULT_SPECULATIVE_TOKENS = 3
_FLOAT_DTYPES = frozenset({"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True, slots=True)
class ServingFacts:
    """The numbers that people ask for before they serve a draft; see schemas/report.schema.json.

    Attributes:
        num_parameters: elements of the float tensors.
        tensor_parallel_size: that the figures a rank are for.
        kv_bytes_per_token: of the draft, whole.
        kv_bytes_per_token_per_rank: of the draft on one rank; None where the heads do not fit.
        target_kv_bytes_per_token_per_rank: of the target; None where its layers keep several kinds of cache.
        page_size_ratio: a draft layer's page over a target layer's, on one rank.
        kv_pool_share_lost: share of the KV pool that the draft takes.
        tensor_parallel_sizes_that_fit: of 1, 2, 4, 8 and 16.
        shared_with_target: weights that an engine takes from the target.
        shared_bytes: what these would cost in the draft.
        aux_layers_vllm, aux_layers_sglang: in each engine's numbering.
        aux_layers_are_default: the config is silent and these follow from the target.
        speculative_config: the JSON for vLLM's --speculative-config.
    """

    num_parameters: int | None
    tensor_parallel_size: int
    kv_bytes_per_token: int
    kv_bytes_per_token_per_rank: int | None
    target_kv_bytes_per_token_per_rank: int | None
    page_size_ratio: float | None
    kv_pool_share_lost: float | None
    tensor_parallel_sizes_that_fit: list[int]
    shared_with_target: list[str]
    shared_bytes: int | None
    aux_layers_vllm: list[int] | None
    aux_layers_sglang: list[int] | None
    aux_layers_are_default: bool
    speculative_config: str

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def heads_fit(heads: int, key_value_heads: int, tensor_parallel_size: int) -> bool:
    """Whether vLLM can split attention over that many ranks.

    Source: vLLM 0.32 models/llama.py LlamaAttention: query heads divide, key/value heads divide or are
        replicated evenly.
    """
    if heads % tensor_parallel_size:
        return False
    small, large = sorted((key_value_heads, tensor_parallel_size))
    return large % small == 0


def sizes_that_fit(draft: DraftConfig, target: TargetSpec | None) -> list[int]:
    """Tensor-parallel sizes that draft and target both take."""
    return [
        size
        for size in CANDIDATE_SIZES
        if heads_fit(draft.num_attention_heads, draft.num_key_value_heads, size)
        and (
            target is None
            or heads_fit(target.num_attention_heads, 1 if target.is_mla else target.num_key_value_heads, size)
        )
    ]


def layer_kv_bytes(key_value_heads: int, head_dim: int, tensor_parallel_size: int) -> int:
    """KV bytes of a token in a layer on one rank; heads fewer than ranks are replicated."""
    return max(1, key_value_heads // tensor_parallel_size) * head_dim * 2 * KV_DTYPE_BYTES


def target_layer_kv_bytes(target: TargetSpec, tensor_parallel_size: int) -> int | None:
    """Likewise of a target's layer; None where its layers differ."""
    if target.mla_latent_size is not None:
        return target.mla_latent_size * KV_DTYPE_BYTES  # one latent, the same on every rank
    if set(target.attention_kinds) <= {"full", "sparse"}:  # an indexer's keys aside
        return layer_kv_bytes(target.num_key_value_heads, target.head_dim, tensor_parallel_size)
    return None


def serving_facts(context: Context) -> ServingFacts:
    """Compute the facts.

    Raises:
        Undecided: the draft's config cannot be read.
    """
    config = context.config
    target = context.target if context.has_target else None
    size = context.options.tensor_parallel_size or 1
    fits = heads_fit(config.num_attention_heads, config.num_key_value_heads, size)
    layer = layer_kv_bytes(config.num_key_value_heads, config.head_dim, size) if fits else None
    theirs = target_layer_kv_bytes(target, size) if target else None
    mine_all = None if layer is None else layer * config.num_hidden_layers
    theirs_all = None if theirs is None or target is None else theirs * target.num_hidden_layers
    ids = list(config.aux_hidden_state_layer_ids or (context.default_aux_ids if target else ())) or None
    parameters, shared, shared_bytes = _weights(context)
    return ServingFacts(
        num_parameters=parameters,
        tensor_parallel_size=size,
        kv_bytes_per_token=layer_kv_bytes(config.num_key_value_heads, config.head_dim, 1)
        * config.num_hidden_layers,
        kv_bytes_per_token_per_rank=mine_all,
        target_kv_bytes_per_token_per_rank=theirs_all,
        page_size_ratio=layer / theirs if layer and theirs else None,
        kv_pool_share_lost=mine_all / (mine_all + theirs_all) if mine_all and theirs_all else None,
        tensor_parallel_sizes_that_fit=sizes_that_fit(config, target),
        shared_with_target=shared,
        shared_bytes=shared_bytes,
        aux_layers_vllm=ids,
        aux_layers_sglang=None if ids is None else [i - 1 for i in ids],
        aux_layers_are_default=config.aux_hidden_state_layer_ids is None,
        speculative_config=_speculative_config(context),
    )


def _weights(context: Context) -> tuple[int | None, list[str], int | None]:
    """Parameters, and what is not among them because the target has it."""
    config = context.config
    try:
        tensors = context.tensors
    except Undecided:
        return None, [], None
    parameters = 0
    for entry in tensors.values():
        if entry.dtype in _FLOAT_DTYPES:
            count = 1
            for axis in entry.shape:
                count *= axis
            parameters += count
    shared = []
    if config.target_hidden_size == config.hidden_size:
        shared += ["embed_tokens"] if "embed_tokens.weight" not in tensors else []
        if "lm_head.weight" not in tensors and config.has_full_vocabulary:
            shared.append("lm_head")
    return parameters, shared, len(shared) * config.vocab_size * config.hidden_size * KV_DTYPE_BYTES


def _speculative_config(context: Context) -> str:
    """What to paste after --speculative-config; `method` always, since vLLM guesses it from the path else."""
    config = context.config
    value: dict[str, Any] = {
        "method": "eagle3",
        "model": str(context.draft_name),
        "num_speculative_tokens": DEFAULT_SPECULATIVE_TOKENS,
    }
    size = context.options.tensor_parallel_size
    if size and size > 1 and not heads_fit(config.num_attention_heads, config.num_key_value_heads, size):
        value["draft_tensor_parallel_size"] = 1
    if config.is_mha and config.num_attention_heads > 1:
        value["attention_backend"] = "FLASH_ATTN"  # K06
    return json.dumps(value)

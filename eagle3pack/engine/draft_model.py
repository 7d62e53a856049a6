"""The EAGLE3 draft as a plain PyTorch module, number for number what vLLM computes.

The target's auxiliary hidden states are fused into one vector (`fc`); the first layer attends over
the pair (token embedding, fused vector); what leaves the last layer predicts the next token and is
fed back in the place of the fused vector for the token after that.

Sources: EAGLE-3, Li et al. 2025, arXiv:2503.01840; vLLM 0.32 model_executor/models/llama_eagle3.py and
qwen3_eagle3.py (norms, residuals, biases, d2t); the tensor inventory of draft/tensors.py, whose logical
names are this module's parameter names. Shape letters: draft/config.py, and B rows, T tokens a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3pack.draft.config import DraftConfig
from eagle3pack.engine.kv_cache import KeyValueCache, attention_mask
from eagle3pack.engine.rotary import RotaryTable, rotary_table, rotate
from eagle3pack.errors import InputError, UnsupportedDraftError


class DraftOutput(NamedTuple):
    """What one pass of the draft yields.

    Attributes:
        normed: after the final norm, (B, T, H); the head reads it.
        feedback: the hidden state of the next speculative step, (B, T, H): before the final norm,
            or after it where the config says `norm_output`.
    """

    normed: Tensor
    feedback: Tensor


class AttentionContext(NamedTuple):
    """What every layer of one pass shares: rotation, mask and cache."""

    cos: Tensor  # (B, 1, T, rotary_dim)
    sin: Tensor
    mask: Tensor  # (B, 1, N / K * T, slots): the query heads of a group one after another
    cache: KeyValueCache | None


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last dimension."""
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


class DraftAttention(nn.Module):
    """Grouped-query attention: query head h reads key/value head h // (N / K)."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        inputs = config.hidden_size * (2 if layer == 0 else 1)
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.layer = layer
        self.head_dim = config.head_dim
        self.group_size = config.group_size
        self.q_proj = nn.Linear(inputs, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(inputs, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(inputs, keys, bias=config.attention_bias)
        # vLLM's Qwen3 layer has no output bias, whatever attention_bias says
        self.o_proj = nn.Linear(
            queries, config.hidden_size, bias=config.attention_bias and not config.qk_norm
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """Attend from `x` (B, T, 2H or H) over the cache and `x` itself; returns (B, T, H)."""
        queries = self.q_norm(self._heads(self.q_proj(x)))  # (B, N, T, D)
        keys = self.k_norm(self._heads(self.k_proj(x)))  # (B, K, T, D)
        values = self._heads(self.v_proj(x))
        queries = rotate(queries, context.cos, context.sin)
        keys = rotate(keys, context.cos, context.sin)
        if context.cache is not None:
            keys, values = context.cache.update(keys, values, self.layer)
        output: Tensor = self.o_proj(self._attend(queries, keys, values, context.mask))
        return output

    def _heads(self, projected: Tensor) -> Tensor:
        rows, width, _ = projected.shape
        return projected.view(rows, width, -1, self.head_dim).transpose(1, 2)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        rows, heads, width, depth = queries.shape
        group = self.group_size
        # the query heads of a group become more queries of one head: no key or value is copied
        folded = queries.reshape(rows, heads // group, group * width, depth)
        mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return mixed.reshape(rows, heads, width, depth).transpose(1, 2).reshape(rows, width, heads * depth)


class DraftMLP(nn.Module):
    """The gated feed-forward block with SiLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H) to (B, T, H)."""
        hidden: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class DraftLayer(nn.Module):
    """A decoder layer; the first one also reads the token embeddings."""

    def __init__(self, config: DraftConfig, layer: int) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        if layer == 0:
            self.hidden_norm = RMSNorm(config.hidden_size, eps)
        self.self_attn = DraftAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)
        self.mlp = DraftMLP(config)

    def attention_input(self, embeds: Tensor | None, hidden: Tensor) -> Tensor:
        """What q, k and v read: (B, T, 2H) in the first layer, which has embeddings, else (B, T, H)."""
        if embeds is None:
            normed: Tensor = self.input_layernorm(hidden)
            return normed
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def forward(self, embeds: Tensor | None, hidden: Tensor, context: AttentionContext) -> Tensor:
        """One layer on the residual stream, (B, T, H) to (B, T, H)."""
        x = self.attention_input(embeds, hidden)
        residual = hidden
        if embeds is not None and self.norm_before_residual:
            residual = x[..., hidden.shape[-1] :]  # the normed hidden state
        hidden = residual + self.self_attn(x, context)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class DraftModel(nn.Module):
    """An EAGLE3 draft.

    `embed_tokens` and `lm_head` are None where the file has none; `share_with_target` fills them.

    Args:
        config: its config.
        where: its config.json, for messages.
        has_embedding: the file has `embed_tokens.weight`.
        has_head: the file has `lm_head.weight`.
        max_position: positions the target is served for; vLLM raises the draft to them.

    Raises:
        UnsupportedDraftError: an activation, quantisation or rotary scaling that is not computed here.
    """

    d2t: Tensor | None

    def __init__(
        self, config: DraftConfig, *, where: str, has_embedding: bool, has_head: bool, max_position: int = 0
    ) -> None:
        super().__init__()
        _require_computable(config, where)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        width = config.num_aux_hidden_states * config.target_hidden_size
        self.config = config
        self.where = where
        self.fc = nn.Linear(width, hidden, bias=False) if config.use_aux_hidden_state else None
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps) for _ in range(config.num_aux_hidden_states)
            )
            if config.fc_norm
            else None
        )
        self.layers = nn.ModuleList(DraftLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if has_embedding else None
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False) if has_head else None
        mapping = (
            None if config.has_full_vocabulary else torch.zeros(config.draft_vocab_size, dtype=torch.long)
        )
        self.register_buffer("d2t", mapping)
        longest = max(config.max_position_embeddings or 0, max_position)
        with torch.device("cpu"):  # computed, not loaded: it must not become a meta tensor
            self._rotary = rotary_table(config.rope, config.head_dim, longest, where=where)

    def share_with_target(self, embedding: Tensor, head: Tensor) -> None:
        """Take what the file lacks from the target, as engines do.

        Args:
            embedding: the target's token embeddings, (V, Ht).
            head: the weight of its head, (V, Ht).

        Raises:
            InputError: the shapes do not fit, so the draft needs tensors of its own.
        """
        vocabulary, hidden = self.config.vocab_size, self.config.hidden_size
        if self.embed_tokens is None:
            self.embed_tokens = nn.Embedding(vocabulary, hidden, device="meta")
            self.embed_tokens.weight = self._shared(embedding, "embed_tokens.weight")
        if self.lm_head is None:
            if not self.config.has_full_vocabulary:
                raise InputError(
                    "lm_head.weight is missing; a draft with a vocabulary of its own needs its own head",
                    where=self.where,
                )
            self.lm_head = nn.Linear(hidden, vocabulary, bias=False, device="meta")
            self.lm_head.weight = self._shared(head, "lm_head.weight")

    def _shared(self, theirs: Tensor, name: str) -> nn.Parameter:
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(theirs.shape) != expected:
            raise InputError(
                f"{name} is not in the draft, and the target's is {tuple(theirs.shape)}, expected {expected}",
                where=self.where,
                hint="Is this the target the draft was trained for?",
            )
        return nn.Parameter(theirs.detach(), requires_grad=False)

    def fuse(self, states: Tensor) -> Tensor:
        """Turn the target's states into the hidden state of speculative step 0.

        Args:
            states: concatenated auxiliary hidden states (B, T, A * Ht), in ascending order of layer; the
                target's last hidden state (B, T, H) where `use_aux_hidden_state` is false.

        Returns:
            (B, T, H).
        """
        if self.fc is None:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            chunks = states.chunk(self.config.num_aux_hidden_states, dim=-1)
            states = torch.cat(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1
            )
        fused: Tensor = self.fc(states)
        return fused

    def forward(
        self, token_ids: Tensor, hidden: Tensor, positions: Tensor, cache: KeyValueCache | None = None
    ) -> DraftOutput:
        """Run the layers once.

        The entry at position p pairs the state after reading token p with the embedding of token
        p + 1, and predicts token p + 2.

        Args:
            token_ids: tokens that follow each position, (B, T).
            hidden: from `fuse` or the feedback of the step before, (B, T, H).
            positions: (B, T).
            cache: told of these positions with `at`; without one, the T tokens attend to each other
                causally.
        """
        if self.embed_tokens is None:
            raise RuntimeError("the draft has no embeddings yet: call share_with_target")
        embeds: Tensor | None = self.embed_tokens(token_ids)
        context = self._context(positions, cache, hidden)
        for layer in self.layers:
            hidden = layer(embeds, hidden, context)
            embeds = None
        normed = self.norm(hidden)
        return DraftOutput(normed, normed if self.config.norm_output else hidden)

    def _context(self, positions: Tensor, cache: KeyValueCache | None, like: Tensor) -> AttentionContext:
        cos, sin = self.rotary_table(positions.device).cos_sin(positions, like.dtype)
        if cache is None:
            order = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
            mask = attention_mask(order, positions.shape[1], like.dtype)
        else:
            mask = attention_mask(positions, cache.length, like.dtype)
        mask = mask.repeat(1, 1, self.config.group_size, 1)
        return AttentionContext(cos[:, None], sin[:, None], mask, cache)

    def rotary_table(self, device: torch.device) -> RotaryTable:
        """The rotation of this draft, on a device."""
        if self._rotary.frequencies.device != device:
            self._rotary = RotaryTable(self._rotary.frequencies.to(device), self._rotary.magnitude)
        return self._rotary

    def logits(self, normed: Tensor) -> Tensor:
        """Scores over the draft vocabulary, (..., H) to (..., Vd)."""
        if self.lm_head is None:
            raise RuntimeError("the draft has no head yet: call share_with_target")
        scores: Tensor = self.lm_head(normed)
        return scores

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary: d2t holds offsets, id i of the draft is i + d2t[i]."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def greedy(self, normed: Tensor) -> Tensor:
        """The most likely next token, in the target's ids, (..., H) to (...)."""
        return self.target_ids(self.logits(normed).argmax(dim=-1))


def _require_computable(config: DraftConfig, where: str) -> None:
    vllm = "Run the smoke test with --engine vllm."
    if config.hidden_act != "silu":
        raise UnsupportedDraftError(
            f"hidden_act is {config.hidden_act!r}; EAGLE3 drafts are served with silu only", where=where
        )
    if config.quantization is not None:
        raise UnsupportedDraftError(
            f"the reference engine does not compute {config.quantization} weights", where=where, hint=vllm
        )

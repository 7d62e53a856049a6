"""How near a merged layer comes to its source on activations that nothing was fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3pack.convert.merging.attention import AttentionWeights, attention_forward, attention_logits
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.convert.merging.rotary import RopeSpec

MOST_LOGITS = 2048  # positions at which whole vocabularies are compared
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The merged layer beside its source.

    Attributes:
        num_tokens: activations.
        output_error: |y' - y|^2 / |y|^2 of the attention's output.
        attention_kl: mean divergence of the merged attention weights from the source's, nats.
        logits_kl: the same of the draft's next-token distribution; None where the rest is not at hand.
        same_token: share of positions at which both drafts propose the same token, by speculative step.
    """

    num_tokens: int
    output_error: float
    attention_kl: float
    logits_kl: float | None = None
    same_token: tuple[float, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rest:
    """What follows the attention in a draft of one layer; products are formed in the weights' dtype.

    Attributes:
        post_attention_layernorm, norm: (H,).
        gate, up, down: of the MLP.
        lm_head: (Vd, H).
        eps: of the norms.
    """

    post_attention_layernorm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    norm: Tensor
    lm_head: Tensor
    eps: float

    def log_probabilities(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The next token's, float32, (T, Vd), from the attention's input residual and output, (T, H)."""
        hidden = residual.float() + attended.float()
        x = self._normed(hidden, self.post_attention_layernorm)
        mixed = F.silu(_product(x, self.gate)) * _product(x, self.up)
        hidden = hidden + _product(mixed, self.down)
        return _product(self._normed(hidden, self.norm), self.lm_head).log_softmax(-1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight.float()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.to(weight.dtype) @ weight.T).float()


def output_error(
    source: AttentionWeights, merged: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample]
) -> float:
    """|y' - y|^2 / |y|^2 of the attention's output, biases of o_proj left out."""
    lost = there = 0.0
    bias = 0 if source.o_bias is None else source.o_bias.float()
    source, merged = source.to(torch.float32), merged.to(torch.float32)
    for sample in samples:
        x = sample.x.float()
        y = attention_forward(source, rope, x, sample.positions, sample.visible)
        other = attention_forward(merged, rope, x, sample.positions, sample.visible)
        lost += float((other - y).double().square().sum())
        there += float((y - bias).double().square().sum())
    return lost / there if there else 0.0


def compare(
    source: AttentionWeights,
    merged: AttentionWeights,
    rope: RopeSpec,
    query_order: Sequence[int],
    samples: Sequence[Sample],
    rest: Rest | None = None,
) -> Fidelity:
    """Run both layers over activations.

    Args:
        source: before the merge.
        merged: after it.
        rope: with frequencies.
        query_order: the source's query head at every place of the merged layer.
        samples: at least one.
        rest: of the draft; samples then need residuals and steps.
    """
    error = output_error(source, merged, rope, samples)
    source, merged = source.to(torch.float32), merged.to(torch.float32)
    divergence = 0.0
    tokens = sum(len(sample.x) for sample in samples)
    order = torch.tensor(query_order)
    for sample in samples:
        x, visible = sample.x.float(), _visible(sample)
        ours = _log_attention(source, rope, x, sample.positions, visible)[order]
        theirs = _log_attention(merged, rope, x, sample.positions, visible)
        terms = torch.where(visible, ours.exp() * (ours - theirs), 0.0)
        divergence += float(terms.double().sum()) / len(order)
    logits_kl, same = (None, None) if rest is None else _compare_logits(source, merged, rope, samples, rest)
    return Fidelity(tokens, error, divergence / tokens, logits_kl, same)


def _visible(sample: Sample) -> Tensor:
    if sample.visible is not None:
        return sample.visible
    return torch.ones(len(sample.x), len(sample.x), dtype=torch.bool).tril()


def _log_attention(
    weights: AttentionWeights, rope: RopeSpec, x: Tensor, positions: Tensor, visible: Tensor
) -> Tensor:
    logits = attention_logits(weights, rope, x, positions)
    return logits.masked_fill(~visible, -torch.inf).log_softmax(-1)


def _compare_logits(
    source: AttentionWeights,
    merged: AttentionWeights,
    rope: RopeSpec,
    samples: Sequence[Sample],
    rest: Rest,
) -> tuple[float | None, tuple[float, ...] | None]:
    """Divergence of next-token distributions, and the share of equal proposals by step."""
    known = [sample for sample in samples if sample.residual is not None and sample.steps is not None]
    if not known:
        return None, None
    stride = -(-sum(len(sample.x) for sample in known) // MOST_LOGITS)
    divergence, steps, equal = 0.0, [], []
    for sample in known:
        assert sample.residual is not None and sample.steps is not None
        x = sample.x.float()
        outputs = [
            attention_forward(w, rope, x, sample.positions, sample.visible)[::stride]
            for w in (source, merged)
        ]
        residual = sample.residual[::stride]
        for start in range(0, len(residual), _BLOCK):
            part = slice(start, start + _BLOCK)
            ours, theirs = (rest.log_probabilities(residual[part], y[part]) for y in outputs)
            divergence += float((ours.exp() * (ours - theirs)).double().sum())
            equal.append(ours.argmax(-1) == theirs.argmax(-1))
        steps.append(sample.steps[::stride])
    step, same = torch.cat(steps), torch.cat(equal).double()
    shares = tuple(
        float(same[step == s].mean()) for s in range(int(step.max()) + 1) if bool((step == s).any())
    )
    return divergence / len(step), shares

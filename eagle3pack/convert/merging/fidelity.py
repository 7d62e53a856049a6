"""How near a merged layer comes to its source on activations that nothing was fitted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3pack.convert.merging.attention import (
    AttentionWeights,
    attend,
    attention_forward,
    project,
    project_output,
)
from eagle3pack.convert.merging.moments import Sample
from eagle3pack.convert.merging.rotary import RopeSpec

MOST_LOGITS = 2048  # positions at which whole vocabularies are compared
_BLOCK = 128  # of these at a time


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
        return self.logits(self.normed(self.hidden(residual, attended), self.norm)).log_softmax(-1)

    def hidden(self, residual: Tensor, attended: Tensor) -> Tensor:
        """What leaves the layer, float32, (T, H)."""
        hidden = residual.float() + attended.float()
        x = self.normed(hidden, self.post_attention_layernorm)
        mixed = F.silu(_product(x, self.gate)) * _product(x, self.up)
        return hidden + _product(mixed, self.down)

    def logits(self, normed: Tensor) -> Tensor:
        """Scores of the next token, float32, (T, Vd), from what left the last norm."""
        return _product(normed, self.lm_head)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of float32 rows, with one of the draft's weights."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight.float()


def rest_of(tensors: Mapping[str, Tensor], eps: float) -> Rest:
    """What follows the attention, from a draft's tensors by logical name."""
    names = ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    norm, gate, up, down = (tensors[f"layers.0.{name}.weight"] for name in names)
    return Rest(norm, gate, up, down, tensors["norm.weight"], tensors["lm_head.weight"], eps)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return (x.to(weight.dtype) @ weight.T).float()


def attention_outputs(weights: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample]) -> list[Tensor]:
    """The attention's output of each sample, float32, (T, H), the bias of o_proj left out."""
    weights = replace(weights, o_bias=None).to(torch.float32)
    return [
        attention_forward(weights, rope, sample.x.float(), sample.positions, sample.visible)
        for sample in samples
    ]


def output_error(
    expected: Sequence[Tensor], merged: AttentionWeights, rope: RopeSpec, samples: Sequence[Sample]
) -> float:
    """|y' - y|^2 / |y|^2 of a layer's outputs, y being the source's `attention_outputs`."""
    found = attention_outputs(merged, rope, samples)
    lost = sum(_energy(other - y) for other, y in zip(found, expected, strict=True))
    there = sum(map(_energy, expected))
    return lost / there if there else 0.0


def _energy(x: Tensor) -> float:
    return float(x.square().sum(dtype=torch.float64))


def compare(
    source: AttentionWeights,
    merged: AttentionWeights,
    rope: RopeSpec,
    query_order: Sequence[int],
    samples: Sequence[Sample],
    rest: Callable[[], Rest | None] = lambda: None,
) -> Fidelity:
    """Run both layers over activations.

    Args:
        source: before the merge.
        merged: after it.
        rope: with frequencies.
        query_order: the source's query head at every place of the merged layer.
        samples: at least one.
        rest: loads what follows in the draft, once the layers have run: it is large. Samples then need
            residuals and steps.
    """
    tokens = sum(len(sample.positions) for sample in samples)
    stride = -(-tokens // MOST_LOGITS)
    divergence = lost = there = 0.0
    kept: list[tuple[Tensor, Tensor]] = []  # both outputs, at every `stride`-th position
    bias = 0 if source.o_bias is None else source.o_bias.float()
    for sample in samples:
        x = sample.x.float()
        ours, theirs = (project(layer, rope, x, sample.positions) for layer in (source, merged))
        divergence += _divergence(ours, theirs, query_order, _visible(sample))
        y, other = (
            project_output(layer, attend(*heads, sample.visible))
            for layer, heads in ((source, ours), (merged, theirs))
        )
        lost += _energy(other - y)
        there += _energy(y - bias)
        kept.append((y[::stride], other[::stride]))
    following = rest()
    logits_kl, same = (None, None) if following is None else _logits(following, samples, kept, stride)
    return Fidelity(tokens, lost / there if there else 0.0, divergence / tokens, logits_kl, same)


def _divergence(
    ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], query_order: Sequence[int], visible: Tensor
) -> float:
    """Of attention weights, summed over queries, mean over heads; a head at a time: they are T x T."""
    (q, k, _), (other_q, other_k, _) = ours, theirs
    total, scale = 0.0, q.shape[-1] ** -0.5
    for place, head in enumerate(query_order):
        mine, other = (
            (queries @ keys.T * scale).masked_fill(~visible, -torch.inf).log_softmax(-1)
            for queries, keys in ((q[head], k[head]), (other_q[place], other_k[place]))
        )
        total += float(torch.where(visible, mine.exp() * (mine - other), 0.0).sum(dtype=torch.float64))
    return total / len(q)


def _visible(sample: Sample) -> Tensor:
    if sample.visible is not None:
        return sample.visible
    return torch.ones(len(sample.x), len(sample.x), dtype=torch.bool).tril()


def _logits(
    rest: Rest, samples: Sequence[Sample], outputs: Sequence[tuple[Tensor, Tensor]], stride: int
) -> tuple[float | None, tuple[float, ...] | None]:
    """Mean divergence of the next-token distributions, and the share of equal proposals by step."""
    divergence = 0.0
    steps: list[Tensor] = []
    same: list[Tensor] = []
    for sample, (ours, theirs) in zip(samples, outputs, strict=True):
        if sample.residual is None or sample.steps is None:
            continue
        steps.append(sample.steps[::stride])
        parts = (torch.split(x, _BLOCK) for x in (sample.residual[::stride], ours, theirs))
        for residual, y, other in zip(*parts, strict=True):
            mine, its = rest.log_probabilities(residual, y), rest.log_probabilities(residual, other)
            divergence += float((mine.exp() * (mine - its)).sum(dtype=torch.float64))
            same.append(mine.argmax(-1) == its.argmax(-1))
    if not steps:
        return None, None
    step, equal = torch.cat(steps), torch.cat(same).double()
    known = [s for s in range(int(step.max()) + 1) if bool((step == s).any())]
    return divergence / len(step), tuple(float(equal[step == s].mean()) for s in known)

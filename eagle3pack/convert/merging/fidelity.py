"""How near a merged layer comes to its source on activations that nothing was fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    bias = 0 if source.o_bias is None else source.o_bias.float()
    source, merged = source.to(torch.float32), merged.to(torch.float32)
    tokens, order = sum(len(sample.x) for sample in samples), torch.tensor(query_order)
    comparison = None if rest is None else _Logits(rest, stride=-(-tokens // MOST_LOGITS))
    lost = there = divergence = 0.0
    for sample in samples:
        x, visible = sample.x.float(), _visible(sample)
        y, other = (attention_forward(w, rope, x, sample.positions, visible) for w in (source, merged))
        lost += float((other - y).double().square().sum())
        there += float((y - bias).double().square().sum())
        ours = _log_attention(source, rope, x, sample.positions, visible)[order]
        theirs = _log_attention(merged, rope, x, sample.positions, visible)
        terms = torch.where(visible, ours.exp() * (ours - theirs), 0.0)
        divergence += float(terms.double().sum()) / len(order)
        if comparison is not None and sample.residual is not None and sample.steps is not None:
            comparison.add(sample.residual, sample.steps, y, other)
    logits_kl, same = (None, None) if comparison is None else comparison.result()
    return Fidelity(tokens, lost / there if there else 0.0, divergence / tokens, logits_kl, same)


def _visible(sample: Sample) -> Tensor:
    if sample.visible is not None:
        return sample.visible
    return torch.ones(len(sample.x), len(sample.x), dtype=torch.bool).tril()


def _log_attention(
    weights: AttentionWeights, rope: RopeSpec, x: Tensor, positions: Tensor, visible: Tensor
) -> Tensor:
    logits = attention_logits(weights, rope, x, positions)
    return logits.masked_fill(~visible, -torch.inf).log_softmax(-1)


class _Logits:
    """Next-token distributions of both drafts at every `stride`-th position."""

    def __init__(self, rest: Rest, stride: int) -> None:
        self._rest, self._stride = rest, stride
        self._divergence = 0.0
        self._steps: list[Tensor] = []
        self._same: list[Tensor] = []

    def add(self, residual: Tensor, steps: Tensor, ours: Tensor, theirs: Tensor) -> None:
        """Count one text, all (T, H) but steps (T,)."""
        chosen = torch.arange(0, len(residual), self._stride)
        self._steps.append(steps[chosen])
        for part in torch.split(chosen, _BLOCK):
            mine = self._rest.log_probabilities(residual[part], ours[part])
            other = self._rest.log_probabilities(residual[part], theirs[part])
            self._divergence += float((mine.exp() * (mine - other)).double().sum())
            self._same.append(mine.argmax(-1) == other.argmax(-1))

    def result(self) -> tuple[float | None, tuple[float, ...] | None]:
        """Mean divergence, and the share of equal proposals by step."""
        if not self._steps:
            return None, None
        step, same = torch.cat(self._steps), torch.cat(self._same).double()
        known = [s for s in range(int(step.max()) + 1) if bool((step == s).any())]
        return self._divergence / len(step), tuple(float(same[step == s].mean()) for s in known)

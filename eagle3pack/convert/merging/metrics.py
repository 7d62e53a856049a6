"""What the attention input looks like: the second moment in which every method measures errors.

Where a projection has a bias, the input is augmented by a one, so the second moment by the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagle3pack.errors import InputError

MetricName = Literal["identity", "norm", "embedding", "calibration"]


@dataclass(frozen=True, slots=True)
class Metric:
    """E[x x'] of the attention input x.

    Attributes:
        name: where it comes from.
        second_moment: None for the identity, (In,) for a diagonal, (In, In) for a full matrix.
        mean: E[x], shape (In,), or None for zero; matters where projections have biases.
        shrinkage: share of its diagonal that a full matrix is mixed with.
    """

    name: MetricName
    second_moment: Tensor | None = None
    mean: Tensor | None = None
    shrinkage: float = 0.0

    def inner(self, rows: Tensor, others: Tensor) -> Tensor:
        """E[(rows x)(others x)'] in float64.

        Args:
            rows: shape (..., R, In), float32 or float64; products are formed in this precision.
            others: shape (..., S, In).

        Returns:
            Shape (..., R, S).
        """
        moment = self.second_moment
        if moment is None:
            weighted = rows
        elif moment.dim() == 1:
            weighted = rows * moment.to(rows.dtype)
        else:
            weighted = rows @ moment.to(rows.dtype)
            if self.shrinkage:
                weighted = torch.lerp(weighted, rows * moment.diagonal().to(rows.dtype), self.shrinkage)
        return (weighted @ others.mT).double()

    def gram(self, rows: Tensor) -> Tensor:
        """E[y y'] of y = rows x in float64, shape (..., R, R), symmetric."""
        gram = self.inner(rows, rows)
        return (gram + gram.mT) / 2

    def augmented(self) -> Metric:
        """The metric of [x, 1], for rows that carry their bias as a last column."""
        moment, mean = self.second_moment, self.mean
        if moment is None and mean is None:
            return self
        if mean is None and moment is not None and moment.dim() == 1:
            return Metric(self.name, torch.cat([moment, moment.new_ones(1)]))
        width = len(moment) if moment is not None else len(mean) if mean is not None else 0
        full = torch.eye(width + 1, dtype=torch.float64)
        if moment is not None:
            full[:width, :width] = torch.diag(moment) if moment.dim() == 1 else moment
            full[:width, :width].lerp_(full[:width, :width].diagonal().diag(), self.shrinkage)
        if mean is not None:
            full[:width, width] = full[width, :width] = mean.double()
        return Metric(self.name, full)


IDENTITY = Metric("identity")


def norm_metric(*norm_weights: Tensor) -> Metric:
    """Uncorrelated inputs with the energy that the RMSNorms before them give.

    An RMSNorm scales its input to mean square one, so its output's dimension i has about w_i squared.

    Args:
        norm_weights: in the order in which the attention input concatenates their outputs
            (input_layernorm, then hidden_norm in an EAGLE3 draft's first layer), each shape (H,).
    """
    return Metric("norm", torch.cat([w.double() for w in norm_weights]).square())


def embedding_metric(
    embed_tokens: Tensor,
    input_layernorm: Tensor,
    hidden_norm: Tensor,
    *,
    token_weights: Tensor | None = None,
    fc: Tensor | None = None,
    eps: float = 1e-6,
    block: int = 8192,
) -> Metric:
    """The token half exactly, from the embedding table; the hidden half from norms and fc.

    Token embeddings reach the attention as w * e / rms(e), so their second moment and mean follow from
    the table and the tokens' frequencies. The hidden half is fc's image of white auxiliary states,
    scaled to the energy that hidden_norm gives; the halves count as uncorrelated.

    Args:
        embed_tokens: shape (V, H).
        input_layernorm, hidden_norm: shape (H,).
        token_weights: relative frequencies, shape (V,); by default 1 / (1 + id), since tokenizers give
            out ids roughly by frequency.
        fc: shape (H, A Ht); None for white hidden states.
        eps: of the RMSNorms.
        block: tokens at a time.
    """
    vocabulary, hidden = embed_tokens.shape
    if token_weights is None:
        token_weights = 1 / (1 + torch.arange(vocabulary, dtype=torch.float64))
    if token_weights.shape != (vocabulary,) or not float(token_weights.sum()) > 0:
        raise InputError(f"expected {vocabulary} token weights with a positive sum", where="token weights")
    share = token_weights.double() / token_weights.double().sum()
    moment = torch.zeros(2 * hidden, 2 * hidden, dtype=torch.float64)
    mean = torch.zeros(2 * hidden, dtype=torch.float64)
    for start in range(0, vocabulary, block):
        rows = embed_tokens[start : start + block].float()
        rows = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + eps) * input_layernorm.float()
        weight = share[start : start + block]
        moment[:hidden, :hidden] += ((rows * weight.float()[:, None]).T @ rows).double()
        mean[:hidden] += weight @ rows.double()
    scale = hidden_norm.double()
    if fc is None:
        moment[hidden:, hidden:] = torch.diag(scale.square())
    else:
        image = (fc.float() @ fc.float().T).double()
        image = image * (hidden / image.trace().clamp_min(torch.finfo(torch.float64).tiny))
        moment[hidden:, hidden:] = scale[:, None] * image * scale
    return Metric("embedding", moment, mean)

from __future__ import annotations

import pytest
import torch

from eagle3pack.convert.merging.metrics import IDENTITY, Metric, embedding_metric, norm_metric
from eagle3pack.errors import InputError


def samples(seed: int, count: int = 500, width: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, dtype=torch.float64, generator=generator)
    return torch.randn(count, width, dtype=torch.float64, generator=generator) @ mix + 1


def test_gram_matrices_are_second_moments_of_what_rows_make_of_the_input() -> None:
    x, rows = samples(1), torch.randn(3, 6, dtype=torch.float64)
    metric = Metric("calibration", x.T @ x / len(x), x.mean(0))
    y = x @ rows.T
    torch.testing.assert_close(metric.gram(rows), y.T @ y / len(x))
    bias = torch.randn(3, dtype=torch.float64)
    augmented = metric.augmented().gram(torch.cat([rows, bias[:, None]], dim=1))
    torch.testing.assert_close(augmented, (y + bias).T @ (y + bias) / len(x))


@pytest.mark.parametrize("moment", [None, torch.arange(1.0, 7), torch.diag(torch.arange(1.0, 7))])
def test_identity_diagonal_and_full_moments_agree(moment: torch.Tensor | None) -> None:
    rows = torch.randn(3, 7, dtype=torch.float64)
    full = torch.eye(6, dtype=torch.float64) if moment is None else moment.double()
    full = torch.block_diag(torch.diag(full) if full.dim() == 1 else full, torch.ones(1, 1))
    found = Metric("norm", moment).augmented().gram(rows)
    torch.testing.assert_close(found, rows @ full.double() @ rows.T)


def test_the_norm_metric_is_what_rms_norms_give_white_inputs() -> None:
    weights = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([3.0, 1.0, 1.0])
    x = torch.randn(20000, 2, 3, generator=torch.Generator().manual_seed(2))
    x = x / x.square().mean(-1, keepdim=True).sqrt() * torch.stack(weights)
    measured = x.flatten(1).square().mean(0).double()
    torch.testing.assert_close(norm_metric(*weights).second_moment, measured, rtol=0.05, atol=0)


def test_the_embedding_metric_is_the_second_moment_of_normed_embeddings() -> None:
    generator = torch.Generator().manual_seed(3)
    table, norm = torch.randn(50, 4, generator=generator), torch.rand(4, generator=generator) + 0.5
    hidden_norm, fc = torch.rand(4, generator=generator) + 0.5, torch.randn(4, 12, generator=generator)
    weights = torch.rand(50, generator=generator).double()
    metric = embedding_metric(table, norm, hidden_norm, token_weights=weights, fc=fc, block=7)
    share = weights / weights.sum()
    rows = (table / (table.square().mean(1, keepdim=True) + 1e-6).sqrt() * norm).double()
    moment, mean = metric.second_moment, metric.mean
    assert moment is not None and mean is not None
    torch.testing.assert_close(moment[:4, :4], (rows * share[:, None]).T @ rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mean[:4], share @ rows)
    assert not moment[:4, 4:].any() and not mean[4:].any()
    white = moment[4:, 4:] / hidden_norm.double() / hidden_norm.double()[:, None]
    assert float(white.trace()) == pytest.approx(4, rel=1e-6)
    flat = embedding_metric(table, norm, hidden_norm)
    assert flat.second_moment is not None
    torch.testing.assert_close(flat.second_moment[4:, 4:], torch.diag(hidden_norm.double().square()))


def test_token_weights_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match="50 token weights"):
        embedding_metric(torch.ones(50, 4), torch.ones(4), torch.ones(4), token_weights=torch.ones(49))


def test_no_metric_is_the_identity() -> None:
    rows = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(IDENTITY.gram(rows), rows @ rows.T)

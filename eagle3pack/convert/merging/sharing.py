"""The problem that every method solves: several heads of a group share one factor of a product.

A head's logit is q' R k, its output o v: a left factor (query, o_proj) and a right factor (key, value)
with a rotation in between, or none. A group of n source heads keeps one right factor. A solution is
a basis B (the shared factor is B times the stacked right factors) and one map T a source head (its
left factor becomes T times the old one; o_proj's columns become O T'). The error is what the product
loses, averaged over inputs and distances:

    J = sum_h E |l_h' R' r_h - (T_h l_h)' R' r|^2,   r = B [r_1 ... r_n]

Queries and keys enter as independent draws of the attention input, so all of it needs only second
moments: of left factors (d x d a head) and of stacked right factors (n d x n d).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3pack.convert.merging.rotary import Positions


@dataclass(frozen=True, slots=True)
class Sharing:
    """One group: n source heads, m query heads each, d dimensions in canonical order. All float64.

    Attributes:
        left: second moments of the left factors by query head, shape (n, m, d, d).
        right: second moment of the stacked right factors, shape (n d, n d).
        positions: the average over distances.
        noise: relative size of rounding in the moments; directions below it count as empty.
    """

    left: Tensor
    right: Tensor
    positions: Positions
    noise: float

    @property
    def n(self) -> int:
        """Source heads."""
        return self.left.shape[0]

    @property
    def d(self) -> int:
        """Dimensions of a head."""
        return self.left.shape[-1]

    @property
    def weights(self) -> Tensor:
        """Left moments by source head, shape (n, d, d): all its query heads together."""
        return self.left.sum(1)

    def own(self) -> Tensor:
        """Second moment of each right factor alone, shape (n, d, d)."""
        blocks = self.right.reshape(self.n, self.d, self.n, self.d)
        return torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1)

    def seen(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """E[r r_h'] with each right factor, (n, d, d), and E[r r'] of a shared one, (d, d) or by head."""
        with_stack = basis @ self.right
        across = with_stack.reshape(self.d, self.n, self.d).transpose(0, 1)
        return self.positions.averaged(across), self.positions.averaged(with_stack @ basis.T)


@dataclass(frozen=True, slots=True)
class Solution:
    """A shared right factor and how the left factors adapt.

    Attributes:
        basis: B, shape (d, n d).
        maps: T, shape (n, d, d).
    """

    basis: Tensor
    maps: Tensor


def psd_solve(matrix: Tensor, right: Tensor, noise: float) -> Tensor:
    """Minimum-norm solution of a positive semidefinite system, empty directions left out.

    Args:
        matrix: shape (..., d, d).
        right: shape (..., d, m).
        noise: eigenvalues below this share of the largest count as zero, after scaling to unit diagonal.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    scale = torch.where(diagonal > 0, diagonal.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0)
    values, vectors = torch.linalg.eigh(scale[..., :, None] * (matrix + matrix.mT) / 2 * scale[..., None, :])
    kept = values > noise * values[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    root = scale[..., :, None] * vectors
    solution: Tensor = root @ (inverse[..., :, None] * (root.mT @ right))
    return solution


def psd_root(matrices: Tensor) -> Tensor:
    """The symmetric root of positive semidefinite matrices, shape (..., d, d)."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
    return root


def optimal_maps(problem: Sharing, basis: Tensor) -> Tensor:
    """The maps that lose least for a given shared factor; the left moments do not matter.

    dJ/dT = 0: T_h = avg(E[r r'])^-1 avg(E[r r_h']), avg over the distances as the keys see them.
    """
    across, shared = problem.seen(basis)
    return psd_solve(shared, across, problem.noise)


def optimal_basis(problem: Sharing, maps: Tensor) -> Tensor:
    """The shared factor that loses least for given maps; the right moments do not matter.

    dJ/dr = 0: r = (sum_h avg(T_h L_h T_h'))^-1 sum_h avg(T_h L_h) r_h, avg as the queries see them.
    """
    mapped = maps @ problem.weights  # (n, d, d)
    energy = problem.positions.averaged_back(mapped @ maps.mT).sum(0)
    pull = problem.positions.averaged_back(mapped)
    return psd_solve(energy, pull.transpose(0, 1).reshape(problem.d, -1), problem.noise)


def residuals(problem: Sharing, solution: Solution) -> tuple[Tensor, Tensor]:
    """Second moments of what each source head's right factor loses, and of what there was.

    Returns:
        Two tensors of shape (n, d, d), seen through the distances: J = sum_h tr(L_h lost_h).
    """
    maps, there = solution.maps, problem.positions.averaged(problem.own())
    across, shared = problem.seen(solution.basis)
    cross = maps.mT @ across
    return there - cross - cross.mT + maps.mT @ shared @ maps, there


def lost(problem: Sharing, solution: Solution) -> float:
    """J, the error of a solution."""
    missing, _ = residuals(problem, solution)
    return float((problem.weights * missing).sum())


def total(problem: Sharing) -> float:
    """J of a shared factor of zero: all there is to lose."""
    return float((problem.weights * problem.positions.averaged(problem.own())).sum())

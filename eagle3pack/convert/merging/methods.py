"""The methods: mean, first, procrustes, svd and als, each a pure function from a Sharing to a Solution.

Sources: mean and first, Ainslie et al. 2023 (arXiv:2305.13245); procrustes, Jin et al. 2024
(arXiv:2412.20677); svd generalises activation SVD of grouped heads (Yu et al. 2024, arXiv:2406.07056)
to an optimum under RoPE; docs/conversion.md derives it, and als.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3pack.convert.merging.rotary import complex_parts, real_matrices, without_positions
from eagle3pack.convert.merging.sharing import (
    Sharing,
    Solution,
    lost,
    optimal_basis,
    optimal_maps,
    psd_root,
    psd_solve,
    total,
)

PROCRUSTES_ROUNDS = 30
ALS_ROUNDS = 15
ALS_TOLERANCE = 1e-5  # share of all there is to lose; a round that gains less is the last


def average(n: int, d: int) -> Solution:
    """The average of n heads of d dimensions; left factors stay."""
    eye = torch.eye(d, dtype=torch.float64)
    return Solution(eye.repeat(1, n) / n, eye.expand(n, -1, -1))


def mean(problem: Sharing) -> Solution:
    """The average head, whatever the problem says."""
    return average(problem.n, problem.d)


def first(problem: Sharing) -> Solution:
    """The first head; left factors stay."""
    eye = torch.eye(problem.d, dtype=torch.float64)
    basis = torch.zeros(problem.d, problem.n * problem.d, dtype=torch.float64)
    basis[:, : problem.d] = eye
    return Solution(basis, eye.expand(problem.n, -1, -1))


def procrustes(problem: Sharing, movable: Tensor | None = None) -> Solution:
    """The average of heads that were turned towards it: a phase a rotated pair, else an orthogonal map.

    Args:
        problem: of the group.
        movable: rotated pairs that may be turned, bool, shape (rotary pairs,); all by default.
    """
    rotary = problem.positions.num_rotary_pairs
    turns = torch.eye(problem.d, dtype=torch.float64).repeat(problem.n, 1, 1)
    if rotary:
        phases = _aligned_phases(_pair_moments(problem.right, problem.n, problem.d)[:rotary])
        if movable is not None:
            phases = torch.where(movable[:, None], phases, torch.ones_like(phases))
        turns = _pair_matrices(phases.T, problem.d)
    free = _free_dimensions(problem)
    if len(free) and movable is None:
        part = _unrotated(problem, free)
        turns[:, free[:, None], free] = _aligned_orthogonal(part)
    basis = turns.transpose(0, 1).reshape(problem.d, -1) / problem.n
    return Solution(basis, turns)


def low_rank(problem: Sharing) -> Solution:
    """The optimum where rotated pairs turn independently: no other shared factor and maps lose less.

    Per rotated pair, the top eigenvector of an n x n Hermitian matrix: complex principal components
    of the keys, weighted by the energy of their queries. Unrotated dimensions (all, for values) keep
    the top d directions of the product, a truncated SVD with both factors whitened.
    """
    basis = torch.zeros(problem.d, problem.n, problem.d, dtype=torch.float64)
    rotary = problem.positions.num_rotary_pairs
    if rotary:
        moments = _pair_moments(problem.right, problem.n, problem.d)[:rotary]
        energy = _pair_energy(problem.weights)[:, :rotary].T  # (pairs, n)
        energy = torch.where(energy.sum(1, keepdim=True) > 0, energy, 1.0)  # a pair that no query uses
        root = energy.clamp_min(0).sqrt()
        _, vectors = torch.linalg.eigh(root[:, :, None] * moments * root[:, None, :])
        coefficients = (vectors[..., -1] * root).T  # (n, pairs)
        basis += _pair_matrices(coefficients, problem.d).transpose(0, 1)
    free = _free_dimensions(problem)
    if len(free):
        part = _truncated(_unrotated(problem, free)).reshape(len(free), problem.n, len(free))
        basis[free[:, None, None], torch.arange(problem.n)[:, None], free] = part
    flat = basis.reshape(problem.d, -1)
    flat = anchor_values(problem, flat) if rotary == 0 else flat
    solution = Solution(flat, optimal_maps(problem, flat))
    return anchor_keys(problem, solution) if rotary else solution


def alternating(problem: Sharing, *starts: Solution) -> Solution:
    """Alternating least squares over all distances at once, never worse than the best start.

    Pairs that turn slowly are nearly unrotated within the context, so keys may mix them: full d x d
    maps, each half step the exact optimum given the other half.
    """
    best = min(starts, key=lambda start: lost(problem, start))
    error, everything = lost(problem, best), total(problem)
    maps = optimal_maps(problem, best.basis)
    for _ in range(ALS_ROUNDS):
        basis = optimal_basis(problem, maps)
        across, shared = problem.seen(basis)
        maps = psd_solve(shared, across, problem.noise)
        # With optimal maps E[error r'] vanishes, so the error is what there is less what is explained.
        reached = everything - float((problem.weights * (maps.mT @ across)).sum())
        if not reached < error:
            break
        gained, best, error = error - reached, Solution(basis, maps), reached
        if gained <= ALS_TOLERANCE * everything:
            break
    return anchor_keys(problem, best)


def anchor_keys(problem: Sharing, solution: Solution) -> Solution:
    """Choose among equal solutions: queries keep their energy per pair, and their phase on average.

    Any complex factor a pair may move between keys and queries. This choice keeps the scale of q_proj,
    so that learning rates and low precision behave as before, and is deterministic.
    """
    before = _pair_energy(problem.weights)  # (n, pairs)
    after = _pair_energy(solution.maps @ problem.weights @ solution.maps.mT).sum(0)
    size = torch.where((after > 0) & (before.sum(0) > 0), (after / before.sum(0)).sqrt(), 1.0)
    linear, _ = complex_parts(solution.maps)
    direction = (before * torch.diagonal(linear, dim1=-2, dim2=-1)).sum(0)
    known = direction.abs() > problem.noise * before.sum(0)
    phase = torch.where(known, direction / direction.abs().clamp_min(torch.finfo(torch.float64).tiny), 1.0)
    turn = phase.conj()
    maps = _pair_matrices((turn / size)[None], problem.d)[0] @ solution.maps
    return Solution(_pair_matrices((turn * size)[None], problem.d)[0] @ solution.basis, maps)


def anchor_values(problem: Sharing, basis: Tensor) -> Tensor:
    """Choose among bases of one subspace: as near the average head as it gets, with the heads' energy."""
    moment = basis @ problem.right @ basis.T
    values, vectors = torch.linalg.eigh((moment + moment.T) / 2)
    kept = values > problem.noise * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    white = torch.where(kept, values, 1.0).rsqrt().mul(kept)[:, None] * (vectors.T @ basis)
    average = mean(problem).basis
    left, _, right = torch.linalg.svd(average @ problem.right @ white.T)
    size = problem.own().diagonal(dim1=-2, dim2=-1).mean(0).clamp_min(0).sqrt()
    anchored: Tensor = size[:, None] * (left @ right @ white)
    return anchored


def _pair_moments(right: Tensor, n: int, d: int) -> Tensor:
    """E[conj(r_h) r_h'] of every pair across heads, complex Hermitian, shape (d / 2, n, n)."""
    blocks = right.reshape(n, 2, d // 2, n, 2, d // 2)
    pairs = torch.diagonal(blocks, dim1=2, dim2=5).permute(4, 0, 2, 1, 3)  # (pairs, n, n, part, part)
    real, imaginary = pairs[..., 0, 0] + pairs[..., 1, 1], pairs[..., 0, 1] - pairs[..., 1, 0]
    return torch.complex(real, imaginary)


def _pair_energy(moments: Tensor) -> Tensor:
    """E|z|^2 of every pair, from second moments (..., d, d) to (..., d / 2)."""
    diagonal = moments.diagonal(dim1=-2, dim2=-1)
    half = diagonal.shape[-1] // 2
    return diagonal[..., :half] + diagonal[..., half:]


def _pair_matrices(factors: Tensor, d: int) -> Tensor:
    """Matrices that multiply each pair by a complex number, from (n, pairs) to (n, d, d)."""
    n, pairs = factors.shape
    padded = torch.zeros(n, d // 2, dtype=torch.complex128)
    padded[:, :pairs] = factors
    linear = torch.diag_embed(padded)
    matrices = real_matrices(linear, torch.zeros_like(linear))
    if pairs < d // 2:  # unrotated dimensions stay
        index = torch.cat([torch.arange(pairs, d // 2), torch.arange(d // 2 + pairs, d)])
        matrices[:, index, index] = 1
    return matrices


def _free_dimensions(problem: Sharing) -> Tensor:
    """Canonical dimensions that no rotation touches."""
    half, rotary = problem.d // 2, problem.positions.num_rotary_pairs
    return torch.cat([torch.arange(rotary, half), torch.arange(half + rotary, problem.d)])


def _unrotated(problem: Sharing, free: Tensor) -> Sharing:
    """The same problem on the dimensions that no rotation touches."""
    if len(free) == problem.d:
        return problem
    index = (torch.arange(problem.n)[:, None] * problem.d + free).flatten()
    left, right = problem.left[..., free[:, None], free], problem.right[index[:, None], index]
    return Sharing(left, right, without_positions(len(free)), problem.noise)


def _aligned_phases(moments: Tensor) -> Tensor:
    """Phases that make the sum of heads longest, by fixed-point rounds from none; shape (pairs, n)."""
    phases = torch.ones(moments.shape[:2], dtype=torch.complex128)
    for _ in range(PROCRUSTES_ROUNDS):
        sums = (moments @ phases[..., None])[..., 0]
        size = sums.abs()
        phases = torch.where(size > 0, sums / size.clamp_min(torch.finfo(torch.float64).tiny), phases)
    return phases


def _aligned_orthogonal(problem: Sharing) -> Tensor:
    """Orthogonal maps that bring heads nearest to their average, by rounds from none; (n, d, d)."""
    n, d = problem.n, problem.d
    turns = torch.eye(d, dtype=torch.float64).repeat(n, 1, 1)
    for _ in range(PROCRUSTES_ROUNDS):
        average = turns.transpose(0, 1).reshape(d, -1) / n
        left, _, right = torch.linalg.svd(problem.seen(average)[0])
        turns = left @ right
    return turns


def _truncated(problem: Sharing) -> Tensor:
    """The top d directions of the stacked products, as a basis of shape (d, n d)."""
    n, d = problem.n, problem.d
    weights = problem.weights
    weights = torch.where(weights.abs().sum() > 0, weights, torch.eye(d, dtype=torch.float64))
    roots = psd_root(weights)
    left = torch.einsum("hab,hbx->hax", roots, problem.right.reshape(n, d, n * d)).reshape(n * d, n, d)
    whitened = torch.einsum("xhb,hab->xha", left, roots).reshape(n * d, n * d)
    values, vectors = torch.linalg.eigh((whitened + whitened.T) / 2)
    kept = values[-d:] > problem.noise * values[-1].clamp_min(torch.finfo(torch.float64).tiny)
    top = (vectors[:, -d:] * kept).flip(1).T.reshape(d, n, d)
    return torch.einsum("xha,hab->xhb", top, roots).reshape(d, n * d)

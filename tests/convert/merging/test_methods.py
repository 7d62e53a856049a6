from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle3pack.convert.merging import methods
from eagle3pack.convert.merging.metrics import Metric
from eagle3pack.convert.merging.rotary import (
    Positions,
    at_distances,
    averaged_phases,
    distance_prior,
    without_positions,
)
from eagle3pack.convert.merging.sharing import Sharing, Solution, lost, optimal_basis, optimal_maps, total
from tests.convert.merging.planted import IN, D, rope

seeds = st.integers(0, 2**31)
DISTANCES = 12


class Factors:
    """Explicit left and right factors of one group, and the second moment of the input."""

    def __init__(self, seed: int, n: int = 3, m: int = 2, d: int = D, rank: int = IN) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        self.left, self.right = random(n, m, d, IN), random(n, d, IN)
        root = random(IN, rank)
        self.moment = root @ root.T / IN
        self.root = self.moment_root()

    def moment_root(self) -> Tensor:
        values, vectors = torch.linalg.eigh(self.moment)
        root: Tensor = vectors * values.clamp_min(0).sqrt()
        return root

    def problem(self, positions: Positions) -> Sharing:
        metric = Metric("calibration", self.moment)
        return Sharing(metric.gram(self.left), metric.gram(self.right.flatten(0, 1)), positions, 1e-12)


def rotations(rotary_dim: int = D) -> list[Tensor]:
    """R_t in canonical order, t = 0, 1, ..."""
    spec = rope(rotary_dim=rotary_dim)
    half, found = D // 2, []
    for t in range(DISTANCES):
        factors = torch.ones(half, dtype=torch.complex128)
        angles = torch.tensor(spec.frequencies, dtype=torch.float64) * t
        factors[: rotary_dim // 2] = torch.polar(torch.ones_like(angles), angles)
        found.append(methods._pair_matrices(factors[None], D)[0])
    return found


def explicit_loss(factors: Factors, solution: Solution, turns: list[Tensor], mass: Tensor) -> float:
    """J by its definition: every head, every distance, whole matrices."""
    n, m = factors.left.shape[:2]
    shared = solution.basis @ factors.right.reshape(n * D, IN)
    loss = 0.0
    for h in range(n):
        for i in range(m):
            for weight, r in zip(mass[h] / mass[h].sum(), turns, strict=True):
                old = factors.left[h, i].T @ r.T @ factors.right[h]
                new = (solution.maps[h] @ factors.left[h, i]).T @ r.T @ shared
                loss += float(weight * (factors.root.T @ (old - new) @ factors.root).square().sum())
    return loss


def random_solution(seed: int, n: int = 3) -> Solution:
    generator = torch.Generator().manual_seed(seed)
    return Solution(
        torch.randn(D, n * D, dtype=torch.float64, generator=generator),
        torch.randn(n, D, D, dtype=torch.float64, generator=generator),
    )


def masses(by_head: bool) -> torch.Tensor:
    """Of three heads by distance: all alike, or each its own."""
    powers = torch.tensor([0.5, 1, 3] if by_head else [1, 1, 1], dtype=torch.float64)
    return distance_prior(DISTANCES) ** powers[:, None]


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("rotary_dim", [D, 4])
def test_the_error_in_second_moments_is_the_error_by_definition(rotary_dim: int, by_head: bool) -> None:
    factors, mass = Factors(1), masses(by_head)
    problem = factors.problem(at_distances(rope(rotary_dim=rotary_dim), mass))
    turns = rotations(rotary_dim)
    for solution in (random_solution(2), methods.mean(problem), methods.low_rank(problem)):
        assert lost(problem, solution) == pytest.approx(
            explicit_loss(factors, solution, turns, mass), rel=1e-9
        )
    nothing = Solution(torch.zeros(D, 3 * D, dtype=torch.float64), torch.zeros(3, D, D, dtype=torch.float64))
    assert total(problem) == pytest.approx(explicit_loss(factors, nothing, turns, mass), rel=1e-9)


@settings(deadline=None, max_examples=10)
@given(seed=seeds)
def test_the_shared_key_is_the_unconstrained_optimum_of_its_objective(seed: int) -> None:
    """Any queries v and any key u: per pair a rank-one approximation, which Eckart-Young bounds."""
    factors = Factors(seed)
    problem = factors.problem(averaged_phases(rope()))
    bound, half = 0.0, D // 2
    root = factors.root.to(torch.complex128)
    for f in range(half):
        products = []
        for h in range(3):
            for i in range(2):
                query = torch.complex(factors.left[h, i, f], factors.left[h, i, f + half]) @ root
                key = torch.complex(factors.right[h, f], factors.right[h, f + half]) @ root
                products.append(torch.outer(query.conj(), key))
        spectrum = torch.linalg.svdvals(torch.cat(products))
        bound += float(spectrum[1:].square().sum()) / 2  # half: the real part of a random phase
    assert lost(problem, methods.low_rank(problem)) == pytest.approx(bound, rel=1e-9)


@settings(deadline=None, max_examples=10)
@given(seed=seeds)
def test_the_shared_value_is_the_unconstrained_optimum_of_its_objective(seed: int) -> None:
    factors = Factors(seed)
    problem = factors.problem(without_positions(D))
    products = [factors.left[h, i].T @ factors.right[h] for h in range(3) for i in range(2)]
    whitened = torch.cat([factors.root.T @ product @ factors.root for product in products])
    bound = float(torch.linalg.svdvals(whitened)[D:].square().sum())
    assert lost(problem, methods.low_rank(problem)) == pytest.approx(bound, rel=1e-9)


def test_unrotated_dimensions_of_keys_reach_their_own_optimum() -> None:
    factors, spec = Factors(5), rope(rotary_dim=4)
    problem = factors.problem(averaged_phases(spec))
    free = torch.tensor([2, 3, 6, 7])
    products = [factors.left[h, i][free].T @ factors.right[h][free] for h in range(3) for i in range(2)]
    whitened = torch.cat([factors.root.T @ product @ factors.root for product in products])
    bound = float(torch.linalg.svdvals(whitened)[4:].square().sum())
    rotated = torch.tensor([0, 1, 4, 5])
    part = methods._unrotated(problem, free)
    solution = methods.low_rank(problem)
    index = (torch.arange(3)[:, None] * D + free).flatten()
    reached = Solution(solution.basis[free][:, index], solution.maps[:, free[:, None], free])
    assert lost(part, reached) == pytest.approx(bound, rel=1e-9)
    assert float(solution.maps[:, free[:, None], rotated].abs().max()) < 1e-12


@settings(deadline=None, max_examples=10)
@given(seed=seeds, rotary_dim=st.sampled_from([D, 4, 0]))
def test_svd_loses_no_more_than_procrustes_and_mean_and_als_no_more_than_any(
    seed: int, rotary_dim: int
) -> None:
    factors, spec = Factors(seed), rope(rotary_dim=rotary_dim)
    phases = factors.problem(averaged_phases(spec))
    best = lost(phases, methods.low_rank(phases))
    for method in (methods.mean, methods.first, methods.procrustes):
        assert best <= lost(phases, method(phases)) * (1 + 1e-12)
    near = factors.problem(at_distances(spec, distance_prior(DISTANCES)))
    starts = [methods.low_rank(phases), methods.mean(near)]
    errors = [lost(near, start) for start in starts]
    assert lost(near, methods.alternating(near, *starts)) <= min(errors) * (1 + 1e-12)


def test_every_round_of_als_gains() -> None:
    problem = Factors(6).problem(at_distances(rope(), distance_prior(DISTANCES)))
    solution, errors = methods.mean(problem), []
    for _ in range(8):
        solution = Solution(optimal_basis(problem, solution.maps), solution.maps)
        solution = Solution(solution.basis, optimal_maps(problem, solution.basis))
        errors.append(lost(problem, solution))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("rotary_dim", [D, 4])
def test_half_steps_in_second_moments_are_least_squares_on_whole_matrices(
    rotary_dim: int, by_head: bool
) -> None:
    """Each half step against one big least-squares system with all heads and distances as rows."""
    factors, mass, turns = Factors(7), masses(by_head), rotations(rotary_dim)
    problem = factors.problem(at_distances(rope(rotary_dim=rotary_dim), mass))
    shares = (mass / mass.sum(1, keepdim=True)).sqrt()
    steps = [list(zip(share, turns, strict=True)) for share in shares]
    stacked = factors.right.reshape(3 * D, IN)
    start = random_solution(8)
    maps = optimal_maps(problem, start.basis)
    for h in range(3):
        new = torch.cat([w * r.T @ start.basis @ stacked @ factors.root for w, r in steps[h]], dim=1)
        old = torch.cat([w * r.T @ factors.right[h] @ factors.root for w, r in steps[h]], dim=1)
        expected = torch.linalg.lstsq(new.T, old.T).solution  # T' new = old
        torch.testing.assert_close(maps[h], expected)
    basis = optimal_basis(problem, start.maps)
    rows, targets = [], []
    for h in range(3):
        for i in range(2):
            query = factors.root.T @ factors.left[h, i].T  # (In, D)
            rows += [w * query @ start.maps[h].T @ r.T for w, r in steps[h]]
            targets += [w * query @ r.T @ factors.right[h] for w, r in steps[h]]
    shared = torch.linalg.lstsq(torch.cat(rows), torch.cat(targets)).solution
    torch.testing.assert_close(basis @ stacked, shared)


def test_anchors_change_no_logit_and_keep_the_size_of_queries() -> None:
    factors = Factors(9)
    problem = factors.problem(at_distances(rope(), distance_prior(DISTANCES)))
    solution = random_solution(10)
    anchored = methods.anchor_keys(problem, solution)
    assert lost(problem, anchored) == pytest.approx(lost(problem, solution), rel=1e-9)
    energy = methods._pair_energy(anchored.maps @ problem.weights @ anchored.maps.mT).sum(0)
    torch.testing.assert_close(energy, methods._pair_energy(problem.weights).sum(0))
    values = factors.problem(without_positions(D))
    basis = methods.anchor_values(values, solution.basis)
    before = lost(values, Solution(solution.basis, optimal_maps(values, solution.basis)))
    assert lost(values, Solution(basis, optimal_maps(values, basis))) == pytest.approx(before, rel=1e-9)
    size = (basis @ values.right @ basis.T).diagonal()
    torch.testing.assert_close(size, values.own().diagonal(dim1=-2, dim2=-1).mean(0))


def test_procrustes_aligns_what_only_turned() -> None:
    factors, spec = Factors(11), rope()
    generator = torch.Generator().manual_seed(12)
    for h in range(1, 3):
        angles = torch.randn(1, D // 2, dtype=torch.float64, generator=generator)
        turn = methods._pair_matrices(torch.polar(torch.ones_like(angles), angles), D)[0]
        factors.right[h] = turn @ factors.right[0]
    problem = factors.problem(averaged_phases(spec))
    assert lost(problem, methods.procrustes(problem)) < 1e-12 * total(problem)
    assert lost(problem, methods.mean(problem)) > 0.1 * total(problem)
    held = methods.procrustes(problem, torch.zeros(D // 2, dtype=torch.bool))
    torch.testing.assert_close(held.basis, methods.mean(problem).basis)


@pytest.mark.parametrize("dead", ["queries", "keys", "everything", "duplicates", "one token"])
@pytest.mark.parametrize("rotary_dim", [D, 4, 0])
def test_degenerate_groups_stay_finite(dead: str, rotary_dim: int) -> None:
    factors = Factors(13, rank=1 if dead == "one token" else IN)
    if dead in ("queries", "everything"):
        factors.left[1 if dead == "queries" else slice(None)] = 0
    if dead in ("keys", "everything"):
        factors.right[1 if dead == "keys" else slice(None)] = 0
    if dead == "duplicates":
        factors.right[:] = factors.right[0]
    spec = rope(rotary_dim=rotary_dim)
    phases = factors.problem(averaged_phases(spec))
    near = factors.problem(at_distances(spec, distance_prior(DISTANCES)))
    svd = methods.low_rank(phases)
    als = methods.alternating(near, svd, methods.mean(near))
    for solution in (methods.procrustes(phases), svd, als):
        assert bool(solution.basis.isfinite().all()) and bool(solution.maps.isfinite().all())
    assert lost(near, als) <= lost(near, methods.mean(near)) + 1e-9 * total(near)
    if dead == "duplicates":
        assert lost(phases, svd) < 1e-10 * total(phases)

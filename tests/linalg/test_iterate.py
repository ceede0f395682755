"""The loop that all iterative solvers share, and the steps that they give it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

from linalg import problems
from tensigma.linalg import Deflation, Metric, Tucker2, cp, tensor_train, tucker2, weighted
from tensigma.linalg.iterate import iterate
from tensigma.linalg.lbfgs import Descent, Point
from tensigma.linalg.problem import Problem
from tensigma.linalg.spatial_svd import rows_as_channels


@dataclass(frozen=True)
class State:
    loss: float
    error: float


def play(*states: State, max_sweeps: int = 10, tol: float = 0.0):
    """Iterate over given states, as a solver that visits them in turn."""
    first, *others = states
    remaining = iter(others)
    return iterate(lambda _: next(remaining, None), first, max_sweeps=max_sweeps, tol=tol)


def test_a_step_that_raises_the_loss_ends_the_iteration_and_is_not_taken():
    state, errors, converged = play(State(1.0, 0.9), State(0.5, 0.7), State(0.6, 0.1), State(0.1, 0.1))
    assert state == State(0.5, 0.7)
    assert errors == (0.9, 0.7)
    assert converged


@pytest.mark.parametrize("hostile", [State(math.nan, 0.1), State(math.nan, math.nan)], ids=str)
def test_a_loss_that_is_not_a_number_ends_the_iteration_and_is_not_taken(hostile):
    state, errors, _ = play(State(1.0, 0.9), State(0.5, 0.7), hostile, State(0.1, 0.1))
    assert state == State(0.5, 0.7)
    assert errors == (0.9, 0.7)


def test_an_error_that_is_not_a_number_is_never_returned():
    state, errors, _ = play(State(1.0, 0.9), State(0.5, math.nan), State(0.4, 0.6))
    assert state == State(0.4, 0.6)
    assert errors == (0.9, 0.9, 0.6)


def test_a_lower_loss_with_a_higher_error_is_walked_through_and_not_returned():
    """Under a singular gram the damped loss may fall while the error itself rises."""
    state, errors, _ = play(State(1.0, 0.5), State(0.8, 0.7), State(0.6, 0.4), State(0.5, 0.45))
    assert state == State(0.6, 0.4)
    assert errors == (0.5, 0.5, 0.4, 0.4)


def test_stops_at_the_limit_of_sweeps_without_claiming_to_have_settled():
    state, errors, converged = play(*(State(1 / n, 1 / n) for n in range(1, 20)), max_sweeps=4)
    assert state == State(1 / 5, 1 / 5)
    assert len(errors) == 5
    assert not converged


def test_stops_after_three_steps_that_gain_less_than_the_tolerance():
    long, *short = [State(1.0, 1.0), *(State(0.25 - 1e-9 * n, 0.5) for n in range(9))]
    _, errors, converged = play(long, *short, tol=1e-3)
    assert converged
    assert len(errors) == 5  # the start, the one long step and three short ones


def test_a_loss_of_zero_needs_no_step():
    _, errors, converged = iterate(lambda _: pytest.fail("stepped"), State(0.0, 0.0), max_sweeps=5, tol=0.0)
    assert (errors, converged) == ((0.0,), True)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_descent_backs_off_from_a_loss_that_is_not_finite(value):
    def evaluate(position):
        loss = position.square().sum().item() if position.norm() < 2 else value
        return Point(position, loss, 2 * position, loss, None)

    descent = Descent(evaluate, lambda point, vector: 10 * vector)  # steps twenty times too long
    point = evaluate(torch.tensor([1.0, 0.5], dtype=torch.float64))
    successor = descent.step(point)
    assert successor is not None
    assert successor.loss < point.loss


def losses(step, state, count=12):
    """The losses of ``count`` steps, fewer where no descent is left."""
    visited = [state.loss]
    for _ in range(count):
        successor = step(state)
        if successor is None:
            break
        state = successor
        visited.append(state.loss)
    return visited


def elimination(name, weight, metric):
    """(step of quasi-Newton or ALS, start) of one solver, from a start that is far from the end."""
    problem, generator = Problem(weight, metric), torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(problem.kernel)

    t, s, *taps = weight.shape
    if name.startswith("tucker2"):
        solver = tucker2.Elimination(problem, max(1, t // 2))
        start = solver.at(torch.linalg.qr(randn(s, max(1, s // 2)))[0])
        return (solver.descent().step if name == "tucker2-varpro" else solver.als_sweep), start
    if name.startswith("cp"):
        modes = (s, math.prod(taps)) if name == "cp-joint" else (s, *taps)
        terms = cp.Elimination(problem, modes, 5)
        point = terms.at(terms.pack([randn(n, 5) for n in modes]))
        return (terms.als_sweep if name == "cp-als" else terms.descent().step), point
    train = tensor_train.Elimination(Problem(rows_as_channels(weight), metric), s, max(1, t // 2), max(1, s // 2))
    rank_mid = min(max(1, s // 2) * taps[0], max(1, t // 2) * taps[1])
    return train.descent().step, train.at(
        train.pack(randn(s, max(1, s // 2)), randn(max(1, s // 2), taps[0] * rank_mid))
    )


STEPS = [
    pytest.param(name, shape, id=f"{name}-{label}")
    for name in ("tucker2-varpro", "tucker2-als", "cp-varpro", "cp-als", "cp-joint", "tensor-train")
    for shape, label in problems.KERNELS
    if name != "tensor-train" or len(shape) == 4
]


@pytest.mark.parametrize(("name", "shape"), STEPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_step_of_a_solver_lowers_its_loss(name, shape, dtype, seed):
    weight = problems.kernel(shape, seed, dtype)
    metric = problems.metric(weight[0].numel(), seed, dtype=dtype)
    visited = losses(*elimination(name, weight, metric))
    rounding = 1e-10 if dtype == torch.float64 else 1e-4  # of ALS, whose steps are not searched along a line
    slack = rounding if name.endswith("als") else 0.0
    assert all(later <= earlier * (1 + slack) for earlier, later in itertools.pairwise(visited))
    assert visited[-1] < visited[0] or visited[0] < 1e-6


def test_every_sweep_of_weighted_tucker2_lowers_its_loss(seed):
    weight = problems.kernel((12, 10, 3, 3), seed)
    importance = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sweeps = weighted.Sweeps(weight, importance)
    visited = losses(sweeps.sweep, sweeps.at(Tucker2(4, 3).fit(weight, Metric.identity(90)).factors))
    assert all(later <= earlier * (1 + 1e-10) for earlier, later in itertools.pairwise(visited))
    assert visited[-1] < visited[0]


def test_every_term_of_deflation_lowers_the_error(seed):
    weight, metric = problems.kernel((12, 10, 3, 3), seed), problems.metric(90, seed)
    factors = Deflation(20).fit(weight, metric).factors
    first = [
        replace(
            factors,
            out_factor=factors.out_factor[:, :rank],
            in_factor=factors.in_factor[:, :rank],
            spatial=tuple(factor[:, :rank] for factor in factors.spatial),
        )
        for rank in range(1, 21)
    ]
    errors = [1.0, *(metric.relative_error(weight, terms.to_dense()) for terms in first)]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))

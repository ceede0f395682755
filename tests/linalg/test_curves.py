"""Errors of many ranks at once, beside the solvers that reach them."""

from __future__ import annotations

import math

import pytest
import torch

import cases
from linalg import problems
from tensigma.errors import RankError
from tensigma.linalg import SVD, Metric, Tucker2, Tucker2Factors, svd_errors, tucker2_errors
from tensigma.linalg.problem import Problem
from tensigma.linalg.tucker2 import Elimination, input_basis


@pytest.mark.parametrize("shape", cases.KERNELS)
@pytest.mark.parametrize("identity", [False, True])
def test_svd_errors_are_those_of_the_solver(shape, identity):
    weight, size = problems.kernel(shape, 0), math.prod(shape[1:])
    metric = Metric.identity(size) if identity else problems.metric(size, 0)
    errors = svd_errors(weight, metric)
    assert len(errors) == min(shape[0], size)
    for rank in {1, 2, len(errors) // 2, len(errors)}:
        assert errors[rank - 1].sqrt().item() == pytest.approx(SVD(rank).fit(weight, metric).error, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("shape", cases.KERNELS)
@pytest.mark.parametrize("identity", [False, True])
def test_tucker2_errors_are_those_of_a_start_and_the_solver_ends_no_higher(shape, identity):
    weight, size = problems.kernel(shape, 0), math.prod(shape[1:])
    metric = Metric.identity(size) if identity else problems.metric(size, 0)
    problem = Problem(weight, metric)
    basis = input_basis(problem, shape[0], data=True)
    ranks_in = sorted({1, shape[1] // 2, shape[1]})
    errors = tucker2_errors(weight, metric, ranks_in).sqrt()
    assert errors.shape == (len(ranks_in), shape[0])
    for row, rank_in in enumerate(ranks_in):
        for rank_out in (1, max(1, shape[0] // 2), shape[0]):
            start = Elimination(problem, rank_out).at(basis[:, :rank_in].contiguous())
            found = errors[row, rank_out - 1].item()
            assert found == pytest.approx(math.sqrt(start.loss), rel=1e-6, abs=1e-6)
            factors = Tucker2Factors(torch.ones(shape[0], 1), torch.ones(1, rank_in, *shape[2:]), basis[:, :rank_in])
            solved = Tucker2(rank_out, rank_in, init=factors).fit(weight, metric)
            assert solved.error <= found + 1e-6


def test_tucker2_errors_fall_with_both_ranks(seed):
    errors = tucker2_errors(problems.kernel((12, 10, 3, 3), seed), problems.metric(90, seed), list(range(1, 11)))
    assert (errors.diff(dim=0) <= 1e-9).all()
    assert (errors.diff(dim=1) <= 1e-9).all()
    assert errors[-1, -1] < 1e-6


@pytest.mark.parametrize("ranks", [[], [0, 2], [2, 2], [3, 1], [1, 11]], ids=str)
def test_ranks_must_rise_within_bounds(ranks):
    with pytest.raises(RankError, match="rise from at least 1 to at most 10"):
        tucker2_errors(problems.kernel((12, 10, 3, 3), 0), problems.metric(90, 0), ranks)


def test_zero_weights_lose_nothing():
    assert torch.equal(svd_errors(torch.zeros(4, 6), Metric.identity(6)), torch.zeros(4, dtype=torch.float64))
    assert not tucker2_errors(torch.zeros(4, 6, 3), Metric.identity(18), [1, 6]).any()

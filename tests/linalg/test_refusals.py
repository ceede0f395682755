"""Bad input to solvers: one clear error each, from our own tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from linalg import problems
from tensigma.errors import InputError, RankError, TensigmaError
from tensigma.linalg import CP, SVD, Deflation, Metric, Tucker2, WeightedTucker2

METRIC = problems.metric(54, 0)
ANYTHING: Any = "anything"
WEIGHT = problems.kernel((8, 6, 3, 3), 0)
SOLVERS = [SVD(3), Tucker2(3, 3), CP(3), CP(3, joint=True), Deflation(3)]
solvers = pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)


@solvers
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(solver, value):
    weight = WEIGHT.clone()
    weight[0, 0, 0, 0] = value
    with pytest.raises(InputError, match="NaN or infinite"):
        solver.fit(weight, METRIC)


@solvers
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        pytest.param(torch.ones(8), r"\(t, s, \*taps\)", id="vector"),
        pytest.param(torch.ones(8, 0, 3, 3), "no empty axis", id="empty"),
        pytest.param(torch.ones(8, 6, 3, 3, dtype=torch.int64), "floating-point", id="integers"),
        pytest.param(torch.ones(8, 5, 3, 3), "45 input features, the metric has 54", id="other-size"),
    ],
)
def test_weights_of_the_wrong_form(solver, weight, message):
    with pytest.raises(InputError, match=message):
        solver.fit(weight, METRIC)


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        pytest.param(SVD(9), "between 1 and 8", id="svd"),
        pytest.param(SVD(0), "between 1 and 8", id="svd-zero"),
        pytest.param(Tucker2(9, 3), "rank_out lies between 1 and 8", id="tucker2-out"),
        pytest.param(Tucker2(3, 7), "rank_in lies between 1 and 6", id="tucker2-in"),
        pytest.param(Tucker2(3, -1), "rank_in lies between 1 and 6", id="tucker2-negative"),
        pytest.param(CP(55), "between 1 and 54", id="cp"),
        pytest.param(CP(2.5), "whole number", id="cp-fraction"),  # type: ignore[arg-type]
        pytest.param(CP(True), "whole number", id="cp-bool"),
        pytest.param(Deflation(55), "between 1 and 54", id="deflation"),
    ],
)
def test_ranks_out_of_range(solver, message):
    with pytest.raises(RankError, match=message) as caught:
        solver.fit(WEIGHT, METRIC)
    assert isinstance(caught.value, TensigmaError)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: Tucker2(3, 3, solver=ANYTHING), "'varpro', 'als'", id="solver"),
        pytest.param(lambda: Tucker2(3, 3, init=ANYTHING), "'auto', 'data', 'hosvd'", id="tucker2-init"),
        pytest.param(lambda: CP(3, init=ANYTHING), "CPFactors", id="cp-init"),
        pytest.param(lambda: CP(3, max_sweeps=-1), "max_sweeps", id="sweeps"),
        pytest.param(lambda: CP(3, tol=float("nan")), "tol", id="tol"),
        pytest.param(lambda: Deflation(3, max_sweeps=0), "max_sweeps", id="deflation-sweeps"),
        pytest.param(lambda: Deflation(3, tol=-1.0), "tol", id="deflation-tol"),
    ],
)
def test_options_check_themselves(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("solver", [Tucker2(3, 3), CP(3)], ids=["tucker2", "cp"])
def test_starting_factors_of_another_shape(solver):
    other = solver.fit(problems.kernel((5, 6, 3, 3), 0), METRIC).factors
    with pytest.raises(InputError, match="starting factors are for a kernel"):
        dataclasses.replace(solver, init=other).fit(WEIGHT, METRIC)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        pytest.param(torch.ones(8, 6), "shape of the kernel", id="shape"),
        pytest.param(-torch.ones(8), "never negative", id="negative"),
        pytest.param(torch.full((8,), torch.nan), "finite", id="nan"),
    ],
)
def test_importance_of_the_wrong_form(importance, message):
    with pytest.raises(InputError, match=message):
        WeightedTucker2(3, 3).fit(WEIGHT, importance)


def test_importance_of_zero_everywhere_is_the_classical_problem():
    fit = WeightedTucker2(3, 3).fit(WEIGHT, torch.zeros(8))
    assert fit.error == pytest.approx(Tucker2(3, 3).fit(WEIGHT, Metric.identity(54)).error, rel=1e-3)

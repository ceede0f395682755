"""Bad input to solvers: one clear error each, from our own tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from linalg import problems
from tensigma.errors import InputError, RankError, TensigmaError
from tensigma.linalg import (
    CP,
    SVD,
    CPJoint,
    Deflation,
    Metric,
    SpatialSVD,
    SpatialSVDFactors,
    TensorTrain,
    TensorTrainFactors,
    Tucker2,
    Tucker2Factors,
    WeightedTucker2,
)

METRIC = problems.metric(54, 0)
ANYTHING: Any = "anything"
WEIGHT = problems.kernel((8, 6, 3, 3), 0)
SOLVERS = [SVD(3), Tucker2(3, 3), CP(3), CPJoint(3), Deflation(3), SpatialSVD(3), TensorTrain(3, 3, 3)]
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
        pytest.param(SpatialSVD(19), "between 1 and 18", id="spatial-svd"),
        pytest.param(TensorTrain(9, 3, 3), "rank_out lies between 1 and 8", id="train-out"),
        pytest.param(TensorTrain(3, 19, 3), "rank_mid lies between 1 and 18", id="train-mid"),
        pytest.param(TensorTrain(3, 3, 7), "rank_in lies between 1 and 6", id="train-in"),
        pytest.param(TensorTrain(3, 10, 5), "between 1 and 9 with rank_out=3 and rank_in=5", id="train-mid-past-out"),
        pytest.param(TensorTrain(5, 7, 2), "between 1 and 6 with rank_out=5 and rank_in=2", id="train-mid-past-in"),
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
        pytest.param(lambda: SpatialSVD(3, init=ANYTHING), "SpatialSVDFactors", id="spatial-svd-init"),
        pytest.param(lambda: TensorTrain(3, 3, 3, solver=ANYTHING), "choose one of 'varpro'", id="train-solver"),
        pytest.param(lambda: TensorTrain(3, 3, 3, init=ANYTHING), "TensorTrainFactors", id="train-init"),
        pytest.param(lambda: CP(3, max_sweeps=-1), "max_sweeps", id="sweeps"),
        pytest.param(lambda: CP(3, tol=float("nan")), "tol", id="tol"),
        pytest.param(lambda: Deflation(3, max_sweeps=0), "max_sweeps", id="deflation-sweeps"),
        pytest.param(lambda: Deflation(3, tol=-1.0), "tol", id="deflation-tol"),
    ],
)
def test_options_check_themselves(make, message):
    with pytest.raises(InputError, match=message):
        make()


iterative = pytest.mark.parametrize(
    "solver",
    [Tucker2(3, 3), CP(3), SpatialSVD(3), TensorTrain(3, 3, 3)],
    ids=lambda solver: type(solver).__name__,
)


@iterative
def test_starting_factors_of_another_shape(solver):
    other = solver.fit(problems.kernel((5, 6, 3, 3), 0), METRIC).factors
    with pytest.raises(InputError, match="starting factors are for a kernel"):
        dataclasses.replace(solver, init=other).fit(WEIGHT, METRIC)


@pytest.mark.parametrize(
    ("solver", "start"),
    [
        pytest.param(Tucker2(3, 3), Tucker2Factors(*map(torch.ones, [(8, 3), (3, 2, 3, 3), (6, 2)])), id="tucker2"),
        pytest.param(SpatialSVD(3), SpatialSVDFactors(torch.ones(2, 6, 3), torch.ones(8, 2, 3)), id="spatial-svd"),
        pytest.param(
            TensorTrain(3, 3, 3),
            TensorTrainFactors(*map(torch.ones, [(8, 3), (3, 2, 3), (2, 3, 3), (6, 3)])),
            id="tensor-train",
        ),
    ],
)
def test_starting_factors_of_another_rank(solver, start):
    with pytest.raises(InputError, match="starting factors are for a kernel"):
        dataclasses.replace(solver, init=start).fit(WEIGHT, METRIC)


@pytest.mark.parametrize(("solver", "shape"), problems.solvers_and_kernels(taken=False))
def test_kernels_that_a_solver_does_not_take(solver, shape):
    """The other half of the table that laws run over."""
    made, weight = solver.make(problems.ranks_for(shape, 0.4)), problems.kernel(shape, 0)
    metric, message = problems.metric(weight[0].numel(), 0), r"two spatial axes, \(t, s, h, w\), got shape"
    for refused in (
        lambda: made.fit(weight, metric),
        lambda: made.errors(weight, metric),
        lambda: made.max_ranks(shape),
        lambda: made.vbmf_ranks(weight, 1.0),
    ):
        with pytest.raises(InputError, match=message):
            refused()


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

"""Laws that every solver obeys, over seeds, shapes and precisions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

import reference
from linalg import problems
from tensigma.linalg import Metric

DTYPES = [pytest.param(torch.float64, id="float64"), pytest.param(torch.float32, id="float32")]
SOLVERS = problems.SOLVERS
EXACT = [param for param in problems.solvers_and_kernels() if param.values[0].exact]
solvers = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
solvers_and_kernels = pytest.mark.parametrize(("solver", "shape"), problems.solvers_and_kernels())
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def fit(solver, shape, seed, dtype=torch.float64, share=0.4, metric=None):
    weight = problems.kernel(shape, seed, dtype)
    metric = metric or problems.metric(math.prod(shape[1:]), seed, dtype=dtype)
    return weight, metric, solver.make(problems.ranks_for(shape, share)).fit(weight, metric)


@solvers_and_kernels
@dtypes
def test_error_reported_is_that_of_the_dense_reconstruction(solver, shape, dtype):
    weight, metric, result = fit(solver, shape, 0, dtype)
    dense = result.factors.to_dense()
    naive = reference.naive_error(weight.double().numpy(), dense.double().numpy(), metric.dense().double().numpy())
    assert dense.shape == weight.shape
    assert result.factors.shape == tuple(weight.shape)
    assert result.error == pytest.approx(naive, rel=1e-3 if dtype == torch.float32 else 1e-6, abs=1e-4)


@solvers_and_kernels
@dtypes
def test_a_solution_is_no_worse_than_its_start_or_than_nothing(solver, shape, dtype, seed):
    _, _, result = fit(solver, shape, seed, dtype)
    assert 0 <= result.error <= min(result.errors[0], 1)


@solvers
def test_error_falls_with_rank(solver, seed):
    errors = [fit(solver, (12, 10, 3, 3), seed, share=share)[2].error for share in (0.1, 0.4, 0.8)]
    assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize(("solver", "shape"), EXACT)
@dtypes
def test_full_rank_changes_nothing(solver, shape, dtype):
    weight, _, result = fit(solver, shape, 0, dtype, share=1.0)
    assert result.error < 1e-5
    torch.testing.assert_close(result.factors.to_dense(), weight)


@solvers
def test_scale_of_the_gram_changes_nothing(solver, seed):
    shape = (12, 10, 3, 3)
    gram = problems.gram(90, seed)
    _, _, one = fit(solver, shape, seed, metric=Metric.from_gram(gram))
    _, _, other = fit(solver, shape, seed, metric=Metric.from_gram(gram * 2.0**20))
    torch.testing.assert_close(one.factors.to_dense(), other.factors.to_dense(), rtol=1e-6, atol=1e-8)


@solvers
def test_same_seed_same_result(solver):
    _, _, one = fit(solver, (12, 10, 3, 3), 0)
    _, _, other = fit(solver, (12, 10, 3, 3), 0)
    assert torch.equal(one.factors.to_dense(), other.factors.to_dense())
    assert one.errors == other.errors


@solvers_and_kernels
def test_rank_one(solver, shape):
    _, _, result = fit(solver, shape, 0, share=0.0)
    assert torch.linalg.matrix_rank(solver.unfold(result.factors.to_dense())) == 1
    assert result.error < 1


@solvers
@dtypes
def test_singular_gram_is_no_obstacle(solver, dtype, seed):
    """Fewer patches than features, and one dead channel."""
    shape = (12, 10, 3, 3)
    sigma = problems.gram(90, seed, rows=40, dtype=dtype)
    sigma.view(10, 9, 10, 9)[3] = 0
    sigma.view(10, 9, 10, 9)[:, :, 3] = 0
    weight, _, result = fit(solver, shape, seed, dtype, metric=Metric.from_gram(sigma))
    dense = result.factors.to_dense()
    assert torch.isfinite(dense).all()
    naive = reference.naive_error(weight.double().numpy(), dense.double().numpy(), sigma.double().numpy())
    assert result.error == pytest.approx(naive, rel=1e-2, abs=1e-3)
    # Nothing forces weights that no input excites to run away.
    assert dense.norm() < 10 * weight.norm()


@solvers_and_kernels
def test_zero_weights_stay_zero(solver, shape):
    weight = torch.zeros(shape)
    metric = problems.metric(weight[0].numel(), 0, dtype=torch.float32)
    result = solver.make(problems.ranks_for(shape, 0.4)).fit(weight, metric)
    assert result.error == 0
    assert torch.equal(result.factors.to_dense(), weight)


@solvers
def test_zero_gram_falls_back_to_the_weights(solver):
    weight, _, result = fit(solver, (12, 10, 3, 3), 0, metric=Metric.from_gram(torch.zeros(90, 90).double()))
    _, _, classical = fit(solver, (12, 10, 3, 3), 0, metric=Metric.identity(90))
    assert result.error == 0
    frobenius = Metric.identity(90).relative_error(weight, result.factors.to_dense())
    assert frobenius == pytest.approx(classical.error, rel=0.02)


@solvers
def test_error_is_the_output_error_of_real_convolutions(solver, seed):
    """The paper's proposition, on the data that made Σ: stride, padding and all."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(6, 10, 8, 8, generator=generator, dtype=torch.float64).cumsum(-1).cumsum(-2)
    options: dict[str, Any] = {"stride": (2, 1), "padding": 1}
    rows = functional.unfold(images, 3, **options).transpose(0, 1).flatten(1)
    weight, _, result = fit(solver, (12, 10, 3, 3), seed, metric=Metric.from_gram(rows @ rows.T / rows.shape[1]))
    before = functional.conv2d(images, weight, **options)
    after = functional.conv2d(images, result.factors.to_dense(), **options)
    assert result.error == pytest.approx(((before - after).norm() / before.norm()).item(), rel=1e-6)


@solvers
def test_arguments_are_left_untouched(solver):
    weight, sigma = problems.kernel((12, 10, 3, 3), 0), problems.gram(90, 0)
    weight_before, sigma_before = weight.clone(), sigma.clone()
    solver.make(problems.ranks_for((12, 10, 3, 3), 0.4)).fit(weight, Metric.from_gram(sigma))
    assert torch.equal(weight, weight_before)
    assert torch.equal(sigma, sigma_before)


@solvers
def test_half_precision_weights_are_worked_on_in_float32(solver):
    weight = problems.kernel((12, 10, 3, 3), 0, torch.bfloat16)
    result = solver.make(problems.ranks_for((12, 10, 3, 3), 0.4)).fit(
        weight, problems.metric(90, 0, dtype=torch.float32)
    )
    assert result.factors.to_dense().dtype == torch.float32


@solvers
def test_gradients_of_the_weight_are_not_followed(solver):
    weight = problems.kernel((12, 10, 3, 3), 0).requires_grad_()
    result = solver.make(problems.ranks_for((12, 10, 3, 3), 0.4)).fit(weight, problems.metric(90, 0))
    assert not result.factors.to_dense().requires_grad

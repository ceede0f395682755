"""Rounding under a metric: its laws, and exhaustive search on tiny kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from linalg import problems
from tensigma.errors import InputError
from tensigma.linalg import Metric, Rounding
from tensigma.linalg.rounding import _RIDGE, _Problem

GRIDS = [{}, {"symmetric": False}, {"group": 9}, {"group": 9, "symmetric": False}]
grids = pytest.mark.parametrize("grid", GRIDS)


def error_of_nearest(weight, metric, bits, **grid):
    return metric.relative_error(weight, torch.from_numpy(reference.nearest_rounding(weight.numpy(), bits, **grid)))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@grids
def test_never_worse_than_nearest(bits, grid, seed):
    weight, metric = problems.kernel((6, 4, 3, 3), seed), problems.metric(36, seed)
    fit = Rounding(bits, **grid).fit(weight, metric)
    assert fit.error <= error_of_nearest(weight, metric, bits, **grid) * (1 + 1e-9)
    assert fit.error == pytest.approx(metric.relative_error(weight, fit.factors.to_dense()))


def test_far_better_than_nearest_where_inputs_are_correlated():
    weight, metric = problems.kernel((16, 8, 3, 3), 0), Metric.from_gram(problems.image_gram(8, (3, 3), 0))
    assert Rounding(3).fit(weight, metric).error < 0.5 * error_of_nearest(weight, metric, 3)


def test_the_size_of_an_output_changes_no_integer(seed):
    """So BatchNorm, which scales outputs, may be folded into the weights before rounding or not."""
    weight, metric = problems.kernel((6, 4, 3, 3), seed), problems.metric(36, seed)
    sizes = 2.0 ** torch.arange(-3, 3).reshape(6, 1, 1, 1)
    plain, scaled = (Rounding(3).fit(kernel, metric).factors for kernel in (weight, sizes * weight))
    assert torch.equal(plain.integers, scaled.integers)
    torch.testing.assert_close(plain.scales * sizes.flatten(1), scaled.scales)


def test_scales_of_half_precision_cost_next_to_nothing(seed):
    weight, metric = problems.kernel((6, 4, 3, 3), seed), problems.metric(36, seed)
    halves = Rounding(4, half_scales=True).fit(weight, metric)
    assert torch.equal(halves.factors.scales.half().to(weight), halves.factors.scales)
    assert halves.error <= 1.1 * Rounding(4).fit(weight, metric).error
    # Too small for half precision: the scales stay as they are, and the weights are not lost.
    tiny = Rounding(4, half_scales=True).fit(1e-9 * weight, metric)
    assert tiny.error <= 1.1 * halves.error


@grids
def test_integers_stay_on_the_grid(grid, seed):
    weight, metric = problems.kernel((5, 4, 3, 3), seed), problems.metric(36, seed)
    rounded = Rounding(3, **grid).fit(weight, metric).factors
    least, most = (0, 7) if grid.get("symmetric") is False else (-4, 3)
    assert least <= rounded.integers.min() <= rounded.integers.max() <= most
    assert rounded.scales.shape == (5, 4 if "group" in grid else 1)
    assert rounded.to_dense().shape == weight.shape


def test_a_kernel_on_the_grid_is_unchanged():
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-8, 8, (6, 20), generator=generator).double()
    integers[:, 0] = -8  # so that the grid is known from the weights
    weight = integers * torch.rand(6, 1, generator=generator, dtype=torch.float64)
    fit = Rounding(4).fit(weight, problems.metric(20, 0))
    assert fit.error < 1e-12
    torch.testing.assert_close(fit.factors.to_dense(), weight)


def test_between_exhaustive_search_and_nearest(seed):
    weight, metric = problems.kernel((2, 4), seed), problems.metric(4, seed)
    fit = Rounding(2).fit(weight, metric)
    scales = fit.factors.scales[:, 0].numpy()
    best = reference.exhaustive_rounding(weight.numpy(), metric.dense().numpy(), scales, range(-2, 2))
    lost = metric.norm(weight - fit.factors.to_dense()).item() ** 2
    assert best <= lost * (1 + 1e-9)
    # On so few weights single changes find the best integers nearly always; never by far worse ones.
    assert lost <= 2 * best + 1e-12


@pytest.mark.parametrize("bits", [2, 4])
def test_errors_are_passed_on_as_by_the_inverse(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(60, 20, generator=generator, dtype=torch.float64) @ torch.randn(
        20, 20, generator=generator, dtype=torch.float64
    )
    weight = torch.randn(5, 20, generator=generator, dtype=torch.float64)
    rounding = Rounding(bits)
    problem = _Problem(weight, Metric.from_gram(rows.T @ rows / 60), rounding._stored)
    grid = rounding._grid(weight, [1.0])
    sigma = problem.gram.numpy() + _RIDGE * problem.gram.diagonal().mean().item() * np.eye(20)
    scales = grid.scales[:, 0].numpy()
    expected = reference.rounding_with_feedback(weight.numpy(), sigma, scales, bits, problem.order.tolist())
    assert np.array_equal(problem.fed_back(grid).integers.numpy(), expected)


def test_more_bits_lose_less(seed):
    weight, metric = problems.kernel((6, 4, 3, 3), seed), problems.metric(36, seed)
    errors = [Rounding(bits).fit(weight, metric).error for bits in (2, 3, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)


def test_a_singular_gram_and_an_empty_kernel_are_taken():
    weight, metric = problems.kernel((6, 5), 0), problems.metric(5, 0, rows=2)
    assert Rounding(4).fit(weight, metric).error < 0.2
    assert not Rounding(4).fit(torch.zeros(3, 5), Metric.identity(5)).factors.to_dense().any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits is one of 2, 3"),
        ({"bits": True}, "bits is one of"),
        ({"bits": 4, "group": 0}, "at least 1"),
        ({"bits": 4, "group": 5}, "does not divide the 36 inputs"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(InputError, match=message):
        Rounding(**options).fit(problems.kernel((6, 4, 3, 3), 0), Metric.identity(36))

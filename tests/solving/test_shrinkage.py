"""Moments of few rows: what is expected to be lost should be what is lost on other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tensigma.calibration import LayerStats
from tensigma.layers import Geometry
from tensigma.linalg import SVD, Metric, Rounding
from tensigma.solving import Treatment, method_of, norm_of, shrunk, solve
from tensigma.solving.shrinkage import diagonal_share, independent_rows

D = 96
LINEAR = Geometry.of(nn.Linear(D, 12))


def rows_of(count: int, rng: torch.Generator) -> Tensor:
    """Inputs of unlike sizes that vary together in a few directions."""
    directions = torch.randn(8, D, generator=torch.Generator().manual_seed(99))
    together = torch.randn(count, 8, generator=rng) @ directions / 3
    return (together + 0.5 * torch.randn(count, D, generator=rng)) * torch.linspace(0.5, 2, D)


def metric_of(stats: LayerStats) -> Metric:
    return Metric.from_gram(stats.covariance)


def test_rounding_loses_less_on_other_rows_and_expects_what_it_loses(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    stats = LayerStats.from_rows(rows_of(40, rng))
    other = metric_of(LayerStats.from_rows(rows_of(20_000, rng)))
    weight = torch.randn(12, D, generator=rng)
    plain = metric_of(stats)
    drawn = shrunk(plain, LINEAR, stats)
    fits = [Rounding(3).fit(weight, metric) for metric in (plain, drawn)]
    lost = [other.relative_error(weight, fit.factors.to_dense()) ** 2 for fit in fits]
    assert lost[1] < lost[0]
    naive, expected = (fit.error**2 / loss for fit, loss in zip(fits, lost, strict=True))
    assert naive < 0.5
    assert 0.5 < expected < 2


def test_many_rows_are_taken_as_they_are() -> None:
    stats = LayerStats.from_rows(rows_of(10 * D, torch.Generator().manual_seed(0)))
    metric = metric_of(stats)
    assert shrunk(metric, LINEAR, stats) is metric
    identity = Metric.identity(D)
    assert shrunk(identity, LINEAR, stats) is identity


def test_neighbouring_positions_count_as_one_row() -> None:
    wide, pointwise = Geometry.of(nn.Conv1d(D // 12, 4, 12)), Geometry.of(nn.Conv1d(D, 4, 1))
    rows = rows_of(12 * D, torch.Generator().manual_seed(0))
    for samples, expected in ((12 * D, (12 * D, 12 * D)), (D, (D * 12 / 9, D)), (D // 12, (D * 12 / 9, D))):
        stats = LayerStats.from_rows(rows, samples=samples)
        assert (independent_rows(pointwise, stats), independent_rows(wide, stats)) == pytest.approx(expected)
        assert (shrunk(metric_of(stats), wide, stats).share > 0) == (samples != 12 * D)


def test_ranks_of_few_rows_lose_less_on_other_rows_and_errors_are_those_of_the_data(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    rows = rows_of(40, rng)
    stats = LayerStats.from_rows(rows)
    other = metric_of(LayerStats.from_rows(rows_of(20_000, rng)))
    layer = nn.Linear(D, 64, bias=False)
    weight = layer.weight.detach()
    method, norm = method_of("svd"), norm_of("centred")
    treatment = Treatment(geometry=Geometry.of(layer), method=method, norm=norm, format=method.format((24,)))
    solution = solve(treatment, layer, stats)
    first, second = (module.weight.detach() for module in solution.modules)  # type: ignore[operator]
    drawn, plain = second @ first, SVD(24).fit(weight, metric_of(stats)).factors.to_dense()
    assert other.relative_error(weight, drawn) < other.relative_error(weight, plain)
    lost = ((rows - rows.mean(0)) @ (weight - drawn).T).square().sum()
    energy = ((rows - rows.mean(0)) @ weight.T).square().sum()
    assert solution.error == pytest.approx((lost / energy).sqrt().item(), rel=1e-3)


@pytest.mark.parametrize("count", [2, 30, 300])
def test_the_diagonal_stays_and_the_rest_shrinks_by_one_factor(count: int) -> None:
    stats = LayerStats.from_rows(rows_of(count, torch.Generator().manual_seed(1)))
    before = metric_of(stats).dense()
    after = shrunk(metric_of(stats), LINEAR, stats).dense()
    torch.testing.assert_close(after.diagonal(), before.diagonal())
    share = diagonal_share(metric_of(stats), count)
    assert 0 < share <= 1
    off = ~torch.eye(D, dtype=torch.bool)
    torch.testing.assert_close(after[off], (1 - share) * before[off], rtol=1e-4, atol=1e-6)


def test_rows_that_are_kept_as_rows_are_drawn_in_as_well() -> None:
    rows = rows_of(20, torch.Generator().manual_seed(2))
    stats = LayerStats.from_rows(rows)
    kept = shrunk(Metric.from_rows(rows, stats.mean), LINEAR, stats).dense()
    torch.testing.assert_close(kept, shrunk(metric_of(stats), LINEAR, stats).dense(), rtol=1e-3, atol=1e-4)


def test_inputs_without_variation_have_no_say() -> None:
    gram = torch.diag(torch.tensor([1.0, 0.0, 2.0]))
    assert diagonal_share(Metric.from_gram(gram), 5) == 1.0
    gram[0, 2] = gram[2, 0] = 0.9
    both = Metric.from_gram(gram), Metric.from_gram(gram[::2, ::2])
    assert diagonal_share(both[0], 5) == pytest.approx(diagonal_share(both[1], 5))

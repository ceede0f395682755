"""Moments of few rows: what rounding is expected to lose should be what it loses on other rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tensigma.calibration import LayerStats
from tensigma.layers import Geometry
from tensigma.linalg import Metric, Rounding
from tensigma.solving import shrunk
from tensigma.solving.shrinkage import diagonal_share

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


def test_overlapping_windows_count_as_one_row() -> None:
    conv, pointwise = Geometry.of(nn.Conv1d(D // 3, 4, 3)), Geometry.of(nn.Conv1d(D, 4, 1))
    stats = LayerStats.from_rows(rows_of(12 * D, torch.Generator().manual_seed(0)))
    metric = metric_of(stats)
    assert shrunk(metric, pointwise, stats) is metric
    assert shrunk(metric, conv, stats) is not metric


@pytest.mark.parametrize("count", [2, 30, 300])
def test_the_diagonal_stays_and_the_rest_shrinks_by_one_factor(count: int) -> None:
    stats = LayerStats.from_rows(rows_of(count, torch.Generator().manual_seed(1)))
    before = metric_of(stats).dense()
    after = shrunk(metric_of(stats), LINEAR, stats).dense()
    torch.testing.assert_close(after.diagonal(), before.diagonal())
    share = diagonal_share(before, count)
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
    assert diagonal_share(gram, 5) == 1.0
    gram[0, 2] = gram[2, 0] = 0.9
    assert diagonal_share(gram, 5) == pytest.approx(diagonal_share(gram[::2, ::2], 5))

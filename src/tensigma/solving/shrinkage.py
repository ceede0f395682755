"""Moments of few rows, drawn towards their diagonal.

Where a layer has about as many inputs as rows were seen, everything varies with everything by chance. What is lost on
these rows is then a small part of what is lost on others: the last layer of a ResNet-50 (2,048 inputs, 256 images) at
rank 250 seems to lose 0.02 of its output and loses 0.34, so a budget would take most of its savings there. Error
feedback, which passes what one input loses on to inputs that vary with it, suffers more than ranks do. Drawn towards
the diagonal, 0.23 is expected and 0.30 lost.
"""

from __future__ import annotations

import math

from tensigma.calibration import LayerStats
from tensigma.layers import Geometry
from tensigma.linalg import Metric

#: Metrics wider than this are not written out as matrices.
WIDEST = 8192
#: With so many independent rows for each column, moments are taken as they are.
_ENOUGH = 10
# So many neighbouring positions of a map tell about as much as one: on layers of a ResNet-50, 1×1 and 3×3, the share
# that loses least on other images belongs to a ninth of the rows.
_ALIKE = 9


def shrunk(metric: Metric, geometry: Geometry, stats: LayerStats) -> Metric:
    """``metric``, which belongs to a group of the layer, as fits the number of rows that ``stats`` has seen.

    >>> import torch
    >>> from torch import nn
    >>> rows = torch.randn(6_000, 4)
    >>> few, many = (LayerStats.from_rows(rows[:count]) for count in (8, 6_000))
    >>> geometry = Geometry.of(nn.Linear(4, 3))
    >>> metrics = [Metric.from_gram(stats.covariance) for stats in (few, many)]
    >>> [shrunk(metric, geometry, stats) is metric for metric, stats in zip(metrics, (few, many))]
    [False, True]
    """
    if metric.is_identity or metric.share or geometry.kind == "conv_transpose" or metric.size > WIDEST:
        return metric
    rows = independent_rows(geometry, stats)
    if rows >= _ENOUGH * metric.size:
        return metric
    return metric.drawn(diagonal_share(metric, rows))


def independent_rows(geometry: Geometry, stats: LayerStats) -> float:
    """How many independent rows tell as much as those that ``stats`` has seen.

    >>> import torch
    >>> from torch import nn
    >>> stats = LayerStats.from_rows(torch.randn(900, 4), samples=10)
    >>> independent_rows(Geometry.of(nn.Conv2d(4, 3, 1)), stats)
    100.0
    """
    samples = max(1, min(stats.samples, stats.count))  # some samples may not have reached the layer
    positions = stats.count / samples
    return samples * max(1.0, positions / max(_ALIKE, math.prod(geometry.kernel_size)))


def diagonal_share(metric: Metric, rows: float) -> float:
    """How much of ``metric``, from so many independent rows, should be its diagonal alone, from 0 to 1.

    The oracle-approximating shrinkage of Chen, Wiesel, Eldar and Hero (2010) for inputs at unit variance.

    >>> import torch
    >>> metric = Metric.from_gram(torch.tensor([[1.0, 0.8], [0.8, 1.0]]))
    >>> round(diagonal_share(metric, 10), 2), round(diagonal_share(metric, 1000), 4)
    (0.31, 0.0031)
    """
    alive, squares = metric.correlations()
    off_diagonal = squares - alive
    if alive < 2 or off_diagonal <= 0:
        return 1.0
    numerator = (1 - 2 / alive) * squares + alive**2
    return min(1.0, numerator / ((rows + 1 - 2 / alive) * off_diagonal))

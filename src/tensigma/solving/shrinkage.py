"""Moments of few rows, drawn towards their diagonal.

Error feedback passes what one input loses on to inputs that vary with it. Where a layer has more inputs than rows were
seen, everything varies with everything by chance, and what rounding seems to lose is a small part of what it loses on
other data: the last layer of a ResNet-50 (2,048 inputs, 512 images) at 3 bits 0.002 of its energy on these images and
0.046 on others. Drawn towards the diagonal, 0.024 is expected and 0.032 lost.
"""

from __future__ import annotations

import math

import torch

from tensigma.calibration import LayerStats
from tensigma.layers import Geometry
from tensigma.linalg import Metric
from tensigma.solving.rounding import WIDEST

#: With so many independent rows for each column, moments are taken as they are.
_ENOUGH = 10


def shrunk(metric: Metric, geometry: Geometry, stats: LayerStats) -> Metric:
    """``metric``, which belongs to a group of the layer, as fits the number of rows that ``stats`` has seen.

    >>> from torch import nn
    >>> rows = torch.randn(6_000, 4)
    >>> few, many = (LayerStats.from_rows(rows[:count]) for count in (8, 6_000))
    >>> geometry = Geometry.of(nn.Linear(4, 3))
    >>> metrics = [Metric.from_gram(stats.covariance) for stats in (few, many)]
    >>> [shrunk(metric, geometry, stats) is metric for metric, stats in zip(metrics, (few, many))]
    [False, True]
    """
    # Windows that overlap repeat each other.
    rows = stats.count / math.prod(geometry.kernel_size)
    if metric.is_identity or geometry.kind == "conv_transpose":
        return metric
    if metric.size > WIDEST or rows >= _ENOUGH * metric.size:
        return metric
    gram = metric.dense()
    share = diagonal_share(gram, rows)
    gram = (1 - share) * gram + share * torch.diag(gram.diagonal())
    return Metric.from_gram(gram)


def diagonal_share(gram: torch.Tensor, rows: float) -> float:
    """How much of ``gram``, from so many independent rows, should be its diagonal alone, from 0 to 1.

    The oracle-approximating shrinkage of Chen, Wiesel, Eldar and Hero (2010) for inputs at unit variance.

    >>> gram = torch.tensor([[1.0, 0.8], [0.8, 1.0]])
    >>> round(diagonal_share(gram, 10), 2), round(diagonal_share(gram, 1000), 4)
    (0.31, 0.0031)
    """
    lengths = gram.diagonal().double().sqrt()
    lengths = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    alive = int((gram.diagonal() > 0).sum())
    squares = (gram.double() / lengths / lengths[:, None]).square().sum().item()
    off_diagonal = squares - alive
    if alive < 2 or off_diagonal <= 0:
        return 1.0
    numerator = (1 - 2 / alive) * squares + alive**2
    return min(1.0, numerator / ((rows + 1 - 2 / alive) * off_diagonal))

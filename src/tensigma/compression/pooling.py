"""Moments of a layer over the data of all processes, each of which has seen its own share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from tensigma.calibration import LayerStats, reduce_stats
from tensigma.running import all_notes, common_device, rank_and_size


def pooled(name: str, stats: LayerStats, cross: Tensor, output: Tensor, rows: int) -> tuple[LayerStats, Tensor, Tensor]:
    """The same moments over all processes, with ``cross`` and ``output`` as means of sums over ``rows`` rows.

    Under ``torchrun`` all processes call this inside a process group.
    """
    if rank_and_size()[1] == 1:
        return stats, cross / rows, output / rows
    total = sum(all_notes(rows))
    return reduce_stats({name: stats})[name], _summed(cross) / total, _summed(output) / total


def _summed(tensor: Tensor) -> Tensor:
    whole = tensor.to(common_device(), torch.float64, copy=True)
    dist.all_reduce(whole)
    return whole.to(tensor.device)

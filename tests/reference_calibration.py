"""Slow, obvious twins of the streaming moments: unfold everything in float64, multiply, average."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensigma.layers import Geometry


def naive_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """All rows the layer multiplies by its weights, (groups, n, d), in float64."""
    geometry = Geometry.of(layer)
    x = x.double()
    if geometry.kind == "linear":
        return x.reshape(1, -1, geometry.in_channels)
    if x.dim() == geometry.n_spatial + 1:
        x = x[None]
    if geometry.kind == "conv_transpose":
        rows = x.movedim(1, -1).reshape(-1, geometry.groups, geometry.in_channels // geometry.groups)
        return rows.transpose(0, 1)
    mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
    padded = functional.pad(x, [p for pads in reversed(geometry.pads) for p in pads], mode=mode)
    size = geometry.output_size(x.shape[2:])
    columns = []
    for channel in range(geometry.in_channels):
        for tap in product(*map(range, geometry.kernel_size)):
            view = padded[:, channel]
            for axis, (t, dilation, step, n) in enumerate(
                zip(tap, geometry.dilation, geometry.stride, size, strict=True)
            ):
                index = torch.arange(n) * step + t * dilation
                view = view.index_select(axis + 1, index)
            columns.append(view.reshape(-1))
    rows = torch.stack(columns, dim=1)  # (n, groups · d)
    return rows.reshape(len(rows), geometry.groups, -1).transpose(0, 1)


def naive_moments(layer: nn.Module, inputs: list[Tensor]) -> tuple[int, Tensor, Tensor, Tensor]:
    """Count, mean, covariance and gram of all rows, with a leading axis of groups only where there are several."""
    rows = torch.cat([naive_rows(layer, x) for x in inputs], dim=1)
    mean = rows.mean(1)
    centred = rows - mean[:, None]
    covariance = centred.mT @ centred / rows.shape[1]
    gram = rows.mT @ rows / rows.shape[1]
    if len(rows) == 1:
        return rows.shape[1], mean[0], covariance[0], gram[0]
    return rows.shape[1], mean, covariance, gram

"""Importing torchvision where its compiled operators do not fit the installed build of torch.

A torchvision built for CUDA cannot load its operators beside a CPU-only torch, and its import then fails because
``torchvision::nms`` does not exist. Classifiers and segmenters need no such operator, and detectors need two. They are
declared here, written with plain torch operations, and the import is tried again. Where the builds belong together
nothing is changed.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import torch
from torch import Tensor

#: Operators stay declared for as long as this object lives.
_LIBRARIES: list[torch.library.Library] = []
_MISSING = "operator torchvision::nms does not exist"


def import_torchvision() -> ModuleType:
    """The package torchvision, with stand-ins for compiled operators if they cannot be loaded.

    >>> import_torchvision().__name__
    'torchvision'
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if not lacks_operators(error):
            raise
    # Modules that were imported before the failure are incomplete.
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    if not _LIBRARIES:
        _declare()
    torchvision = importlib.import_module("torchvision")
    # Callers ask these before they use an operator.
    for name in ("torchvision.extension", "torchvision.ops.roi_align"):
        sys.modules[name]._has_ops = lambda: True  # type: ignore[attr-defined]
    return torchvision


def lacks_operators(error: Exception) -> bool:
    """Whether importing torchvision failed for want of its compiled operators."""
    return _MISSING in str(error)


def _declare() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    # Its result has no gradient, and torchvision adds what it is for tensors without values.
    library.impl("nms", nms, "CompositeExplicitAutograd")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    _LIBRARIES.append(library)


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Positions of the boxes (n, 4) that no better one overlaps by more than ``iou_threshold``, the best first.

    >>> boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.9], [5.0, 5.0, 6.0, 6.0]])
    >>> nms(boxes, torch.tensor([0.5, 0.9, 0.1]), 0.5).tolist()
    [1, 2]
    """
    order = scores.argsort(descending=True, stable=True)
    boxes = dets.detach()[order]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    remaining = torch.ones(len(boxes), dtype=torch.bool, device=dets.device)
    kept = []
    for index in range(len(boxes)):
        if not remaining[index]:
            continue
        kept.append(index)
        low, high = torch.maximum(boxes[index, :2], boxes[:, :2]), torch.minimum(boxes[index, 2:], boxes[:, 2:])
        shared = (high - low).clamp_min(0).prod(1)
        remaining &= shared <= iou_threshold * (areas[index] + areas - shared)
    return order[torch.tensor(kept, dtype=torch.long, device=dets.device)]


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Means of maps (n, c, h, w) over the cells of a grid laid over each of the boxes (k, 5): image, x₁, y₁, x₂, y₂.

    In each cell ``sampling_ratio`` × ``sampling_ratio`` points are interpolated, or as many as the cell has pixels if
    that is not positive.

    >>> roi_align(torch.ones(1, 2, 4, 4), torch.tensor([[0.0, 1.0, 1.0, 3.0, 3.0]]), 1.0, 2, 2, 2, False).shape
    torch.Size([1, 2, 2, 2])
    """
    means = []
    for roi in rois:
        x1, y1, x2, y2 = (roi[1:] * spatial_scale - (0.5 if aligned else 0.0)).tolist()
        height, width = y2 - y1, x2 - x1
        if not aligned:
            height, width = max(height, 1.0), max(width, 1.0)
        rows = _points(y1, height, pooled_height, sampling_ratio).to(input)  # (pooled_height · points)
        columns = _points(x1, width, pooled_width, sampling_ratio).to(input)
        image = input[int(roi[0])]  # (c, h, w)
        sampled = _weights(rows, image.shape[1]) @ image @ _weights(columns, image.shape[2]).T
        cells = sampled.unflatten(1, (pooled_height, -1)).unflatten(3, (pooled_width, -1))
        means.append(cells.mean((2, 4)))
    return torch.stack(means) if means else input.new_zeros(0, input.shape[1], pooled_height, pooled_width)


def _points(start: float, size: float, n_cells: int, per_cell: int) -> Tensor:
    """Where to look along one axis: in the middle of equal parts of every cell."""
    n = per_cell if per_cell > 0 else max(1, -int(-size // n_cells))
    return start + (torch.arange(n_cells * n, dtype=torch.float64) + 0.5) * (size / (n_cells * n))


def _weights(points: Tensor, size: int) -> Tensor:
    """Weights of ``size`` pixels in the linear interpolation at each of the points, (points, size); 0 outside."""
    inside = (points >= -1) & (points <= size)
    near = points.clamp(0, size - 1)
    pixels = torch.arange(size, dtype=points.dtype, device=points.device)
    return (1 - (near[:, None] - pixels).abs()).clamp_min(0) * inside[:, None]

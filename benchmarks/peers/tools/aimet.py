"""AIMET: spatial or weight SVD, ratios by layer chosen greedily by how far the answers agree with the original's."""

from __future__ import annotations

from decimal import Decimal

import torch
from torch import nn

from peers.worker import Assignment, main
from tensigma.zoo import import_torchvision

# Images for the score of every layer and candidate ratio.
_IMAGES = 128


def compress(assignment: Assignment) -> nn.Module:
    """AIMET's target is a share of the memory of the layers that it may split."""
    # AIMET imports torchvision, whose compiled operators may not fit the CPU build of torch.
    import_torchvision()
    from aimet_torch.common.defs import CompressionScheme, CostMetric, GreedySelectionParameters, RankSelectScheme
    from aimet_torch.compress import ModelCompressor
    from aimet_torch.defs import SpatialSvdParameters, WeightSvdParameters

    model, images = assignment.model, assignment.images[:_IMAGES]
    with torch.no_grad():
        classes = model(images).argmax(1)

    def agreement(small: nn.Module, iterations: int | None = None, use_cuda: bool = False) -> float:
        with torch.no_grad():
            return float((small.eval()(images).argmax(1) == classes).float().mean())

    spatial = assignment.job.method == "spatial"
    greedy = GreedySelectionParameters(target_comp_ratio=Decimal(str(round(1 / assignment.job.rate, 4))))
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    if spatial:
        kind = SpatialSvdParameters
        choice = kind.AutoModeParams(greedy, modules_to_ignore=[first])
    else:
        kind = WeightSvdParameters
        choice = kind.AutoModeParams(RankSelectScheme.greedy, greedy, modules_to_ignore=[first])
    small, _ = ModelCompressor.compress_model(
        model,
        eval_callback=agreement,
        eval_iterations=None,
        input_shape=tuple(assignment.example.shape),
        compress_scheme=CompressionScheme.spatial_svd if spatial else CompressionScheme.weight_svd,
        cost_metric=CostMetric.memory,
        parameters=kind(kind.Mode.auto, choice),
    )
    return small


if __name__ == "__main__":
    main(compress)

"""AIMET: spatial or weight SVD, ratios by layer chosen greedily by how far the answers are from the original's."""

from __future__ import annotations

import json
import shutil
import time
from decimal import Decimal
from pathlib import Path

import torch
from torch import nn

from peers.worker import Assignment, main
from tensigma.zoo import import_torchvision

# Images for the score of every layer and candidate ratio: small ones, and those of more than 64 pixels, for which there
# would be hours of scoring.
_IMAGES, _LARGE_IMAGES = 128, 32
# Where AIMET leaves these scores.
_SCORES = Path("data/greedy_selection_eval_scores_dict.pkl")


def compress(assignment: Assignment) -> nn.Module:
    """AIMET's target is a share of the memory of the layers that it may split.

    The scores of all layers do not depend on the target: those of one rate serve the others, and count there too.
    """
    # AIMET imports torchvision, whose compiled operators may not fit the CPU build of torch.
    import_torchvision()
    from aimet_torch.common.defs import CompressionScheme, CostMetric, GreedySelectionParameters, RankSelectScheme
    from aimet_torch.compress import ModelCompressor
    from aimet_torch.defs import SpatialSvdParameters, WeightSvdParameters

    model = assignment.model
    images = assignment.images[: _IMAGES if assignment.images.shape[-1] <= 64 else _LARGE_IMAGES]
    with torch.no_grad():
        wanted = model(images).softmax(1)
    last_score = 0.0

    def likeness(small: nn.Module, iterations: int | None = None, use_cuda: bool = False) -> float:
        """What the probabilities of both have in common: agreement of so few images is the same for many ratios, and
        AIMET's search takes equal scores for the end of it."""
        nonlocal last_score
        with torch.no_grad():
            value = float(torch.minimum(small.eval()(images).softmax(1), wanted).sum(1).mean())
        last_score = time.process_time()
        return value

    method = assignment.job.method
    kept = Path(assignment.job.material) / f"aimet-{method}.pkl"
    facts = kept.with_suffix(".json")
    begin = time.process_time()
    spatial = method == "spatial"
    greedy = GreedySelectionParameters(
        target_comp_ratio=Decimal(str(round(1 / assignment.job.rate, 4))),
        saved_eval_scores_dict=str(kept) if facts.exists() else None,
    )
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    if spatial:
        kind = SpatialSvdParameters
        choice = kind.AutoModeParams(greedy, modules_to_ignore=[first])
    else:
        kind = WeightSvdParameters
        choice = kind.AutoModeParams(RankSelectScheme.greedy, greedy, modules_to_ignore=[first])
    small, _ = ModelCompressor.compress_model(
        model,
        eval_callback=likeness,
        eval_iterations=None,
        input_shape=tuple(assignment.example.shape),
        compress_scheme=CompressionScheme.spatial_svd if spatial else CompressionScheme.weight_svd,
        cost_metric=CostMetric.memory,
        parameters=kind(kind.Mode.auto, choice),
    )
    if facts.exists():
        assignment.notes["scores"] = "those of another rate"
        assignment.notes["seconds_before"] = json.loads(facts.read_text(encoding="utf-8"))["seconds"]
    else:
        shutil.copyfile(_SCORES, kept)
        facts.write_text(json.dumps({"seconds": round(last_score - begin, 2)}) + "\n", encoding="utf-8")
    return small


if __name__ == "__main__":
    main(compress)

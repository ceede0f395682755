"""Detectors: images of different sizes, boxes as answers, two stages, from calibration to training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_detectors import faster_rcnn, photographs, ssdlite
from tensigma.errors import CalibrationWarning, TensigmaError
from tensigma.zoo.torchvision_operators import nms, roi_align

pytestmark = pytest.mark.slow

#: Random networks are sure of nothing; whatever they find counts.
BOXES = ts.Boxes(score=0.0)
HEADS = {
    ssdlite: {"head.classification_head.module_list.0.1", "head.regression_head.module_list.1.1"},
    faster_rcnn: {"rpn.head.cls_logits", "rpn.head.bbox_pred"},
}


@pytest.mark.parametrize("make", [ssdlite, faster_rcnn])
def test_from_calibration_to_evaluation(make: Any) -> None:
    model, data = make(), photographs()
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, budget=ts.Params(0.8), data=data, answers=BOXES)
    weighing = plan.notes["weighing"]
    # Boxes have no gradient: what is compared are the outputs of the layers after which no other comes.
    assert weighing["answers"] == "boxes with scores and classes"
    assert all(divergence < float("inf") for _, divergence in weighing["tried"])
    small, report = ts.compress(model, plan, stats, data=data)
    assert report.notes["sequential"]
    assert report.after.params <= 0.8 * report.before.params
    result = ts.evaluate(small, photographs(2, seed=5), original=model, answers=BOXES)
    assert result.original is not None
    assert result.original.precision == 1
    assert result.precision is not None
    assert 0 < result.precision <= 1
    assert result.label_precision is not None
    assert (result.measure, result.likeness) == ("average precision", result.precision)
    whole = ts.evaluate(model, photographs(2, seed=5), original=model, answers=BOXES)
    assert (whole.precision, whole.agreement) == (1, 1)


@pytest.mark.parametrize("make", [ssdlite, faster_rcnn])
def test_raw_outputs_are_those_of_the_heads(make: Any) -> None:
    model = make()
    (images, _), *_ = photographs()
    with torch.no_grad():
        _, answers = ts.running.first_answers(model, ts.running.Batch(0, images, None))
        _, tensors = answers.run(model, ts.running.Batch(0, images, None))
    assert HEADS[make] <= set(answers.raw)
    assert not any(name.startswith("backbone") for name in answers.raw)
    # Those of the second stage have a row for each candidate and are left out.
    assert {len(tensor) for tensor in tensors} == {len(images)}


def test_drop_goes_by_average_precision() -> None:
    model = ssdlite()
    images = [(images,) for images, _ in photographs(5)]
    plan = ts.plan(model, budget=ts.Drop(0.5, trials=3), data=images, answers=BOXES, weights=None)
    note = plan.notes["drop"]
    assert note["measure"] == "average precision"
    assert note["kept"] >= 0.5
    # Targets that have nothing to do with what the model finds are no measure.
    with pytest.warns(CalibrationWarning, match="agreement is measured instead of accuracy"):
        ts.plan(model, budget=ts.Drop(0.5, trials=1), data=photographs(5), answers=BOXES, weights=None)


@pytest.mark.parametrize("make", [ssdlite, faster_rcnn])
def test_training_by_the_original_lowers_the_distance_of_raw_outputs(make: Any) -> None:
    model, data = make(), photographs()
    small, _ = ts.compress(model, data, recipe=ts.Recipe(ranks=ts.Ranks({"backbone.second.0": 3})), sequential=False)
    tuned, history = ts.finetune(
        small, data, validation=data, teacher=model, answers=BOXES, epochs=4, learning_rates=1e-4
    )
    assert history.measure == "average precision"
    losses = [epoch.validation_loss for epoch in history.rates[0].epochs]
    assert history.start.validation_loss is not None
    assert min(loss for loss in losses if loss is not None) < history.start.validation_loss
    # BatchNorm statistics stay, because the model is trained in evaluation mode.
    assert torch.equal(tuned.backbone.stem[1].running_mean, model.backbone.stem[1].running_mean)  # type: ignore[union-attr,index]


def test_refinement_lowers_the_distance_of_raw_outputs() -> None:
    model, data = ssdlite(), photographs()
    recipe = ts.Recipe(ranks=ts.Ranks({"backbone.second.0": 3}), answers=BOXES)
    refine = ts.Refine(passes=24, learning_rate=3e-3)
    _, report = ts.compress(model, data, recipe=recipe, sequential=False, refine=refine)
    note = report.notes["refinement"]
    assert note["kept"]
    assert note["loss_after"] < note["loss_before"]


def test_training_by_the_losses_of_the_model() -> None:
    def total(model: nn.Module, pair: Any) -> Tensor:
        return torch.stack(list(model(*pair).values())).sum()

    model, data = faster_rcnn(), photographs()
    _, history = ts.finetune(
        model, data, validation=data, loss=total, answers=BOXES, epochs=2, learning_rates=1e-2, optimizer="sgd"
    )
    assert history.measure == "average precision"
    assert history.start.validation_loss is not None
    assert history.best.validation_loss is not None
    assert history.best.validation_loss < history.start.validation_loss


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_the_backbone_is_exported_and_the_whole_says_so(format: Any, tmp_path: Path) -> None:
    model, data = ssdlite(), photographs()
    for example in (data[0], torch.rand(2, 3, 32, 32)):
        with pytest.raises(TensigmaError, match=r"export .* such as model\.backbone.*ts\.save") as refused:
            ts.export(model, tmp_path / "whole", example, format=format)
        assert "dynamic_batch" not in str(refused.value)
    small, _ = ts.compress(model, data, budget=ts.Params(0.8), answers=BOXES)
    assert isinstance(small.backbone, nn.Module)
    exported = ts.export(small.backbone, tmp_path / "backbone", torch.rand(2, 3, 32, 32), format=format)
    assert exported.batches == (1, 3, 5)
    assert not (tmp_path / "whole").exists()


def naive_nms(boxes: list[list[float]], scores: list[float], iou: float) -> list[int]:
    def overlap(one: list[float], other: list[float]) -> float:
        sides = [max(0.0, min(one[k + 2], other[k + 2]) - max(one[k], other[k])) for k in (0, 1)]
        areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
        return sides[0] * sides[1] / (sum(areas) - sides[0] * sides[1])

    kept: list[int] = []
    for index in sorted(range(len(scores)), key=lambda k: -scores[k]):
        if all(overlap(boxes[index], boxes[other]) <= iou for other in kept):
            kept.append(index)
    return kept


def naive_roi_align(
    maps: Tensor, rois: Tensor, scale: float, cells: tuple[int, int], ratio: int, aligned: bool
) -> Tensor:
    """Point by point: each is interpolated between its four neighbours, and the points of a cell are averaged."""

    def at(image: Tensor, y: float, x: float) -> Tensor:
        height, width = image.shape[1:]
        if not -1 <= y <= height or not -1 <= x <= width:
            return torch.zeros(len(image))
        y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
        top, left = int(y), int(x)
        low, right = min(top + 1, height - 1), min(left + 1, width - 1)
        v, h = y - top, x - left
        upper = image[:, top, left] * (1 - h) + image[:, top, right] * h
        return upper * (1 - v) + (image[:, low, left] * (1 - h) + image[:, low, right] * h) * v

    pooled = torch.zeros(len(rois), maps.shape[1], *cells)
    for k, (number, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (corner * scale - (0.5 if aligned else 0.0) for corner in corners)
        sides = [y2 - y1, x2 - x1] if aligned else [max(y2 - y1, 1.0), max(x2 - x1, 1.0)]
        steps = [side / n for side, n in zip(sides, cells, strict=True)]
        n_y, n_x = (ratio if ratio > 0 else math.ceil(step) for step in steps)
        for row in range(cells[0]):
            for column in range(cells[1]):
                points = [
                    (y1 + steps[0] * (row + (i + 0.5) / n_y), x1 + steps[1] * (column + (j + 0.5) / n_x))
                    for i in range(n_y)
                    for j in range(n_x)
                ]
                pooled[k, :, row, column] = torch.stack([at(maps[int(number)], *point) for point in points]).mean(0)
    return pooled


def test_stand_ins_of_operators(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(30, 2, generator=generator) * 5
    boxes = torch.cat([corners, corners + 1 + 3 * torch.rand(30, 2, generator=generator)], 1)
    scores = torch.rand(30, generator=generator)
    assert nms(boxes, scores, 0.3).tolist() == naive_nms(boxes.tolist(), scores.tolist(), 0.3)
    assert nms(boxes[:0], scores[:0], 0.3).tolist() == []
    maps = torch.randn(2, 3, 9, 11, generator=generator)
    rois = torch.cat([torch.tensor([[0.0], [1.0], [1.0]]), boxes[:3] * 2], 1)
    for aligned in (True, False):
        for ratio in (2, -1):
            expected = naive_roi_align(maps, rois, 0.5, (3, 4), ratio, aligned)
            assert torch.allclose(roi_align(maps, rois, 0.5, 3, 4, ratio, aligned), expected, atol=1e-5)

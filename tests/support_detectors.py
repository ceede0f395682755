"""torchvision's detectors on a small backbone, as fast as tests need them."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.compression import reestimate_bn_


def block(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())


class Backbone(nn.Module):
    """Maps at two scales."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = block(3, 8), block(8, 16), block(16, 16)
        self.out_channels = 16

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        near = self.first(self.stem(x))
        return OrderedDict([("0", near), ("1", self.second(near))])


def photographs(n_batches: int = 3, seed: int = 0) -> list[Any]:
    """Batches of images of different sizes, with targets."""
    generator = torch.Generator().manual_seed(seed)
    target = {"boxes": torch.tensor([[4.0, 4.0, 20.0, 24.0]]), "labels": torch.tensor([1])}
    sizes = ((32, 40), (36, 32))
    return [([torch.rand(3, *size, generator=generator) for size in sizes], [target, target]) for _ in range(n_batches)]


def ssdlite() -> nn.Module:
    """SSD with the heads of SSDlite."""
    detection = ts.zoo.import_torchvision().models.detection
    torch.manual_seed(0)
    anchors = detection.anchor_utils.DefaultBoxGenerator([[2], [2]], min_ratio=0.2, max_ratio=0.9)
    head = detection.ssdlite.SSDLiteHead([16, 16], anchors.num_anchors_per_location(), 3, partial(nn.BatchNorm2d))
    model = detection.ssd.SSD(
        Backbone(), anchors, (32, 32), 3, head=head, score_thresh=0.0, detections_per_img=10, topk_candidates=20
    )
    return alive(model)


def faster_rcnn() -> nn.Module:
    """Faster R-CNN, whose second stage looks at the candidates of the first."""
    torchvision = ts.zoo.import_torchvision()
    detection = torchvision.models.detection
    torch.manual_seed(0)
    model = detection.FasterRCNN(
        Backbone(),
        None,
        min_size=32,
        max_size=48,
        rpn_anchor_generator=detection.rpn.AnchorGenerator(((8,), (16,)), ((0.5, 1.0, 2.0),) * 2),
        box_roi_pool=torchvision.ops.MultiScaleRoIAlign(["0", "1"], output_size=3, sampling_ratio=2),
        box_head=detection.faster_rcnn.TwoMLPHead(16 * 9, 32),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(32, 3),
        rpn_post_nms_top_n_test=12,
        rpn_post_nms_top_n_train=12,
        box_score_thresh=0.0,
        box_detections_per_img=10,
    )
    return alive(model)


def alive(model: nn.Module) -> nn.Module:
    """Statistics of BatchNorm that fit the random weights, so that there is something to detect."""
    model.eval()
    reestimate_bn_(model, photographs(2, seed=9))
    return model

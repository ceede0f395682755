"""The networks on which tools are compared, and the images that all of them see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.files import whole_file
from tensigma.zoo import load_data, load_model


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A trained network and its data. In names of data, DIR is the folder of the real models and images."""

    name: str
    title: str
    network: str
    weights: str
    calibration: str
    training: str
    test: str
    batch: int

    def load(self, data: Path) -> nn.Module:
        return load_model(self.network, data / self.weights)

    def images(self, part: str, data: Path) -> tuple[Tensor, Tensor]:
        """Images and labels of ``calibration``, ``training`` or ``test``."""
        batches = list(load_data(getattr(self, part).replace("DIR", str(data)), batch_size=100))
        return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])

    def prepare(self, data: Path, folder: Path) -> Path:
        """The folder of arrays that every environment can read."""
        place = folder / self.name
        place.mkdir(parents=True, exist_ok=True)
        for part in ("calibration", "training", "test"):
            files = place / f"{part}.npy", place / f"{part}-labels.npy"
            if all(file.exists() for file in files):
                continue
            for file, values in zip(files, self.images(part, data), strict=True):
                with whole_file(file) as partial, partial.open("wb") as stream:
                    np.save(stream, values.numpy())
        return place


def _cifar(name: str, title: str, network: str, folder: str, *, training: int) -> Subject:
    kind, _, file = folder.partition("/")
    return Subject(
        name=name,
        title=title,
        network=network,
        weights=f"{kind}/{file}.safetensors",
        calibration=f"{kind}:DIR/{kind}?samples=2000",
        training=f"{kind}:DIR/{kind}?samples={training}",
        test=f"{kind}:DIR/{kind}?split=test&shuffle=false",
        batch=32,
    )


def _imagenet(
    name: str, title: str, network: str, file: str, *, batch: int, training: int, calibration: int = 1000
) -> Subject:
    return Subject(
        name=name,
        title=title,
        network=network,
        weights=f"imagenet/{file}.safetensors",
        calibration=f"imagefolder:DIR/imagenet/calib?samples={calibration}",
        training=f"imagefolder:DIR/imagenet/calib?samples={training}",
        test="imagefolder:DIR/imagenet/val?shuffle=false",
        batch=batch,
    )


SUBJECTS = {
    subject.name: subject
    for subject in (
        _cifar("resnet20", "ResNet-20, CIFAR-10", "zoo:resnet20-cifar", "cifar10/resnet20", training=4000),
        _cifar("resnet56", "ResNet-56, CIFAR-10", "zoo:resnet56-cifar", "cifar10/resnet56", training=4000),
        _cifar(
            "resnet20-c100",
            "ResNet-20, CIFAR-100",
            "zoo:resnet20-cifar?num_classes=100",
            "cifar100/resnet20",
            training=3000,
        ),
        _imagenet(
            "squeezenet", "SqueezeNet 1.1, ImageNet", "zoo:squeezenet1_1", "squeezenet1_1", batch=16, training=500
        ),
        # Few images, for with 1,000 some tools take hours.
        _imagenet(
            "resnet50",
            "ResNet-50, ImageNet",
            "zoo:resnet50-v1",
            "resnet50",
            batch=16,
            training=256,
            calibration=256,
        ),
    )
}

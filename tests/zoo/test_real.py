"""Published weights on the images they were trained for: the zoo's networks and data reading together."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tensigma.zoo import Data, load_data, load_model

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def root() -> Path:
    folder = os.environ.get("TENSIGMA_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("TENSIGMA_DATA does not name a folder with the real models and images")
    return Path(folder)


@torch.inference_mode()
def accuracy(model: nn.Module, data: Data) -> float:
    hits = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in data)
    return 100 * hits / data.n_samples


@pytest.mark.parametrize(
    ("name", "published"), [("resnet20", 91.73), ("resnet56", 93.39), ("resnet18w32", 87.42)], ids=lambda value: value
)
def test_cifar10_accuracy(root: Path, name: str, published: float) -> None:
    model = load_model(f"zoo:{name}-cifar", root / "cifar10" / f"{name}.safetensors")
    data = load_data(f"cifar10:{root / 'cifar10'}?split=test", samples=2000 if name == "resnet20" else 1000)
    assert isinstance(data, Data)
    # Two standard errors of a sample of this size are 1.2 to 2.1 points.
    assert accuracy(model, data) == pytest.approx(published, abs=1 if name == "resnet20" else 2.2)


def test_imagenet_accuracy(root: Path) -> None:
    model = load_model("zoo:squeezenet1_1", root / "imagenet" / "squeezenet1_1.safetensors")
    data = load_data(f"imagefolder:{root / 'imagenet' / 'val'}", batch_size=50)
    assert isinstance(data, Data)
    assert (data.n_samples, data.n_classes) == (1000, 1000)
    # 55.0 % on all of them; two standard errors of 300 are 5.7 points.
    assert accuracy(model, data.take(300)) == pytest.approx(55.0, abs=5.7)


def test_the_real_resnet50(root: Path) -> None:
    file = root / "imagenet" / "resnet50.safetensors"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    model = load_model("zoo:resnet50-v1", file)
    data = load_data(f"imagefolder:{root / 'imagenet' / 'val'}?shuffle=false", batch_size=20)
    assert isinstance(data, Data)
    # 18 of the first 20, no answer within 0.2 of the next; 16 if the 3×3 convolutions had the stride.
    assert accuracy(model, data.take(20)) == 90.0


def test_cifar100_accuracy(root: Path) -> None:
    file = root / "cifar100" / "resnet20.safetensors"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    model = load_model("zoo:resnet20-cifar?num_classes=100", file)
    data = load_data(f"cifar100:{root / 'cifar100'}?split=test", samples=1000)
    assert isinstance(data, Data)
    # 63.0 % on all 5,000; two standard errors of 1,000 are 3.1 points.
    assert accuracy(model, data) == pytest.approx(63.0, abs=3.1)

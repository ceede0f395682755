"""Networks of our own, in plain layers, for examples, experiments and tests.

Parameter names follow the published checkpoints of each architecture, so that those load without renaming.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _conv3x3(n_in: int, n_out: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)


class _PaddedShortcut(nn.Module):
    """The parameter-free shortcut of the CIFAR ResNets: every second pixel, and zeros for the new channels."""

    def __init__(self, n_new: int) -> None:
        super().__init__()
        self.n_before = n_new // 2
        self.n_after = n_new - self.n_before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.n_before, self.n_after))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int, *, projection: bool) -> None:
        super().__init__()
        self.conv1 = _conv3x3(n_in, n_out, stride)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = _conv3x3(n_out, n_out)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.downsample: nn.Module | None = None
        if stride != 1 or n_in != n_out:
            self.downsample = (
                nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False), nn.BatchNorm2d(n_out))
                if projection
                else _PaddedShortcut(n_out - n_in)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + shortcut)


class CifarResNet(nn.Module):
    """A ResNet for 32×32 images: a 3×3 stem, stages of basic blocks, global pooling, one linear layer."""

    def __init__(
        self, widths: tuple[int, ...], n_blocks: int, *, projection: bool, head: str, in_chans: int, num_classes: int
    ) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_chans, widths[0])
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.n_stages = len(widths)
        n_in = widths[0]
        for stage, width in enumerate(widths, start=1):
            strides = [1 if stage == 1 else 2] + [1] * (n_blocks - 1)
            blocks = []
            for stride in strides:
                blocks.append(BasicBlock(n_in, width, stride, projection=projection))
                n_in = width
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.head, self.num_classes = head, num_classes
        self.add_module(head, nn.Linear(n_in, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.n_stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.get_submodule(self.head)(x.mean((2, 3)))


class Bottleneck(nn.Module):
    """A 1×1, a 3×3 and a 1×1 convolution beside a shortcut; the first has the stride, as in the first ResNets."""

    expansion = 4

    def __init__(self, n_in: int, width: int, stride: int, *, projection: bool) -> None:
        super().__init__()
        n_out = self.expansion * width
        self.conv1 = nn.Conv2d(n_in, width, 1, stride=stride, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, n_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(n_out)
        self.downsample: nn.Module | None = None
        if projection:
            self.downsample = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + shortcut)


class BottleneckResNet(nn.Module):
    """A ResNet of bottlenecks for large images: a 7×7 stem and max-pooling, four stages, global pooling, one linear
    layer."""

    def __init__(self, n_blocks: tuple[int, ...], *, width: int, in_chans: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.n_stages = len(n_blocks)
        n_in = width
        for stage, count in enumerate(n_blocks, start=1):
            stage_width = width * 2 ** (stage - 1)
            blocks = []
            for index in range(count):
                stride = 2 if stage > 1 and index == 0 else 1
                blocks.append(Bottleneck(n_in, stage_width, stride, projection=index == 0))
                n_in = Bottleneck.expansion * stage_width
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.fc = nn.Linear(n_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        for stage in range(1, self.n_stages + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


class Fire(nn.Module):
    """SqueezeNet's module: a 1×1 squeeze, then a 1×1 and a 3×3 expansion side by side."""

    def __init__(self, n_in: int, n_squeeze: int, n_expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(n_in, n_squeeze, 1)
        self.expand1x1 = nn.Conv2d(n_squeeze, n_expand, 1)
        self.expand3x3 = nn.Conv2d(n_squeeze, n_expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = F.relu(self.squeeze(x))
        return F.relu(torch.cat([self.expand1x1(squeezed), self.expand3x3(squeezed)], dim=1))


class SqueezeNet(nn.Module):
    """SqueezeNet 1.1."""

    def __init__(self, *, in_chans: int, num_classes: int) -> None:
        super().__init__()

        def pool() -> nn.Module:
            return nn.MaxPool2d(3, stride=2, ceil_mode=True)

        self.features = nn.Sequential(
            nn.Conv2d(in_chans, 64, 3, stride=2),
            nn.ReLU(),
            pool(),
            Fire(64, 16, 64),
            Fire(128, 16, 64),
            pool(),
            Fire(128, 32, 128),
            Fire(256, 32, 128),
            pool(),
            Fire(256, 48, 192),
            Fire(384, 48, 192),
            Fire(384, 64, 256),
            Fire(512, 64, 256),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), nn.Conv2d(512, num_classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x)).flatten(1)


def digits_cnn(*, in_chans: int = 1, num_classes: int = 10, width: int = 32) -> nn.Sequential:
    """A small CNN for scikit-learn's 8×8 digits, wide enough to be worth compressing.

    >>> digits_cnn()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    n_in = in_chans
    for index, n_out in enumerate((width, 2 * width, 4 * width, 4 * width), start=1):
        layers[f"conv{index}"] = _conv3x3(n_in, n_out)
        layers[f"bn{index}"] = nn.BatchNorm2d(n_out)
        layers[f"relu{index}"] = nn.ReLU()
        if index == 2:
            layers["pool"] = nn.MaxPool2d(2)
        n_in = n_out
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(n_in, num_classes)
    return nn.Sequential(layers)


def vgg_cifar(*, in_chans: int = 3, num_classes: int = 10, width: int = 32) -> nn.Sequential:
    """Four convolutions and two wide Linear layers before the last one, for 32×32 images.

    >>> vgg_cifar(width=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    n_in = in_chans
    for index, n_out in enumerate((width, 2 * width, 4 * width, 4 * width), start=1):
        layers[f"conv{index}"] = _conv3x3(n_in, n_out)
        layers[f"bn{index}"] = nn.BatchNorm2d(n_out)
        layers[f"relu{index}"] = nn.ReLU()
        layers[f"pool{index}"] = nn.MaxPool2d(2)
        n_in = n_out
    layers["flatten"] = nn.Flatten()
    n_in *= 4
    for index in (1, 2):
        layers[f"fc{index}"] = nn.Linear(n_in, 16 * width)
        layers[f"relu_fc{index}"] = nn.ReLU()
        layers[f"dropout{index}"] = nn.Dropout(0.3)
        n_in = 16 * width
    layers["fc3"] = nn.Linear(n_in, num_classes)
    return nn.Sequential(layers)


def _resnet_a(n_blocks: int) -> Callable[..., nn.Module]:
    def build(*, in_chans: int = 3, num_classes: int = 10) -> nn.Module:
        return CifarResNet(
            (16, 32, 64), n_blocks, projection=False, head="linear", in_chans=in_chans, num_classes=num_classes
        )

    return build


def _resnet18w32(*, in_chans: int = 3, num_classes: int = 10, width: int = 32) -> nn.Module:
    widths = (width, 2 * width, 4 * width, 8 * width)
    return CifarResNet(widths, 2, projection=True, head="fc", in_chans=in_chans, num_classes=num_classes)


def _resnet50_v1(*, in_chans: int = 3, num_classes: int = 1000, width: int = 64) -> nn.Module:
    return BottleneckResNet((3, 4, 6, 3), width=width, in_chans=in_chans, num_classes=num_classes)


def _squeezenet(*, in_chans: int = 3, num_classes: int = 1000) -> nn.Module:
    return SqueezeNet(in_chans=in_chans, num_classes=num_classes)


#: The networks behind ``zoo:NAME``.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet20-cifar": _resnet_a(3),
    "resnet56-cifar": _resnet_a(9),
    "resnet18w32-cifar": _resnet18w32,
    "resnet50-v1": _resnet50_v1,
    "squeezenet1_1": _squeezenet,
    "digits-cnn": digits_cnn,
    "vgg-cifar": vgg_cifar,
}

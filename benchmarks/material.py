"""What the solver benchmarks work on: grams of a ResNet-18 on real images, kernels with a stated spectrum.

The network has torchvision's shapes and random weights, with BatchNorm estimated on the images; the images are those of
``$TENSIGMA_DATA/imagenet/calib``, or smooth random fields where that is not set (said in the output).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

POWER = 0.5  # singular values of both channel unfoldings fall as i^-POWER; trained ResNets have 0.4 to 0.7
N_IMAGES = 512  # 25,088 rows for the 4,608 features of the last stage


class Block(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out, momentum=None)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out, momentum=None)
        self.downsample = (
            nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out, momentum=None))
            if stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def resnet18() -> nn.Sequential:
    torch.manual_seed(0)
    widths = (64, 128, 256, 512)
    stages = [
        nn.Sequential(Block(widths[max(i - 1, 0)], width, 1 if i == 0 else 2), Block(width, width, 1))
        for i, width in enumerate(widths)
    ]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64, momentum=None), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def _pixels(file: Path) -> Tensor:
    with Image.open(file) as image:
        left, top = (image.width - 224) // 2, (image.height - 224) // 2
        cropped = image.convert("RGB").crop((left, top, left + 224, top + 224))
    return torch.from_numpy(np.array(cropped)).permute(2, 0, 1)


def images(count: int) -> tuple[Tensor, str]:
    """``count`` normalised 224² images and where they are from."""
    folder = Path(os.environ.get("TENSIGMA_DATA", "")) / "imagenet" / "calib"
    if os.environ.get("TENSIGMA_DATA") and folder.is_dir():
        files = sorted(folder.glob("*/*.jpg"))[:count]
        pixels = torch.stack([_pixels(file) for file in files])
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        return (pixels / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1), "imagenet/calib"
    coarse = torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    return functional.interpolate(coarse, size=224, mode="bicubic"), "smooth random fields"


@torch.no_grad()
def grams() -> tuple[dict[str, Tensor], str]:
    """Σ of one 3×3, stride-1 layer in three stages: 64, 256 and 512 channels."""
    model = resnet18()
    batches, source = images(N_IMAGES)
    model.train()
    for batch in batches.split(16):
        model(batch)  # momentum=None: BatchNorm averages over these batches
    model.eval()
    stages = {"layer1": 4, "layer3": 6, "layer4": 7}
    targets = {name: model.get_submodule(f"{index}.1.conv1") for name, index in stages.items()}
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def gather(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = functional.unfold(args[0], 3, padding=1).transpose(0, 1).flatten(1)
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + rows @ rows.T
            counts[name] = counts.get(name, 0) + rows.shape[1]

        return hook

    handles = [module.register_forward_pre_hook(gather(name)) for name, module in targets.items()]
    for batch in batches.split(16):
        model(batch)
    for handle in handles:
        handle.remove()
    return {name: (sums[name] / counts[name]).float() for name in sums}, source


def kernel(n_out: int, n_in: int, taps: tuple[int, ...] = (3, 3), seed: int = 0) -> Tensor:
    """A Gaussian kernel with the spectra of its output and input unfoldings bent to i^-POWER."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n_out, n_in, *taps, generator=generator)

    def basis(n: int) -> Tensor:
        return torch.linalg.qr(torch.randn(n, n, generator=generator))[0] * torch.arange(1.0, n + 1).pow(-POWER)

    left, right = basis(n_out), basis(n_in)
    return torch.einsum("cd,ad...->ac...", right, torch.einsum("ab,bd...->ad...", left, weight))

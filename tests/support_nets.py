"""Small networks and batches that tests of planning and compression share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SmallNet(nn.Module):
    """A stem, a residual block, a grouped, a depthwise, a pointwise and a transposed convolution, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.pointwise = nn.Conv2d(16, 20, 1)
        self.up = nn.ConvTranspose2d(20, 12, 2, stride=2)
        self.hidden = nn.Linear(12, 24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        x = self.block(x)
        x = functional.relu(self.grouped(x)) + functional.relu(self.depthwise(x))
        x = functional.relu(self.up(functional.relu(self.pointwise(x))))
        return self.head(functional.relu(self.hidden(x.mean((2, 3)))))


def small_net(seed: int = 0) -> SmallNet:
    """A network with random weights and running statistics that are not the usual 0 and 1."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = SmallNet()
        norm = net.block[1]
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.uniform_(-0.2, 0.2)
        norm.running_var.uniform_(0.5, 2)
    return net.eval()


def batches(count: int = 3, size: int = 8, pixels: int = 10, seed: int = 0) -> list[Tensor]:
    """Images with neighbouring pixels alike, as real ones have, and a mean far from 0."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count * size, 3, pixels + 2, pixels + 2, generator=generator)
    images = functional.avg_pool2d(noise, 3, stride=1) * 3 + 0.5
    return list(images.split(size))


class ReusingNet(nn.Module):
    """Layers that are called several times: at one size, at two, on tokens, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.again = nn.Conv2d(16, 16, 3, padding=1)
        self.scales = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.tokens = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = x + functional.relu(self.again(x))
        x = self.scales(x) + self.up(self.scales(functional.avg_pool2d(x, 2)))
        x = self.up(functional.avg_pool2d(x, 2))
        rows = x.flatten(2).mT
        return self.head(self.tokens(functional.relu(self.tokens(rows))).mean(1))


def reusing_net(seed: int = 0) -> ReusingNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ReusingNet().eval()

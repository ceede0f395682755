"""Tables of cases that several tests share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerCase:
    """A layer by its constructor and the size of an input it meets."""

    kind: type[nn.Module]
    channels: tuple[int, int]
    size: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def layer(self, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.kind(*self.channels, **self.options).to(dtype)

    def inputs(self, n: int = 3, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
        shape = (n, *self.size, self.channels[0]) if self.kind is nn.Linear else (n, self.channels[0], *self.size)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _conv2d(id: str, size: tuple[int, int] = (9, 7), channels: tuple[int, int] = (6, 8), **options: Any) -> Any:
    return pytest.param(LayerCase(nn.Conv2d, channels, size, {"kernel_size": 3, **options}), id=id)


#: Everything a convolution can be asked for, one thing at a time and a few together.
CONVOLUTIONS = [
    _conv2d("plain"),
    _conv2d("no-bias", bias=False),
    _conv2d("padding", padding=1),
    _conv2d("padding-2x1", padding=(2, 1)),
    _conv2d("stride-2", stride=2, padding=1),
    _conv2d("stride-2x1", stride=(2, 1), padding=1),
    _conv2d("stride-past-kernel", kernel_size=2, stride=3),
    _conv2d("dilation-2", dilation=2, padding=2),
    _conv2d("dilation-1x2", dilation=(1, 2), padding=(1, 0)),
    _conv2d("kernel-3x1", kernel_size=(3, 1), padding=(1, 0)),
    _conv2d("kernel-1x5-strided", kernel_size=(1, 5), stride=(2, 3), padding=(1, 2)),
    _conv2d("kernel-2x4", kernel_size=(2, 4)),
    _conv2d("pointwise", kernel_size=1),
    _conv2d("pointwise-strided", kernel_size=1, stride=2, padding=1),
    _conv2d("same", padding="same"),
    _conv2d("same-dilated", padding="same", dilation=(2, 1)),
    _conv2d("same-even", padding="same", kernel_size=(4, 2)),
    _conv2d("valid", padding="valid", stride=2),
    _conv2d("reflect", padding=(2, 1), padding_mode="reflect"),
    _conv2d("replicate", padding=(1, 2), padding_mode="replicate", stride=(1, 2)),
    _conv2d("circular", padding=2, padding_mode="circular", dilation=2),
    _conv2d("reflect-same-even", padding="same", padding_mode="reflect", kernel_size=(2, 4)),
    _conv2d("map-smaller-than-kernel", size=(2, 1), kernel_size=5, padding=2),
    _conv2d("one-in", channels=(1, 5), padding=1),
    _conv2d("one-out", channels=(5, 1), padding=1),
    _conv2d("everything", kernel_size=(3, 2), stride=(2, 1), padding=(3, 1), dilation=(2, 3), padding_mode="circular"),
    pytest.param(LayerCase(nn.Conv1d, (5, 7), (11,), {"kernel_size": 3, "stride": 2, "padding": 1}), id="conv1d"),
    pytest.param(
        LayerCase(nn.Conv1d, (5, 7), (11,), {"kernel_size": 4, "padding": "same", "padding_mode": "replicate"}),
        id="conv1d-same-even-replicate",
    ),
    pytest.param(
        LayerCase(nn.Conv3d, (4, 5), (5, 6, 4), {"kernel_size": (3, 2, 1), "stride": (1, 2, 1), "padding": (1, 1, 0)}),
        id="conv3d",
    ),
    pytest.param(
        LayerCase(nn.Conv3d, (4, 5), (5, 6, 4), {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}),
        id="conv3d-circular",
    ),
]

GROUPED = [
    _conv2d("groups-2", groups=2, padding=1),
    _conv2d("groups-3-strided", channels=(6, 9), groups=3, stride=(2, 1), padding=1, bias=False),
    _conv2d("groups-2-pointwise", groups=2, kernel_size=1),
    pytest.param(LayerCase(nn.Conv1d, (6, 8), (11,), {"kernel_size": 3, "groups": 2}), id="conv1d-groups-2"),
]

TRANSPOSED = [
    pytest.param(LayerCase(nn.ConvTranspose2d, (6, 8), (5, 4), {"kernel_size": 3}), id="transposed"),
    pytest.param(
        LayerCase(
            nn.ConvTranspose2d,
            (6, 8),
            (5, 4),
            {"kernel_size": (3, 4), "stride": (2, 3), "padding": (1, 2), "output_padding": (1, 2), "dilation": (1, 2)},
        ),
        id="transposed-everything",
    ),
    pytest.param(
        LayerCase(nn.ConvTranspose2d, (6, 8), (5, 4), {"kernel_size": 2, "stride": 2, "groups": 2, "bias": False}),
        id="transposed-groups-2",
    ),
    pytest.param(LayerCase(nn.ConvTranspose1d, (5, 7), (6,), {"kernel_size": 4, "stride": 2}), id="transposed1d"),
    pytest.param(LayerCase(nn.ConvTranspose3d, (4, 5), (3, 4, 2), {"kernel_size": 2}), id="transposed3d"),
]

LINEAR = [
    pytest.param(LayerCase(nn.Linear, (7, 5), ()), id="linear"),
    pytest.param(LayerCase(nn.Linear, (7, 5), (3, 2), {"bias": False}), id="linear-leading-axes"),
]

GEOMETRIES = [*CONVOLUTIONS, *GROUPED, *TRANSPOSED, *LINEAR]

DEPTHWISE = [
    _conv2d("depthwise", channels=(6, 6), groups=6, padding=1),
    _conv2d("depthwise-multiplier", channels=(6, 12), groups=6, padding=1),
]


#: Kernels that solvers must master, as (t, s, *taps).
KERNELS = [
    pytest.param((12, 10, 3, 3), id="3x3"),
    pytest.param((4, 24, 3, 3), id="t≪s"),
    pytest.param((24, 4, 3, 3), id="t≫s"),
    pytest.param((12, 10, 1, 1), id="1x1"),
    pytest.param((12, 10, 1, 5), id="1x5"),
    pytest.param((12, 10, 4), id="conv1d"),
    pytest.param((8, 6, 2, 3, 2), id="conv3d"),
    pytest.param((14, 11), id="linear"),
]

"""The Fourier transform of small maps as matrix products, read at a few lags."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tensigma.calibration.lag_recipe import Pair


@dataclass(frozen=True, eq=False)
class Basis:
    across: Tensor  # (2·wf, width)
    down_real: Tensor  # (2·nh, height), rows of each frequency: real part, imaginary part
    down_imag: Tensor
    cosines: Tensor  # (lags, wf·nh)
    sines: Tensor


@lru_cache(maxsize=64)
def basis_of(map_size: Pair, size: Pair, lags: tuple[Pair, ...], dtype: torch.dtype, device: torch.device) -> Basis:
    """Matrices of the transform from ``map_size`` to ``size``, and from there to the lags."""
    (height, width), (nh, nw) = map_size, size
    wf = nw // 2 + 1
    tau = 2 * math.pi

    def angles(first: Tensor, second: Tensor, n: int) -> Tensor:
        # Reduced in integers, so that large arguments lose no precision.
        return (first[:, None] * second[None, :] % n).double() * (tau / n)

    across = angles(torch.arange(wf), torch.arange(width), nw)
    down = angles(torch.arange(nh), torch.arange(height), nh)
    dy, dx = torch.tensor(lags).T
    down_lag = angles(dy % nh, torch.arange(nh), nh)  # (lags, nh)
    across_lag = angles(dx % nw, torch.arange(wf), nw)  # (lags, wf)
    turn = (across_lag[:, :, None] + down_lag[:, None, :]).flatten(1)  # (lags, wf·nh)
    weight = torch.full((wf,), 2.0, dtype=torch.float64)
    weight[0] = 1.0
    if nw % 2 == 0:
        weight[-1] = 1.0
    weight = (weight / (nh * nw)).repeat_interleave(nh)
    # e^{-iθ}(re + i·im) = (cos·re + sin·im) + i(cos·im − sin·re)
    down_real = torch.stack([down.cos(), -down.sin()], dim=1).flatten(0, 1)
    down_imag = torch.stack([down.sin(), down.cos()], dim=1).flatten(0, 1)
    parts = (
        torch.cat([across.cos(), -across.sin()]),
        down_real,
        down_imag,
        turn.cos() * weight,
        turn.sin() * weight,
    )
    return Basis(*(part.to(dtype).to(device).contiguous() for part in parts))

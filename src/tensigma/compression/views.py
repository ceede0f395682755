"""Random views of images, so that refinement sees more than the images that layers were fitted to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Shares of the area that crops have, and by how much their sides differ at most.
_AREA, _LONGER = (0.35, 1.0), 1.22
# Sides of exchanged patches as shares of those of the image.
_PATCH = (0.25, 0.75)


class Views:
    """Crops of images, mirrored at random; of three batches, one is mixed in pairs and one has patches exchanged.

    For ``ts.Refine(augment=Views())``. The original is asked about the very images that the small model sees, so no
    view is given a wrong answer. Inputs other than batches of images, (n, channels, height, width), stay as they are.

    >>> import torch
    >>> views = Views(seed=0)
    >>> views(torch.randn(4, 3, 8, 8)).shape, views("text")
    (torch.Size([4, 3, 8, 8]), 'text')
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, x: Any) -> Any:
        if not (isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()):
            return x
        cropped = self._cropped(x)
        return (self._mixed, self._exchanged, lambda crops: crops)[int(self._uniform(1, 0, 3))](cropped)

    def _cropped(self, x: Tensor) -> Tensor:
        n = len(x)
        side = self._uniform(n, *_AREA).sqrt()
        longer = _LONGER ** self._uniform(n, -0.5, 0.5)
        scale = torch.stack([side * longer, side / longer], dim=1).clamp(max=1.0)
        shift = (2 * self._uniform(2 * n).reshape(n, 2) - 1) * (1 - scale)
        mirror = torch.where(self._uniform(n) < 0.5, -1.0, 1.0)
        window = torch.zeros(n, 2, 3)
        window[:, 0, 0], window[:, 1, 1], window[:, :, 2] = scale[:, 0] * mirror, scale[:, 1], shift
        grid = F.affine_grid(window.to(x), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

    def _mixed(self, x: Tensor) -> Tensor:
        share = self._uniform(len(x)).to(x)[:, None, None, None]
        return share * x + (1 - share) * self._shuffled(x)

    def _exchanged(self, x: Tensor) -> Tensor:
        share, *place = self._uniform(3).tolist()
        sides = [max(1, round((_PATCH[0] + (_PATCH[1] - _PATCH[0]) * share) * side)) for side in x.shape[2:]]
        rows, columns = (
            slice(start := int(at * (whole - side + 1)), start + side)
            for at, whole, side in zip(place, x.shape[2:], sides, strict=True)
        )
        x = x.clone()
        x[..., rows, columns] = self._shuffled(x)[..., rows, columns]
        return x

    def _shuffled(self, x: Tensor) -> Tensor:
        return x[torch.randperm(len(x), generator=self._generator).to(x.device)]

    def _uniform(self, n: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(n, generator=self._generator)

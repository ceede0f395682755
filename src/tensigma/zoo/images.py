"""From images to network inputs: size, an optional detour via another resolution, normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tensigma.errors import InputError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class View:
    """How the pixel values of a set become network inputs."""

    #: Pixel values are divided by this before normalisation.
    scale: float
    #: Side of the square that is cropped from the centre; None keeps images as they are.
    size: int | None = None
    #: Length of the short side before the crop; None takes the crop from the image as it is.
    resize: int | None = None
    #: Side of a square to shrink to and enlarge from, so that images are as detailed as a set of that resolution.
    via: int | None = None
    interpolation: str = "bilinear"
    #: Height and width to bring the whole image to, instead of a square from its centre: by stretching it, or with its
    #: proportions kept and zeros right and below.
    shape: tuple[int, int] | None = None
    fit: str = "stretch"
    #: Order of the colours, "rgb" or "bgr", and place of the channels, "nchw" or "nhwc".
    order: str = "rgb"
    layout: str = "nchw"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def apply(self, images: Tensor) -> Tensor:
        """Prepare (n, c, h, w) pixel values, any dtype.

        >>> view = View(scale=255, size=4, resize=4, via=2, mean=(0.5,), std=(0.5,))
        >>> view.apply(torch.full((1, 1, 8, 6), 255, dtype=torch.uint8)).unique()
        tensor([1.])
        """
        x = images.float()
        if self.shape is not None:
            x = self._to(x, self._fitted(x, self.shape))
        elif self.resize is not None:
            x = self._to_short_side(x, self.resize)
        if self.size is not None and self.shape is None:
            x = self._crop(x, self.size)
        if self.via is not None:
            size = x.shape[-2:]
            x = self._to(self._to(x, (self.via, self.via)), size)
        if self.order == "bgr":
            x = x.flip(1)
        mean, std = self._statistics(x.shape[1])
        x = (x / self.scale - mean) / std
        if self.shape is not None:
            height, width = self.shape
            x = F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]))
        return x.permute(0, 2, 3, 1).contiguous() if self.layout == "nhwc" else x

    def _fitted(self, x: Tensor, shape: tuple[int, int]) -> tuple[int, int]:
        """The size to bring an image to within ``shape``."""
        if self.fit == "stretch":
            return shape
        factor = min(side / length for side, length in zip(shape, x.shape[-2:], strict=True))
        height, width = (max(1, min(side, round(factor * n))) for side, n in zip(shape, x.shape[-2:], strict=True))
        return height, width

    def _statistics(self, n_channels: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, (c, 1, 1) or (1, 1, 1) each."""
        statistics = []
        for name, values in (("mean", self.mean or (0.0,)), ("std", self.std or (1.0,))):
            if len(values) not in (1, n_channels):
                raise InputError(
                    f"{name} has {len(values)} values and the images {n_channels} channels; give one or {n_channels}"
                )
            statistics.append(torch.tensor(values, dtype=torch.float32)[:, None, None])
        return statistics[0], statistics[1]

    def _to_short_side(self, x: Tensor, length: int) -> Tensor:
        height, width = x.shape[-2:]
        short = min(height, width)
        return self._to(x, (int(length * height / short), int(length * width / short)))

    def _crop(self, x: Tensor, size: int) -> Tensor:
        height, width = x.shape[-2:]
        if min(height, width) < size:
            raise InputError(f"size={size} is too large; the image has {height}×{width} pixels at resize={self.resize}")
        top, left = round((height - size) / 2), round((width - size) / 2)
        return x[..., top : top + size, left : left + size]

    def _to(self, x: Tensor, size: tuple[int, ...]) -> Tensor:
        if tuple(x.shape[-2:]) == tuple(size):
            return x
        y = F.interpolate(x, size=list(size), mode=self.interpolation, align_corners=False, antialias=True)
        # Whole pixel values within range, as an image stored at that resolution would have.
        return y.round_().clamp_(0, 255) if self.scale == 255 else y

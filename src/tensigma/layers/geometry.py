"""What a layer is: sizes, strides and paddings, apart from the weights it carries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from tensigma.errors import UnsupportedLayer

Kind = Literal["linear", "conv", "conv_transpose"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: The layers that Tensigma looks at. Subclasses with a forward of their own are left alone.
TARGETS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One linear or convolutional layer without its weights.

    >>> geometry = Geometry.of(nn.Conv2d(8, 16, (3, 1), stride=(2, 1), padding=(1, 0), groups=2))
    >>> geometry.patch_size, geometry.n_taps, geometry.pads
    (12, 3, ((1, 1), (0, 0)))
    >>> geometry.macs((4, 7))
    5376
    """

    kind: Kind
    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | Literal["same", "valid"] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: str = "zeros"
    output_padding: tuple[int, ...] = ()
    bias: bool = True

    @classmethod
    def of(cls, module: nn.Module) -> Geometry:
        """The geometry of ``module``; raises :class:`UnsupportedLayer` for any other kind of layer."""
        if type(module) is nn.Linear:
            return cls(
                kind="linear",
                in_channels=module.in_features,
                out_channels=module.out_features,
                bias=module.bias is not None,
            )
        if type(module) in (*CONVOLUTIONS, *TRANSPOSED):
            assert isinstance(module, (*CONVOLUTIONS, *TRANSPOSED))
            padding = module.padding if isinstance(module.padding, str) else tuple(module.padding)
            return cls(
                kind="conv" if isinstance(module, CONVOLUTIONS) else "conv_transpose",
                in_channels=module.in_channels,
                out_channels=module.out_channels,
                kernel_size=tuple(module.kernel_size),
                stride=tuple(module.stride),
                padding=padding,  # type: ignore[arg-type]
                dilation=tuple(module.dilation),
                groups=module.groups,
                padding_mode=module.padding_mode,
                output_padding=tuple(module.output_padding),
                bias=module.bias is not None,
            )
        accepted = ", ".join(target.__name__ for target in TARGETS)
        raise UnsupportedLayer(f"{type(module).__name__} is not a layer Tensigma can read; it reads exactly {accepted}")

    @property
    def n_spatial(self) -> int:
        """Number of spatial axes: 0 for Linear, 2 for Conv2d."""
        return len(self.kernel_size)

    @property
    def n_taps(self) -> int:
        return math.prod(self.kernel_size)

    @property
    def patch_size(self) -> int:
        """``d``: what one group of the layer sees at once, in-channels × taps."""
        return self.in_channels // self.groups * self.n_taps

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """Padding (before, after) of each spatial axis, with ``"same"`` and ``"valid"`` resolved."""
        if self.padding == "valid":
            return ((0, 0),) * self.n_spatial
        if self.padding == "same":
            totals = [dilation * (k - 1) for dilation, k in zip(self.dilation, self.kernel_size, strict=True)]
            # PyTorch puts the odd one at the end.
            return tuple((total // 2, total - total // 2) for total in totals)
        return tuple((int(p), int(p)) for p in self.padding)

    @property
    def n_params(self) -> int:
        return (
            self.out_channels * self.patch_size + self.bias * self.out_channels
            if self.kind != "conv_transpose"
            else self.in_channels * self.out_channels // self.groups * self.n_taps + self.bias * self.out_channels
        )

    def output_size(self, input_size: Sequence[int]) -> tuple[int, ...]:
        """Spatial size of the output for an input of spatial size ``input_size`` (empty for Linear)."""
        spans = [dilation * (k - 1) for dilation, k in zip(self.dilation, self.kernel_size, strict=True)]
        pads = [before + after for before, after in self.pads]
        axes = zip(input_size, spans, pads, self.stride, strict=True)
        if self.kind == "conv_transpose":
            extra = self.output_padding
            return tuple(
                (n - 1) * step - pad + span + e + 1 for (n, span, pad, step), e in zip(axes, extra, strict=True)
            )
        return tuple((n + pad - span - 1) // step + 1 for n, span, pad, step in axes)

    def macs(self, spatial: Sequence[int]) -> int:
        """Multiply-adds for one sample, where ``spatial`` is the output size (the input size if transposed).

        For Linear, ``spatial`` is the leading shape the layer is applied over, often empty.
        """
        weights = self.n_params - self.bias * self.out_channels
        return weights * math.prod(spatial)

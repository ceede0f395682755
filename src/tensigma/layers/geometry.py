"""What a layer is: sizes, strides and paddings, apart from the weights it carries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.utils import parametrize

from tensigma.errors import UnsupportedLayer

Kind = Literal["linear", "conv", "conv_transpose"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: The layers that Tensigma looks at. Subclasses that may compute something else are left alone.
TARGETS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
#: What a subclass may change of its base and still compute the same: how it is built and how it is shown.
_HARMLESS = {
    *("__init__", "__repr__", "extra_repr", "reset_parameters"),
    *("__doc__", "__module__", "__annotations__", "__annotate_func__", "__annotations_cache__"),
    *("__firstlineno__", "__static_attributes__"),  # from Python 3.13 on
}


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of a layer, without subclasses that compute the same.

    Those are the one that ``torch.nn.utils.parametrize`` makes, and those that only build their base in another way.

    >>> plain_type(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))).__name__
    'Linear'
    >>> class Pointwise(nn.Conv2d):
    ...     def __init__(self, n_in, n_out):
    ...         super().__init__(n_in, n_out, 1, bias=False)
    >>> plain_type(Pointwise(3, 4)).__name__
    'Conv2d'
    """
    parametrized = parametrize.is_parametrized(module)
    kind = type(module).__mro__[1] if parametrized else type(module)
    base = next((target for target in TARGETS if issubclass(kind, target)), None)
    if base is None or kind is base or parametrized or not _is_plain_layer(module):
        return kind
    between = kind.__mro__[: kind.__mro__.index(base)]
    return base if all(_changes_nothing(each, base) for each in between) else kind


def _is_plain_layer(module: nn.Module) -> bool:
    """Whether a layer has a weight and a bias, and nothing besides."""
    return set(module._parameters) == {"weight", "bias"} and not module._buffers and not module._modules


def _changes_nothing(kind: type, base: type[nn.Module]) -> bool:
    """Whether a subclass computes what its base computes. Those of torch itself are lazy, quantised or watched."""
    overridden = {name for name in vars(kind) if hasattr(base, name)} - _HARMLESS
    return not overridden and not {"weight", "bias"} & set(vars(kind)) and not kind.__module__.startswith("torch.")


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
        kind = plain_type(module)
        if kind is nn.Linear:
            assert isinstance(module, nn.Linear)
            return cls(
                kind="linear",
                in_channels=module.in_features,
                out_channels=module.out_features,
                bias=module.bias is not None,
            )
        if kind in (*CONVOLUTIONS, *TRANSPOSED):
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

    def to_module(self) -> nn.Module:
        """A plain layer of this geometry whose parameters are on the ``meta`` device, to be assigned.

        Nothing is initialised, so the global random state stays as it was.

        >>> Geometry.of(nn.Conv1d(4, 6, 3, padding="same")).to_module()
        Conv1d(4, 6, kernel_size=(3,), stride=(1,), padding=same)
        """
        if self.kind == "linear":
            return nn.Linear(self.in_channels, self.out_channels, bias=self.bias, device="meta")
        options: dict[str, object] = {
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "bias": self.bias,
            "padding_mode": self.padding_mode,
            "device": "meta",
        }
        family: Sequence[type[nn.Module]] = CONVOLUTIONS
        if self.kind == "conv_transpose":
            family = TRANSPOSED
            options["output_padding"] = self.output_padding
        return family[self.n_spatial - 1](self.in_channels, self.out_channels, self.kernel_size, **options)

    @property
    def n_spatial(self) -> int:
        """Number of spatial axes: 0 for Linear, 2 for Conv2d."""
        return len(self.kernel_size)

    @property
    def n_taps(self) -> int:
        """Number of kernel positions: 9 for 3×3, 1 for Linear."""
        return math.prod(self.kernel_size)

    @property
    def kernel_shape(self) -> tuple[int, ...]:
        """Shape of the kernel of one group in the solvers' orientation, (t/groups, s/groups, *taps)."""
        return (self.out_channels // self.groups, self.in_channels // self.groups, *self.kernel_size)

    @property
    def patch_size(self) -> int:
        """``d``: what one group of the layer sees at once, in-channels × taps."""
        return self.in_channels // self.groups * self.n_taps

    @property
    def is_pointwise(self) -> bool:
        """Whether the layer mixes channels only: Linear, or a kernel of one tap."""
        return self.n_taps == 1

    @property
    def is_depthwise(self) -> bool:
        """Whether every group has a single input channel, so that there are no channels to mix."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """Padding (before, after) of each spatial axis, with ``"same"`` and ``"valid"`` resolved."""
        if self.padding == "valid":
            return ((0, 0),) * self.n_spatial
        if self.padding == "same":
            totals = [dilation * (k - 1) for dilation, k in zip(self.dilation, self.kernel_size, strict=True)]
            # PyTorch puts the odd one at the end.
            return tuple((total // 2, total - total // 2) for total in totals)
        return tuple((p, p) for p in self.padding)

    @property
    def n_weights(self) -> int:
        """Parameters without the bias."""
        return self.out_channels * self.patch_size

    @property
    def n_params(self) -> int:
        """Parameters, the bias included."""
        return self.n_weights + self.bias * self.out_channels

    def output_size(self, input_size: Sequence[int]) -> tuple[int, ...]:
        """Spatial size of the output for an input of spatial size ``input_size`` (for Linear, its leading shape)."""
        if self.kind == "linear":
            return tuple(input_size)
        spans = [dilation * (k - 1) for dilation, k in zip(self.dilation, self.kernel_size, strict=True)]
        pads = [before + after for before, after in self.pads]
        axes = zip(input_size, spans, pads, self.stride, strict=True)
        if self.kind == "conv_transpose":
            extra = self.output_padding
            return tuple(
                (n - 1) * step - pad + span + e + 1 for (n, span, pad, step), e in zip(axes, extra, strict=True)
            )
        return tuple((n + pad - span - 1) // step + 1 for n, span, pad, step in axes)

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether one sample at the input of the layer can have this shape.

        >>> geometry = Geometry.of(nn.Conv2d(3, 8, 3))
        >>> tuple(map(geometry.takes, ((3, 9, 9), (3, 9), (4, 9, 9), (3, 9, 2))))
        (True, False, False, False)
        """
        if self.kind == "linear":
            # Of leading axes any may be empty, such as the boxes that a detector did not find.
            return len(shape) > 0 and shape[-1] == self.in_channels
        if len(shape) != self.n_spatial + 1 or shape[0] != self.in_channels:
            return False
        return min(*shape, *self.output_size(shape[1:])) >= 1

    def macs(self, spatial: Sequence[int]) -> int:
        """Multiply-adds for one sample, where ``spatial`` is the output size (the input size if transposed).

        For Linear, ``spatial`` is the leading shape the layer is applied over, often empty. Products with padded
        zeros count, as is usual.
        """
        return self.n_weights * math.prod(spatial)

    def macs_from(self, input_size: Sequence[int]) -> int:
        """Multiply-adds for one sample of spatial size ``input_size``.

        >>> Geometry.of(nn.Conv2d(3, 8, 3, stride=2)).macs_from((9, 9)) == 3 * 8 * 9 * 4 * 4
        True
        """
        return self.macs(input_size if self.kind == "conv_transpose" else self.output_size(input_size))

"""Helpers for writing formats: parts of a layer, the layer that parts come from, and common reasons to refuse one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from tensigma.errors import InputError
from tensigma.layers.geometry import Geometry


def pointwise(geometry: Geometry, in_channels: int, out_channels: int, *, bias: bool = False) -> Geometry:
    """A layer that only mixes channels, for use beside ``geometry``: as many axes, as many groups.

    It is a 1×1 convolution next to convolutions, transposed ones too, and a Linear next to a Linear.

    >>> from torch import nn
    >>> pointwise(Geometry.of(nn.ConvTranspose2d(8, 16, 3, stride=2, groups=2)), 8, 4).to_module()
    Conv2d(8, 4, kernel_size=(1, 1), stride=(1, 1), groups=2, bias=False)
    """
    ones, zeros = (1,) * geometry.n_spatial, (0,) * geometry.n_spatial
    return Geometry(
        kind="linear" if geometry.kind == "linear" else "conv",
        in_channels=in_channels,
        out_channels=out_channels,
        kernel_size=ones,
        stride=ones,
        padding=zeros,
        dilation=ones,
        groups=geometry.groups,
        output_padding=zeros,
        bias=bias,
    )


def pointwise_kernel(matrix: Tensor, n_spatial: int) -> Tensor:
    """A matrix (t, s) as the kernel of a pointwise layer of one group, (1, t, s, 1, …).

    >>> import torch
    >>> pointwise_kernel(torch.ones(6, 4), 2).shape
    torch.Size([1, 6, 4, 1, 1])
    """
    return matrix.reshape(1, *matrix.shape, *(1,) * n_spatial)


def along(geometry: Geometry, axes: Iterable[int]) -> Geometry:
    """The part of a convolution that acts on ``axes``: taps, stride, padding and dilation of these spatial axes alone.

    >>> from torch import nn
    >>> layer = Geometry.of(nn.Conv2d(8, 16, (3, 5), stride=(2, 1), padding=(1, 2)))
    >>> along(layer, [0]).to_module()
    Conv2d(8, 16, kernel_size=(3, 1), stride=(2, 1), padding=(1, 0))
    """
    kept = set(axes)

    def pick(values: tuple[int, ...], default: int) -> tuple[int, ...]:
        return tuple(value if axis in kept else default for axis, value in enumerate(values))

    padding = geometry.padding
    return replace(
        geometry,
        kernel_size=pick(geometry.kernel_size, 1),
        stride=pick(geometry.stride, 1),
        dilation=pick(geometry.dilation, 1),
        # "same" stays right as it is: along an axis with one tap it pads nothing.
        padding=padding if isinstance(padding, str) else pick(padding, 0),
        output_padding=pick(geometry.output_padding, 0),
    )


def joined(axes: Sequence[int], stages: Sequence[Geometry]) -> Geometry:
    """One convolution from several that act along one axis each, the inverse of :func:`along`.

    ``axes[i]`` is the axis of ``stages[i]``. Channels, groups, bias and the axes that no stage names are those of the
    first stage.

    >>> from torch import nn
    >>> layer = Geometry.of(nn.Conv2d(8, 16, (3, 5), stride=(2, 1), padding=(1, 2)))
    >>> joined([0, 1], [along(layer, [0]), along(layer, [1])]) == layer
    True
    """
    whole = stages[0]
    n_spatial = whole.n_spatial
    if any(stage.n_spatial != n_spatial for stage in stages) or not set(axes) <= set(range(n_spatial)):
        counts = [stage.n_spatial for stage in stages]
        raise InputError(f"got axes {list(axes)} for stages with {counts} spatial axes; these cannot be joined")
    for axis, stage in zip(axes[1:], stages[1:], strict=True):

        def put(into: tuple[int, ...], source: tuple[int, ...], axis: int = axis) -> tuple[int, ...]:
            return tuple(source[i] if i == axis else value for i, value in enumerate(into))

        padding = whole.padding
        if not isinstance(padding, str) and not isinstance(stage.padding, str):
            padding = put(padding, stage.padding)
        whole = replace(
            whole,
            kernel_size=put(whole.kernel_size, stage.kernel_size),
            stride=put(whole.stride, stage.stride),
            dilation=put(whole.dilation, stage.dilation),
            padding=padding,
            output_padding=put(whole.output_padding, stage.output_padding),
        )
    return whole


def axis_groups(kernel_size: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Spatial axes grouped by the layer that carries them, if every axis with taps gets a layer of its own.

    The first axis of each group has the taps. Axes with one tap join the first group: they need no layer, but their
    stride and padding must be applied somewhere.

    >>> axis_groups((3, 3)), axis_groups((1, 7)), axis_groups((1, 1))
    ([(0,), (1,)], [(1, 0)], [(0, 1)])
    """
    wide = [axis for axis, k in enumerate(kernel_size) if k > 1] or [0]
    single = [axis for axis in range(len(kernel_size)) if axis not in wide]
    return [(wide[0], *single), *((axis,) for axis in wide[1:])]


def depthwise_reason(geometry: Geometry) -> str | None:
    """Why a depthwise convolution is refused by formats that reduce its channels; None for other layers.

    >>> from torch import nn
    >>> depthwise_reason(Geometry.of(nn.Conv2d(6, 6, 3, groups=6)))
    'a depthwise convolution (groups=6) has one input channel per group and none to reduce; leave it dense'
    """
    if not geometry.is_depthwise:
        return None
    return (
        f"a depthwise convolution (groups={geometry.groups}) has one input channel per group and none to reduce; "
        "leave it dense"
    )


def two_axes_reason(title: str, geometry: Geometry) -> str | None:
    """Why a format that treats height and width apart cannot replace the layer; None if it can.

    Such a format takes ordinary convolutions with two spatial axes and more than one tap on both. ``title`` is what the
    message calls the format.

    >>> from torch import nn
    >>> two_axes_reason("spatial SVD", Geometry.of(nn.Conv1d(8, 8, 3)))
    "spatial SVD needs two spatial axes and this convolution has 1; use method='tucker2' for it"
    >>> two_axes_reason("spatial SVD", Geometry.of(nn.Conv2d(8, 8, 3)))
    """
    if geometry.kind == "linear":
        return f"{title} needs a kernel with two spatial axes and Linear has none; use method='svd' for it"
    if geometry.kind == "conv_transpose":
        return f"{title} cannot carry a transposed convolution; use method='tucker2' or method='svd' for it"
    if geometry.n_spatial != 2:
        return (
            f"{title} needs two spatial axes and this convolution has {geometry.n_spatial}; use method='tucker2' for it"
        )
    if min(geometry.kernel_size) == 1:
        method = "svd" if geometry.is_pointwise else "tucker2"
        size = "×".join(map(str, geometry.kernel_size))
        return f"{title} needs more than one tap on both axes and the kernel is {size}; use method='{method}' for it"
    if geometry.is_depthwise:
        return (
            f"{title} is not offered for a depthwise convolution (groups={geometry.groups}), which has few weights to "
            "save; leave it dense"
        )
    return None

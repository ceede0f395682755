"""The formats a layer can take, by rank alone: which small layers stand in for it, and which layers it cannot carry.

A format is what a plan writes down. It needs no factors, so costs can be asked for before anything is solved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import singledispatch
from typing import ClassVar, Protocol

from tensigma.errors import InputError, RankError, UnsupportedLayer
from tensigma.layers.geometry import Geometry
from tensigma.linalg import CPFactors, Factors, SVDFactors, Tucker2Factors


class Format(Protocol):
    """A decomposition and its ranks; for a grouped layer the ranks are those of each group."""

    name: ClassVar[str]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the order of the constructor."""
        ...

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        """Why this format cannot carry the layer, or None where it can."""
        ...

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        """The layers that replace a layer of this geometry, by name and in the order of execution."""
        ...


class _Ranked:
    """What all formats share: ranks are the fields of that name, and they are at least 1."""

    def __post_init__(self) -> None:
        for name, rank in zip(self._rank_names(), self.ranks, strict=True):
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise RankError(f"{type(self).__name__}: {name}={rank!r} came; give an integer of at least 1")

    @classmethod
    def _rank_names(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.name.startswith("rank")]  # type: ignore[arg-type]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the order of the constructor."""
        return tuple(getattr(self, name) for name in self._rank_names())


def _depthwise_reason(geometry: Geometry) -> str | None:
    if geometry.is_depthwise:
        return (
            f"a depthwise convolution (groups={geometry.groups}) has a single input channel per group, "
            "so there are no channels to reduce; leave it dense"
        )
    return None


@dataclass(frozen=True)
class SVDFormat(_Ranked):
    """A full-size convolution into ``rank`` channels, then a pointwise one; for Linear, two Linear layers.

    >>> [(name, stage.kernel_size) for name, stage in SVDFormat(4).stages(_example()).items()]
    [('reduce', (3, 3)), ('expand', (1, 1))]
    """

    name: ClassVar[str] = "svd"
    rank: int

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        return _depthwise_reason(geometry)

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        rank = self.rank * geometry.groups
        return {
            "reduce": replace(geometry, out_channels=rank, bias=False),
            "expand": _pointwise(geometry, rank, geometry.out_channels, bias=geometry.bias),
        }


@dataclass(frozen=True)
class Tucker2Format(_Ranked):
    """Pointwise into ``rank_in`` channels, a small core convolution into ``rank_out``, pointwise again.

    >>> [(stage.in_channels, stage.out_channels) for stage in Tucker2Format(4, 2).stages(_example()).values()]
    [(8, 2), (2, 4), (4, 16)]
    """

    name: ClassVar[str] = "tucker2"
    rank_out: int
    rank_in: int

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        if geometry.kind == "linear":
            return "Tucker-2 needs a kernel with spatial taps and Linear has none; use method='svd' for it"
        return _depthwise_reason(geometry)

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        rank_out, rank_in = self.rank_out * geometry.groups, self.rank_in * geometry.groups
        # No layer before the core has a bias, so every kind of padding gives the same on channels already mixed.
        return {
            "reduce": _pointwise(geometry, geometry.in_channels, rank_in),
            "core": replace(geometry, in_channels=rank_in, out_channels=rank_out, bias=False),
            "expand": _pointwise(geometry, rank_out, geometry.out_channels, bias=geometry.bias),
        }


@dataclass(frozen=True)
class CPFormat(_Ranked):
    """Pointwise into ``rank`` channels, depthwise along each spatial axis (or, joint, over all at once), pointwise.

    Axes on which the kernel has a single tap get no layer of their own.

    >>> [(name, stage.kernel_size) for name, stage in CPFormat(4).stages(_example()).items()]
    [('reduce', (1, 1)), ('depth0', (3, 1)), ('depth1', (1, 3)), ('expand', (1, 1))]
    >>> list(CPFormat(4, joint=True).stages(_example()))
    ['reduce', 'depth', 'expand']
    """

    name: ClassVar[str] = "cp"
    rank: int
    joint: bool = False

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        if geometry.kind == "linear":
            return "CP needs a kernel with spatial taps and Linear has none; use method='svd' for it"
        if geometry.kind == "conv_transpose":
            return "CP cannot carry a transposed convolution; use method='tucker2' or method='svd' for it"
        if geometry.is_depthwise:
            return _depthwise_reason(geometry)
        if geometry.groups > 1:
            return f"CP cannot carry groups={geometry.groups}; use method='tucker2' for it"
        return None

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        depthwise = replace(geometry, in_channels=self.rank, out_channels=self.rank, groups=self.rank, bias=False)
        if self.joint:
            middle = {"depth": depthwise}
        else:
            middle = {f"depth{axes[0]}": _along(depthwise, axes) for axes in axis_groups(geometry.kernel_size)}
        return {
            "reduce": _pointwise(geometry, geometry.in_channels, self.rank),
            **middle,
            "expand": _pointwise(geometry, self.rank, geometry.out_channels, bias=geometry.bias),
        }


def check(format: Format, geometry: Geometry) -> None:
    """Raise :class:`UnsupportedLayer` where ``format`` cannot carry a layer of this geometry."""
    reason = format.why_not(geometry)
    if reason is not None:
        raise UnsupportedLayer(reason)


def axis_groups(kernel_size: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Spatial axes by the layer that carries them when CP treats axes apart; the first axis of each has the taps.

    Axes with one tap join the first layer: they have no taps to spend a layer on, but a stride or padding to carry.

    >>> axis_groups((3, 3)), axis_groups((1, 7)), axis_groups((1, 1))
    ([(0,), (1,)], [(1, 0)], [(0, 1)])
    """
    wide = [axis for axis, k in enumerate(kernel_size) if k > 1] or [0]
    single = [axis for axis in range(len(kernel_size)) if axis not in wide]
    return [(wide[0], *single), *((axis,) for axis in wide[1:])]


def _along(geometry: Geometry, axes: Iterable[int]) -> Geometry:
    """The part of a convolution that acts on some of its spatial axes."""
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
    )


def _pointwise(geometry: Geometry, in_channels: int, out_channels: int, *, bias: bool = False) -> Geometry:
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


@singledispatch
def format_of(factors: Factors) -> Format:
    """The format, ranks included, of some factors.

    >>> import torch
    >>> format_of(SVDFactors(torch.ones(4, 2), torch.ones(2, 3, 3, 3)))
    SVDFormat(rank=2)
    """
    raise InputError(f"{type(factors).__name__} came; SVDFactors, Tucker2Factors and CPFactors are known")


@format_of.register
def _(factors: SVDFactors) -> Format:
    return SVDFormat(factors.rank)


@format_of.register
def _(factors: Tucker2Factors) -> Format:
    return Tucker2Format(factors.rank_out, factors.rank_in)


@format_of.register
def _(factors: CPFactors) -> Format:
    return CPFormat(factors.rank, factors.joint)


def _example() -> Geometry:
    """The 3×3 convolution of the docstrings above."""
    return Geometry(
        kind="conv",
        in_channels=8,
        out_channels=16,
        kernel_size=(3, 3),
        stride=(1, 1),
        padding=(1, 1),
        dilation=(1, 1),
    )

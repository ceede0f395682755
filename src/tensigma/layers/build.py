"""Factors into plain layers, and back.

How the layers hang together (sizes, strides, padding) is known to the format; here the weights are put in place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor, nn

from tensigma.errors import InputError
from tensigma.layers.formats import (
    CPFormat,
    Format,
    SVDFormat,
    Tucker2Format,
    axis_groups,
    check,
    format_of,
)
from tensigma.layers.geometry import Geometry
from tensigma.layers.kernel import to_kernels, to_weight
from tensigma.linalg import CPFactors, Factors, SVDFactors, Tucker2Factors


def to_modules(factors: Factors | Sequence[Factors], geometry: Geometry, bias: Tensor | None = None) -> nn.Sequential:
    """Plain layers that compute what the dense layer with the kernel ``factors.to_dense()`` computes.

    A grouped layer takes one set of factors per group, all of one format with equal ranks. The bias, in the last
    layer, may be there where the original had none. Device and dtype are those of the factors.

    >>> factors = Tucker2Factors(torch.ones(6, 2), torch.ones(2, 3, 3, 3), torch.ones(4, 3))
    >>> to_modules(factors, Geometry.of(nn.Conv2d(4, 6, 3, stride=2, padding=1)))
    Sequential(
      (reduce): Conv2d(4, 3, kernel_size=(1, 1), stride=(1, 1), bias=False)
      (core): Conv2d(3, 2, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False)
      (expand): Conv2d(2, 6, kernel_size=(1, 1), stride=(1, 1), bias=False)
    )
    """
    parts = tuple(factors) if isinstance(factors, Sequence) else (factors,)
    format = _common_format(parts, geometry)
    stages = format.stages(replace(geometry, bias=bias is not None))
    columns = zip(*(_kernels(part) for part in parts), strict=True)
    modules = nn.Sequential()
    for (name, stage), kernels in zip(stages.items(), columns, strict=True):
        modules.add_module(name, to_layer(torch.cat(kernels), stage, bias if stage.bias else None))
    return modules


def to_layer(kernels: Tensor, geometry: Geometry, bias: Tensor | None = None) -> nn.Module:
    """One plain layer with these kernels, (groups, t/groups, s/groups, *taps), which are copied.

    >>> to_layer(torch.ones(1, 2, 3), Geometry.of(nn.Linear(3, 2)), torch.zeros(2))
    Linear(in_features=3, out_features=2, bias=True)
    """
    weight = to_weight(kernels.detach(), geometry)
    layer = replace(geometry, bias=bias is not None).to_module()
    layer.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format))
    if bias is not None:
        if bias.shape != (geometry.out_channels,):
            raise InputError(f"a bias of shape {tuple(bias.shape)} came; this layer takes ({geometry.out_channels},)")
        layer.bias = nn.Parameter(bias.detach().to(weight, copy=True))
    return layer


def empty_modules(format: Format, geometry: Geometry) -> nn.Sequential:
    """The layers of :func:`to_modules` with parameters on the ``meta`` device, for weights that are yet to be loaded.

    ``geometry.bias`` decides whether the last layer has a bias.

    >>> modules = empty_modules(SVDFormat(2), Geometry.of(nn.Linear(8, 4)))
    >>> {name: tuple(weight.shape) for name, weight in modules.state_dict().items()}
    {'reduce.weight': (2, 8), 'expand.weight': (4, 2), 'expand.bias': (4,)}
    """
    modules = nn.Sequential()
    for name, stage in format.stages(geometry).items():
        modules.add_module(name, stage.to_module())
    return modules


def from_modules(modules: nn.Sequential, format: Format, geometry: Geometry) -> tuple[Factors, ...]:
    """The factors inside layers that :func:`to_modules` built, one set per group; their tensors are detached.

    >>> factors = SVDFactors(torch.ones(6, 2), torch.ones(2, 4, 3, 3))
    >>> geometry = Geometry.of(nn.Conv2d(4, 6, 3))
    >>> (again,) = from_modules(to_modules(factors, geometry), SVDFormat(2), geometry)
    >>> torch.equal(again.to_dense(), factors.to_dense())
    True
    """
    stages = format.stages(geometry)
    if len(modules) != len(stages):
        raise InputError(f"{len(modules)} layers came; {format} has {len(stages)}: {', '.join(stages)}")
    kernels = [
        to_kernels(module.weight.detach(), stage)  # type: ignore[operator]
        for module, stage in zip(modules, stages.values(), strict=True)
    ]
    return _factors(format, kernels, geometry)


def _common_format(parts: tuple[Factors, ...], geometry: Geometry) -> Format:
    formats = {format_of(part) for part in parts}
    shapes = {part.shape for part in parts}
    for format in formats:
        check(format, geometry)
    if len(parts) != geometry.groups:
        raise InputError(f"factors for {len(parts)} groups came; the layer has groups={geometry.groups}")
    if len(formats) != 1:
        found = ", ".join(sorted(map(str, formats)))
        raise InputError(f"the groups of a layer share one format with equal ranks; {found} came")
    if shapes != {geometry.kernel_shape}:
        found = ", ".join(sorted(map(str, shapes)))
        raise InputError(f"factors of a kernel {found} came; this layer has {geometry.kernel_shape} per group")
    return formats.pop()


@singledispatch
def _kernels(factors: Factors) -> list[Tensor]:
    """The kernels of each stage of the format, (groups of the stage, t', s', *taps)."""
    raise NotImplementedError(type(factors).__name__)


@singledispatch
def _factors(format: Format, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[Factors, ...]:
    """The inverse of :func:`_kernels`, for all groups of the layer."""
    raise NotImplementedError(type(format).__name__)


def _pointwise(matrix: Tensor, n_spatial: int) -> Tensor:
    return matrix.reshape(1, *matrix.shape, *(1,) * n_spatial)


@_kernels.register
def _(factors: SVDFactors) -> list[Tensor]:
    return [factors.right[None], _pointwise(factors.left, factors.right.ndim - 2)]


@_factors.register
def _(format: SVDFormat, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[Factors, ...]:
    reduce, expand = kernels
    return tuple(SVDFactors(left.flatten(1), right) for left, right in zip(expand, reduce, strict=True))


@_kernels.register
def _(factors: Tucker2Factors) -> list[Tensor]:
    n_spatial = factors.core.ndim - 2
    return [
        _pointwise(factors.in_basis.T, n_spatial),
        factors.core[None],
        _pointwise(factors.out_basis, n_spatial),
    ]


@_factors.register
def _(format: Tucker2Format, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[Factors, ...]:
    reduce, cores, expand = kernels
    groups = zip(expand, cores, reduce, strict=True)
    return tuple(Tucker2Factors(out.flatten(1), core, into.flatten(1).T) for out, core, into in groups)


@_kernels.register
def _(factors: CPFactors) -> list[Tensor]:
    n_spatial = len(factors.taps)
    if factors.joint:
        (taps,) = factors.spatial  # (k, r)
        depthwise = [taps.T.reshape(-1, 1, 1, *factors.taps)]
    else:
        depthwise = []
        for axes in axis_groups(factors.taps):
            taps = math.prod((factors.spatial[axis] for axis in axes[1:]), start=factors.spatial[axes[0]])  # (k, r)
            shape = [1] * n_spatial
            shape[axes[0]] = factors.taps[axes[0]]
            depthwise.append(taps.T.reshape(-1, 1, 1, *shape))
    return [_pointwise(factors.in_factor.T, n_spatial), *depthwise, _pointwise(factors.out_factor, n_spatial)]


@_factors.register
def _(format: CPFormat, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[Factors, ...]:
    reduce, *depthwise, expand = kernels
    if format.joint:
        spatial = [depthwise[0].flatten(1).T]
    else:
        spatial = [reduce.new_ones(1, format.rank)] * geometry.n_spatial
        for axes, kernel in zip(axis_groups(geometry.kernel_size), depthwise, strict=True):
            spatial[axes[0]] = kernel.flatten(1).T
    out_factor, in_factor = expand[0].flatten(1), reduce[0].flatten(1).T
    return (CPFactors(out_factor, in_factor, tuple(spatial), geometry.kernel_size, format.joint),)

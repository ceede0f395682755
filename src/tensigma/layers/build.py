"""Factors into plain layers, and back.

The format knows how the layers are connected (sizes, strides, padding) and what their kernels are; here they are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tensigma.errors import InputError
from tensigma.layers.format import Format, check, format_of
from tensigma.layers.geometry import Geometry
from tensigma.layers.kernel import to_kernels, to_weight
from tensigma.linalg import Factors

_NOTE = "built_as_format"


def to_modules(factors: Factors | Sequence[Factors], geometry: Geometry, bias: Tensor | None = None) -> nn.Sequential:
    """Plain layers that compute what the dense layer with the kernel ``factors.to_dense()`` computes.

    A grouped layer takes one set of factors per group, all of one format with equal ranks. The bias, in the last
    layer, may exist even if the original had none. Device and dtype are those of the factors.

    >>> from tensigma.linalg import Tucker2Factors
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
    columns = zip(*(format.kernels(part) for part in parts), strict=True)
    modules = _container(format)
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
            raise InputError(f"got a bias of shape {tuple(bias.shape)}; this layer takes ({geometry.out_channels},)")
        layer.bias = nn.Parameter(bias.detach().to(weight, copy=True))
    return layer


def empty_modules(format: Format, geometry: Geometry) -> nn.Sequential:
    """The layers of :func:`to_modules` with parameters on the ``meta`` device, for weights to be loaded later.

    ``geometry.bias`` decides whether the last layer has a bias.

    >>> from tensigma.layers import SVDFormat
    >>> modules = empty_modules(SVDFormat(2), Geometry.of(nn.Linear(8, 4)))
    >>> {name: tuple(weight.shape) for name, weight in modules.state_dict().items()}
    {'reduce.weight': (2, 8), 'expand.weight': (4, 2), 'expand.bias': (4,)}
    """
    modules = _container(format)
    for name, stage in format.stages(geometry).items():
        modules.add_module(name, stage.to_module())
    return modules


def from_modules(modules: nn.Sequential, format: Format, geometry: Geometry) -> tuple[Factors, ...]:
    """The factors inside layers that :func:`to_modules` built, one set per group; their tensors are detached.

    >>> from tensigma.layers import SVDFormat
    >>> from tensigma.linalg import SVDFactors
    >>> factors = SVDFactors(torch.ones(6, 2), torch.ones(2, 4, 3, 3))
    >>> geometry = Geometry.of(nn.Conv2d(4, 6, 3))
    >>> (again,) = from_modules(to_modules(factors, geometry), SVDFormat(2), geometry)
    >>> torch.equal(again.to_dense(), factors.to_dense())
    True
    """
    stages = format.stages(geometry)
    if len(modules) != len(stages):
        raise InputError(f"got {len(modules)} layers; {format} has {len(stages)}: {', '.join(stages)}")
    kernels = [
        to_kernels(module.weight.detach(), stage)  # type: ignore[operator]
        for module, stage in zip(modules, stages.values(), strict=True)
    ]
    return format.factors(kernels, geometry)


def is_container(modules: nn.Sequential, format_type: type[Format]) -> bool:
    """Whether ``modules`` may be layers of this format: of one that is noted, only if they were built as such."""
    return not format_type.is_noted or getattr(modules, _NOTE, None) == format_type.name


def _container(format: Format) -> nn.Sequential:
    modules = nn.Sequential()
    if format.is_noted:
        setattr(modules, _NOTE, format.name)
    return modules


def _common_format(parts: tuple[Factors, ...], geometry: Geometry) -> Format:
    formats = {format_of(part) for part in parts}
    shapes = {part.shape for part in parts}
    for format in formats:
        check(format, geometry)
    if len(parts) != geometry.groups:
        raise InputError(f"got factors for {len(parts)} groups; the layer has groups={geometry.groups}")
    if len(formats) != 1:
        listed = ", ".join(sorted(map(str, formats)))
        raise InputError(f"the groups of a layer share one format with equal ranks; got {listed}")
    if shapes != {geometry.kernel_shape}:
        listed = ", ".join(sorted(map(str, shapes)))
        raise InputError(f"got factors of a kernel {listed}; this layer has {geometry.kernel_shape} per group")
    return formats.pop()

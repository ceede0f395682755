"""Compressed layers by their structure alone.

A compressed model is made of plain modules and carries no mark of Tensigma. But the names and shapes of the layers that
stand in for another tell which format they are and what the layer was, and it is checked that they say so exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tensigma.layers.architecture import compressible, describe
from tensigma.errors import UnsupportedLayer
from tensigma.layers.formats import CPFormat, Format, SVDFormat, Tucker2Format
from tensigma.layers.geometry import Geometry
from tensigma.layers.formats import check


@dataclass(frozen=True)
class Compressed:
    """A format and the layer that it stands in for."""

    format: Format
    #: Of the layer as it was, but for the bias, which is that of the layers now.
    geometry: Geometry


def recognise(module: nn.Module) -> Compressed | None:
    """What ``module`` is if :func:`tensigma.layers.to_modules` could have built it, otherwise None.

    >>> from tensigma.layers import empty_modules
    >>> geometry = Geometry.of(nn.Conv2d(8, 6, (3, 5), stride=(2, 1), padding=1))
    >>> recognise(empty_modules(CPFormat(7), geometry)) == Compressed(CPFormat(7), geometry)
    True
    >>> recognise(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4)))
    """
    if type(module) is not nn.Sequential:
        return None
    names = [name for name, _ in module.named_children()]
    if names[:1] != ["reduce"] or names[-1:] != ["expand"] or len(names) != len(module):
        return None
    try:
        stages = [Geometry.of(child) for child in module]
        for guess in _guesses(names[1:-1], stages):
            check(guess.format, guess.geometry)
            if guess.format.stages(guess.geometry) == dict(zip(names, stages, strict=True)):
                return guess
    except (UnsupportedLayer, ValueError):
        pass
    return None


def _guesses(middle: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
    """What the layers would be, judging by their names; whether they are is for the caller to check."""
    reduce, expand = stages[0], stages[-1]
    groups = reduce.groups
    ends: dict[str, Any] = {"in_channels": reduce.in_channels, "out_channels": expand.out_channels, "bias": expand.bias}
    if not middle:
        yield Compressed(SVDFormat(reduce.out_channels // groups), replace(reduce, **ends))
    elif list(middle) == ["core"]:
        core = stages[1]
        ranks = core.out_channels // groups, core.in_channels // groups
        yield Compressed(Tucker2Format(*ranks), replace(core, **ends))
    elif list(middle) == ["depth"]:
        yield Compressed(CPFormat(reduce.out_channels, joint=True), replace(stages[1], groups=1, **ends))
    elif all(name.startswith("depth") for name in middle):
        axes = [int(name.removeprefix("depth")) for name in middle]
        yield Compressed(CPFormat(reduce.out_channels), replace(_joined(axes, stages[1:-1]), groups=1, **ends))


def _joined(axes: Sequence[int], stages: Sequence[Geometry]) -> Geometry:
    """One convolution out of those along single axes; the first also carries what axes without taps have."""
    whole = stages[0]
    for axis, stage in zip(axes[1:], stages[1:], strict=True):

        def put(into: tuple[int, ...], of: tuple[int, ...], axis: int = axis) -> tuple[int, ...]:
            return (*into[:axis], of[axis], *into[axis + 1 :])

        padding = whole.padding
        if not isinstance(padding, str) and not isinstance(stage.padding, str):
            padding = put(padding, stage.padding)
        whole = replace(
            whole,
            kernel_size=put(whole.kernel_size, stage.kernel_size),
            stride=put(whole.stride, stage.stride),
            dilation=put(whole.dilation, stage.dilation),
            padding=padding,
        )
    return whole


def find_compressed(model: nn.Module) -> dict[str, Compressed]:
    """All compressed layers of a model by name."""
    found = {name: recognise(module) for name, module in model.named_modules() if name}
    return {name: compressed for name, compressed in found.items() if compressed is not None}


def original_fingerprint(model: nn.Module, compressed: Collection[str] | None = None) -> dict[str, str]:
    """Name → geometry in words of every layer, compressed ones as what they were.

    ``compressed`` names those to take for compressed, where that is known; all that look like it by default.

    >>> from tensigma.layers import empty_modules
    >>> small = nn.Sequential(empty_modules(SVDFormat(2), Geometry.of(nn.Linear(8, 4))), nn.ReLU(), nn.Linear(4, 2))
    >>> original_fingerprint(small)
    {'0': 'linear 8→4', '2': 'linear 4→2'}
    """
    found = find_compressed(model)
    if compressed is not None:
        found = {name: layer for name, layer in found.items() if name in compressed}
    inside = {f"{name}.{stage}" for name in found for stage, _ in model.get_submodule(name).named_children()}
    plain = {name: Geometry.of(module) for name, module in compressible(model) if name not in inside}
    geometries = plain | {name: layer.geometry for name, layer in found.items()}
    return {name: describe(geometries[name]) for name, _ in model.named_modules() if name in geometries}

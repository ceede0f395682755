"""The layers of a model in words, so that two models can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn.utils import parametrize

from tensigma.layers.geometry import TARGETS, Geometry, plain_type


def compressible(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the layers that Tensigma can read, in the order of the model."""
    for name, module in model.named_modules():
        if plain_type(module) in TARGETS and not parametrize.is_parametrized(module):
            yield name, module


def measurable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The same and layers whose weight is parametrised: they stay as they are, but their multiply-adds count."""
    for name, module in model.named_modules():
        if plain_type(module) in TARGETS:
            yield name, module


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Name → geometry in words, for every layer of ``model`` that Tensigma can read.

    >>> fingerprint(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Linear(4, 2)))
    {'0': 'conv 3→4 kernel 3×3 stride 1×1 padding 1×1 dilation 1×1 groups 1 zeros', '2': 'linear 4→2'}
    """
    return {name: describe(Geometry.of(module)) for name, module in compressible(model)}


def describe(geometry: Geometry) -> str:
    """A geometry in words, without the bias, which compression may add.

    >>> describe(Geometry.of(nn.Linear(4, 2)))
    'linear 4→2'
    """
    text = f"{geometry.kind} {geometry.in_channels}→{geometry.out_channels}"
    if not geometry.n_spatial:
        return text
    padding = geometry.padding if isinstance(geometry.padding, str) else _times(geometry.padding)
    return (
        f"{text} kernel {_times(geometry.kernel_size)} stride {_times(geometry.stride)} padding {padding}"
        f" dilation {_times(geometry.dilation)} groups {geometry.groups} {geometry.padding_mode}"
    )


def first_difference(
    first: Mapping[str, str], second: Mapping[str, str], mine: str = "the first", yours: str = "the second"
) -> str | None:
    """The first layer in which two fingerprints differ, in words, or None if they are equal.

    >>> first_difference({"fc": "linear 4→2"}, {"fc": "linear 4→3"})
    "layer 'fc' is linear 4→2 in the first and linear 4→3 in the second"
    """
    for name in first:
        if name not in second:
            return f"layer {name!r} ({first[name]}) of {mine} is missing in {yours}"
        if first[name] != second[name]:
            return f"layer {name!r} is {first[name]} in {mine} and {second[name]} in {yours}"
    for name in second:
        if name not in first:
            return f"layer {name!r} ({second[name]}) of {yours} is missing in {mine}"
    return None


def _times(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))

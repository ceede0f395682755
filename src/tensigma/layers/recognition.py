"""Compressed layers recognised by their structure alone.

A compressed model consists of plain modules. The names and shapes of the layers that replace another tell their format
and what the layer was. A guess counts only if its stages are exactly these layers. A single layer in a container, as
rounding leaves it, could be anybody's; it counts only with the note that building it left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from tensigma.errors import UnsupportedLayer
from tensigma.layers.architecture import compressible, describe
from tensigma.layers.build import is_container
from tensigma.layers.format import FORMATS, Compressed, Format
from tensigma.layers.geometry import TARGETS, Geometry


def recognise(module: nn.Module) -> Compressed | None:
    """The format and original geometry of ``module`` if :func:`to_modules` could have built it, otherwise None.

    All registered formats are asked, in the order of registration.

    >>> from tensigma.layers import CPFormat, empty_modules
    >>> geometry = Geometry.of(nn.Conv2d(8, 6, (3, 5), stride=(2, 1), padding=1))
    >>> recognise(empty_modules(CPFormat(7), geometry)) == Compressed(CPFormat(7), geometry)
    True
    >>> recognise(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4)))
    """
    if type(module) is not nn.Sequential or not all(type(child) in TARGETS for child in module):
        return None
    stages = {name: Geometry.of(child) for name, child in module.named_children()}
    if not stages or len(stages) != len(module):  # empty, or the same layer twice
        return None
    for format_type in FORMATS.values():
        if not is_container(module, format_type):
            continue
        compressed = _confirmed(format_type, stages)
        if compressed is not None:
            return compressed
    return None


def _confirmed(format_type: type[Format], stages: Mapping[str, Geometry]) -> Compressed | None:
    """The first guess of a format whose stages are these."""
    try:
        for guess in format_type.guesses(list(stages), list(stages.values())):
            # As lists: the order of execution counts, which comparing dicts would ignore.
            if list(guess.format.stages(guess.geometry).items()) == list(stages.items()):
                return guess
    except (UnsupportedLayer, ValueError):
        pass
    return None


def find_compressed(model: nn.Module) -> dict[str, Compressed]:
    """All compressed layers of a model by name.

    >>> from tensigma.layers import SVDFormat, empty_modules
    >>> small = nn.Sequential(empty_modules(SVDFormat(2), Geometry.of(nn.Linear(8, 4))), nn.ReLU(), nn.Linear(4, 2))
    >>> {name: compressed.format for name, compressed in find_compressed(small).items()}
    {'0': SVDFormat(rank=2)}
    """
    candidates = {name: recognise(module) for name, module in model.named_modules() if name}
    return {name: compressed for name, compressed in candidates.items() if compressed is not None}


def original_fingerprint(model: nn.Module, compressed: Collection[str] | None = None) -> dict[str, str]:
    """Name → geometry in words of every layer, with compressed layers described as they were.

    ``compressed`` names the layers to treat as compressed, if known; by default all that look compressed.

    >>> from tensigma.layers import SVDFormat, empty_modules
    >>> small = nn.Sequential(empty_modules(SVDFormat(2), Geometry.of(nn.Linear(8, 4))), nn.ReLU(), nn.Linear(4, 2))
    >>> original_fingerprint(small)
    {'0': 'linear 8→4', '2': 'linear 4→2'}
    """
    originals = {
        name: layer.geometry
        for name, layer in find_compressed(model).items()
        if compressed is None or name in compressed
    }
    inside = {f"{name}.{stage}" for name in originals for stage, _ in model.get_submodule(name).named_children()}
    plain = {name: Geometry.of(module) for name, module in compressible(model) if name not in inside}
    geometries = plain | originals
    return {name: describe(geometries[name]) for name, _ in model.named_modules() if name in geometries}

"""Which layers a caller wants compressed."""

from __future__ import annotations

from collections.abc import Sequence

from tensigma.calibration import Calibration
from tensigma.layers import Geometry, Layer
from tensigma.planning.patterns import select


class Sieve:
    """Which layers the caller wants compressed."""

    def __init__(
        self,
        found: Sequence[Layer],
        layers: str | Sequence[str],
        skip: str | Sequence[str] | None,
        stats: Calibration | None,
    ) -> None:
        names = [layer.name for layer in found]
        self.layers, self.default_skip = layers, skip is None
        self.wanted = set(names) if layers in ("all", "spatial") else select(layers, names, what="layers")
        self.skipped = first_convolution(found, stats) if skip is None else select(skip, names, what="skip")

    def why_not(self, layer: Layer, geometry: Geometry) -> str | None:
        if layer.name in self.skipped:
            return "the first convolution is left dense" if self.default_skip else "left out by skip"
        if layer.name not in self.wanted or (self.layers == "spatial" and geometry.is_pointwise):
            return f"left out by layers={self.layers!r}"
        return None


def first_convolution(found: Sequence[Layer], stats: Calibration | None = None) -> set[str]:
    """The layer left dense by default: in order of definition, among those that data reaches."""
    for layer in found:
        if layer.geometry is not None and layer.geometry.kind != "linear" and (stats is None or layer.name in stats):
            return {layer.name}
    return set()

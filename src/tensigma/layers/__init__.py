"""Layers as geometry, factors as modules, and surgery by name."""

from tensigma.layers.build import empty_modules, from_modules, to_layer, to_modules
from tensigma.layers.cost import Cost, cost
from tensigma.layers.formats import CPFormat, Format, SVDFormat, Tucker2Format, format_of
from tensigma.layers.geometry import TARGETS, Geometry
from tensigma.layers.kernel import kernel_of, kernels_of, why_not
from tensigma.layers.replace import Layer, find_layers, replace_

__all__ = [
    "TARGETS",
    "CPFormat",
    "Cost",
    "Format",
    "Geometry",
    "Layer",
    "SVDFormat",
    "Tucker2Format",
    "cost",
    "empty_modules",
    "find_layers",
    "format_of",
    "from_modules",
    "kernel_of",
    "kernels_of",
    "replace_",
    "to_layer",
    "to_modules",
    "why_not",
]

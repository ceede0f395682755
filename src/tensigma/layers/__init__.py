"""Layers as geometry, factors as modules, and surgery by name."""

from tensigma.layers.architecture import compressible, fingerprint, first_difference
from tensigma.layers.build import empty_modules, from_modules, to_layer, to_modules
from tensigma.layers.cost import Cost, cost
from tensigma.layers.formats import CPFormat, Format, SVDFormat, Tucker2Format, format_of
from tensigma.layers.geometry import Geometry, TARGETS
from tensigma.layers.kernel import kernel_of, kernels_of, to_kernels, to_weight, why_not
from tensigma.layers.patterns import matches, select
from tensigma.layers.recognise import find_compressed, original_fingerprint, recognise
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
    "compressible",
    "cost",
    "empty_modules",
    "find_compressed",
    "find_layers",
    "fingerprint",
    "first_difference",
    "format_of",
    "from_modules",
    "kernel_of",
    "kernels_of",
    "matches",
    "original_fingerprint",
    "recognise",
    "replace_",
    "select",
    "to_kernels",
    "to_layer",
    "to_modules",
    "to_weight",
    "why_not",
]

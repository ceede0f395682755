"""Layers as geometry, formats that replace them, and surgery by name.

A format is registered when its file is imported, so every built-in one is imported here.
"""

from tensigma.layers.architecture import compressible, describe, fingerprint, first_difference, measurable
from tensigma.layers.build import empty_modules, from_modules, to_layer, to_modules
from tensigma.layers.costs import Cost, cost, packed_bias_bytes, packed_bytes, stage_bits
from tensigma.layers.cp_format import CPFormat
from tensigma.layers.dense_format import DenseFormat
from tensigma.layers.format import (
    FORMATS,
    Compressed,
    Format,
    check,
    format_from_json,
    format_of,
    format_to_json,
    register_format,
    temporary_formats,
)
from tensigma.layers.geometry import TARGETS, Geometry
from tensigma.layers.grids import HALF, Grid, grid_of, has_half_bias, in_half, set_grid_
from tensigma.layers.kernel import hooks_of, kernels_of, to_kernels, to_weight, why_not
from tensigma.layers.patterns import matches, select
from tensigma.layers.reads import is_compiled, weight_reads
from tensigma.layers.recognition import find_compressed, original_fingerprint, recognise
from tensigma.layers.replace import Layer, find_layers, memory_format_of, replace_
from tensigma.layers.spatial_svd_format import SpatialSVDFormat
from tensigma.layers.stages import (
    along,
    axis_groups,
    depthwise_reason,
    joined,
    pointwise,
    pointwise_kernel,
    two_axes_reason,
)
from tensigma.layers.svd_format import SVDFormat
from tensigma.layers.tensor_train_format import TensorTrainFormat
from tensigma.layers.tucker2_format import Tucker2Format

__all__ = [
    "FORMATS",
    "HALF",
    "TARGETS",
    "CPFormat",
    "Compressed",
    "Cost",
    "DenseFormat",
    "Format",
    "Geometry",
    "Grid",
    "Layer",
    "SVDFormat",
    "SpatialSVDFormat",
    "TensorTrainFormat",
    "Tucker2Format",
    "along",
    "axis_groups",
    "check",
    "compressible",
    "cost",
    "depthwise_reason",
    "describe",
    "empty_modules",
    "find_compressed",
    "find_layers",
    "fingerprint",
    "first_difference",
    "format_from_json",
    "format_of",
    "format_to_json",
    "from_modules",
    "grid_of",
    "has_half_bias",
    "hooks_of",
    "in_half",
    "is_compiled",
    "joined",
    "kernels_of",
    "matches",
    "measurable",
    "memory_format_of",
    "original_fingerprint",
    "packed_bias_bytes",
    "packed_bytes",
    "pointwise",
    "pointwise_kernel",
    "recognise",
    "register_format",
    "replace_",
    "select",
    "set_grid_",
    "stage_bits",
    "temporary_formats",
    "to_kernels",
    "to_layer",
    "to_modules",
    "to_weight",
    "two_axes_reason",
    "weight_reads",
    "why_not",
]

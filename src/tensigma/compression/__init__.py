"""Carrying out a plan: layers fitted independently or in sequence, then refined."""

from tensigma.compression.batchnorm import reestimate_bn_
from tensigma.compression.execution import compress, compress_
from tensigma.compression.refinement import WITHOUT_REFINEMENT, Refine, RefinementProgress, blocks_around, refine_
from tensigma.compression.reports import LayerReport, PageData, Report
from tensigma.compression.views import Views

__all__ = [
    "WITHOUT_REFINEMENT",
    "LayerReport",
    "PageData",
    "Refine",
    "RefinementProgress",
    "Report",
    "Views",
    "blocks_around",
    "compress",
    "compress_",
    "reestimate_bn_",
    "refine_",
]

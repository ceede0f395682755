"""Compressed models outside this process: archives, exported files, fewer bits, other runtimes."""

from tensigma.deployment.archive import load, plain_bytes, save, stored_bytes
from tensigma.deployment.equalisation import equalise
from tensigma.deployment.exporting import Exported, check_exporter, export, read_exported
from tensigma.deployment.measuring import measure_together
from tensigma.deployment.quantization import Quantized, quantize
from tensigma.graphs import OnnxModel

__all__ = [
    "Exported",
    "OnnxModel",
    "Quantized",
    "check_exporter",
    "equalise",
    "export",
    "load",
    "measure_together",
    "plain_bytes",
    "quantize",
    "read_exported",
    "save",
    "stored_bytes",
]

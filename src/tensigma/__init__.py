"""Tensigma shrinks trained CNNs by tensor decomposition that knows the data."""

from importlib.metadata import version

from tensigma import linalg
from tensigma.calibration import Calibration, LayerStats, calibrate
from tensigma.evaluation import Certificate, Evaluation
from tensigma.deployment import Exported, Quantized, load, save
from tensigma.pipeline import FineTuning, Report, compress, evaluate, export, finetune, quantize
from tensigma.compression import Refine, compress_
from tensigma.planning import VBMF, Drop, Energy, Latency, Macs, Params, Plan, Ranks, SigmaVBMF, plan
from tensigma.report import write_report

__all__ = [
    "VBMF",
    "Calibration",
    "Certificate",
    "Drop",
    "Energy",
    "Evaluation",
    "Exported",
    "FineTuning",
    "Latency",
    "LayerStats",
    "Macs",
    "Params",
    "Plan",
    "Quantized",
    "Ranks",
    "Refine",
    "Report",
    "SigmaVBMF",
    "__version__",
    "calibrate",
    "compress",
    "compress_",
    "evaluate",
    "export",
    "finetune",
    "linalg",
    "load",
    "plan",
    "quantize",
    "save",
    "write_report",
]
__version__ = version("tensigma")

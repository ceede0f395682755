"""Tensigma shrinks trained CNNs by tensor decomposition that knows the data."""

from importlib.metadata import version

from tensigma import linalg
from tensigma.calibration import Calibration, LayerStats, calibrate
from tensigma.compression import Refine, Report, compress, compress_
from tensigma.deployment import Exported, Quantized, export, load, quantize, save
from tensigma.evaluation import Certificate, Evaluation, evaluate
from tensigma.finetuning import FineTuning, finetune
from tensigma.planning import VBMF, Drop, Energy, Latency, Macs, Params, Plan, Ranks, Recipe, SigmaVBMF, plan
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
    "Recipe",
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

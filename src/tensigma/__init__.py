"""Tensigma shrinks trained CNNs by tensor decomposition that knows the data."""

from importlib.metadata import version

from tensigma import linalg
from tensigma.calibration import Calibration, LayerStats, calibrate
from tensigma.pipeline import Evaluation, FineTuning, Report, compress, compress_, evaluate, finetune, load, save
from tensigma.planning import VBMF, Drop, Energy, Latency, Macs, Params, Plan, Ranks, SigmaVBMF, plan
from tensigma.report import write_report

__all__ = [
    "VBMF",
    "Calibration",
    "Drop",
    "Energy",
    "Evaluation",
    "FineTuning",
    "Latency",
    "LayerStats",
    "Macs",
    "Params",
    "Plan",
    "Ranks",
    "Report",
    "SigmaVBMF",
    "__version__",
    "calibrate",
    "compress",
    "compress_",
    "evaluate",
    "finetune",
    "linalg",
    "load",
    "plan",
    "save",
    "write_report",
]
__version__ = version("tensigma")

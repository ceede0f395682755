"""Tensigma shrinks trained CNNs by tensor decomposition that knows the data."""

from importlib.metadata import version

from tensigma import linalg
from tensigma.calibration import Calibration, LayerStats, calibrate
from tensigma.pipeline import Report, compress, compress_
from tensigma.planning import VBMF, Energy, Macs, Params, Plan, Ranks, plan

__all__ = [
    "VBMF",
    "Calibration",
    "Energy",
    "LayerStats",
    "Macs",
    "Params",
    "Plan",
    "Ranks",
    "Report",
    "__version__",
    "calibrate",
    "compress",
    "compress_",
    "linalg",
    "plan",
]
__version__ = version("tensigma")

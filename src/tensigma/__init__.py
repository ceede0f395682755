"""Tensigma shrinks trained CNNs by tensor decomposition that knows the data."""

from importlib.metadata import version

from tensigma import linalg
from tensigma.calibration import Calibration, LayerStats, calibrate

__all__ = ["Calibration", "LayerStats", "__version__", "calibrate", "linalg"]
__version__ = version("tensigma")

"""The second moment of every layer's input, gathered by running the model over data without labels."""

from tensigma.calibration.collect import Progress, calibrate
from tensigma.calibration.stats import Calibration, LayerStats

__all__ = ["Calibration", "LayerStats", "Progress", "calibrate"]

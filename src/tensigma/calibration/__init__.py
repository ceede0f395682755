"""The second moment of every layer's input, gathered by running the model over data without labels."""

from tensigma.calibration.checkpoint import remove_checkpoint
from tensigma.calibration.collect import calibrate, select_layers
from tensigma.calibration.collector import summable
from tensigma.calibration.distances import Distance, LayerDistance, distance
from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.memory import MemoryEstimate, estimate_memory, parse_bytes
from tensigma.calibration.moments import Moments
from tensigma.calibration.reduction import reduce_stats
from tensigma.calibration.runner import CalibrationProgress
from tensigma.calibration.stats import Calibration

__all__ = [
    "Calibration",
    "CalibrationProgress",
    "Distance",
    "LayerDistance",
    "LayerStats",
    "MemoryEstimate",
    "Moments",
    "calibrate",
    "distance",
    "estimate_memory",
    "parse_bytes",
    "reduce_stats",
    "remove_checkpoint",
    "select_layers",
    "summable",
]

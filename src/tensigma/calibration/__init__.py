"""The second moment of every layer's input, gathered by running the model over data without labels."""

from tensigma.calibration.architecture import fingerprint
from tensigma.calibration.collect import calibrate, select_layers
from tensigma.calibration.distance import Distance, LayerDistance, distance
from tensigma.calibration.distributed import shard
from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.memory import MemoryEstimate, estimate_memory
from tensigma.calibration.progress import Progress
from tensigma.calibration.stats import Calibration

__all__ = [
    "Calibration",
    "Distance",
    "LayerDistance",
    "LayerStats",
    "MemoryEstimate",
    "Progress",
    "calibrate",
    "distance",
    "estimate_memory",
    "fingerprint",
    "select_layers",
    "shard",
]

"""The paper's experiments and the baselines they are run beside."""

from tensigma.experiments.baselines import TensorLyCP, TensorLyTucker2

__all__ = ["TensorLyCP", "TensorLyTucker2"]

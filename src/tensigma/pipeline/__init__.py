"""From a plan to a smaller network: compression, evaluation, and the archive."""

from tensigma.pipeline.archive import load, save
from tensigma.pipeline.compression import compress, compress_
from tensigma.pipeline.evaluation import Evaluation, EvaluationProgress, evaluate
from tensigma.pipeline.finetuning import finetune
from tensigma.pipeline.latency import Latency
from tensigma.pipeline.progress import CompressionProgress
from tensigma.pipeline.report import LayerReport, Report, Size
from tensigma.pipeline.tuning import FineTuning, FineTuningProgress

__all__ = [
    "CompressionProgress",
    "Evaluation",
    "EvaluationProgress",
    "FineTuning",
    "FineTuningProgress",
    "Latency",
    "LayerReport",
    "Report",
    "Size",
    "compress",
    "compress_",
    "evaluate",
    "finetune",
    "load",
    "save",
]

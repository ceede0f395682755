"""From a plan to a smaller network: compression, evaluation, and the archive."""

from tensigma.pipeline.archive import load, save
from tensigma.pipeline.certificate import Certificate
from tensigma.pipeline.compression import compress, compress_
from tensigma.pipeline.evaluation import Evaluation, EvaluationProgress, evaluate
from tensigma.pipeline.exporting import Exported, export
from tensigma.pipeline.finetuning import finetune
from tensigma.pipeline.latency import Timing
from tensigma.pipeline.progress import CompressionProgress
from tensigma.pipeline.quantization import Quantized, quantize
from tensigma.pipeline.refinement import Refine, RefinementProgress
from tensigma.pipeline.report import LayerReport, Report, Size
from tensigma.pipeline.tuning import FineTuning, FineTuningProgress

__all__ = [
    "Certificate",
    "CompressionProgress",
    "Evaluation",
    "EvaluationProgress",
    "Exported",
    "FineTuning",
    "FineTuningProgress",
    "LayerReport",
    "Quantized",
    "Refine",
    "RefinementProgress",
    "Report",
    "Size",
    "Timing",
    "compress",
    "compress_",
    "evaluate",
    "export",
    "finetune",
    "load",
    "quantize",
    "save",
]

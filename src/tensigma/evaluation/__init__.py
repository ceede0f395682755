"""One model or several over data: figures, certificate, size and latency."""

from tensigma.evaluation.certificate import Certificate
from tensigma.evaluation.figures import SHARES, Evaluation, EvaluationProgress, compare, evaluate
from tensigma.evaluation.latency import Timing, measure_latency
from tensigma.evaluation.runtime import runtime_in_words, runtime_note
from tensigma.evaluation.size import Size, count_bytes, count_params, size_of
from tensigma.evaluation.speed import is_slower, speed_in_words, speed_note, speedup_of

__all__ = [
    "SHARES",
    "Certificate",
    "Evaluation",
    "EvaluationProgress",
    "Size",
    "Timing",
    "compare",
    "count_bytes",
    "count_params",
    "evaluate",
    "is_slower",
    "measure_latency",
    "runtime_in_words",
    "runtime_note",
    "size_of",
    "speed_in_words",
    "speed_note",
    "speedup_of",
]

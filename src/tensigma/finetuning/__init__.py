"""Training a compressed model, with labels or by the original's answers."""

from tensigma.finetuning.finetuner import finetune
from tensigma.finetuning.history import FineTuning, FineTuningProgress
from tensigma.finetuning.unfinished import remove_unfinished

__all__ = [
    "FineTuning",
    "FineTuningProgress",
    "finetune",
    "remove_unfinished",
]

"""Counting right answers and answers like another model's, part by part."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from tensigma.errors import AnswersWarning, InputError
from tensigma.running.answers import Answers, Part
from tensigma.running.part_tallies import BoxesTally, LikenedTally, NumbersTally, tally_of
from tensigma.running.part_tally import PartTally
from tensigma.running.scores_tally import ScoresTally


class Tally:
    """All parts of the answers of one model, over batches; the first part gives the main figures."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.parts = [tally_of(part.kind) for part in answers.parts]
        self.samples = 0

    @property
    def main(self) -> PartTally | None:
        """The first part; None if nothing is compared."""
        return self.parts[0] if self.parts else None

    def add(self, output: Any, n_samples: int, labels: Any = None, reference: Any = None) -> None:
        """Count a batch; ``reference`` is the output of the model that answers are compared with."""
        self.samples += n_samples
        own = self.answers.read(output)
        others = [None] * len(own) if reference is None else self.answers.read(reference)
        for one, other in zip(own, others, strict=True):
            if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape != other.shape:
                raise InputError(
                    f"the model answers with shape {tuple(one.shape)} and the original with {tuple(other.shape)}; only "
                    "answers of the same shape can be compared"
                )
        for part, answer, other in zip(self.parts, own, others, strict=True):
            if isinstance(part, LikenedTally):
                part.add(answer, None, other, n_samples)
            else:
                part.add(answer, labels if part is self.main else None, other)

    def merge(self, other: Tally) -> None:
        """Add what another process has counted."""
        self.samples += other.samples
        for part, another in zip(self.parts, other.parts, strict=True):
            part.merge(another)

    @property
    def likeness(self) -> float | None:
        """How much the answers are like those of the reference, between 0 and 1; of several numbers, the worst."""
        if self.main is None:
            return None
        rest = [part for part in self.parts if isinstance(part, NumbersTally)]
        shares = [part.likeness for part in (rest if isinstance(self.main, NumbersTally) else [self.main])]
        return min((share for share in shares if share is not None), default=None)

    def warn(self, stacklevel: int = 3) -> None:
        """Say so if the main figures are missing because the reference answers nothing."""
        if isinstance(self.main, BoxesTally) and self.main.finds_nothing:
            warnings.warn(self.main.finds_nothing, AnswersWarning, stacklevel=stacklevel)

    @property
    def others(self) -> list[tuple[Part, float | None]]:
        """Every part that the main figures are not about, and how much it is like the reference's.

        If the first part is numbers, the main figures are about all numbers.
        """
        pairs = list(zip(self.answers.parts, self.parts, strict=True))[1:]
        numbers = isinstance(self.main, NumbersTally)
        return [(part, tally.likeness) for part, tally in pairs if not (numbers and isinstance(tally, NumbersTally))]

    @property
    def figures(self) -> dict[str, float | None]:
        """The figures of the first part, and the largest relative error if there are only numbers."""
        if self.main is None:
            return {}
        figures = {**self.main.figures, "likeness": self.likeness}
        if self.main.samples != self.samples:
            # Rows that are no samples, such as those of all positions, are not independent of each other.
            figures["agreement"] = None
            if isinstance(self.main, ScoresTally):
                figures["position_agreement"] = self.likeness
        if isinstance(self.main, NumbersTally):
            errors = [part.error for part in self.parts if isinstance(part, NumbersTally) and part.error is not None]
            figures["error"] = max(errors, default=None)
        return figures

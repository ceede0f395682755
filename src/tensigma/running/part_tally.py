"""Figures of one part of the answers of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class PartTally(ABC):
    """Figures of one part of the answers of one model, over batches; None where something is missing."""

    samples = 0
    unanswered = 0
    #: Samples on which the answer was that of the reference; None if that is not a yes or a no.
    agreed: int | None = None

    @property
    @abstractmethod
    def likeness(self) -> float | None:
        """How much the answers are like those of the reference, between 0 and 1."""

    @property
    def accuracy(self) -> float | None:
        """How much the answers are like the labels, between 0 and 1."""
        return None

    @property
    @abstractmethod
    def figures(self) -> dict[str, float | None]:
        """Every figure by its name in :class:`tensigma.Evaluation`."""

    @abstractmethod
    def add(self, answer: Any, labels: Any = None, reference: Any = None) -> None:
        """Count a batch."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Add what another process has counted."""

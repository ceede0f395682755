"""How far the search for ranks has come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlanningProgress:
    """The error curves of a layer are known.

    >>> PlanningProgress(layer="conv1", done=1, total=4, work=0.25, seconds=2.0).remaining
    6.0
    """

    layer: str
    done: int
    total: int
    #: The share of all work that is done, by a rough count of operations.
    work: float
    seconds: float

    @property
    def remaining(self) -> float | None:
        """Seconds to go at the present rate."""
        return self.seconds / self.work * (1 - self.work) if self.work > 0 else None

    def __str__(self) -> str:
        return f"curves of layer {self.done} of {self.total}, {self.layer}"


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """Steps of about equal length, some of them done."""

    done: int
    total: int
    seconds: float

    @property
    def remaining(self) -> float:
        """Seconds to go at the present rate."""
        return self.seconds / self.done * (self.total - self.done)


@dataclass(frozen=True, kw_only=True)
class TimingProgress(_Counted):
    """The shape of some layers has been timed at several ranks.

    >>> print(TimingProgress(shape="conv 64 → 64, 3×3", done=2, total=9, seconds=1.0))
    time of shape 2 of 9, conv 64 → 64, 3×3
    """

    shape: str

    def __str__(self) -> str:
        return f"time of shape {self.done} of {self.total}, {self.shape}"


@dataclass(frozen=True, kw_only=True)
class SearchProgress(_Counted):
    """A plan has been tried on held-out data.

    >>> print(SearchProgress(done=2, total=8, share=0.5, kept=0.97, measure="agreement", enough=False, seconds=3.0))
    trial 2 of 8, 50.0 % of the parameters: agreement 97.00 %, too little
    """

    #: The share of the parameters that the plan leaves.
    share: float
    #: Agreement or accuracy of the model it gives.
    kept: float
    measure: str
    #: Whether that is as much as was asked for.
    enough: bool

    def __str__(self) -> str:
        found = f"{self.measure} {100 * self.kept:.2f} %, {'enough' if self.enough else 'too little'}"
        return f"trial {self.done} of {self.total}, {100 * self.share:.1f} % of the parameters: {found}"


@dataclass(frozen=True, kw_only=True)
class EffectProgress(_Counted):
    """What an error in a layer does to the answers has been measured.

    >>> print(EffectProgress(layer="conv1", done=2, total=9, seconds=1.0))
    effect of layer 2 of 9, conv1
    """

    layer: str

    def __str__(self) -> str:
        return f"effect of layer {self.done} of {self.total}, {self.layer}"


@dataclass(frozen=True, kw_only=True)
class TrialProgress(_Counted):
    """A plan with one power of the layers' effects for weights has been tried.

    >>> print(TrialProgress(done=2, total=3, power=0.25, divergence=0.0123, seconds=1.0))
    weights 2 of 3, power 0.25: divergence 0.0123
    """

    power: float
    #: Of the answers from the original's.
    divergence: float

    def __str__(self) -> str:
        return f"weights {self.done} of {self.total}, power {self.power:g}: divergence {self.divergence:.3g}"


Report = Callable[[PlanningProgress | TimingProgress | SearchProgress | EffectProgress | TrialProgress], None]


def reporter(progress: bool | Callable[[Any], None]) -> Report:
    """What to do with progress: nothing, a line of the log, or the caller's own function."""
    if callable(progress):
        return progress
    if not progress:
        return lambda state: None
    return lambda state: logger.info("planning: %s", state)

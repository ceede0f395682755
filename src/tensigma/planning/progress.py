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


def reporter(progress: bool | Callable[[Any], None]) -> Callable[[PlanningProgress], None]:
    """What to do with progress: nothing, a line of the log, or the caller's own function."""
    if callable(progress):
        return progress
    if not progress:
        return lambda state: None
    return lambda state: logger.info("planning: %s (%d of %d)", state.layer, state.done, state.total)

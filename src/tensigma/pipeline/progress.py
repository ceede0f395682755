"""How far a compression has come."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CompressionProgress:
    """A layer is done.

    Work is measured in a rough count of operations, because layers differ a thousandfold.

    >>> state = CompressionProgress(layer="conv1", done=1, total=4, work=0.1, seconds=2.0)
    >>> round(state.remaining, 6)
    18.0
    """

    layer: str
    done: int
    total: int
    #: The share of all work that is done.
    work: float
    seconds: float
    error: float | None = None
    cached: bool = False

    @property
    def remaining(self) -> float | None:
        """Seconds to go at the present rate."""
        return self.seconds / self.work * (1 - self.work) if self.work > 0 else None


Reporter = Callable[[CompressionProgress], None]


def reporter(progress: bool | Callable[[Any], None]) -> Reporter:
    """What to do with progress: nothing, a line of the log, or the caller's own function."""
    if callable(progress):
        return progress
    if not progress:
        return lambda state: None

    def log(state: CompressionProgress) -> None:
        error = "" if state.error is None else f", error {state.error:.3f}"
        logger.info("compression: %s (%d of %d%s)", state.layer, state.done, state.total, error)

    return log

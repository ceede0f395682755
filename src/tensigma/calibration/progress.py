"""How far a calibration has come, for whoever wants to show it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a calibration has come, in batches.

    >>> Progress(done=5, total=20, samples=80, seconds=2.0).remaining
    6.0
    """

    done: int
    #: Batches in all passes together, where that is known.
    total: int | None
    #: Samples and seconds of this process in this pass.
    samples: int
    seconds: float
    #: Batches that were done before the clock started.
    first: int = 0
    passes: int = 1
    #: Bytes that the run may take beyond the model's own forward pass.
    memory: int = 0

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def remaining(self) -> float | None:
        """Seconds to go at the present rate, where the end is known."""
        if self.total is None or self.done == self.first:
            return None
        return self.seconds / (self.done - self.first) * (self.total - self.done)


def reporter(progress: bool | Callable[[Progress], None]) -> Callable[[Progress], None]:
    """What to do with progress: nothing, a line of the log, or the caller's own function."""
    if callable(progress):
        return progress
    if not progress:
        return lambda state: None

    def log(state: Progress) -> None:
        total = "" if state.total is None else f" of {state.total}"
        remaining = "" if state.remaining is None else f", {state.remaining:.0f} s to go"
        logger.info("calibration: batch %d%s, %.1f samples/s%s", state.done, total, state.rate, remaining)

    return log

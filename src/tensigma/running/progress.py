"""The progress of long work, and how it is reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

logger = logging.getLogger(__name__)

#: What ``progress=`` takes everywhere: False for nothing, True for lines in the log, or a function to call.
Wanted = bool | Callable[[Any], None]
#: A function that is called with progress.
Listener = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of long work: ``done`` of ``total`` steps, ``seconds`` after it began or was resumed.

    ``str(progress)`` describes the step in a few words. Each kind of work has its own subclass.

    >>> Progress(done=5, total=20, seconds=2.0).remaining
    6.0
    """

    #: The kind of work, for the log.
    title: ClassVar[str] = "progress"

    done: float
    #: None if the end is unknown.
    total: float | None
    seconds: float = 0.0
    #: Steps that an earlier run had done.
    first: float = 0.0

    @property
    def share(self) -> float | None:
        """The part of all work that is done, between 0 and 1."""
        return None if self.total is None else self.done / max(self.total, 1e-12)

    @property
    def remaining(self) -> float | None:
        """Seconds to go at the present rate; None if unknown."""
        if self.total is None or self.done <= self.first:
            return None
        return self.seconds / (self.done - self.first) * (self.total - self.done)

    def __str__(self) -> str:
        return f"{self.done:g}" if self.total is None else f"{self.done:g} of {self.total:g}"


@dataclass(frozen=True, kw_only=True)
class WeightedProgress(Progress):
    """For steps that differ a thousandfold in length: ``work`` is a rough share of all operations.

    >>> WeightedProgress(done=1, total=4, work=0.1, seconds=2.0).remaining
    18.0
    """

    work: float

    @property
    def share(self) -> float:
        return self.work

    @property
    def remaining(self) -> float | None:
        return self.seconds / self.work * (1 - self.work) if self.work > 0 else None


def reporter(progress: Wanted) -> Listener:
    """The listener for ``progress``: one that does nothing, one that logs a line, or the caller's function.

    >>> reporter(print)("half done")
    half done
    """
    if callable(progress):
        return progress
    return _log if progress else silent


def silent(state: Any) -> None:
    """Report nothing."""


def _log(state: Any) -> None:
    logger.info("%s: %s", getattr(state, "title", "progress"), state)


def samples_per_second(samples: float, seconds: float) -> str:
    """A rate as text.

    >>> samples_per_second(300, 2.0), samples_per_second(3, 2.0)
    ('150 samples/s', '1.5 samples/s')
    """
    rate = samples / seconds if seconds > 0 else 0.0
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"

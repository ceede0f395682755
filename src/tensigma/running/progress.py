"""How far long work has come, and who is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

logger = logging.getLogger(__name__)

#: What ``progress=`` takes everywhere: nothing, lines in the log, or a function of the caller's.
Wanted = bool | Callable[[Any], None]
#: A function that is told where work stands.
Listener = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where long work stands: ``done`` of ``total`` steps, ``seconds`` after it began or was resumed.

    ``str(progress)`` describes the step in a few words. Rooms derive their own kinds from it.

    >>> Progress(done=5, total=20, seconds=2.0).remaining
    6.0
    """

    #: The kind of work, for the log.
    title: ClassVar[str] = "progress"

    done: float
    #: None where the end is not known.
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
        """Seconds to go at the present rate, where the end is known."""
        if self.total is None or self.done <= self.first:
            return None
        return self.seconds / (self.done - self.first) * (self.total - self.done)

    def __str__(self) -> str:
        return f"{self.done:g}" if self.total is None else f"{self.done:g} of {self.total:g}"


@dataclass(frozen=True, kw_only=True)
class WeightedProgress(Progress):
    """Steps that differ a thousandfold in length: ``work`` is the share of all operations, roughly counted.

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
    """What to do with progress: nothing, a line of the log, or the caller's own function.

    >>> reporter(print)("half done")
    half done
    """
    if callable(progress):
        return progress
    return _log if progress else silent


def silent(state: Any) -> None:
    """Tell nobody."""


def _log(state: Any) -> None:
    logger.info("%s: %s", getattr(state, "title", "progress"), state)


def samples_per_second(samples: float, seconds: float) -> str:
    """A rate in words.

    >>> samples_per_second(300, 2.0), samples_per_second(3, 2.0)
    ('150 samples/s', '1.5 samples/s')
    """
    rate = samples / seconds if seconds > 0 else 0.0
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"

"""The one loop that all iterative solvers share: it owns stopping and the promise that errors never rise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

# A quasi-Newton step can be short without being the last; several in a row are.
_PATIENCE = 3


class State(Protocol):
    """Where an iteration stands: the loss it lowers, and the error it reports."""

    @property
    def loss(self) -> float: ...

    @property
    def error(self) -> float: ...


S = TypeVar("S", bound=State)


def iterate(
    step: Callable[[S], S | None], state: S, *, max_sweeps: int, tol: float
) -> tuple[S, tuple[float, ...], bool]:
    """Run ``step`` until it finds nothing better, gains less than ``tol`` of the error a sweep, or for ``max_sweeps``.

    A step that would raise the error ends the iteration and is thrown away, so the state returned is the best one.
    """
    errors = [state.error]
    roots = [math.sqrt(state.loss)]
    for _ in range(max_sweeps):
        successor = step(state) if state.loss > 0 else None
        if successor is None or not (successor.error <= state.error and successor.loss <= state.loss):
            return state, tuple(errors), True
        state = successor
        errors.append(state.error)
        roots.append(math.sqrt(state.loss))
        # Judged by the loss: the error is blind to directions that a singular gram does not see.
        if len(roots) > _PATIENCE and roots[-1 - _PATIENCE] - roots[-1] <= _PATIENCE * tol * roots[-1]:
            return state, tuple(errors), True
    return state, tuple(errors), False

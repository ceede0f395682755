"""The one loop that all iterative solvers share: it owns stopping and the promise that errors never rise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

# A quasi-Newton step can be short without being the last; several in a row are.
_PATIENCE = 3


class State(Protocol):
    """Where an iteration stands."""

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
    for _ in range(max_sweeps):
        if errors[-1] == 0:
            return state, tuple(errors), True
        successor = step(state)
        if successor is None or not successor.error <= errors[-1]:
            return state, tuple(errors), True
        state = successor
        errors.append(state.error)
        if len(errors) > _PATIENCE and errors[-1 - _PATIENCE] - errors[-1] <= _PATIENCE * tol * errors[-1]:
            return state, tuple(errors), True
    return state, tuple(errors), False

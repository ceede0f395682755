"""The loop that all iterative solvers share: it decides when to stop and guarantees that errors never rise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

# One short quasi-Newton step does not mean convergence; several in a row do.
_PATIENCE = 3


class State(Protocol):
    """A point of an iteration: the loss that it lowers and the error that it reports."""

    @property
    def loss(self) -> float: ...

    @property
    def error(self) -> float: ...


S = TypeVar("S", bound=State)


def iterate(
    step: Callable[[S], S | None], state: S, *, max_sweeps: int, tol: float
) -> tuple[S, tuple[float, ...], bool]:
    """Run ``step`` until it no longer lowers the loss, gains less than ``tol`` per sweep, or has run ``max_sweeps``
    times.

    Returns the state with the lowest error, the lowest error so far after each sweep, and whether the iteration
    settled. Solvers lower the loss under the damped gram. Under a singular gram the error itself may rise on the way,
    by as much as the damping; such a state is passed through but not returned.
    """
    best = state
    errors = [best.error]
    roots = [math.sqrt(state.loss)]
    for _ in range(max_sweeps):
        successor = step(state) if state.loss > 0 else None
        if successor is None or not successor.loss <= state.loss:
            return best, tuple(errors), True
        state = successor
        if (state.error, state.loss) <= (best.error, best.loss):  # false if the error is NaN
            best = state
        errors.append(best.error)
        roots.append(math.sqrt(state.loss))
        if len(roots) > _PATIENCE and roots[-1 - _PATIENCE] - roots[-1] <= _PATIENCE * tol * roots[-1]:
            return best, tuple(errors), True
    return best, tuple(errors), False

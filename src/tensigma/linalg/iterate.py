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
    """Run ``step`` until it lowers the loss no more, gains less than ``tol`` a sweep, or for ``max_sweeps``.

    Returns the state with the lowest error met, the lowest error after each sweep, and whether the iteration settled.
    Solvers lower the loss under the damped gram; under a singular one the error itself may rise on the way, by as much
    as the damping, and is then not taken for an improvement.
    """
    best = state
    errors = [best.error]
    roots = [math.sqrt(state.loss)]
    for _ in range(max_sweeps):
        successor = step(state) if state.loss > 0 else None
        if successor is None or not successor.loss <= state.loss:
            return best, tuple(errors), True
        state = successor
        if (state.error, state.loss) <= (best.error, best.loss):  # false where the error is NaN
            best = state
        errors.append(best.error)
        roots.append(math.sqrt(state.loss))
        if len(roots) > _PATIENCE and roots[-1 - _PATIENCE] - roots[-1] <= _PATIENCE * tol * roots[-1]:
            return best, tuple(errors), True
    return best, tuple(errors), False

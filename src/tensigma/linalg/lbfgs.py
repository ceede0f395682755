"""Preconditioned limited-memory BFGS on one flat vector, one monotone step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

P = TypeVar("P")

_SUFFICIENT_DECREASE = 1e-4
_MAX_TRIALS = 12


@dataclass(frozen=True, eq=False)
class Point(Generic[P]):
    """A visited point: its loss and gradient, the error to report, and data of the solver."""

    position: Tensor  # flat
    loss: float
    gradient: Tensor  # flat
    error: float
    payload: P


@dataclass(eq=False)
class Descent(Generic[P]):
    """Steps that lower the loss. ``precondition(point, vector)`` applies an approximate inverse Hessian."""

    evaluate: Callable[[Tensor], Point[P]]
    precondition: Callable[[Point[P], Tensor], Tensor]
    memory: int = 10
    _pairs: deque[tuple[Tensor, Tensor, float]] = field(init=False)

    def __post_init__(self) -> None:
        self._pairs = deque(maxlen=self.memory)

    def step(self, point: Point[P]) -> Point[P] | None:
        """The next point, with a strictly lower loss, or None if no descent is left."""
        successor = self._search(point, self._direction(point))
        if successor is None and self._pairs:
            # The remembered curvature may be stale: one plain preconditioned step decides whether this is the end.
            self._pairs.clear()
            successor = self._search(point, self._direction(point))
        if successor is None:
            return None
        moved = successor.position - point.position
        change = successor.gradient - point.gradient
        curvature = moved.dot(change).item()
        if curvature > 1e-10 * moved.norm().item() * change.norm().item():
            self._pairs.append((moved, change, 1.0 / curvature))
        return successor

    def _direction(self, point: Point[P]) -> Tensor:
        vector = point.gradient.clone()
        weights = []
        for moved, change, inverse in reversed(self._pairs):
            weight = inverse * moved.dot(vector).item()
            vector -= weight * change
            weights.append(weight)
        vector = self.precondition(point, vector)
        for (moved, change, inverse), weight in zip(self._pairs, reversed(weights), strict=True):
            vector += (weight - inverse * change.dot(vector).item()) * moved
        return -vector

    def _search(self, point: Point[P], direction: Tensor) -> Point[P] | None:
        """Armijo backtracking, each trial at the minimum of the parabola through the last one."""
        slope = point.gradient.dot(direction).item()
        if not slope < 0:
            return None
        length = 1.0
        for _ in range(_MAX_TRIALS):
            trial = self.evaluate(point.position + length * direction)
            if trial.loss <= point.loss + _SUFFICIENT_DECREASE * length * slope and trial.loss < point.loss:
                return trial
            excess = trial.loss - point.loss - length * slope
            best = -slope * length * length / (2 * excess) if excess > 0 else 0.5 * length
            length = min(max(best, 0.1 * length), 0.5 * length)
        return None

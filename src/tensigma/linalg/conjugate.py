"""Preconditioned conjugate gradients on a matrix of unknowns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradient(
    normal: Callable[[Tensor], Tensor],
    target: Tensor,
    start: Tensor,
    precondition: Callable[[Tensor], Tensor],
    *,
    steps: int,
) -> Tensor:
    """``steps`` steps towards normal(X) = target from ``start``; each lowers ½⟨X, normal(X)⟩ − ⟨X, target⟩.

    ``normal`` and ``precondition`` are symmetric and positive semi-definite.
    """
    solution = start.clone()
    residual = target - normal(solution)
    direction = preconditioned = precondition(residual)
    energy = _dot(residual, preconditioned)
    for _ in range(steps):
        image = normal(direction)
        curvature = _dot(direction, image)
        if not curvature > 0 or not energy > 0:
            break
        length = energy / curvature
        solution = solution + length * direction
        residual = residual - length * image
        preconditioned = precondition(residual)
        energy, previous = _dot(residual, preconditioned), energy
        direction = preconditioned + (energy / previous) * direction
    return solution


def _dot(left: Tensor, right: Tensor) -> float:
    return torch.dot(left.reshape(-1).double(), right.reshape(-1).double()).item()

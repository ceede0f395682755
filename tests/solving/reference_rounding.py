"""Slow, obvious twins of the rounding of factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def composed_by_loops(kernels: Sequence[Tensor]) -> Tensor:
    """The kernel of stages (groups, o, c, h, w) that run one after the other, found by sending impulses through."""
    n_in = kernels[0].shape[0] * kernels[0].shape[2]
    height, width = (max(kernel.shape[axis] for kernel in kernels) for axis in (3, 4))
    size_h, size_w = 2 * height - 1, 2 * width - 1
    columns = []
    for channel in range(n_in):
        signal = torch.zeros(1, n_in, size_h, size_w, dtype=kernels[0].dtype)
        signal[0, channel, height - 1, width - 1] = 1.0
        for kernel in kernels:
            signal = torch.nn.functional.conv2d(signal, kernel.flatten(0, 1), groups=kernel.shape[0])
        # Cross-correlation shows the kernel mirrored around the impulse.
        columns.append(signal[0].flip(1, 2))
    return torch.stack(columns, 1)


def quadratic_form(kernels: Sequence[Tensor], place: int, target: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """H and h of one stage: the whole kernel is linear in its weights, so each weight gives one column of a matrix."""
    columns = []
    for index in range(kernels[place].numel()):
        unit = torch.zeros_like(kernels[place]).flatten()
        unit[index] = 1.0
        changed = [unit.reshape(kernel.shape) if i == place else kernel for i, kernel in enumerate(kernels)]
        columns.append(composed_by_loops(changed).flatten())
    jacobian = torch.stack(columns, 1)  # (t·d, n)
    whole = torch.kron(torch.eye(len(target), dtype=gram.dtype), gram)
    return jacobian.T @ whole @ jacobian, jacobian.T @ whole @ target.flatten()


def loss(target: Tensor, kernel: Tensor, gram: Tensor) -> float:
    """tr(E Σ Eᵀ)."""
    error = (target - kernel).flatten(1)
    return torch.trace(error @ gram @ error.T).item()

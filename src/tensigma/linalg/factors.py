"""The result of a decomposition: factors that can rebuild their dense kernel and count their parameters.

Axes: ``t`` output channels, ``s`` input channels, ``k1, k2, …`` spatial taps, ``r`` rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Factors(Protocol):
    """The factors of one kernel, whatever their format."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense kernel, (t, s, *taps)."""
        ...

    @property
    def n_params(self) -> int:
        """How many numbers are stored, without the bias of the layer."""
        ...

    def to_dense(self) -> Tensor:
        """The kernel that these factors represent, shape (t, s, *taps)."""
        ...


def count_params(tensors: Sequence[Tensor]) -> int:
    """The numbers that these tensors hold together."""
    return sum(tensor.numel() for tensor in tensors)

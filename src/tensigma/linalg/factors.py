"""The result of a decomposition: factors that can rebuild their dense kernel and count their parameters.

Axes: ``t`` output channels, ``s`` input channels, ``k1, k2, …`` spatial taps, ``r`` rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

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


F = TypeVar("F", bound=Factors)


@dataclass(frozen=True, eq=False)
class Fit(Generic[F]):
    """Factors, and the errors on the way to them.

    ``errors[0]`` belongs to the starting point, ``errors[i]`` to the best state after sweep (or step) ``i``, and
    ``errors[-1]`` to ``factors``. They are relative errors under the metric of the fit and never rise.

    >>> import torch
    >>> from tensigma.linalg import SVD, Metric
    >>> fit = SVD(rank=1).fit(torch.diag(torch.tensor([4.0, 3.0])), Metric.identity(2))
    >>> round(fit.error, 4), fit.error == fit.errors[-1], fit.converged
    (0.6, True, True)
    """

    factors: F
    errors: tuple[float, ...]
    converged: bool

    @property
    def error(self) -> float:
        """Relative error of ``factors``."""
        return self.errors[-1]

"""No decomposition at all: the kernel itself, for layers that are only rounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tensigma.linalg.factors import Fit
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import check_kernel
from tensigma.linalg.solver import RankTuple, Solver
from tensigma.linalg.spectra import Spectra


@dataclass(frozen=True, eq=False)
class DenseFactors:
    """A kernel as its only factor.

    >>> import torch
    >>> DenseFactors(torch.ones(4, 3, 3, 3)).n_params
    108
    """

    kernel: Tensor  # (t, s, *taps)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape)

    @property
    def n_params(self) -> int:
        return self.kernel.numel()

    def to_dense(self) -> Tensor:
        return self.kernel


@dataclass(frozen=True)
class Dense(Solver):
    """The kernel as it is; it has no ranks.

    >>> import torch
    >>> Dense().fit(torch.ones(2, 3), Metric.identity(3)).error
    0.0
    """

    reads_inputs: ClassVar[bool] = False

    @classmethod
    def max_ranks(cls, shape: Sequence[int]) -> RankTuple:
        return ()

    @classmethod
    def vbmf_ranks(cls, kernel: Tensor, alpha: float) -> RankTuple:
        return ()

    @classmethod
    def energy_ranks(cls, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        return ()

    @classmethod
    def errors(cls, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        return [((), 0.0)]

    @classmethod
    def expected_error(cls, spectra: Spectra, ranks: RankTuple) -> float | None:
        return 0.0

    def fit(self, weight: Tensor, metric: Metric) -> Fit[DenseFactors]:
        return Fit(DenseFactors(check_kernel(weight, metric).clone()), (0.0,), converged=True)

"""TensorLy's own decompositions behind the protocol of our solvers, for side-by-side runs.

They minimise the Frobenius norm of the weights, whatever metric is given; the error they report is that under the
metric, so that a row of a table means the same for all.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from types import ModuleType

from torch import Tensor

from tensigma.errors import MissingExtra
from tensigma.linalg import CPFactors, Fit, Metric, Tucker2Factors


def _tensorly() -> ModuleType:
    try:
        import tensorly
        import tensorly.decomposition
    except ImportError as error:
        raise MissingExtra(
            "this baseline is TensorLy's own; install it with: pip install 'tensigma[baselines]'"
        ) from error
    return tensorly


@dataclass(frozen=True)
class TensorLyCP:
    """``tensorly.decomposition.parafac``.

    >>> import torch
    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = TensorLyCP(rank=10).fit(weight, Metric.identity(54))
    >>> fit.factors.shape, 0 < fit.error < 1
    ((8, 6, 3, 3), True)
    """

    rank: int
    _: KW_ONLY
    max_sweeps: int = 100
    tol: float = 1e-6
    seed: int = 0

    def fit(self, weight: Tensor, metric: Metric) -> Fit[CPFactors]:
        tensorly = _tensorly()
        kernel = weight.detach()
        with tensorly.backend_context("pytorch"):
            scales, (outs, ins, *spatial) = tensorly.decomposition.parafac(
                kernel, self.rank, n_iter_max=self.max_sweeps, tol=self.tol, init="random", random_state=self.seed
            )
        factors = CPFactors(outs * scales, ins, tuple(spatial), tuple(kernel.shape[2:])).balanced()
        return Fit(factors, (metric.relative_error(kernel, factors.to_dense()),), converged=True)


@dataclass(frozen=True)
class TensorLyTucker2:
    """``tensorly.decomposition.partial_tucker`` on the two channel modes, from HOSVD.

    >>> import torch
    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = TensorLyTucker2(rank_out=5, rank_in=4).fit(weight, Metric.identity(54))
    >>> fit.factors.core.shape, 0 < fit.error < 1
    (torch.Size([5, 4, 3, 3]), True)
    """

    rank_out: int
    rank_in: int
    _: KW_ONLY
    max_sweeps: int = 100
    tol: float = 1e-4

    def fit(self, weight: Tensor, metric: Metric) -> Fit[Tucker2Factors]:
        tensorly = _tensorly()
        kernel = weight.detach()
        ranks = [self.rank_out, self.rank_in]
        with tensorly.backend_context("pytorch"):
            (core, (outs, ins)), _ = tensorly.decomposition.partial_tucker(
                kernel, rank=ranks, modes=[0, 1], n_iter_max=self.max_sweeps, tol=self.tol
            )
        factors = Tucker2Factors(outs, core, ins)
        return Fit(factors, (metric.relative_error(kernel, factors.to_dense()),), converged=True)

"""The best matrix of rank r under a metric, in closed form. Notation: M (t, d) kernel, Σ (d, d) gram, U (t, r) basis.

M̃ = U Uᵀ M with U the top eigenvectors of M Σ Mᵀ: no root of Σ and no inverse.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tensigma.linalg.factors import SVDFactors
from tensigma.linalg.fit import Fit
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import check_kernel, check_rank, psd_cholesky


@dataclass(frozen=True)
class SVD:
    """Two factors of rank ``rank``; serves Linear layers, 1×1 convolutions and any kernel seen as a matrix.

    >>> weight = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> fit = SVD(rank=2).fit(weight, Metric.identity(3))
    >>> round(fit.error**2 * 14, 5)
    1.0
    """

    rank: int

    def fit(self, weight: Tensor, metric: Metric) -> Fit[SVDFactors]:
        kernel = check_kernel(weight, metric)
        t, d = kernel.flatten(1).shape
        check_rank(self.rank, min(t, d), "rank")
        metric = metric.to(kernel)
        matrix = kernel.flatten(1)
        if self.rank == min(t, d):
            return Fit(_unchanged(kernel), (0.0,), converged=True)
        basis = output_basis(matrix, metric)[1][:, : self.rank].to(kernel.dtype)
        factors = SVDFactors(basis, (basis.T @ matrix).reshape(self.rank, *kernel.shape[1:]))
        return Fit(factors, (metric.relative_error(kernel, factors.to_dense()),), converged=True)


def _unchanged(kernel: Tensor) -> SVDFactors:
    """The kernel itself beside an identity on its shorter side."""
    t, d = kernel.flatten(1).shape
    if t <= d:
        return SVDFactors(torch.eye(t).to(kernel), kernel.clone())
    return SVDFactors(kernel.flatten(1).clone(), torch.eye(d).to(kernel).view(d, *kernel.shape[1:]))


def output_basis(matrix: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """Eigenvalues, descending, and eigenvectors of M (Σ + εI) Mᵀ, (t, min(t, d)), in float64.

    The sum of the eigenvalues beyond the first r is the squared error of the best rank-r approximation: one
    decomposition serves every rank. ε orders the directions that Σ does not see by their weight.
    """
    t, d = matrix.shape
    if t > d:
        return _tall_basis(matrix, metric)
    moment = metric.outputs(matrix).double()
    if metric.epsilon:
        moment = moment + metric.epsilon * (matrix @ matrix.T).double()
    values, vectors = torch.linalg.eigh(moment)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _tall_basis(matrix: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """The same by way of the smaller d × d problem: with Σ + εI = L Lᵀ, the eigenvectors of (M L)ᵀ(M L), times M L."""
    gram = metric.dense().to(matrix.device, torch.float64)
    lower = psd_cholesky(gram + metric.epsilon * torch.eye(len(gram)).to(gram))
    half = matrix.double() @ lower
    values, vectors = torch.linalg.eigh(half.T @ half)
    # QR instead of a division by singular values: columns of no energy become any orthonormal ones.
    return values.flip(0).clamp_min(0), torch.linalg.qr(half @ vectors.flip(1))[0]

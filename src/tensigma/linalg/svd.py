"""The best matrix of rank r under a metric, in closed form. Notation: M (t, d) kernel, Σ (d, d) gram, U (t, r) basis.

M̃ = U Uᵀ M with U the top eigenvectors of M Σ Mᵀ: no root of Σ and no inverse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tensigma.linalg.curves import rank_grid, share_lost
from tensigma.linalg.factors import Fit, count_params
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import check_kernel, check_rank, psd_cholesky
from tensigma.linalg.solver import RankTuple, Solver
from tensigma.linalg.spectra import Spectra
from tensigma.linalg.vbmf import alpha_rank, vbmf_rank

# How many ranks the error curve has. More change no choice by more than its rounding.
_CURVE_RANKS = 64
_BLOCK = 512  # rows of a kernel that are copied to float64 at once
# Steps of subspace iteration, and directions that it carries beside those that are asked for.
_STEPS, _SPARE = 3, 16


@dataclass(frozen=True, eq=False)
class SVDFactors:
    """``kernel ≈ left · right``: a full-size convolution into r channels, then a pointwise one.

    >>> factors = SVDFactors(torch.ones(4, 1), torch.ones(1, 3, 3, 3))
    >>> factors.shape, factors.n_params, factors.to_dense().sum().item()
    ((4, 3, 3, 3), 31, 108.0)
    """

    left: Tensor  # (t, r)
    right: Tensor  # (r, s, *taps)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.left.shape[0], *self.right.shape[1:])

    @property
    def n_params(self) -> int:
        return count_params((self.left, self.right))

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    def to_dense(self) -> Tensor:
        return (self.left @ self.right.flatten(1)).reshape(self.shape)


@dataclass(frozen=True)
class SVD(Solver):
    """Two factors of rank ``rank``; serves Linear layers, 1×1 convolutions and any kernel seen as a matrix.

    >>> weight = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> fit = SVD(rank=2).fit(weight, Metric.identity(3))
    >>> round(fit.error**2 * 14, 5)
    1.0
    """

    reads_inputs: ClassVar[bool] = False

    rank: int

    @classmethod
    def max_ranks(cls, shape: Sequence[int]) -> RankTuple:
        return (min(shape[0], math.prod(shape[1:])),)

    @classmethod
    def vbmf_ranks(cls, kernel: Tensor, alpha: float) -> RankTuple:
        return (svd_rank(kernel, alpha),)

    @classmethod
    def energy_ranks(cls, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        return (min(spectra.rank_out(tail), *cls.max_ranks(shape)),)

    @classmethod
    def errors(cls, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        errors = svd_errors(kernel, metric).tolist()
        return [((rank,), errors[rank - 1]) for rank in rank_grid(len(errors), _CURVE_RANKS)]

    @classmethod
    def expected_error(cls, spectra: Spectra, ranks: RankTuple) -> float | None:
        (rank,) = ranks
        return spectra.svd_error(rank)

    def fit(self, weight: Tensor, metric: Metric) -> Fit[SVDFactors]:
        kernel = check_kernel(weight, metric)
        t, d = kernel.flatten(1).shape
        check_rank(self.rank, min(t, d), "rank")
        metric = metric.to(kernel)
        matrix = kernel.flatten(1)
        if self.rank == min(t, d):
            return Fit(_unchanged(kernel), (0.0,), converged=True)
        basis = _leading_basis(matrix, metric, self.rank).to(kernel.dtype)
        factors = SVDFactors(basis, (basis.T @ matrix).reshape(self.rank, *kernel.shape[1:]))
        return Fit(factors, (_relative_error(matrix, factors, metric),), converged=True)


def svd_errors(weight: Tensor, metric: Metric) -> Tensor:
    """Squared relative errors of the best approximations of rank 1, 2, … min(t, d), in float64.

    >>> svd_errors(torch.diag(torch.tensor([2.0, 2.0, 0.0])), Metric.identity(3)).round(decimals=6).tolist()
    [0.5, 0.0, 0.0]
    """
    kernel = check_kernel(weight, metric)
    matrix = kernel.flatten(1)
    energies, _ = seen_basis(matrix, metric.to(kernel))
    return share_lost(energies, energies.sum())


def svd_rank(weight: Tensor, alpha: float) -> int:
    """The paper's rule for a matrix, or a kernel seen as one: R_max = min(t, d).

    >>> svd_rank(torch.randn(16, 20, generator=torch.Generator().manual_seed(0)), alpha=0.5)
    8
    """
    matrix = weight.flatten(1)
    return alpha_rank(vbmf_rank(matrix), min(matrix.shape), alpha)


def _unchanged(kernel: Tensor) -> SVDFactors:
    """The kernel itself and an identity on its shorter side."""
    t, d = kernel.flatten(1).shape
    if t <= d:
        return SVDFactors(torch.eye(t).to(kernel), kernel.clone())
    return SVDFactors(kernel.flatten(1).clone(), torch.eye(d).to(kernel).view(d, *kernel.shape[1:]))


def _relative_error(matrix: Tensor, factors: SVDFactors, metric: Metric) -> float:
    if metric.n_rows is None:
        return metric.relative_error(matrix, factors.to_dense().flatten(1))
    # By what comes out for the rows: the product of the factors may be as large as hundreds of megabytes.
    outputs = metric.seen(matrix)
    reference = outputs.double().norm().item()
    lost = (outputs - factors.left @ metric.seen(factors.right.flatten(1))).double().norm().item()
    return lost / reference if reference > 0 else 0.0


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


def seen_basis(matrix: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """All min(t, d) eigenvalues, and the leading eigenvectors: those that the metric sees, if it holds few rows.

    That takes no decomposition of a (t, t) matrix. The eigenvalues of directions that no row sees are then taken as
    equal: their sum is known, and it is at most ε times the energy of the weights.

    >>> energies, basis = seen_basis(torch.eye(4), Metric.from_rows(torch.tensor([[2.0, 0.0, 0.0, 0.0]])))
    >>> energies.round(decimals=3).tolist(), basis.abs().T.tolist()
    ([4.0, 0.0, 0.0, 0.0], [[1.0, 0.0, 0.0, 0.0]])
    """
    t, d = matrix.shape
    if not _has_few_rows(matrix, metric):
        energies, basis = output_basis(matrix, metric)
        return energies[: min(t, d)], basis
    energies, basis = _basis_of_rows(matrix, metric)
    # ε is counted in the energies but does not turn the directions, which it would by less than Σ is known.
    weights = torch.cat([(part.to(matrix) @ matrix).double().square().sum(1) for part in basis.T.split(_BLOCK)])
    total = sum(block.double().square().sum() for block in matrix.split(_BLOCK))
    rest = (metric.epsilon * (total - weights.sum())).clamp_min(0) / (t - len(energies))
    return torch.cat([energies + metric.epsilon * weights, rest.expand(t - len(energies))]), basis


def _leading_basis(matrix: Tensor, metric: Metric, rank: int) -> Tensor:
    """The first ``rank`` eigenvectors, (t, rank); of directions that no row sees, those of nearly the most weight."""
    if not _has_few_rows(matrix, metric):
        return output_basis(matrix, metric)[1][:, :rank]
    basis = _basis_of_rows(matrix, metric)[1]
    extra = rank - basis.shape[1]
    if extra <= 0:
        return basis[:, :rank]
    if 2 * extra > len(matrix):
        return output_basis(matrix, metric)[1][:, :rank]  # no more work than the steps below
    return torch.cat([basis, _heavy_directions(matrix, basis.to(matrix), extra).to(basis)], 1)


def _has_few_rows(matrix: Tensor, metric: Metric) -> bool:
    t, d = matrix.shape
    return metric.n_rows is not None and t <= d and 2 * metric.n_rows <= t


def _heavy_directions(matrix: Tensor, basis: Tensor, count: int) -> Tensor:
    """``count`` orthonormal directions outside ``basis`` with nearly the most of the energy of M, (t, count).

    By a few steps of subspace iteration from random directions: a decomposition of M Mᵀ would take several times as
    long, and only ε tells such directions apart, so nothing that was measured depends on their order.
    """
    t = len(matrix)
    moment = matrix @ matrix.T
    generator = torch.Generator().manual_seed(0)
    spare = min(_SPARE, t - basis.shape[1] - count)
    block = torch.randn(t, count + spare, generator=generator).to(matrix)
    for _ in range(_STEPS):
        block = block - basis @ (basis.T @ block)
        block = moment @ torch.linalg.qr(block)[0]
    # Twice, because what is left of the basis after one subtraction is rounding of large numbers.
    for _ in range(2):
        block = torch.linalg.qr(block - basis @ (basis.T @ block))[0]
    _, vectors = torch.linalg.eigh(block.T @ moment @ block)
    return block @ vectors.flip(1)[:, :count]


def _basis_of_rows(matrix: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """Energies and directions of what n rows see, n or fewer: from the (n, n) products of the layer's outputs."""
    seen = metric.seen(matrix).double()  # (t, n)
    values, vectors = torch.linalg.eigh(seen.T @ seen)
    values, vectors = values.flip(0), vectors.flip(1)
    # Directions of no energy, such as the one that centring takes away, are rounding.
    kept = values > 1e-10 * values[0]
    return values[kept], torch.linalg.qr(seen @ vectors[:, kept])[0]


def _tall_basis(matrix: Tensor, metric: Metric) -> tuple[Tensor, Tensor]:
    """The same by way of the smaller d × d problem: with Σ + εI = L Lᵀ, the eigenvectors of (M L)ᵀ(M L), times M L."""
    gram = metric.dense().to(matrix.device, torch.float64)
    lower = psd_cholesky(gram + metric.epsilon * torch.eye(len(gram)).to(gram))
    half = matrix.double() @ lower
    values, vectors = torch.linalg.eigh(half.T @ half)
    # QR instead of a division by singular values: columns of no energy become any orthonormal ones.
    return values.flip(0).clamp_min(0), torch.linalg.qr(half @ vectors.flip(1))[0]

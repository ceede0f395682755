"""Tucker-2 under a metric. Notation: M (t, d) kernel, S (d, d) damped gram, X (s, r_s) input basis, U (t, r_t) output
basis, G (r_t, k·r_s) core, B = I_k ⊗ X (d, k·r_s) the basis of patches, E = M − U G Bᵀ the residual.

Given X, the best U and G together are a reduced-rank regression with a closed form: only X is searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from tensigma.errors import InputError, RankError
from tensigma.linalg.conjugate import conjugate_gradient
from tensigma.linalg.curves import rank_grid, share_lost
from tensigma.linalg.factors import Fit, count_params
from tensigma.linalg.iterate import iterate
from tensigma.linalg.lbfgs import Descent, Point
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import Problem, check_rank, orthonormal, psd_cholesky
from tensigma.linalg.solver import RankTuple, Solver, check_options
from tensigma.linalg.spectra import Spectra
from tensigma.linalg.vbmf import alpha_rank, vbmf_rank

# Inner steps for X in one ALS sweep. Ten lower the error of a sweep no further than two.
_CG_STEPS = 2
# Ridges of the preconditioner's two factors, relative to their mean diagonal.
_RIDGE = 1e-3
# Up to this order normal equations are solved in float64 and a second start is tried: both cost almost nothing there.
_SMALL = 1024
# How many values each rank takes in the error curve. More change no choice by more than its rounding.
_CURVE_RANKS = 24


@dataclass(frozen=True, eq=False)
class Tucker2Factors:
    """``kernel = core ×₁ out_basis ×₂ in_basis``: pointwise, small spatial core, pointwise.

    >>> factors = Tucker2Factors(torch.eye(4, 2), torch.ones(2, 3, 3, 3), torch.eye(5, 3))
    >>> factors.shape, factors.n_params
    ((4, 5, 3, 3), 77)
    """

    out_basis: Tensor  # (t, r_t)
    core: Tensor  # (r_t, r_s, *taps)
    in_basis: Tensor  # (s, r_s)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.out_basis.shape[0], self.in_basis.shape[0], *self.core.shape[2:])

    @property
    def n_params(self) -> int:
        return count_params((self.out_basis, self.core, self.in_basis))

    @property
    def rank_out(self) -> int:
        return self.out_basis.shape[1]

    @property
    def rank_in(self) -> int:
        return self.in_basis.shape[1]

    def to_dense(self) -> Tensor:
        core = self.core.reshape(self.rank_out, self.rank_in, -1)  # (r_t, r_s, k)
        return torch.einsum("ta,abk,sb->tsk", self.out_basis, core, self.in_basis).reshape(self.shape)


@dataclass(frozen=True)
class Tucker2(Solver):
    """A pointwise layer into ``rank_in`` channels, a spatial core, and a pointwise layer out of ``rank_out`` channels.

    ``solver="varpro"`` searches the input basis by quasi-Newton steps with the rest eliminated; ``solver="als"``
    alternates as the paper does, with exact blocks. ``init`` is ``"data"`` (the optimum for a gram that is a Kronecker
    product), ``"hosvd"`` (singular vectors of the unfolded kernel), ``"auto"`` (both, keeping the better result, if
    the layer is small; otherwise ``"data"``) or factors to start from. All are deterministic: ``seed`` is part of the
    common interface and changes nothing.

    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = Tucker2(rank_out=5, rank_in=4).fit(weight, Metric.identity(54))
    >>> fit.factors.core.shape, fit.error < 1, all(a >= b for a, b in zip(fit.errors, fit.errors[1:]))
    (torch.Size([5, 4, 3, 3]), True, True)
    """

    rank_out: int
    rank_in: int
    _: KW_ONLY
    solver: Literal["varpro", "als"] = "varpro"
    init: Literal["auto", "data", "hosvd"] | Tucker2Factors = "auto"
    max_sweeps: int = 50
    tol: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self, solvers=("varpro", "als"), inits=("auto", "data", "hosvd"), factors=Tucker2Factors)

    @classmethod
    def max_ranks(cls, shape: Sequence[int]) -> RankTuple:
        return shape[0], shape[1]

    @classmethod
    def vbmf_ranks(cls, kernel: Tensor, alpha: float) -> RankTuple:
        return tucker2_ranks(kernel, alpha)

    @classmethod
    def energy_ranks(cls, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        return spectra.rank_out(tail), spectra.rank_in(tail)

    @classmethod
    def errors(cls, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        ranks_out, ranks_in = (rank_grid(n, _CURVE_RANKS) for n in kernel.shape[:2])
        rows = tucker2_errors(kernel, metric, ranks_in).tolist()
        return [
            ((rank_out, rank_in), row[rank_out - 1])
            for rank_in, row in zip(ranks_in, rows, strict=True)
            for rank_out in ranks_out
        ]

    def fit(self, weight: Tensor, metric: Metric) -> Fit[Tucker2Factors]:
        problem = Problem(weight, metric)
        check_rank(self.rank_out, problem.n_out, "rank_out")
        check_rank(self.rank_in, problem.n_in, "rank_in")
        if (self.rank_out, self.rank_in) == (problem.n_out, problem.n_in):
            return Fit(_unchanged(problem), (0.0,), converged=True)
        elimination = Elimination(problem, self.rank_out)
        if self.rank_in == problem.n_in:  # all bases of all channels are equivalent
            exact = elimination.at(torch.eye(problem.n_in).to(problem.kernel))
            return Fit(elimination.factors(exact), (exact.error,), converged=True)
        runs = []
        for start in self._starts(problem):
            step = elimination.descent().step if self.solver == "varpro" else elimination.als_sweep
            runs.append(iterate(step, elimination.at(start), max_sweeps=self.max_sweeps, tol=self.tol))
        state, errors, converged = min(runs, key=lambda run: run[0].loss)
        return Fit(elimination.factors(state), errors, converged)

    def _starts(self, problem: Problem) -> list[Tensor]:
        if isinstance(self.init, Tucker2Factors):
            if self.init.shape != tuple(problem.weight.shape) or self.init.rank_in != self.rank_in:
                raise InputError(
                    f"starting factors are for a kernel {self.init.shape} with rank_in={self.init.rank_in}, "
                    f"the fit is for {tuple(problem.weight.shape)} with rank_in={self.rank_in}"
                )
            return [orthonormal(self.init.in_basis.to(problem.kernel))]
        # Kernels without structure have many local minima: a second start pays where it is cheap.
        both = self.init == "auto" and problem.size <= _SMALL
        kinds = [True, False] if both else [self.init != "hosvd"]
        return [input_basis(problem, self.rank_out, data=data)[:, : self.rank_in].contiguous() for data in kinds]


def tucker2_errors(weight: Tensor, metric: Metric, ranks_in: Sequence[int]) -> Tensor:
    """Squared relative errors of Tucker-2 from its data-aware start, (len(ranks_in), t): row by rank_in, column by
    rank_out − 1. A solver that starts there ends a few per cent lower.

    The input directions are nested, so one Cholesky factor of the full normal matrix, ordered direction by direction,
    contains that of every rank_in; and for each of them one eigendecomposition serves every rank_out.

    >>> weight = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> errors = tucker2_errors(weight, Metric.identity(36), [2, 4])
    >>> errors.shape, errors[1, 5].item() < 1e-6, bool((errors[0] >= errors[1]).all())
    (torch.Size([2, 6]), True, True)
    """
    p = Problem(weight, metric)
    n_in = p.n_in
    if list(ranks_in) != sorted(set(ranks_in)) or not ranks_in or not 1 <= ranks_in[0] <= ranks_in[-1] <= n_in:
        raise RankError(f"ranks_in rise from at least 1 to at most {n_in} for this kernel, got {list(ranks_in)}")
    return errors_of_leading(nested_regression(p), ranks_in, p.damped_norm2)


def errors_of_leading(parts: Tensor, counts: Sequence[int], total: float) -> Tensor:
    """Squared relative errors when the first ``counts`` parts of a :func:`nested_regression` are kept: a row for each
    count, a column for each output rank. ``total`` is the energy of the kernel."""
    explained = parts.new_zeros(parts.shape[2], parts.shape[2])
    rows, done = [], 0
    for count in counts:
        block = parts[done:count].flatten(0, 1)
        explained = explained + block.T @ block
        done = count
        energies = torch.linalg.eigvalsh(explained).flip(0).clamp_min(0)
        rows.append(share_lost(energies, energies.new_tensor(total)))
    return torch.stack(rows)


def nested_regression(problem: Problem) -> Tensor:
    """What the regression of M on the first 1, 2, … starting directions explains: Z (s, k, t) in float64.

    The energy that the leading r directions explain is Σ Z[:r]², and its split over outputs is Σ Z[:r]ᵀ Z[:r].
    """
    p = problem
    t, s, k = p.n_out, p.n_in, p.n_taps
    basis = input_basis(p, t, data=True)
    if p.gram is None:
        inner = torch.einsum("kl,rq->krlq", torch.eye(k).to(basis), basis.T @ basis)
    else:
        image = (p.gram.view(-1, s) @ basis).view(k, s, k * s)  # S B, rows (k, s), columns (k, r)
        inner = (basis.T @ image).view(k, s, k, s)  # Bᵀ S B as (k, r, k, r)
    # Direction-major: leading blocks then belong to the leading directions.
    normal = inner.permute(1, 0, 3, 2).reshape(s * k, s * k).double()
    cross = (p.kernel_gram.view(-1, s) @ basis).view(t, k, s).transpose(1, 2).reshape(t, s * k).double()  # M S B
    lower = psd_cholesky((normal + normal.T) / 2)
    return torch.linalg.solve_triangular(lower, cross.T, upper=False).view(s, k, t)


def tucker2_ranks(weight: Tensor, alpha: float) -> tuple[int, int]:
    """The paper's (rank_out, rank_in) for Tucker-2: VBMF of the two channel unfoldings, R_max the channels.

    >>> weight = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> tucker2_ranks(weight, alpha=0.0), tucker2_ranks(weight, alpha=0.5)
    ((16, 8), (8, 4))
    """
    t, s = weight.shape[:2]
    outs, ins = vbmf_rank(weight.flatten(1)), vbmf_rank(weight.transpose(0, 1).flatten(1))
    return alpha_rank(outs, t, alpha), alpha_rank(ins, s, alpha)


def tucker2_params(shape: Sequence[int], rank_out: int, rank_in: int) -> int:
    """The numbers that Tucker-2 stores for a kernel of this shape.

    >>> tucker2_params((64, 32, 3, 3), rank_out=16, rank_in=8)
    2432
    """
    t, s, *taps = shape
    return t * rank_out + rank_out * rank_in * math.prod(taps) + s * rank_in


def input_basis(problem: Problem, rank_out: int, *, data: bool) -> Tensor:
    """Orthonormal starting directions for X, best first, (s, s): the leading columns serve for every r_s.

    Under S = C ⊗ D the best X spans L⁻ᵀ · top eigenvectors of Lᵀ (Σ_t m_t D m_tᵀ) L, with C = L Lᵀ and m_t the
    (s, k) slices of the outputs that rank r_t keeps. With C = D = I and all outputs this is HOSVD.
    """
    if not data:
        slices = problem.kernel.view(-1, problem.n_in).double()
        return torch.linalg.eigh(slices.T @ slices)[1].flip(1).to(problem.kernel.dtype)
    moment_out = (problem.kernel_gram @ problem.kernel.T).double()
    outs = torch.linalg.eigh(moment_out)[1][:, -rank_out:].to(problem.kernel.dtype)
    slices = (outs.T @ problem.kernel).view(rank_out, problem.n_taps, problem.n_in).double()
    weighted = torch.einsum("kl,tls->tks", problem.tap_gram.double(), slices)
    moment = slices.flatten(0, 1).T @ weighted.flatten(0, 1)
    lower = psd_cholesky(problem.channel_gram.double())
    vectors = torch.linalg.eigh(lower.T @ moment @ lower)[1].flip(1)
    directions = torch.linalg.solve_triangular(lower.T, vectors, upper=True)
    # QR goes column by column, so the leading ones span what the leading directions span.
    return orthonormal(directions).to(problem.kernel.dtype)


def _unchanged(problem: Problem) -> Tucker2Factors:
    def eye(n: int) -> Tensor:
        return torch.eye(n, dtype=problem.kernel.dtype, device=problem.kernel.device)

    return Tucker2Factors(eye(problem.n_out), problem.weight.clone(), eye(problem.n_in))


@dataclass(frozen=True, eq=False)
class Regression:
    """The best U and G for one X."""

    out_basis: Tensor  # U (t, r_t)
    core: Tensor  # G (r_t, k·r_s)


class Elimination:
    """The loss as a function of X alone, with U and G eliminated."""

    def __init__(self, problem: Problem, rank_out: int) -> None:
        self.problem = problem
        self.rank_out = rank_out

    def regress(self, basis: Tensor) -> tuple[Regression, Tensor]:
        """The best (U, G) for X = ``basis``, and S B (d, k·r)."""
        p, r = self.problem, basis.shape[1]
        image = self._image(basis)  # S B, (d, k·r)
        inner = basis.T @ image.view(p.n_taps, p.n_in, p.n_taps * r)  # Bᵀ S B as (k, r, k·r)
        cross = (p.kernel_gram.view(-1, p.n_in) @ basis).view(p.n_out, p.n_taps * r)  # M S B
        lower = _cholesky(inner.reshape(p.n_taps * r, -1))
        whitened = torch.linalg.solve_triangular(lower, cross.T.to(lower), upper=False)  # (k·r, t)
        vectors = torch.linalg.eigh((whitened.T @ whitened).double())[1]
        top = vectors[:, -self.rank_out :].flip(1).to(lower)
        core = torch.linalg.solve_triangular(lower.T, whitened @ top, upper=True).T
        return Regression(top.to(basis), core.to(basis).contiguous()), image

    def at(self, basis: Tensor) -> Point[Regression]:
        """Loss and gradient at X = ``basis``."""
        p, r = self.problem, basis.shape[1]
        regression, image = self.regress(basis)
        outs, core = regression.out_basis, regression.core
        patches = (core.view(-1, r) @ basis.T).view(self.rank_out, p.size)  # G Bᵀ
        residual = torch.addmm(p.kernel, outs, patches, alpha=-1)
        residual_gram = torch.addmm(p.kernel_gram, outs, core @ image.T, alpha=-1)
        loss, error = p.residual_norms(residual, residual_gram)
        # ∂loss/∂B = −2 (E S)ᵀ U G; the gradient for X is the sum of its blocks with equal taps.
        pull = (outs.T @ residual_gram).view(-1, p.n_in)  # (r_t·k, s)
        scale = -2 / p.damped_norm2 if p.damped_norm2 > 0 else 0.0
        gradient = scale * (pull.T @ core.view(-1, r))
        return Point(basis.reshape(-1), loss, gradient.reshape(-1), error, regression)

    def descent(self) -> Descent[Regression]:
        """Quasi-Newton steps on X, preconditioned by the Hessian that S ≈ C ⊗ D would have with G held fixed."""
        channel = psd_cholesky(ridged(self.problem.channel_gram))

        def precondition(point: Point[Regression], vector: Tensor) -> Tensor:
            scale = 2 / self.problem.damped_norm2
            matrix = self._matrix(vector).double()
            core = psd_cholesky(ridged(self.core_gram(point.payload.core)))
            left = torch.cholesky_solve(matrix, channel)
            return torch.cholesky_solve(left.T, core).T.reshape(-1).to(vector.dtype) / scale

        return Descent(lambda flat: self.at(self._matrix(flat)), precondition)

    def als_sweep(self, point: Point[Regression]) -> Point[Regression]:
        """X by conjugate gradients with U and G fixed, then U and G exactly."""
        p = self.problem
        core = point.payload.core
        basis = self.basis_of(point)
        channel = psd_cholesky(ridged(p.channel_gram))
        small = psd_cholesky(ridged(self.core_gram(core)))
        r = basis.shape[1]

        def normal(matrix: Tensor) -> Tensor:
            patches = (core.view(-1, r) @ matrix.T).view(self.rank_out, p.size)  # G Bᵀ
            return p.gram_times(patches.T).T.reshape(-1, p.n_in).T @ core.view(-1, r)

        def precondition(matrix: Tensor) -> Tensor:
            left = torch.cholesky_solve(matrix.double(), channel)
            return torch.cholesky_solve(left.T, small).T.to(matrix.dtype)

        target = (point.payload.out_basis.T @ p.kernel_gram).view(-1, p.n_in).T @ core.view(-1, r)
        better = conjugate_gradient(normal, target, basis, precondition, steps=_CG_STEPS)
        return self.at(orthonormal(better))

    def factors(self, point: Point[Regression]) -> Tucker2Factors:
        """The factors at ``point``, turned so that the input basis is orthonormal: X = Q R, and R moves into G."""
        p = self.problem
        columns, upper = torch.linalg.qr(self.basis_of(point).double())
        core = point.payload.core.view(self.rank_out, p.n_taps, -1).double() @ upper.T  # (r_t, k, r_s)
        by_tap = core.transpose(1, 2).reshape(self.rank_out, columns.shape[1], *p.taps)
        dtype = p.kernel.dtype
        return Tucker2Factors(point.payload.out_basis, by_tap.to(dtype), columns.to(dtype))

    def basis_of(self, point: Point[Regression]) -> Tensor:
        return self._matrix(point.position)

    def _matrix(self, flat: Tensor) -> Tensor:
        return flat.view(self.problem.n_in, -1)

    def _image(self, basis: Tensor) -> Tensor:
        p, r = self.problem, basis.shape[1]
        if p.gram is None:
            return torch.block_diag(*[basis] * p.n_taps)
        return (p.gram.view(-1, p.n_in) @ basis).view(p.size, p.n_taps * r)

    def core_gram(self, core: Tensor) -> Tensor:
        """Σ_{k,l} D_kl G_kᵀ G_l, (r_s, r_s)."""
        p = self.problem
        by_tap = core.view(self.rank_out, p.n_taps, -1).double()
        weighted = torch.einsum("kl,alr->akr", p.tap_gram.double(), by_tap)
        return by_tap.flatten(0, 1).T @ weighted.flatten(0, 1)


def _cholesky(normal: Tensor) -> Tensor:
    """The factor of a normal matrix, in float64 if the matrix is small or float32 is not enough."""
    if len(normal) > _SMALL:
        factor, info = torch.linalg.cholesky_ex(normal)
        if info == 0:
            return factor
    return psd_cholesky(normal.double())


def ridged(gram: Tensor) -> Tensor:
    """A PSD matrix in float64 with a ridge that keeps its inverse from blowing up unseen directions."""
    ridged = gram.double()
    mean = ridged.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    return ridged + _RIDGE * mean * torch.eye(len(ridged), dtype=torch.float64, device=ridged.device)

"""CP under a metric. Notation: M (t, d) kernel, S (d, d) damped gram, T (t, r) output factor, V the factors of all
other modes, P (k, r) the Khatri-Rao product of the spatial ones, B = P ⊙ U_s (d, r), E = M − T Bᵀ the residual.

Given V, the best T is a linear regression, so all that is searched is V. One product S B gives the loss and the
gradients of every mode.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.linalg.conjugate import conjugate_gradient
from tensigma.linalg.factors import CPFactors
from tensigma.linalg.fit import Fit
from tensigma.linalg.iterate import iterate
from tensigma.linalg.lbfgs import Descent, Point
from tensigma.linalg.metric import Metric
from tensigma.linalg.options import check_options
from tensigma.linalg.problem import Problem, check_rank, psd_cholesky
from tensigma.linalg.svd import output_basis

# Inner steps for each mode in one ALS sweep.
_CG_STEPS = 3
# Ridges of the preconditioners, relative to each diagonal entry, so that the scale of a column does not matter. Terms
# of a CP are nearly collinear; less than this trusts directions that the Kronecker model does not know.
_RIDGE = 0.1


@dataclass(frozen=True)
class CP:
    """``rank`` terms, each an outer product of one vector per mode: output, input and every spatial axis.

    ``joint=True`` keeps all spatial taps of a term together in one vector. ``solver="varpro"`` searches all modes but
    the output by quasi-Newton steps; ``solver="als"`` alternates as the paper does. ``init`` is ``"random"`` (seeded),
    ``"svd"`` (the heaviest rank-one terms of nested singular value decompositions) or factors to start from.

    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = CP(rank=10).fit(weight, Metric.identity(54))
    >>> fit.factors.n_params, fit.error < 1, all(a >= b for a, b in zip(fit.errors, fit.errors[1:]))
    (200, True, True)
    """

    rank: int
    _: KW_ONLY
    joint: bool = False
    solver: Literal["varpro", "als"] = "varpro"
    init: Literal["random", "svd"] | CPFactors = "svd"
    max_sweeps: int = 100
    tol: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self, solvers=("varpro", "als"), inits=("random", "svd"), factors=CPFactors)

    def fit(self, weight: Tensor, metric: Metric) -> Fit[CPFactors]:
        problem = Problem(weight, metric)
        modes = _modes(problem, self.joint)
        largest = max_rank((problem.n_out, *modes))
        check_rank(self.rank, largest, "rank")
        if self.rank == largest:
            return Fit(_unchanged(problem, modes, self.joint), (0.0,), converged=True)
        elimination = Elimination(problem, modes, self.rank)
        start = elimination.at(elimination.pack(self._start(problem, modes)))
        step = elimination.descent().step if self.solver == "varpro" else elimination.als_sweep
        state, errors, converged = iterate(step, start, max_sweeps=self.max_sweeps, tol=self.tol)
        ins, *spatial = elimination.unpack(state.position)
        factors = CPFactors(state.payload, ins, tuple(spatial), problem.taps, self.joint)
        return Fit(factors.balanced(), errors, converged)

    def _start(self, problem: Problem, modes: tuple[int, ...]) -> list[Tensor]:
        if isinstance(self.init, CPFactors):
            given = self.init
            if given.shape != tuple(problem.weight.shape) or (given.rank, given.joint) != (self.rank, self.joint):
                raise InputError(
                    f"starting factors are for a kernel {given.shape} with rank={given.rank}, joint={given.joint}, the "
                    f"fit is for {tuple(problem.weight.shape)} with rank={self.rank}, joint={self.joint}"
                )
            return [factor.to(problem.kernel) for factor in (given.in_factor, *given.spatial)]
        generator = torch.Generator().manual_seed(self.seed)
        random = [torch.randn(n, self.rank, generator=generator, dtype=torch.float64) for n in modes]
        if self.init == "svd":
            terms = nested_svd(problem, modes, self.rank)
            # Where the kernel has fewer terms than wanted, random ones fill up.
            random = [torch.cat([term, fill[:, term.shape[1] :]], 1) for term, fill in zip(terms, random, strict=True)]
        return [factor.to(problem.kernel) for factor in random]


def max_rank(shape: tuple[int, ...]) -> int:
    """The number of terms with which any tensor of this shape can be written: all entries ÷ the longest mode.

    >>> max_rank((64, 64, 3, 3)), max_rank((512, 512, 3, 3))
    (576, 4608)
    """
    return math.prod(shape) // max(shape)


def nested_svd(problem: Problem, modes: tuple[int, ...], count: int) -> list[Tensor]:
    """The ``count`` heaviest rank-one terms of M when it is split by one SVD per mode, outputs first.

    The outputs are split under the metric and the rest by plain SVDs. Taken all together the terms are M itself.
    """
    basis = output_basis(problem.weight.flatten(1), problem.metric)[1]  # (t, t)
    rest = (basis.T @ problem.weight.flatten(1).double()).view(-1, *modes)  # one (s, k1, …) tensor per output direction
    # Any term of a lighter output direction is lighter than the direction itself.
    rest = rest[: min(count, len(rest))]
    columns: list[Tensor] = []  # per finished mode, (terms, n)
    for _ in modes[:-1]:
        left, values, right = torch.linalg.svd(rest.flatten(2), full_matrices=False)
        n_terms, width = values.shape
        columns = [column.repeat_interleave(width, 0) for column in columns]
        columns.append(left.transpose(1, 2).reshape(n_terms * width, -1))
        rest = (values[:, :, None] * right).reshape(n_terms * width, *rest.shape[2:])
        heaviest = rest.flatten(1).norm(dim=1).topk(min(count, len(rest))).indices
        columns, rest = [column[heaviest] for column in columns], rest[heaviest]
    lengths = rest.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)
    return [factor.T for factor in (*columns, rest / lengths)]


def _modes(problem: Problem, joint: bool) -> tuple[int, ...]:
    spatial = (problem.n_taps,) if joint else problem.taps
    return (problem.n_in, *spatial)


def _unchanged(problem: Problem, modes: tuple[int, ...], joint: bool) -> CPFactors:
    """The kernel itself: one-hot vectors in all modes but the longest, which holds the entries."""
    kernel = problem.weight.reshape(problem.n_out, *modes)
    longest = kernel.shape.index(max(kernel.shape))
    others = [n for mode, n in enumerate(kernel.shape) if mode != longest]
    grid = torch.cartesian_prod(*[torch.arange(n) for n in others]).view(-1, len(others)).T
    factors = [torch.nn.functional.one_hot(index, n).T.to(kernel) for index, n in zip(grid, others, strict=True)]
    factors.insert(longest, kernel.movedim(longest, 0).flatten(1))
    out, ins, *spatial = factors
    return CPFactors(out, ins, tuple(spatial), problem.taps, joint).balanced()


class Elimination:
    """The loss as a function of the input and spatial factors, with the output factor eliminated."""

    def __init__(self, problem: Problem, modes: tuple[int, ...], rank: int) -> None:
        self.problem = problem
        self.modes = modes
        self.rank = rank
        #: One small gram per mode with S ≈ C_s ⊗ D_1 ⊗ D_2 ⊗ …
        self.mode_grams = [problem.channel_gram.double(), *_marginals(problem.tap_gram.double(), modes[1:])]
        self._mode_choleskys = [psd_cholesky(_ridged(gram)) for gram in self.mode_grams]

    def pack(self, factors: list[Tensor]) -> Tensor:
        """All factors as one vector, their columns at unit length: T carries the scale."""
        tiny = torch.finfo(factors[0].dtype).tiny
        return torch.cat([(factor / factor.norm(dim=0).clamp_min(tiny)).reshape(-1) for factor in factors])

    def unpack(self, flat: Tensor) -> list[Tensor]:
        return [part.view(-1, self.rank) for part in flat.split([n * self.rank for n in self.modes])]

    def at(self, flat: Tensor) -> Point[Tensor]:
        """Loss and gradient at the packed factors V; the payload is T."""
        p = self.problem
        factors = self.unpack(flat)
        basis = _patches(factors)  # B, (d, r)
        image = p.gram_times(basis)  # S B
        outs = self._regress(basis, image)
        residual = torch.addmm(p.kernel, outs, basis.T, alpha=-1)
        residual_gram = torch.addmm(p.kernel_gram, outs, image.T, alpha=-1)
        loss, error = p.residual_norms(residual, residual_gram)
        scale = -2 / p.damped_norm2 if p.damped_norm2 > 0 else 0.0
        pull = (residual_gram.T @ outs).mul_(scale)  # ∂loss/∂B, (d, r)
        gradient = torch.cat([self._contract(pull, factors, mode).reshape(-1) for mode in range(len(factors))])
        return Point(flat, loss, gradient, error, outs)

    def descent(self) -> Descent[Tensor]:
        """Quasi-Newton steps on V, preconditioned mode by mode by the Hessian that a Kronecker S would have."""

        def precondition(point: Point[Tensor], vector: Tensor) -> Tensor:
            scale = 2 / self.problem.damped_norm2
            grams = self._factor_grams(point.payload, self.unpack(point.position))
            parts = [self._precondition(grams, mode, part) / scale for mode, part in enumerate(self.unpack(vector))]
            return torch.cat([part.reshape(-1) for part in parts])

        return Descent(self.at, precondition)

    def als_sweep(self, point: Point[Tensor]) -> Point[Tensor]:
        """Each mode in turn by conjugate gradients with the others fixed, then T exactly."""
        p = self.problem
        outs = point.payload
        factors = self.unpack(point.position)
        outer = outs.T @ outs
        target = p.kernel_gram.T @ outs  # (d, r)
        for mode in range(len(factors)):
            grams = self._factor_grams(outs, factors)

            def normal(trial: Tensor, mode: int = mode) -> Tensor:
                others = [*factors[:mode], trial, *factors[mode + 1 :]]
                return self._contract(p.gram_times(_patches(others)) @ outer, factors, mode)

            def precondition(matrix: Tensor, mode: int = mode, grams: list[Tensor] = grams) -> Tensor:
                return self._precondition(grams, mode, matrix)

            wanted = self._contract(target, factors, mode)
            factors[mode] = conjugate_gradient(normal, wanted, factors[mode], precondition, steps=_CG_STEPS)
        return self.at(self.pack(factors))

    def _regress(self, basis: Tensor, image: Tensor) -> Tensor:
        """T = (M S B)(Bᵀ S B)⁻¹ in float64, with columns at unit length and a ridge at the level of rounding."""
        inner = (basis.T @ image).double()
        cross = (self.problem.kernel_gram @ basis).double()
        lengths = inner.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        normal = inner / lengths / lengths[:, None]
        normal.diagonal().add_(10 * torch.finfo(basis.dtype).eps)
        lower = psd_cholesky((normal + normal.T) / 2)
        return (torch.cholesky_solve((cross / lengths).T, lower).T / lengths).to(basis.dtype)

    def _contract(self, pull: Tensor, factors: list[Tensor], mode: int) -> Tensor:
        """The (n, r) derivative with respect to one mode, from that with respect to B."""
        p = self.problem
        by_tap = pull.view(p.n_taps, p.n_in, self.rank)
        if mode == 0:
            return (by_tap * _khatri_rao(factors[1:], like=pull)[:, None]).sum(0)
        spatial = (by_tap * factors[0]).sum(1).view(*self.modes[1:], self.rank)
        for other, factor in reversed(list(enumerate(factors[1:]))):
            if other != mode - 1:
                shape = [1] * spatial.ndim
                shape[other], shape[-1] = factor.shape
                spatial = (spatial * factor.view(shape)).sum(other, keepdim=True)
        return spatial.reshape(self.modes[mode], self.rank)

    def _factor_grams(self, outs: Tensor, factors: list[Tensor]) -> list[Tensor]:
        """U_jᵀ D_j U_j of every mode, the output last."""
        grams = [f.double().T @ gram @ f.double() for f, gram in zip(factors, self.mode_grams, strict=True)]
        return [*grams, (outs.T @ outs).double()]

    def _precondition(self, grams: list[Tensor], mode: int, matrix: Tensor) -> Tensor:
        """D_j⁻¹ · matrix · (∘ of the other modes' grams)⁻¹."""
        others = reduce(torch.mul, [gram for other, gram in enumerate(grams) if other != mode])
        left = torch.cholesky_solve(matrix.double(), self._mode_choleskys[mode])
        return torch.cholesky_solve(left.T, psd_cholesky(_ridged(others))).T.to(matrix.dtype)


def _khatri_rao(factors: list[Tensor], like: Tensor) -> Tensor:
    """Column-wise Kronecker product, first factor slowest: (n1·n2·…, r)."""
    product = like.new_ones(1, like.shape[1])
    for factor in factors:
        product = (product[:, None] * factor).flatten(0, 1)
    return product


def _patches(factors: list[Tensor]) -> Tensor:
    """B = P ⊙ U_s, tap-major, (d, r)."""
    ins, *spatial = factors
    return _khatri_rao([*spatial, ins], like=ins)


def _marginals(tap_gram: Tensor, spatial: tuple[int, ...]) -> list[Tensor]:
    """D (k, k) averaged over all spatial modes but one, for each of them; none for a layer without taps."""
    if not spatial:
        return []
    blocks = tap_gram.view(*spatial, *spatial)
    count = len(spatial)
    marginals = []
    for mode, n in enumerate(spatial):
        rows, columns = list(range(count)), list(range(count))
        columns[mode] = count
        partial = torch.einsum(blocks, [*rows, *columns], [mode, count])
        marginals.append(partial * (n / len(tap_gram)))
    return marginals


def _ridged(gram: Tensor) -> Tensor:
    ridged = gram.clone()
    diagonal = gram.diagonal()
    ridged.diagonal().add_(_RIDGE * diagonal + torch.finfo(gram.dtype).eps * diagonal.max())
    return ridged

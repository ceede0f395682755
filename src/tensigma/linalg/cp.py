"""CP under a metric. Notation: M (t, d) kernel, S (d, d) damped gram, T (t, r) output factor, V the factors of all
other modes, P (k, r) the Khatri-Rao product of the spatial ones, B = P ⊙ U_s (d, r), E = M − T Bᵀ the residual.

Given V, the best T is a linear regression: only V is searched. One product S B gives the loss and the gradient of
every mode.
"""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.linalg.cp_elimination import Elimination, ridged, separable_grams
from tensigma.linalg.curves import power_law, rank_grid
from tensigma.linalg.factors import Fit, count_params
from tensigma.linalg.iterate import iterate
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import Problem, check_rank, psd_cholesky
from tensigma.linalg.solver import RankTuple, Solver, check_options
from tensigma.linalg.spectra import Spectra
from tensigma.linalg.svd import output_basis
from tensigma.linalg.tucker2 import Tucker2, tucker2_params
from tensigma.linalg.vbmf import alpha_rank, vbmf_rank

# How many ranks the error curve has. More change no choice by more than its rounding.
_CURVE_RANKS = 48
# Where the curve is solved: shares of the largest rank, and sweeps for each. Large layers get fewer of both, and the
# fewest sweeps at high ranks, where a sweep takes longest: the curve must stay cheaper than the solution.
_CURVE = tuple((share, 30) for share in (0.05, 0.1, 0.2, 0.35, 0.55, 0.75, 1.0))
_LARGE_CURVE = ((0.05, 20), (0.2, 15), (0.5, 8))
_SMALL = 1024
# Large layers are searched under S ≈ C ⊗ D, where a sweep costs a fourth, while a sweep gains this many times the
# tolerance, or a fair amount if that is loose: what it would find beyond, sweeps under S find as well. Those go on
# while they gain so many times the tolerance, fewer of them the wider the layer, as time grows with the cube of the
# width, and few if the tolerance is looser than a fine one. On 3×3 layers of a ResNet-50 at half their size, errors end
# 4 % above those that twice the time finds.
_SEARCH_GAIN, _SEARCH_TOL = 40.0, 4e-3
_POLISH_GAIN, _FINE, _WIDE = 10.0, 2e-4, 2048


@dataclass(frozen=True, eq=False)
class CPFactors:
    """``kernel = Σ_r out[:, r] ⊗ in[:, r] ⊗ spatial₁[:, r] ⊗ …``: pointwise, depthwise per spatial factor, pointwise.

    With ``joint=True`` there is one spatial factor over all taps together, (k1·k2·…, r), in row-major order;
    otherwise there is one for each spatial axis.

    >>> ones = lambda n: torch.ones(n, 2)
    >>> CPFactors(ones(4), ones(5), (ones(3), ones(3)), taps=(3, 3)).n_params
    30
    >>> CPFactors(ones(4), ones(5), (ones(9),), taps=(3, 3), joint=True).n_params
    36
    """

    out_factor: Tensor  # (t, r)
    in_factor: Tensor  # (s, r)
    spatial: tuple[Tensor, ...]  # (k_i, r) each
    taps: tuple[int, ...]
    joint: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.out_factor.shape[0], self.in_factor.shape[0], *self.taps)

    @property
    def n_params(self) -> int:
        return count_params((self.out_factor, self.in_factor, *self.spatial))

    @property
    def rank(self) -> int:
        return self.out_factor.shape[1]

    def to_dense(self) -> Tensor:
        letters = string.ascii_lowercase.replace("r", "")[: 2 + len(self.spatial)]
        equation = ",".join(f"{letter}r" for letter in letters) + "->" + letters
        return torch.einsum(equation, self.out_factor, self.in_factor, *self.spatial).reshape(self.shape)

    def balanced(self) -> CPFactors:
        """The same kernel with the columns of all factors equally long, so that none overflows or quantises badly."""
        factors = (self.out_factor, self.in_factor, *self.spatial)
        lengths = torch.stack([factor.norm(dim=0) for factor in factors])  # (modes, r)
        # A column that is zero anywhere contributes nothing: make it zero everywhere.
        alive = (lengths > 0).all(0)
        log_lengths = lengths.clamp_min(torch.finfo(lengths.dtype).tiny).log()
        common = log_lengths.mean(0)
        out_factor, in_factor, *spatial = (
            factor * torch.where(alive, (common - log_length).exp(), torch.zeros_like(log_length))
            for factor, log_length in zip(factors, log_lengths, strict=True)
        )
        return CPFactors(out_factor, in_factor, tuple(spatial), self.taps, self.joint)


@dataclass(frozen=True)
class CP(Solver):
    """``rank`` terms, each an outer product of one vector per mode: output, input and every spatial axis.

    ``joint=True`` keeps all spatial taps of a term together in one vector. ``solver="varpro"`` searches all modes but
    the output by quasi-Newton steps; ``solver="als"`` alternates as the paper does. ``init`` is ``"random"`` (seeded),
    ``"svd"`` (the heaviest rank-one terms of nested singular value decompositions) or factors to start from.

    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = CP(rank=10).fit(weight, Metric.identity(54))
    >>> fit.factors.n_params, fit.error < 1, all(a >= b for a, b in zip(fit.errors, fit.errors[1:]))
    (200, True, True)
    """

    variant: ClassVar[tuple[str, ...]] = ("joint",)

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

    @classmethod
    def modes(cls, shape: Sequence[int]) -> tuple[int, ...]:
        """The lengths of the vectors in one term for a kernel of this shape: output, input, spatial.

        >>> CP.modes((64, 32, 3, 3)), CPJoint.modes((64, 32, 3, 3))
        ((64, 32, 3, 3), (64, 32, 9))
        """
        t, s, *taps = shape
        return (t, s, math.prod(taps)) if cls.joint else (t, s, *taps)

    @classmethod
    def max_ranks(cls, shape: Sequence[int]) -> RankTuple:
        return (max_rank(cls.modes(shape)),)

    @classmethod
    def vbmf_ranks(cls, kernel: Tensor, alpha: float) -> RankTuple:
        return (cp_rank(kernel, alpha, joint=cls.joint),)

    @classmethod
    def energy_ranks(cls, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        """CP has no spectrum of its own: it takes the rank that costs as much as Tucker-2 would."""
        budget = tucker2_params(shape, *Tucker2.energy_ranks(spectra, tail, shape))
        return (min(max(1, budget // sum(cls.modes(shape))), *cls.max_ranks(shape)),)

    @classmethod
    def errors(cls, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        """There is no closed form: a few ranks are solved roughly, and those between follow a power law."""
        largest = cls.break_even_rank(kernel.shape)
        points = _CURVE if kernel[0].numel() <= _SMALL else _LARGE_CURVE
        sweeps = {max(1, round(share * largest)): count for share, count in points}
        problem = Problem(kernel, metric)
        solved = [
            (rank, cls(rank, max_sweeps=count, tol=1e-3)._fit(problem, polish=False).error ** 2)
            for rank, count in sweeps.items()
        ]
        return [((rank,), power_law(rank, solved)) for rank in rank_grid(largest, _CURVE_RANKS)]

    @classmethod
    def break_even_rank(cls, shape: Sequence[int]) -> int:
        """The largest rank worth considering: beyond it the factors are larger than the kernel.

        >>> CP.break_even_rank((64, 64, 3, 3))
        275
        """
        return max(1, min(math.prod(shape) // sum(cls.modes(shape)), *cls.max_ranks(shape)))

    def fit(self, weight: Tensor, metric: Metric) -> Fit[CPFactors]:
        return self._fit(Problem(weight, metric), polish=True)

    def _fit(self, problem: Problem, *, polish: bool) -> Fit[CPFactors]:
        modes = _modes(problem, self.joint)
        largest = max_rank((problem.n_out, *modes))
        check_rank(self.rank, largest, "rank")
        if self.rank == largest:
            return Fit(_unchanged(problem, modes, self.joint), (0.0,), converged=True)
        elimination = Elimination(problem, modes, self.rank)
        max_sweeps, tol, start = self.max_sweeps, self.tol, self._start
        if self.solver == "varpro" and problem.size > _SMALL and problem.gram is not None:
            share = _FINE / max(_FINE, self.tol) * min(1, _WIDE / problem.size) if polish else 0.0
            max_sweeps, tol = math.ceil(share * self.max_sweeps), _POLISH_GAIN * self.tol
            start = self._separable_start
        first = elimination.at(elimination.pack(start(problem, modes)))
        step = elimination.descent().step if self.solver == "varpro" else elimination.als_sweep
        state, errors, converged = iterate(step, first, max_sweeps=max_sweeps, tol=tol)
        ins, *spatial = elimination.unpack(state.position)
        factors = CPFactors(state.payload, ins, tuple(spatial), problem.taps, self.joint)
        return Fit(factors.balanced(), errors, converged)

    def _separable_start(self, problem: Problem, modes: tuple[int, ...]) -> list[Tensor]:
        """The solution under S ≈ C ⊗ D_1 ⊗ …: with C = L Lᵀ and so on, a plain CP of M (L ⊗ L_1 ⊗ …).

        No step needs a product with S, and the solution is close to that under S.
        """
        grams = separable_grams(problem, modes)
        roots = [psd_cholesky(ridged(gram.double(), problem.metric.damping)) for gram in grams]
        whitened = problem.weight.view(problem.n_out, *modes).double()
        for mode, root in enumerate(roots, start=1):
            whitened = (whitened.movedim(mode, -1) @ root).movedim(-1, mode)
        kernel = whitened.to(problem.weight).reshape_as(problem.weight)
        init = self.init
        if isinstance(init, CPFactors):
            first, *rest = (
                (root.T @ factor.double()).to(problem.kernel)
                for root, factor in zip(roots, self._start(problem, modes), strict=True)
            )
            init = replace(init, in_factor=first, spatial=tuple(rest))
        search = replace(self, init=init, tol=min(_SEARCH_GAIN * self.tol, max(_SEARCH_TOL, self.tol)))
        factors = search.fit(kernel, Metric.identity(problem.size)).factors
        return [
            torch.linalg.solve_triangular(root.T, factor.double(), upper=True).to(problem.kernel)
            for root, factor in zip(roots, (factors.in_factor, *factors.spatial), strict=True)
        ]

    def _start(self, problem: Problem, modes: tuple[int, ...]) -> list[Tensor]:
        if isinstance(self.init, CPFactors):
            start = self.init
            if start.shape != tuple(problem.weight.shape) or (start.rank, start.joint) != (self.rank, self.joint):
                raise InputError(
                    f"starting factors are for a kernel {start.shape} with rank={start.rank}, joint={start.joint}, the "
                    f"fit is for {tuple(problem.weight.shape)} with rank={self.rank}, joint={self.joint}"
                )
            return [factor.to(problem.kernel) for factor in (start.in_factor, *start.spatial)]
        generator = torch.Generator().manual_seed(self.seed)
        random = [torch.randn(n, self.rank, generator=generator, dtype=torch.float64) for n in modes]
        if self.init == "svd":
            terms = nested_svd(problem, modes, self.rank)
            # The kernel may have fewer terms than the rank: random ones make up the rest.
            random = [torch.cat([term, fill[:, term.shape[1] :]], 1) for term, fill in zip(terms, random, strict=True)]
        return [factor.to(problem.kernel) for factor in random]


@dataclass(frozen=True)
class CPJoint(CP):
    """CP with all spatial taps of a term in one vector: richer than one vector per axis, at almost the same size.

    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> CPJoint(rank=10).fit(weight, Metric.identity(54)).factors.n_params
    230
    """

    joint: bool = field(default=True, kw_only=True)


def max_rank(shape: tuple[int, ...]) -> int:
    """The number of terms with which any tensor of this shape can be written: all entries ÷ the longest mode.

    >>> max_rank((64, 64, 3, 3)), max_rank((512, 512, 3, 3))
    (576, 4608)
    """
    return math.prod(shape) // max(shape)


def cp_rank(weight: Tensor, alpha: float, *, joint: bool = False) -> int:
    """The paper's rank for CP: VBMF's largest over all unfoldings, R_max = all entries ÷ the longest mode.

    >>> weight = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> cp_rank(weight, alpha=0.0), cp_rank(weight, alpha=0.5), cp_rank(weight, alpha=1.0)
    (72, 36, 1)
    """
    kernel = weight.flatten(2) if joint and weight.ndim > 3 else weight
    unfoldings = [kernel.movedim(mode, 0).flatten(1) for mode in range(kernel.ndim)]
    return alpha_rank(max(map(vbmf_rank, unfoldings)), max_rank(tuple(kernel.shape)), alpha)


def nested_svd(problem: Problem, modes: tuple[int, ...], count: int) -> list[Tensor]:
    """The ``count`` heaviest rank-one terms of M when it is split by one SVD per mode, outputs first.

    The outputs are split under the metric and the rest by plain SVDs. All of them together are M itself.
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

"""Tensor train under a metric. Notation: K (t, s, h, w) kernel, A (s, r_in) input basis, B (r_in, h·r_mid) vertical
factor, V = A B the two together, seen as (s·h, r_mid); H (r_out, r_mid, w) horizontal factor, U (t, r_out) output
basis.

Given V, the best U and H are Tucker-2's regression on the kernel seen as (t, s·h, w): only A and B are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from tensigma.errors import InputError, RankError
from tensigma.linalg import spatial_svd, tucker2
from tensigma.linalg.curves import rank_grid
from tensigma.linalg.factors import Fit, count_params
from tensigma.linalg.iterate import iterate
from tensigma.linalg.lbfgs import Descent, Point
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import Problem, check_kernel, check_rank, check_two_axes, psd_cholesky
from tensigma.linalg.solver import RankTuple, Solver, check_options
from tensigma.linalg.spatial_svd import rows_as_channels, unfolded
from tensigma.linalg.spectra import Spectra
from tensigma.linalg.tucker2 import (
    Regression,
    Tucker2,
    errors_of_leading,
    input_basis,
    nested_regression,
    ridged,
    tucker2_ranks,
)
from tensigma.linalg.vbmf import alpha_rank, vbmf_rank

# How many values each of the three ranks takes in the error curve.
_CURVE_RANKS = 12
# Up to this many features a second start is tried: it costs almost nothing there.
_SMALL = 1024


@dataclass(frozen=True, eq=False)
class TensorTrainFactors:
    """``kernel[t, s, h, w] = Σ out_basis[t, a] horizontal[a, m, w] vertical[m, b, h] in_basis[s, b]`` over a, m, b: a
    pointwise convolution, an h×1 one, a 1×w one and a pointwise one.

    >>> ones = torch.ones
    >>> factors = TensorTrainFactors(ones(4, 2), ones(2, 3, 3), ones(3, 2, 3), ones(5, 2))
    >>> factors.shape, factors.n_params, factors.to_dense()[0, 0, 0, 0].item()
    ((4, 5, 3, 3), 54, 12.0)
    """

    out_basis: Tensor  # (t, r_out)
    horizontal: Tensor  # (r_out, r_mid, w)
    vertical: Tensor  # (r_mid, r_in, h)
    in_basis: Tensor  # (s, r_in)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.out_basis), len(self.in_basis), self.vertical.shape[2], self.horizontal.shape[2])

    @property
    def n_params(self) -> int:
        return count_params((self.out_basis, self.horizontal, self.vertical, self.in_basis))

    @property
    def rank_out(self) -> int:
        return self.out_basis.shape[1]

    @property
    def rank_mid(self) -> int:
        return self.vertical.shape[0]

    @property
    def rank_in(self) -> int:
        return self.in_basis.shape[1]

    def to_dense(self) -> Tensor:
        left = torch.einsum("ta,amw->tmw", self.out_basis, self.horizontal)
        right = torch.einsum("mbh,sb->msh", self.vertical, self.in_basis)
        return torch.einsum("tmw,msh->tshw", left, right)


@dataclass(frozen=True)
class TensorTrain(Solver):
    """A pointwise layer into ``rank_in`` channels, h×1 into ``rank_mid``, 1×w into ``rank_out``, and a pointwise layer.

    ``rank_mid`` is at most rank_in·h and rank_out·w; more could carry nothing. Kernels have two spatial axes. The only
    ``solver`` searches the input basis and the vertical factor by quasi-Newton steps with the rest eliminated. ``init``
    is ``"data"`` (Tucker-2's input basis for this metric, then the start of spatial SVD within it), ``"hosvd"`` (the
    same without the metric), ``"auto"`` (both, keeping the better result, if the layer is small; otherwise
    ``"data"``) or factors to start from. All are deterministic: ``seed`` is part of the common interface and changes
    nothing.

    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = TensorTrain(rank_out=5, rank_mid=8, rank_in=4).fit(weight, Metric.identity(54))
    >>> fit.factors.n_params, fit.error < 1, all(a >= b for a, b in zip(fit.errors, fit.errors[1:]))
    (280, True, True)
    """

    rank_out: int
    rank_mid: int
    rank_in: int
    _: KW_ONLY
    solver: Literal["varpro"] = "varpro"
    init: Literal["auto", "data", "hosvd"] | TensorTrainFactors = "auto"
    max_sweeps: int = 50
    tol: float = 1e-4
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(self, solvers=("varpro",), inits=("auto", "data", "hosvd"), factors=TensorTrainFactors)

    @classmethod
    def max_ranks(cls, shape: Sequence[int]) -> RankTuple:
        t, s, h, w = check_two_axes(shape, "a tensor train")
        return t, min(s * h, t * w), s

    @classmethod
    def capped(cls, ranks: RankTuple, shape: Sequence[int]) -> RankTuple:
        """The middle rank is also bounded by what its neighbours can fill.

        >>> TensorTrain.capped((4, 99, 2), (8, 6, 3, 3))
        (4, 6, 2)
        """
        rank_out, rank_mid, rank_in = super().capped(ranks, shape)
        return rank_out, min(rank_mid, _largest_mid(shape, rank_out, rank_in)), rank_in

    @classmethod
    def vbmf_ranks(cls, kernel: Tensor, alpha: float) -> RankTuple:
        """The paper's rule on the unfoldings (t, s·h·w), (s·h, t·w) and (s, t·h·w)."""
        _, largest, _ = cls.max_ranks(kernel.shape)
        rank_out, rank_in = tucker2_ranks(kernel, alpha)
        rank_mid = alpha_rank(vbmf_rank(unfolded(kernel)), largest, alpha)
        return rank_out, min(rank_mid, _largest_mid(kernel.shape, rank_out, rank_in)), rank_in

    @classmethod
    def energy_ranks(cls, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        """Outer ranks are those of Tucker-2. Spectra of channels do not tell the middle one: it is the largest with
        which the two spatial factors cost no more than Tucker-2's core."""
        _, _, h, w = check_two_axes(shape, "a tensor train")
        rank_out, rank_in = Tucker2.energy_ranks(spectra, tail, shape)
        return rank_out, max(1, rank_out * w * rank_in * h // (rank_out * w + rank_in * h)), rank_in

    @classmethod
    def errors(cls, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        """The errors of the data-aware start. Solutions end lower: by 1 to 8 per cent on layers of a trained ResNet-20.

        The grid leaves out chains with a rank that its neighbours cannot fill.
        """
        problem = Problem(kernel, metric)
        ranks_out, ranks_mid, ranks_in = (rank_grid(n, _CURVE_RANKS) for n in cls.max_ranks(kernel.shape))
        directions = input_basis(problem, problem.n_out, data=True)
        curve: dict[RankTuple, float] = {}
        lowest: dict[tuple[int, int], float] = {}
        for rank_in in ranks_in:
            chains = [
                (mid, [out for out in ranks_out if _is_lean(kernel.shape, out, mid, rank_in)]) for mid in ranks_mid
            ]
            lean = {mid: outs for mid, outs in chains if outs}
            parts = nested_regression(_reduced_problem(problem, directions[:, :rank_in].contiguous(), problem.n_out))
            rows = errors_of_leading(parts, list(lean), problem.damped_norm2).tolist()
            for (mid, outs), row in zip(lean.items(), rows, strict=True):
                for out in outs:
                    # A chain contains those with a smaller input rank, even if its own start is worse.
                    lowest[mid, out] = min(row[out - 1], lowest.get((mid, out), 1.0))
                    curve[out, mid, rank_in] = lowest[mid, out]
        return list(curve.items())

    def fit(self, weight: Tensor, metric: Metric) -> Fit[TensorTrainFactors]:
        kernel = check_kernel(weight, metric)
        self._check_ranks(kernel.shape)
        if (self.rank_out, self.rank_mid, self.rank_in) == self.max_ranks(kernel.shape):
            return Fit(_unchanged(kernel), (0.0,), converged=True)
        starts = self._starts(kernel, metric)
        problem = Problem(rows_as_channels(kernel), metric)
        elimination = Elimination(problem, kernel.shape[1], self.rank_out, self.rank_in)
        runs = []
        for start in starts:
            state = elimination.at(elimination.pack(*start))
            runs.append(iterate(elimination.descent().step, state, max_sweeps=self.max_sweeps, tol=self.tol))
        state, errors, converged = min(runs, key=lambda run: run[0].loss)
        return Fit(elimination.factors(state), errors, converged)

    def _check_ranks(self, shape: Sequence[int]) -> None:
        names = ("rank_out", "rank_mid", "rank_in")
        for name, rank, largest in zip(
            names, (self.rank_out, self.rank_mid, self.rank_in), self.max_ranks(shape), strict=True
        ):
            check_rank(rank, largest, name)
        largest = _largest_mid(shape, self.rank_out, self.rank_in)
        if self.rank_mid > largest:
            raise RankError(
                f"rank_mid lies between 1 and {largest} with rank_out={self.rank_out} and rank_in={self.rank_in} for "
                f"a kernel {tuple(shape)}, got {self.rank_mid}"
            )

    def _starts(self, kernel: Tensor, metric: Metric) -> list[tuple[Tensor, Tensor]]:
        """Pairs (A, B) to start from."""
        if isinstance(self.init, TensorTrainFactors):
            start = self.init
            expected = (tuple(kernel.shape), self.rank_mid, self.rank_in)
            if (start.shape, start.rank_mid, start.rank_in) != expected:
                raise InputError(
                    f"starting factors are for a kernel {start.shape} with rank_mid={start.rank_mid}, "
                    f"rank_in={start.rank_in}, the fit is for {expected[0]} with rank_mid={expected[1]}, "
                    f"rank_in={expected[2]}"
                )
            vertical = start.vertical.permute(1, 2, 0).flatten(1)  # (r_in, h·r_mid)
            return [(start.in_basis.to(kernel), vertical.to(kernel))]
        both = self.init == "auto" and kernel[0].numel() <= _SMALL
        kinds = [True, False] if both else [self.init != "hosvd"]
        problem = Problem(kernel, metric)
        starts = []
        for data in kinds:
            basis = input_basis(problem, self.rank_out, data=data)[:, : self.rank_in].contiguous()
            reduced = _reduced_problem(problem, basis, self.rank_out)
            directions = input_basis(reduced, self.rank_out, data=data)[:, : self.rank_mid]
            starts.append((basis, directions.reshape(self.rank_in, -1)))
        return starts


def _largest_mid(shape: Sequence[int], rank_out: int, rank_in: int) -> int:
    """The largest middle rank that these outer ranks can fill."""
    _, _, h, w = shape
    return min(rank_in * h, rank_out * w)


def _is_lean(shape: Sequence[int], rank_out: int, rank_mid: int, rank_in: int) -> bool:
    """Whether no rank is more than its neighbours can fill."""
    _, _, h, w = shape
    return rank_mid <= _largest_mid(shape, rank_out, rank_in) and rank_in <= rank_mid * h and rank_out <= rank_mid * w


def _unchanged(kernel: Tensor) -> TensorTrainFactors:
    middle = spatial_svd.unchanged(kernel)
    t, s = kernel.shape[:2]
    return TensorTrainFactors(torch.eye(t).to(kernel), middle.horizontal, middle.vertical, torch.eye(s).to(kernel))


def _reduced_problem(problem: Problem, basis: Tensor, rank_out: int) -> Problem:
    """Tucker-2's core for the input basis A, seen as (r_out, r_in·h, w), under the gram of the channels behind A."""
    regression, image = tucker2.Elimination(problem, rank_out).regress(basis)
    k, r = problem.n_taps, basis.shape[1]
    inner = (basis.T @ image.view(k, problem.n_in, k * r)).view(k, r, k, r)
    gram = inner.permute(1, 0, 3, 2).reshape(r * k, r * k)
    core = regression.core.view(rank_out, k, r).transpose(1, 2).reshape(rank_out, -1, problem.taps[1])
    # S is damped already.
    return Problem(core, Metric(r * k, (gram + gram.T) / 2, None, damping=0.0, epsilon=0.0))


class Elimination:
    """The loss as a function of A and B, with U and H eliminated; ``problem`` is that of the kernel (t, s·h, w)."""

    def __init__(self, problem: Problem, n_in: int, rank_out: int, rank_in: int) -> None:
        self.problem = problem
        self.n_in = n_in
        self.rank_in = rank_in
        self.n_rows = problem.n_in // n_in  # h
        self.rest = tucker2.Elimination(problem, rank_out)
        blocks = problem.channel_gram.double().view(n_in, self.n_rows, n_in, self.n_rows)
        #: C_s and D_h with S ≈ C_s ⊗ D_h ⊗ D_w; the mean diagonal of D_h is 1.
        self.channel_gram = torch.einsum("ahbh->ab", blocks) / self.n_rows
        row_gram = torch.einsum("ahag->hg", blocks)
        self.row_gram = row_gram * (self.n_rows / row_gram.trace().clamp_min(torch.finfo(torch.float64).tiny))

    def pack(self, basis: Tensor, vertical: Tensor) -> Tensor:
        """A (s, r_in) and B (r_in, h·r_mid) as one vector."""
        return torch.cat([basis.reshape(-1), vertical.reshape(-1)])

    def unpack(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        basis, vertical = flat.split([self.n_in * self.rank_in, flat.numel() - self.n_in * self.rank_in])
        return basis.view(self.n_in, self.rank_in), vertical.view(self.rank_in, -1)

    def at(self, flat: Tensor) -> Point[Regression]:
        """Loss and gradient at the packed (A, B)."""
        basis, vertical = self.unpack(flat)
        both = basis @ vertical  # V as (s, h·r_mid)
        point = self.rest.at(both.view(self.problem.n_in, -1))
        pull = point.gradient.view_as(both)
        gradient = self.pack(pull @ vertical.T, basis.T @ pull)
        return Point(flat, point.loss, gradient, point.error, point.payload)

    def descent(self) -> Descent[Regression]:
        """Quasi-Newton steps on (A, B), preconditioned by the two diagonal blocks of the Hessian that S ≈ C ⊗ D_h ⊗ D_w
        would have with U and H held fixed: C ⊗ B(D_h ⊗ Q)Bᵀ and AᵀCA ⊗ (D_h ⊗ Q), with Q the gram of the core."""
        channel = psd_cholesky(ridged(self.channel_gram))
        inverse_rows = torch.cholesky_inverse(psd_cholesky(ridged(self.row_gram)))

        def precondition(point: Point[Regression], vector: Tensor) -> Tensor:
            scale = 2 / self.problem.damped_norm2
            basis, vertical = (part.double() for part in self.unpack(point.position))
            pull_basis, pull_vertical = (part.double() for part in self.unpack(vector))
            core_gram = self.rest.core_gram(point.payload.core)  # (r_mid, r_mid)
            by_row = vertical.view(self.rank_in, self.n_rows, -1)
            weighted = torch.einsum("hg,bgm->bhm", self.row_gram, by_row @ core_gram).flatten(1)
            small = psd_cholesky(ridged(vertical @ weighted.T))
            before = psd_cholesky(ridged(basis.T @ self.channel_gram @ basis))
            step_basis = _solve_both_sides(channel, pull_basis, small)
            # (r_in, h·r_mid): A's side, then the rows, then the middle channels.
            step = torch.cholesky_solve(pull_vertical, before).view_as(by_row)
            step = torch.einsum("hg,bgm->bhm", inverse_rows, step).reshape(-1, by_row.shape[2])
            step = torch.cholesky_solve(step.T, psd_cholesky(ridged(core_gram))).T
            return (self.pack(step_basis, step) / scale).to(vector.dtype)

        return Descent(self.at, precondition)

    def factors(self, point: Point[Regression]) -> TensorTrainFactors:
        """The factors at ``point``, turned so that all but the horizontal one have orthonormal columns."""
        p, h = self.problem, self.n_rows
        raw_basis, raw_vertical = (part.double() for part in self.unpack(point.position))
        basis, upper = torch.linalg.qr(raw_basis)
        vertical, upper = torch.linalg.qr((upper @ raw_vertical).view(basis.shape[1] * h, -1))
        core = point.payload.core.view(self.rest.rank_out, p.n_taps, -1).double() @ upper.T  # (r_out, w, r_mid)
        horizontal = core.transpose(1, 2).to(p.kernel.dtype).contiguous()
        by_row = vertical.T.reshape(-1, basis.shape[1], h).to(p.kernel.dtype)
        return TensorTrainFactors(point.payload.out_basis, horizontal, by_row, basis.to(p.kernel.dtype))


def _solve_both_sides(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ · matrix · (R Rᵀ)⁻¹ from the Cholesky factors L and R."""
    return torch.cholesky_solve(torch.cholesky_solve(matrix, left).T, right).T

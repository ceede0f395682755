"""Greedy CP under a metric: one rank-one term at a time, each fitted to what the earlier ones left. Notation: E (t, d)
residual, S (d, d) damped gram, b = p ⊗ u (d) one patch vector, o (t) its output vector.

This is the method that the paper compares with; fitting all terms at once (:class:`CP`) reaches a lower error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.linalg.cp import CP, CPFactors, max_rank
from tensigma.linalg.curves import rank_grid
from tensigma.linalg.factors import Fit
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import Problem, check_rank, psd_cholesky
from tensigma.linalg.solver import RankTuple, Solver
from tensigma.linalg.spectra import Spectra

# How many ranks the error curve has. More change no choice by more than its rounding.
_CURVE_RANKS = 48


@dataclass(frozen=True)
class Deflation(Solver):
    """``rank`` terms found greedily; each by ``max_sweeps`` alternating sweeps over its vectors, or fewer if they
    settle to ``tol``. Deterministic: a term starts from the heaviest direction of the residual.

    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = Deflation(rank=10).fit(weight, Metric.identity(54))
    >>> len(fit.errors), all(a >= b for a, b in zip(fit.errors, fit.errors[1:]))
    (11, True)
    """

    rank: int
    _: KW_ONLY
    max_sweeps: int = 20
    tol: float = 1e-4

    def __post_init__(self) -> None:
        if isinstance(self.max_sweeps, bool) or not isinstance(self.max_sweeps, int) or self.max_sweeps < 1:
            raise InputError(f"max_sweeps is a whole number, 1 or more, got {self.max_sweeps!r}")
        if not self.tol >= 0:
            raise InputError(f"tol is 0 or more, got {self.tol!r}")

    @classmethod
    def max_ranks(cls, shape: Sequence[int]) -> RankTuple:
        return CP.max_ranks(shape)

    @classmethod
    def vbmf_ranks(cls, kernel: Tensor, alpha: float) -> RankTuple:
        return CP.vbmf_ranks(kernel, alpha)

    @classmethod
    def energy_ranks(cls, spectra: Spectra, tail: float, shape: Sequence[int]) -> RankTuple:
        return CP.energy_ranks(spectra, tail, shape)

    @classmethod
    def errors(cls, kernel: Tensor, metric: Metric) -> list[tuple[RankTuple, float]]:
        """The first terms are the same at every rank, so one run gives all errors."""
        largest = CP.break_even_rank(kernel.shape)
        errors = cls(largest).fit(kernel, metric).errors
        return [((rank,), errors[rank] ** 2) for rank in rank_grid(largest, _CURVE_RANKS)]

    def fit(self, weight: Tensor, metric: Metric) -> Fit[CPFactors]:
        problem = Problem(weight, metric)
        check_rank(self.rank, max_rank(tuple(problem.weight.shape)), "rank")
        residual, residual_gram = problem.kernel.clone(), problem.kernel_gram.clone()
        errors = [1.0 if problem.norm2 > 0 else 0.0]
        outs, vectors = [], []
        for _ in range(self.rank):
            term = self._term(problem, residual_gram)
            patch = _outer(term)
            image = problem.gram_times(patch[:, None])[:, 0]
            energy = patch.dot(image)
            out = residual_gram @ patch / energy if energy > 0 else torch.zeros_like(residual[:, 0])
            residual.addr_(out, patch, alpha=-1)
            residual_gram.addr_(out, image, alpha=-1)
            outs.append(out)
            vectors.append(term)
            error = problem.residual_norms(residual, residual_gram)[1]
            errors.append(min(error, errors[-1]))  # once no error is left, only rounding remains
        ins, *spatial = (torch.stack(mode, 1) for mode in zip(*vectors, strict=True))
        factors = CPFactors(torch.stack(outs, 1), ins, tuple(spatial), problem.taps)
        return Fit(factors.balanced(), tuple(errors), converged=True)

    def _term(self, problem: Problem, residual_gram: Tensor) -> list[Tensor]:
        """The vectors (input, spatial…) of one term, each solved exactly in turn."""
        term = _heaviest(residual_gram, (problem.n_in, *problem.taps))
        gain = 0.0
        for _ in range(self.max_sweeps):
            # The best output vector for b is E S b up to its length, which the next solutions absorb.
            out = residual_gram @ _outer(term)
            length = out.norm()
            if not length > 0:
                break
            pull = (out / length @ residual_gram).view(problem.n_taps, problem.n_in)
            taps = _outer_taps(term)
            term[0] = _solve(_channel_normal(problem, taps), taps @ pull, term[0])
            tap_normal, tap_pull = _tap_normal(problem, term[0]), pull @ term[0]
            for mode in range(1, len(term)):
                embedding = _embedding(term, mode)  # (k, k_i)
                normal = embedding.T @ tap_normal @ embedding
                term[mode] = _solve(normal, embedding.T @ tap_pull, term[mode])
            # How much this term lowers the loss with its best output vector.
            taps = _outer_taps(term)
            energy = taps @ tap_normal @ taps
            gained = ((residual_gram @ _outer(term)).square().sum() / energy).item() if energy > 0 else 0.0
            if gained - gain <= self.tol * gained:
                break
            gain = gained
        return term


def _outer_taps(term: list[Tensor]) -> Tensor:
    """p (k): the spatial part of a term."""
    taps = term[0].new_ones(1)
    for vector in term[1:]:
        taps = torch.outer(taps, vector).reshape(-1)
    return taps


def _outer(term: list[Tensor]) -> Tensor:
    """b = p ⊗ u, tap-major, (d)."""
    return torch.outer(_outer_taps(term), term[0]).reshape(-1)


def _embedding(term: list[Tensor], mode: int) -> Tensor:
    """The (k, k_i) matrix that turns the vector of one spatial mode into p, the others being fixed."""
    matrix = term[0].new_ones(1, 1)
    for index, vector in enumerate(term[1:], start=1):
        matrix = torch.kron(matrix, torch.eye(len(vector)).to(vector) if index == mode else vector[:, None])
    return matrix


def _channel_normal(problem: Problem, taps: Tensor) -> Tensor:
    """S seen by the channels when the spatial part is p: Σ_kl p_k p_l S_kl, (s, s)."""
    if problem.gram is None:
        return taps.square().sum() * torch.eye(problem.n_in).to(taps)
    half = (taps @ problem.gram.view(problem.n_taps, -1)).view(problem.n_in, problem.n_taps, problem.n_in)
    return torch.einsum("skt,k->st", half, taps)


def _tap_normal(problem: Problem, ins: Tensor) -> Tensor:
    """S seen by the taps when the channel part is u: uᵀ S_kl u, (k, k)."""
    if problem.gram is None:
        return ins.square().sum() * torch.eye(problem.n_taps).to(ins)
    half = (problem.gram.view(-1, problem.n_in) @ ins).view(problem.n_taps, problem.n_in, problem.n_taps)
    return torch.einsum("ksl,s->kl", half, ins)


def _solve(normal: Tensor, target: Tensor, fallback: Tensor) -> Tensor:
    """The solution of a small normal equation at unit length; ``fallback`` if the target is zero."""
    lower = psd_cholesky((normal + normal.T).double() / 2)
    vector = torch.cholesky_solve(target[:, None].double(), lower)[:, 0].to(target)
    length = vector.norm()
    return vector / length if length > 0 else fallback


def _heaviest(residual_gram: Tensor, modes: tuple[int, ...]) -> list[Tensor]:
    """A start: the output row with most energy, split into one vector per mode by its leading singular vectors."""
    row = residual_gram[residual_gram.square().sum(1).argmax()]
    ins, *spatial = modes
    tensor = row.view(*spatial, ins).movedim(-1, 0)  # (s, k1, …)
    unfoldings = (tensor.movedim(mode, 0).reshape(n, -1) for mode, n in enumerate(modes))
    return [torch.linalg.svd(unfolded.double(), full_matrices=False)[0][:, 0].to(row) for unfolded in unfoldings]

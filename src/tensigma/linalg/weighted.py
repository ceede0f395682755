"""Tucker-2 with a weight for every entry of the kernel: the data-aware baselines of the paper. Notation: K (t, s, k)
kernel, H (t, s, k) weights, K̃ = U G Xᵀ with U (t, a), G (a, b, k), X (s, b).

FW-LRA takes H = √F from Fisher information, AG-LRA takes the mean absolute activation of each output channel. Both
minimise ‖H ∘ (K − K̃)‖, which no metric over inputs can express; each factor is a weighted least-squares problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.linalg.conjugate import conjugate_gradient
from tensigma.linalg.factors import Fit
from tensigma.linalg.iterate import iterate
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import check_kernel, check_rank, orthonormal, psd_cholesky
from tensigma.linalg.tucker2 import Tucker2, Tucker2Factors

# Steps of conjugate gradients for one factor in one sweep.
_CG_STEPS = 5


@dataclass(frozen=True, eq=False)
class Importance:
    """A weight for every entry of a kernel, or for every output channel: what no metric over inputs can express.

    >>> Importance(torch.tensor([1.0, 2.0])).applied(torch.ones(2, 1, 2)).tolist()
    [[[1.0, 1.0]], [[2.0, 2.0]]]
    """

    weights: Tensor  # (t, s, *taps) or (t,)

    def applied(self, kernel: Tensor) -> Tensor:
        """H ∘ K, whose plain energy is the energy of K under this norm."""
        weights = self.weights.to(kernel)
        return kernel * weights.reshape(*weights.shape, *[1] * (kernel.ndim - weights.ndim))


@dataclass(frozen=True)
class WeightedTucker2:
    """Tucker-2 under an element-wise weight, by alternating least squares from the unweighted solution.

    >>> generator = torch.Generator().manual_seed(0)
    >>> kernel, weights = torch.randn(8, 6, 3, 3, generator=generator), torch.rand(8, 6, 3, 3, generator=generator)
    >>> fit = WeightedTucker2(rank_out=5, rank_in=4).fit(kernel, weights)
    >>> fit.error < 1, all(a >= b for a, b in zip(fit.errors, fit.errors[1:]))
    (True, True)
    """

    rank_out: int
    rank_in: int
    _: KW_ONLY
    max_sweeps: int = 50
    tol: float = 1e-4

    def fit(self, weight: Tensor, importance: Tensor) -> Fit[Tucker2Factors]:
        """``importance`` is H: the shape of ``weight``, or (t,) for one weight per output channel. Never negative."""
        kernel = check_kernel(weight, Metric.identity(math.prod(weight.shape[1:])))
        check_rank(self.rank_out, kernel.shape[0], "rank_out")
        check_rank(self.rank_in, kernel.shape[1], "rank_in")
        weights = _check_importance(importance, kernel)
        classical = Tucker2(self.rank_out, self.rank_in, max_sweeps=self.max_sweeps, tol=self.tol)
        start = classical.fit(kernel, Metric.identity(kernel[0].numel())).factors
        sweeps = Sweeps(kernel, weights)
        state, errors, converged = iterate(sweeps.sweep, sweeps.at(start), max_sweeps=self.max_sweeps, tol=self.tol)
        return Fit(_orthonormal(state.factors), errors, converged)


def _check_importance(importance: Tensor, kernel: Tensor) -> Tensor:
    if importance.shape == kernel.shape[:1]:
        importance = importance.view(-1, *[1] * (kernel.ndim - 1)).expand_as(kernel)
    if importance.shape != kernel.shape:
        raise InputError(
            f"importance has the shape of the kernel, {tuple(kernel.shape)}, or one value per output channel, "
            f"({kernel.shape[0]},); got {tuple(importance.shape)}"
        )
    if not torch.isfinite(importance).all() or (importance < 0).any():
        raise InputError("importance is finite and never negative")
    weights = importance.to(kernel).square()
    mean = weights.mean()
    # Entries of no importance are free; a trace of weight makes them unique. Scale changes nothing.
    return weights / mean + 1e-6 if mean > 0 else torch.ones_like(kernel)


@dataclass(frozen=True, eq=False)
class _State:
    factors: Tucker2Factors
    loss: float
    error: float


class Sweeps:
    """Alternating least squares on one kernel K under the squared weights H²."""

    def __init__(self, kernel: Tensor, weights: Tensor) -> None:
        self.kernel, self.weights = kernel, weights
        self.norm2 = (weights.double() * kernel.double().square()).sum().item()

    def at(self, factors: Tucker2Factors) -> _State:
        residual = (self.kernel - factors.to_dense()).double()
        loss = (self.weights.double() * residual.square()).sum().item()
        relative = loss / self.norm2 if self.norm2 > 0 else 0.0
        return _State(factors, relative, math.sqrt(relative))

    def sweep(self, state: _State) -> _State:
        """Output basis, input basis, core, each by conjugate gradients with the other two fixed."""
        factors = _orthonormal(state.factors)
        for name in ("out_basis", "in_basis", "core"):
            factors = replace(factors, **{name: self._solve(factors, name)})
        return self.at(factors)

    def _solve(self, factors: Tucker2Factors, name: str) -> Tensor:
        """One factor: the kernel is linear in it, so the normal operator is A*(W ∘ A(·)) with A* the adjoint."""

        def forward(trial: Tensor) -> Tensor:
            return replace(factors, **{name: trial}).to_dense()

        adjoint = _adjoint(factors, name)
        start: Tensor = getattr(factors, name)
        return conjugate_gradient(
            lambda trial: adjoint(self.weights * forward(trial)),
            adjoint(self.weights * self.kernel),
            start,
            self._preconditioner(factors, name),
            steps=_CG_STEPS,
        )

    def _preconditioner(self, factors: Tucker2Factors, name: str) -> Callable[[Tensor], Tensor]:
        """The inverse normal operator for constant weights; with orthonormal bases that of the core is the identity."""
        if name == "core":
            return lambda matrix: matrix
        core = _by_tap(factors.core).double()
        pattern = "abk,cbk->ac" if name == "out_basis" else "abk,ack->bc"
        gram = torch.einsum(pattern, core, core)
        lower = psd_cholesky(gram + 1e-6 * gram.diagonal().mean() * torch.eye(len(gram)).to(gram))
        return lambda matrix: torch.cholesky_solve(matrix.T.double(), lower).T.to(matrix.dtype)


def _adjoint(factors: Tucker2Factors, name: str) -> Callable[[Tensor], Tensor]:
    outs, core, ins = factors.out_basis, _by_tap(factors.core), factors.in_basis
    if name == "out_basis":
        half = torch.einsum("abk,sb->ask", core, ins).flatten(1)
        return lambda dense: dense.flatten(1) @ half.T
    if name == "in_basis":
        half = torch.einsum("ta,abk->btk", outs, core).flatten(1)
        return lambda dense: _by_tap(dense).transpose(0, 1).flatten(1) @ half.T
    return lambda dense: torch.einsum("ta,tsk,sb->abk", outs, _by_tap(dense), ins).reshape(factors.core.shape)


def _by_tap(kernel: Tensor) -> Tensor:
    """(a, b, *taps) as (a, b, k), also without spatial axes."""
    return kernel.reshape(*kernel.shape[:2], -1)


def _orthonormal(factors: Tucker2Factors) -> Tucker2Factors:
    """The same kernel with orthonormal bases, the rest moved into the core."""
    outs, ins = orthonormal(factors.out_basis), orthonormal(factors.in_basis)
    core = _by_tap(factors.core)
    turned = torch.einsum("ca,abk,db->cdk", outs.T @ factors.out_basis, core, ins.T @ factors.in_basis)
    return Tucker2Factors(outs, turned.reshape(factors.core.shape), ins)

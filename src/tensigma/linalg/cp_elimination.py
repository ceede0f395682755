"""The search for a CP: the loss as a function of all factors but that of the outputs.

Notation: M (t, d) kernel, S (d, d) damped gram, T (t, r) output factor, V the factors of all other modes, P (k, r) the
Khatri-Rao product of the spatial ones, B = P ⊙ U_s (d, r), E = M − T Bᵀ the residual. Given V, the best T is a linear
regression. One product S B gives the loss and the gradient of every mode.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from tensigma.linalg.conjugate import conjugate_gradient
from tensigma.linalg.lbfgs import Descent, Point
from tensigma.linalg.problem import Problem, psd_cholesky

# Inner steps for each mode in one ALS sweep.
_CG_STEPS = 3
# Ridges of the preconditioners, relative to each diagonal entry, so that the scale of a column does not matter. Terms
# of a CP are nearly collinear; a smaller ridge trusts directions that the Kronecker model gets wrong, and although it
# needs a fifth fewer sweeps, it leads to large terms that cancel, which INT8 cannot hold.
_RIDGE = 0.1
# Without a gram, a relative loss above this is taken as the difference between what is there and what is explained,
# which leaves it four digits or more. The residual, a third of all products, is then not needed.
_BY_DIFFERENCE = 1e-3


class Elimination:
    """The loss as a function of the input and spatial factors, with the output factor eliminated."""

    def __init__(self, problem: Problem, modes: tuple[int, ...], rank: int) -> None:
        self.problem = problem
        self.modes = modes
        self.rank = rank
        #: One small gram per mode with S ≈ C_s ⊗ D_1 ⊗ D_2 ⊗ …
        self.mode_grams = separable_grams(problem, modes)
        self._mode_choleskys = [psd_cholesky(ridged(gram)) for gram in self.mode_grams]

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
        cross = p.kernel_gram @ basis  # M S B, (t, r)
        scale = -2 / p.damped_norm2 if p.damped_norm2 > 0 else 0.0
        if p.gram is None:
            grams = [factor.T @ factor for factor in factors]
            inner = reduce(torch.mul, grams)
            outs = self._regress(cross, inner)
            outer = outs.T @ outs
            loss = self._loss_by_difference(outs, cross, outer, inner)
            if loss > _BY_DIFFERENCE:
                pull = (p.kernel.T @ outs).mul_(scale)
                explained = [*grams, outer.mul_(scale)]
                parts = [
                    torch.addmm(self._contract(pull, factors, mode), factor, _others(explained, mode), alpha=-1)
                    for mode, factor in enumerate(factors)
                ]
                return Point(flat, loss, torch.cat([part.reshape(-1) for part in parts]), math.sqrt(loss), outs)
            residual = residual_gram = torch.addmm(p.kernel, outs, basis.T, alpha=-1)
        else:
            image = p.gram_times(basis)  # S B
            outs = self._regress(cross, basis.T @ image)
            residual = torch.addmm(p.kernel, outs, basis.T, alpha=-1)
            residual_gram = torch.addmm(p.kernel_gram, outs, image.T, alpha=-1)
        loss, error = p.residual_norms(residual, residual_gram)
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

            mode_target = self._contract(target, factors, mode)
            factors[mode] = conjugate_gradient(normal, mode_target, factors[mode], precondition, steps=_CG_STEPS)
        return self.at(self.pack(factors))

    def _regress(self, cross: Tensor, inner: Tensor) -> Tensor:
        """T = (M S B)(Bᵀ S B)⁻¹ in float64, with columns at unit length and a ridge at the level of rounding.

        ``cross`` is M S B and ``inner`` is Bᵀ S B.
        """
        inner = inner.double()
        lengths = inner.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        normal = inner / lengths / lengths[:, None]
        normal.diagonal().add_(10 * torch.finfo(cross.dtype).eps)
        lower = psd_cholesky((normal + normal.T) / 2)
        return (torch.cholesky_solve((cross.double() / lengths).T, lower).T / lengths).to(cross.dtype)

    def _loss_by_difference(self, outs: Tensor, cross: Tensor, outer: Tensor, inner: Tensor) -> float:
        """(‖M‖² − 2 tr(T (M B)ᵀ) + tr(TᵀT BᵀB)) ÷ ‖M‖², for any T."""
        explained = 2 * (outs.double() * cross.double()).sum() - (outer.double() * inner.double()).sum()
        return 1 - explained.item() / self.problem.damped_norm2 if self.problem.damped_norm2 > 0 else 0.0

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
        grams = [f.T @ (gram @ f) for f, gram in zip(factors, self.mode_grams, strict=True)]
        return [*grams, outs.T @ outs]

    def _precondition(self, grams: list[Tensor], mode: int, matrix: Tensor) -> Tensor:
        """D_j⁻¹ · matrix · (∘ of the other modes' grams)⁻¹."""
        left = torch.cholesky_solve(matrix, self._mode_choleskys[mode])
        return torch.cholesky_solve(left.T, psd_cholesky(ridged(_others(grams, mode)))).T


def _others(grams: list[Tensor], mode: int) -> Tensor:
    """The elementwise product of all ``grams`` but that of ``mode``."""
    return reduce(torch.mul, [gram for other, gram in enumerate(grams) if other != mode])


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


def separable_grams(problem: Problem, modes: tuple[int, ...]) -> list[Tensor]:
    """One small gram per mode with S ≈ C_s ⊗ D_1 ⊗ D_2 ⊗ …"""
    return [problem.channel_gram, *_marginals(problem.tap_gram, modes[1:])]


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


def ridged(gram: Tensor, ridge: float = _RIDGE) -> Tensor:
    """``gram`` with a ridge relative to each diagonal entry."""
    damped = gram.clone()
    diagonal = gram.diagonal()
    damped.diagonal().add_(ridge * diagonal + torch.finfo(gram.dtype).eps * diagonal.max())
    return damped

"""One approximation problem, laid out for fast products. Notation: M (t, d) kernel, S (d, d) damped gram Σ + εI.

Features are tap-major here, (tap, channel), so that contracting channels or taps is a plain matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from tensigma.errors import InputError, RankError
from tensigma.linalg.metric import Metric, working_dtype


def check_kernel(weight: Tensor, metric: Metric) -> Tensor:
    """``weight`` in the precision that the fit will work in, after checking that it fits ``metric``."""
    if weight.ndim < 2 or 0 in weight.shape:
        raise InputError(f"a kernel has shape (t, s, *taps) with no empty axis, got {tuple(weight.shape)}")
    if not weight.is_floating_point():
        raise InputError(f"a kernel is a floating-point tensor, got {weight.dtype}")
    if not torch.isfinite(weight).all():
        raise InputError("the kernel contains NaN or infinite entries; check the checkpoint it came from")
    width = math.prod(weight.shape[1:])
    if metric.size != width:
        raise InputError(
            f"a kernel of shape {tuple(weight.shape)} has {width} input features, the metric has {metric.size}"
        )
    dtype = working_dtype(weight.dtype)
    if metric.dtype is not None:
        dtype = torch.promote_types(dtype, metric.dtype)
    return weight.detach().to(dtype)


def check_rank(rank: int, largest: int, name: str) -> None:
    """Raise :class:`RankError` unless ``rank`` is an integer in [1, largest]."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise RankError(f"{name} is a whole number, got {rank!r}")
    if not 1 <= rank <= largest:
        raise RankError(f"{name} lies between 1 and {largest} for this kernel, got {rank}")


def check_two_axes(shape: Sequence[int], decomposition: str) -> tuple[int, int, int, int]:
    """``shape`` as (t, s, h, w); raises unless the kernel has two spatial axes."""
    if len(shape) != 4:
        raise InputError(
            f"{decomposition} takes kernels with two spatial axes, (t, s, h, w), got shape {tuple(shape)}; "
            "SVD, Tucker2 and CP take any number of them"
        )
    t, s, h, w = shape
    return t, s, h, w


class Problem:
    """Minimise tr((M − M̃) Σ (M − M̃)ᵀ) over some family of M̃."""

    def __init__(self, weight: Tensor, metric: Metric) -> None:
        kernel = check_kernel(weight, metric)
        self.weight = kernel  # (t, s, *taps)
        self.metric = metric.to(kernel)
        self.n_out, self.n_in = kernel.shape[:2]
        self.taps = tuple(kernel.shape[2:])
        self.n_taps = math.prod(self.taps)
        self.size = self.n_in * self.n_taps
        self.epsilon = metric.epsilon
        self.kernel = self._tap_major(kernel)  # M, (t, d)
        # In the caller's order, because a tap-major copy of Σ may never be needed.
        product = self.metric.times(kernel.flatten(1), damped=True)
        self.kernel_gram = self._tap_major(product.view_as(kernel))  # M S, (t, d)
        #: tr(M S Mᵀ), and the same under Σ itself.
        self.damped_norm2, self.norm2 = self._norms2(self.kernel, self.kernel_gram)

    @cached_property
    def gram(self) -> Tensor | None:
        """S, tap-major; None for the identity, which needs no product."""
        if self.metric.is_identity:
            return None
        gram = self.metric.tap_major(self.n_in)
        if self.n_taps == 1:
            gram = gram.clone()
        gram.diagonal().add_(self.epsilon)
        return gram

    def gram_times(self, matrix: Tensor) -> Tensor:
        """S · matrix, (d, r) → (d, r)."""
        return matrix if self.gram is None else self.gram @ matrix

    @cached_property
    def channel_gram(self) -> Tensor:
        """C_s (s, s): S between channels at the same tap, averaged over taps."""
        if self.gram is None:
            return torch.eye(self.n_in, dtype=self.kernel.dtype, device=self.kernel.device)
        blocks = self.gram.view(self.n_taps, self.n_in, self.n_taps, self.n_in)
        return torch.stack([blocks[k, :, k] for k in range(self.n_taps)]).mean(0)

    @cached_property
    def tap_gram(self) -> Tensor:
        """D (k, k): S between taps of the same channel, averaged over channels and scaled to a mean diagonal of 1.

        Preconditioners and starting points assume S ≈ C_s ⊗ D.
        """
        if self.gram is None:
            return torch.eye(self.n_taps, dtype=self.kernel.dtype, device=self.kernel.device)
        blocks = self.gram.view(self.n_taps, self.n_in, self.n_taps, self.n_in)
        gram = torch.einsum("ksls->kl", blocks)
        return gram * (self.n_taps / gram.trace().clamp_min(torch.finfo(gram.dtype).tiny))

    def residual_norms(self, residual: Tensor, residual_gram: Tensor) -> tuple[float, float]:
        """(relative damped loss, relative undamped error) of E = ``residual``, given E S.

        Summed in float64 and not as a difference of two large numbers, so that it stays accurate near full rank.
        """
        damped, plain = self._norms2(residual, residual_gram)
        error = math.sqrt(plain / self.norm2) if self.norm2 > 0 else 0.0
        return damped / self.damped_norm2 if self.damped_norm2 > 0 else 0.0, error

    def _norms2(self, matrix: Tensor, matrix_gram: Tensor) -> tuple[float, float]:
        """(tr(A S Aᵀ), tr(A Σ Aᵀ)) from A and A S."""
        damped = torch.zeros((), dtype=torch.float64, device=matrix.device)
        plain = damped.clone()
        for rows, images in zip(matrix.split(256), matrix_gram.split(256), strict=True):
            wide = rows.double()
            damped += (wide * images.double()).sum()
            plain += wide.square().sum()
        loss = max(damped.item(), 0.0)
        return loss, max(loss - self.epsilon * plain.item(), 0.0)

    def _tap_major(self, kernel: Tensor) -> Tensor:
        """A kernel (t, s, *taps) as a (t, d) matrix in the order used here."""
        return kernel.flatten(2).transpose(1, 2).reshape(kernel.shape[0], -1) if kernel.ndim > 2 else kernel


def psd_cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor of a symmetric matrix that is PSD up to rounding: the ridge grows until it succeeds."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    if info == 0:
        return factor
    scale = matrix.diagonal().abs().max().clamp_min(torch.finfo(matrix.dtype).tiny)
    ridge = torch.finfo(matrix.dtype).eps
    while info != 0:
        ridge *= 10
        damped = matrix.clone()
        damped.diagonal().add_(ridge * scale)
        factor, info = torch.linalg.cholesky_ex(damped)
    return factor


def orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns, in float64 and back."""
    return torch.linalg.qr(matrix.double())[0].to(matrix.dtype).contiguous()

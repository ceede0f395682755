"""Weights on a grid of few integers, chosen under a metric. Notation: M (t, d) kernel, S (d, d) damped gram, Z (t, d)
integers, s scales and z zero points, M̂ = s (Z − z) the rounded kernel, E = M − M̂ its error.

Rounding each weight to the nearest integer ignores that errors of correlated inputs add up or cancel. Here columns are
rounded one after the other, and the error of each is passed on to those not yet rounded. The weights of that are those
of OBQ and GPTQ, who read them off a Cholesky factor of S⁻¹; one of S, in reversed order, gives the same. Integers are
then changed one at a time while that lowers tr(E S Eᵀ), and scales are fitted to the integers. The loss is a sum over
rows, so each row keeps the best of what was tried, nearest rounding included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.linalg.factors import Fit
from tensigma.linalg.metric import Metric
from tensigma.linalg.problem import check_kernel, psd_cholesky

#: Bits that a weight may take.
BITS = (2, 3, 4, 5, 6, 7, 8)
# Scales are tried at these shares of what covers every weight: clipping a few large ones makes the grid finer.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
# Rounds of single changes and new scales after error feedback; later ones gain next to nothing.
_ROUNDS = 3
# Added to S for its factor, relative to the mean of the diagonal. Error feedback into inputs that hardly vary would be
# large and, by the clipping of the grid, in vain.
_RIDGE = 0.01
# Columns whose feedback is applied at once, by a matrix product.
_BLOCK = 128
# Half precision holds scales down to this to a few per cent; the integers are fitted to the scale as it is stored.
_LEAST_HALF, _MOST_HALF = 2.0**-20, 2.0**15


@dataclass(frozen=True, eq=False)
class RoundedKernel:
    """``kernel = scales · (integers − zeros)``, with one scale and zero point per output and group of inputs.

    >>> kernel = RoundedKernel(torch.tensor([[1, -2]]), torch.tensor([[0.5]]), torch.tensor([[0]]), 4, (1, 2))
    >>> kernel.to_dense().tolist(), kernel.n_bits
    ([[0.5, -1.0]], 40)
    """

    integers: Tensor  # (t, d), int8 or int16
    scales: Tensor  # (t, groups)
    zeros: Tensor  # (t, groups), whole numbers; all 0 on a symmetric grid
    bits: int
    shape: tuple[int, ...]

    @property
    def n_params(self) -> int:
        return self.integers.numel() + self.scales.numel()

    @property
    def n_bits(self) -> int:
        """What the integers and scales take; zero points, where there are any, as many bits as a weight."""
        zeros = self.zeros.numel() * self.bits if bool(self.zeros.any()) else 0
        return self.integers.numel() * self.bits + self.scales.numel() * 32 + zeros

    def to_dense(self) -> Tensor:
        size = self.integers.shape[1] // self.scales.shape[1]
        by_group = self.integers.unflatten(1, (-1, size)).to(self.scales.dtype)
        return ((by_group - self.zeros[..., None].to(by_group)) * self.scales[..., None]).reshape(self.shape)


@dataclass(frozen=True)
class Rounding:
    """A kernel rounded to ``bits`` bits, close to what it was under a metric.

    ``symmetric`` grids have the zero point 0. Scales are one for each output, or one for each output and ``group``
    consecutive inputs (in the order of the flattened kernel), which must divide the number of inputs. With
    ``half_scales`` they are numbers of half precision, which take two bytes; only scales beyond its range are not.

    >>> weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> fit = Rounding(4).fit(weight, Metric.identity(54))
    >>> fit.factors.to_dense().shape, fit.factors.integers.unique().numel() <= 16, fit.error < 0.12
    (torch.Size([8, 6, 3, 3]), True, True)
    """

    bits: int
    _: KW_ONLY
    symmetric: bool = True
    group: int | None = None
    half_scales: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in BITS:
            raise InputError(f"bits is one of {', '.join(map(str, BITS))}, got {self.bits!r}")
        if self.group is not None and (isinstance(self.group, bool) or self.group < 1):
            raise InputError(f"group is a number of inputs, at least 1, got {self.group!r}")

    def fit(self, weight: Tensor, metric: Metric) -> Fit[RoundedKernel]:
        """``weight`` on the grid; the error is relative, under ``metric``."""
        kernel = check_kernel(weight, metric)
        matrix = kernel.flatten(1)
        if self.group is not None and matrix.shape[1] % self.group:
            raise InputError(f"group={self.group} does not divide the {matrix.shape[1]} inputs of the kernel")
        problem = _Problem(matrix, metric.to(kernel), self._stored)
        widest = self._grid(matrix, [1.0])
        tight = self._grid(matrix, _SHARES, problem.gram.diagonal())
        tried = [widest.nearest(matrix), tight.nearest(matrix)]
        tried += [problem.polished(problem.fed_back(grid)) for grid in (tight, widest)]
        factors = self._kernel(problem.best_rows(tried), kernel)
        return Fit(factors, (metric.to(kernel).relative_error(kernel, factors.to_dense()),), converged=True)

    def nearest(self, weight: Tensor, energies: Tensor | None = None) -> RoundedKernel:
        """Every weight rounded to the nearest integer, with the scales of which that loses least.

        ``energies`` weigh the inputs, all alike by default. It takes no gram, so a kernel may have any width.

        >>> Rounding(3).nearest(torch.tensor([[0.9, -4.0, 3.1]])).integers.tolist()
        [[1, -4, 3]]
        """
        matrix = weight.flatten(1)
        grid = self._grid(matrix, _SHARES, energies)
        return self._kernel(grid.nearest(matrix), weight)

    def _kernel(self, rounded: _Rounded, weight: Tensor) -> RoundedKernel:
        integers = rounded.integers.to(torch.int16 if self.bits == 8 and not self.symmetric else torch.int8)
        return RoundedKernel(integers, rounded.scales, rounded.zeros, self.bits, tuple(weight.shape))

    def _stored(self, scales: Tensor) -> Tensor:
        """Scales as they will be stored."""
        if not self.half_scales:
            return scales
        fits = (scales >= _LEAST_HALF) & (scales <= _MOST_HALF)
        stored = torch.where(fits, scales.half().to(scales), scales)
        # A row of zeros may have any scale.
        return torch.where(scales <= torch.finfo(scales.dtype).tiny, torch.ones_like(scales), stored)

    def _grid(self, matrix: Tensor, shares: Sequence[float], energies: Tensor | None = None) -> _Rounded:
        """The grid of each row and group that loses least by nearest rounding, inputs weighed by their energy."""
        size = self.group or matrix.shape[1]
        grouped = matrix.unflatten(1, (-1, size))
        low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
        energies = torch.ones_like(matrix[0]) if energies is None else energies
        best: _Rounded | None = None
        lowest = torch.full_like(low, torch.inf)
        for share in shares:
            grid = self._covering(share * low, share * high, size)
            lost = ((matrix - grid.nearest(matrix).dense()).square() * energies).unflatten(1, (-1, size)).sum(2)
            if best is None:
                best, lowest = grid, lost
                continue
            better = lost < lowest
            best = replace(
                best,
                scales=torch.where(better, grid.scales, best.scales),
                zeros=torch.where(better, grid.zeros, best.zeros),
            )
            lowest = torch.minimum(lost, lowest)
        assert best is not None
        return best

    def _covering(self, low: Tensor, high: Tensor, size: int) -> _Rounded:
        """The grid from ``low`` to ``high``."""
        n_levels = 2**self.bits
        tiny = torch.finfo(low.dtype).tiny
        if self.symmetric:
            least, most = -(n_levels // 2), n_levels // 2 - 1
            scales = torch.maximum(low / least, high / most).clamp_min(tiny)
            zeros = torch.zeros_like(scales)
        else:
            least, most = 0, n_levels - 1
            scales = ((high - low) / most).clamp_min(tiny)
            zeros = (-low / scales).round().clamp(least, most)
        integers = torch.zeros(len(low), low.shape[1] * size).to(low)
        return _Rounded(integers, self._stored(scales), zeros, least, most)


@dataclass(frozen=True, eq=False)
class _Rounded:
    """Integers, held as floating-point numbers, and their grid."""

    integers: Tensor  # (t, d)
    scales: Tensor  # (t, groups)
    zeros: Tensor  # (t, groups)
    least: int
    most: int

    def spread(self, by_group: Tensor) -> Tensor:
        """(t, groups) → (t, d)."""
        return by_group.repeat_interleave(self.integers.shape[1] // by_group.shape[1], 1)

    def nearest(self, matrix: Tensor) -> _Rounded:
        """The nearest integers to ``matrix``."""
        integers = (matrix / self.spread(self.scales)).round() + self.spread(self.zeros)
        return replace(self, integers=integers.clamp(self.least, self.most))

    def dense(self) -> Tensor:
        return self.spread(self.scales) * (self.integers - self.spread(self.zeros))


class _Problem:
    """M and S, and ways to lower tr(E S Eᵀ)."""

    def __init__(self, matrix: Tensor, metric: Metric, stored: Callable[[Tensor], Tensor]) -> None:
        self.matrix, self._stored = matrix, stored
        gram = metric.dense().to(matrix)
        self.gram = gram + metric.epsilon * torch.eye(len(gram)).to(gram)
        # Heavy inputs first: what their errors leave behind, light ones can take up.
        self.order = self.gram.diagonal().argsort(descending=True)

    def row_losses(self, rounded: _Rounded) -> Tensor:
        """tr(E S Eᵀ) of each row, in float64."""
        error = self.matrix - rounded.dense()
        return ((error @ self.gram).double() * error.double()).sum(1)

    def best_rows(self, tried: Sequence[_Rounded]) -> _Rounded:
        """Each row from the attempt in which it loses least."""
        choice = torch.stack([self.row_losses(rounded) for rounded in tried]).argmin(0)
        rows = torch.arange(len(choice), device=choice.device)

        def pick(name: str) -> Tensor:
            return torch.stack([getattr(rounded, name) for rounded in tried])[choice, rows]

        return replace(tried[0], integers=pick("integers"), scales=pick("scales"), zeros=pick("zeros"))

    @cached_property
    def _feedback(self) -> Tensor:
        """G, unit upper triangular, of S = G D Gᵀ in the order of rounding.

        Since tr(E S Eᵀ) is the sum of |(E G)_k|² d_k, column k is free to cancel what G passes on from those before it.
        """
        order = self.order.flip(0)  # The Cholesky factor of the reversed matrix is lower triangular; reversed, upper.
        damped = self.gram[order][:, order].double()
        damped.diagonal().add_(_RIDGE * damped.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))
        lower = psd_cholesky(damped)
        return (lower / lower.diagonal()).to(self.matrix).flip(0, 1)

    def fed_back(self, grid: _Rounded) -> _Rounded:
        """Columns rounded one after the other, the error of each passed on to the rest."""
        order, feedback = self.order, self._feedback
        scales, zeros = (_columns(grid.spread(values)[:, order]).unbind() for values in (grid.scales, grid.zeros))
        matrix = _columns(self.matrix[:, order])  # (d, t)
        left = matrix.clone()  # what the columns still have to represent
        integers = torch.empty_like(left)
        for start in range(0, len(left), _BLOCK):
            stop = min(start + _BLOCK, len(left))
            errors = torch.empty_like(left[start:stop])
            for column in range(start, stop):
                wanted = left[column] / scales[column]
                chosen = wanted.round_().add_(zeros[column]).clamp_(grid.least, grid.most)
                integers[column] = chosen
                rounded = chosen.sub_(zeros[column]).mul_(scales[column])
                error = torch.sub(matrix[column], rounded, out=errors[column - start])
                left[column + 1 : stop].addr_(feedback[column, column + 1 : stop], error)
            left[stop:].addmm_(feedback[start:stop, stop:].T, errors)
        return replace(grid, integers=integers.T[:, order.argsort()].contiguous())

    def polished(self, rounded: _Rounded) -> _Rounded:
        """Single integers changed while that lowers the loss, and scales fitted to the integers, in turn."""
        for _ in range(_ROUNDS):
            rounded = self._changed(self._rescaled(rounded))
        return rounded

    def _changed(self, rounded: _Rounded) -> _Rounded:
        """One pass of coordinate descent: every integer takes its best value, the others being fixed."""
        scales, integers = _columns(rounded.spread(rounded.scales)).unbind(), _columns(rounded.integers)
        pull = _columns((self.matrix - rounded.dense()) @ self.gram)  # S Eᵀ, (d, t)
        diagonal = self.gram.diagonal()
        for block in self.order[diagonal[self.order] > 0].split(_BLOCK):
            gram, local = self.gram[block], pull[block]
            moves, inner = torch.empty_like(local), gram[:, block].contiguous()
            pivots = diagonal[block].tolist()
            for i, column in enumerate(block.tolist()):
                former, scale = integers[column], scales[column]
                chosen = local[i].div(scale).div_(pivots[i]).round_().add_(former).clamp_(rounded.least, rounded.most)
                move = torch.sub(chosen, former, out=moves[i]).mul_(scale)
                local.addr_(inner[i], move, alpha=-1)
                former.copy_(chosen)
            pull.addmm_(gram.T, moves, alpha=-1)
        return replace(rounded, integers=integers.T.contiguous())

    def _rescaled(self, rounded: _Rounded) -> _Rounded:
        """Scales fitted to the integers, those of one group of inputs after those of another."""
        scales, dense = rounded.scales.clone(), rounded.dense()
        size = dense.shape[1] // scales.shape[1]
        pull = (self.matrix - dense) @ self.gram  # E S, (t, d)
        for group in range(scales.shape[1]):
            columns = slice(group * size, (group + 1) * size)
            part = dense[:, columns]
            image = part @ self.gram[columns]  # (t, d)
            energy = (image[:, columns].double() * part.double()).sum(1)
            gain = (pull[:, columns].double() * part.double()).sum(1)
            factor = 1 + gain / energy.clamp_min(torch.finfo(torch.float64).tiny)
            factor = torch.where((energy > 0) & (factor > 0), factor, torch.ones_like(factor)).to(scales)
            former = scales[:, group].clone()
            scales[:, group] = self._stored(former * factor)
            pull -= (scales[:, group] / former - 1)[:, None] * image
        return replace(rounded, scales=scales)


def _columns(matrix: Tensor) -> Tensor:
    """A copy with the columns as rows: whatever goes through them one by one then finds each in one piece."""
    return matrix.T.clone(memory_format=torch.contiguous_format)

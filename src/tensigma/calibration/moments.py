"""Streaming moments of the rows one layer sees: count, mean and covariance, exact for any amount of data.

Notation: ``u`` a row, ``m`` the pilot (a rough mean per channel), ``w`` the row of the map shifted by ``−m`` and *then*
zero-padded, ``M`` the row of ones inside the map and zeros on its padding. Then u = w + m·M, and

    Cov(u) = Cov(w) + Cov(w, mM) + Cov(mM, w) + m mᵀ Cov(M),

where w is small however large the mean is, and everything about M is counted in whole numbers. Products are summed in
the precision of the input (half precision in float32), and those sums in float64 from one block of images to the next.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tensigma.calibration.lag_recipe import rest_of
from tensigma.calibration.lags import LagSums
from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.scratch import Scratch
from tensigma.calibration.unfold import UnfoldSums
from tensigma.calibration.window import Window
from tensigma.errors import CalibrationWarning, InputError
from tensigma.layers import Geometry
from tensigma.running import give_back

# Maps are buffered until there are enough for efficient products. Affects speed and memory, never the result.
PENDING_BYTES = 16 * 2**20
MAX_PENDING = 128
#: Layers with one row for each input, at least this wide, keep their rows while there are fewer of them than columns.
WIDE = 4096
# Rounding of sums in float64, relative to what was summed, with room for long ones.
_DUST = 1e-13


class Sums(Protocol):
    """One way to sum u uᵀ over the patches of maps."""

    def add(self, maps: Tensor) -> None: ...

    def rows(self, tap: int, out: Tensor) -> Tensor: ...


class Moments:
    """Count, mean and covariance of the rows of one layer, fed with its inputs one call at a time.

    >>> from torch import nn
    >>> moments = Moments(Geometry.of(nn.Conv2d(2, 5, 3, padding=1)))
    >>> moments.update(torch.ones(4, 2, 6, 6))
    >>> stats = moments.finish()
    >>> stats.count, stats.mean.shape, round(stats.mean.max().item(), 6)
    (144, torch.Size([18]), 1.0)
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        name: str = "layer",
        pending_bytes: int = PENDING_BYTES,
        wide: int = WIDE,
        scratch: Scratch | None = None,
    ) -> None:
        self.scratch = scratch or Scratch()
        self.name = name
        self.geometry = geometry
        self.window = Window.of(geometry)
        self.pending_bytes = pending_bytes
        self.count = 0
        # Linear layers, and convolutions whose kernels turn out to be as large as their maps.
        self._keeps_rows = geometry.kind != "conv_transpose" and geometry.groups == 1 and self.window.d >= wide
        self._kept: list[Tensor] = []
        self._sums: dict[tuple[int, ...], Sums] = {}  # by the rest of the map's size, () for unfolding
        self._pilot: Tensor | None = None
        self._buffer: Tensor | None = None
        self._filled = 0
        self._total: Tensor | None = None  # (channels, *size), sum of all maps of the present size
        self._n_maps = 0
        # Σ w per pair of taps, and the number of rows in which both taps lie inside the map (see Window.border_sums).
        k = self.window.n_taps
        self._pairs = torch.zeros(self.window.channels, k, k if self.window.is_padded else 1, dtype=torch.float64)
        self._inside = torch.zeros(k, k, dtype=torch.float64)

    def update(self, x: Tensor) -> None:
        """Add all rows of one input of the layer, batched as the layer itself takes it."""
        maps = self._maps(x)
        if not maps.numel():
            return
        if self._pilot is None:
            self._start(maps)
        size = maps.shape[2:]
        if self._keeps_rows and not self._is_one_row(size):
            self._stop_keeping()
        if self._total is None or self._total.shape[1:] != size:
            self._settle()
            self._total = torch.zeros(maps.shape[1:], dtype=torch.float64, device=self._device)
        self.count += len(maps) * self.window.n_rows(size)
        self._n_maps += len(maps)
        if self._keeps_rows:
            self._keep(maps)
        else:
            self._push(maps)

    def finish(self, dtype: torch.dtype | None = None) -> LayerStats:
        """The moments so far. More rows may follow afterwards.

        The result is float32, or float64 if the inputs were, unless ``dtype`` is given.
        """
        if self._pilot is None:
            raise InputError(f"{self.name}: no rows were seen")
        if self._keeps_rows:
            self._kept = [torch.cat(self._kept)]
            rows = self._kept[0].flatten(1)
            mean = rows.mean(0, dtype=torch.float64)
            return LayerStats(mean=mean, rows=rows if dtype is None else rows.to(dtype), count=self.count)
        self._settle()
        self.scratch.free("block")  # sums are complete, and the largest temporary comes below
        window, n = self.window, self.count
        g, s, k = window.groups, window.s, window.n_taps
        pilot = self._pilot.double().reshape(g, s)
        pairs = (self._pairs / n).reshape(g, s, k, -1)  # E[w_a M_b]
        inside = self._inside / n  # E[M_a M_b]
        seen = inside.diagonal()
        rise = pairs.diagonal(dim1=2, dim2=3) if window.is_padded else pairs[..., 0]  # E[w], (g, s, k)
        mean = (rise + pilot[:, :, None] * seen).flatten(1)
        covariance = torch.empty(g, s, k, s, k, dtype=dtype or self._pilot.dtype, device=self._device)
        m = pilot[:, None, :].expand(g, k, s)
        w = rise.mT.contiguous()  # E[w_b], (g, k, s)
        ahead = behind = torch.zeros_like(w)
        for tap in range(k):
            # One tap with all taps at a time, (g, k, s, s) in float64, is the largest temporary.
            sigma = self._rows(tap)
            if window.is_padded:
                ahead = pairs[:, :, tap].mT - w[:, tap, None] * seen[:, None]  # Cov(w_a, M_b)
                border = inside[tap] - seen[tap] * seen  # Cov(M_a, M_b)
                behind = pairs[:, :, :, tap].mT - w * seen[tap] + border[:, None] * m  # Cov(M_a, u_b)
            # − E w_a E w_b + m Cov(M_a, u_b) + Cov(w_a, M_b) m, all in one product of three columns
            left = torch.stack([-w[:, tap, None].expand_as(w), m, ahead], dim=3)
            right = torch.stack([w, behind, m], dim=2)
            sigma.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1), beta=1 / n)
            covariance[:, :, tap] = sigma.permute(0, 2, 3, 1)
        covariance = covariance.view(g, window.d, window.d)
        # A layer may see a constant although its maps vary: for one, only zeros that a transposed convolution left.
        # What remains of the differences above is then rounding, neither symmetric nor positive.
        # (Not by its absolute values, which would take as much memory again.)
        if max(map(abs, covariance.aminmax())) <= _DUST * (w.square() + m.square()).max():
            covariance.zero_()
        # Rounding may leave the variance of a constant slightly below zero.
        variance = covariance.diagonal(dim1=1, dim2=2).clamp_(min=0)
        self._check_range(mean, variance)
        if window.groups == 1:
            mean, covariance = mean[0], covariance[0]
        return LayerStats(mean=mean, covariance=covariance, count=n)

    def _check_range(self, mean: Tensor, variance: Tensor) -> None:
        """Refuse inputs whose squares are beyond the range of the numbers; warn if the squares vanish."""
        kind = str(variance.dtype).removeprefix("torch.")
        if not variance.isfinite().all():
            raise InputError(
                f"layer {self.name!r}: its inputs are so large that their squares overflow {kind}; normalise the data, "
                "or run the model and the data in float64"
            )
        largest = mean.abs().max().item()
        numbers = torch.finfo(variance.dtype)
        if variance.max() < numbers.tiny / numbers.eps and 0 < largest < (numbers.tiny / numbers.eps) ** 0.5:
            warnings.warn(
                f"layer {self.name!r}: its inputs are so small, about {largest:.0e}, that their squares vanish in "
                f"{kind}; they count as constant",
                CalibrationWarning,
                stacklevel=2,
            )

    def _rows(self, tap: int) -> Tensor:
        """Sums of one tap with all taps over all forms, (g, k, s, s)."""
        window = self.window
        shape = (window.groups, window.n_taps, window.s, window.s)
        total = self.scratch.get("rows", shape, torch.float64, self._device)
        for index, sums in enumerate(self._sums.values()):
            if index:
                total += sums.rows(tap, self.scratch.get("more rows", shape, torch.float64, self._device))
            else:
                sums.rows(tap, total)
        return total

    @property
    def _device(self) -> torch.device:
        assert self._pilot is not None
        return self._pilot.device

    def _maps(self, x: Tensor) -> Tensor:
        """The input as maps (n, channels, *size), with paddings other than zeros already applied."""
        n_spatial = self.window.n_spatial
        maps = (
            x.reshape(-1, self.window.channels) if not n_spatial else x.unsqueeze(0) if x.dim() <= n_spatial + 1 else x
        )
        if self.geometry.kind == "conv" and self.geometry.padding_mode != "zeros" and any(map(any, self.geometry.pads)):
            pads = [p for pair in reversed(self.geometry.pads) for p in pair]
            maps = functional.pad(_widen(maps), pads, mode=self.geometry.padding_mode)
        return maps

    def _start(self, maps: Tensor) -> None:
        others = [axis for axis in range(maps.dim()) if axis != 1]
        sample = _widen(maps[: 8 if self.window.n_spatial else 1024]).double()
        mean = sample.mean(others)
        spread = (sample - mean.reshape(-1, *(1,) * self.window.n_spatial)).square().mean(others).sqrt()
        # A pilot need only be rough. With few digits, the value that a ReLU repeats keeps few digits too and its
        # products are exact; otherwise their rounding errors all point the same way and add up, to 1e-6 of the result
        # and not 1e-7.
        grid = torch.exp2(torch.floor(torch.log2(spread)) - 3)
        pilot = torch.where(spread > 0, (mean / grid).round() * grid, mean)
        # Non-finite values are reported when maps are added.
        pilot = pilot.nan_to_num(0.0, 0.0, 0.0)
        self._pilot = pilot.to(torch.float64 if maps.dtype == torch.float64 else torch.float32)
        self._pairs = self._pairs.to(maps.device)
        self._inside = self._inside.to(maps.device)

    def _push(self, maps: Tensor) -> None:
        assert self._pilot is not None
        assert self._total is not None
        shift = self._pilot.reshape(-1, *(1,) * self.window.n_spatial)
        capacity = self._capacity(maps.shape[2:])
        if self._buffer is None or self._buffer.shape[1:] != maps.shape[1:]:
            self._buffer = shift.new_empty(capacity, *maps.shape[1:])
        start = 0
        while start < len(maps):
            n = min(len(maps) - start, capacity - self._filled)
            place = self._buffer[self._filled : self._filled + n]
            torch.sub(maps[start : start + n], shift, out=place)
            total = place.sum(0)
            if not math.isfinite(total.sum().item()):
                raise InputError(f"layer {self.name!r}: its input contains NaN or infinite values")
            self._total += total
            self._filled += n
            start += n
            if self._filled == capacity:
                self._flush()

    def _capacity(self, size: Sequence[int]) -> int:
        map_bytes = self.window.channels * math.prod(size) * 4
        if not self.window.n_spatial:
            return max(1, self.pending_bytes // 4 // map_bytes)
        return max(1, min(self.pending_bytes // map_bytes, MAX_PENDING))

    def _flush(self) -> None:
        if not self._filled:
            return
        assert self._buffer is not None
        maps = self._buffer[: self._filled]
        self._filled = 0
        self._form(maps.shape[2:]).add(maps)

    def _form(self, size: Sequence[int]) -> Sums:
        """The cheaper form for maps of this size. Sums of both forms simply add up."""
        window = self.window
        form: tuple[int, ...] = rest_of(window, size) if prefers_lags(window, size) else ()
        if form not in self._sums:
            self._sums[form] = (
                LagSums(window, (form[0], form[1]), self._device, self.scratch)
                if form
                else UnfoldSums(window, self._device, self.scratch)
            )
        return self._sums[form]

    def _settle(self) -> None:
        """Bring all sums up to date with the maps received."""
        if self._total is None or self._keeps_rows:
            return
        self._flush()
        pairs, counts = self.window.border_sums(self._total)
        self._pairs += pairs if self.window.is_padded else pairs.diagonal(dim1=1, dim2=2)[:, :, None]
        self._inside += counts * self._n_maps
        self._total = torch.zeros_like(self._total)
        self._n_maps = 0

    def _is_one_row(self, size: Sequence[int]) -> bool:
        """Whether a map of this size is, entry by entry, the one row that the layer sees of it."""
        window = self.window
        return tuple(size) == window.taps and not window.is_padded and window.n_rows(size) == 1

    def _keep(self, maps: Tensor) -> None:
        assert self._pilot is not None
        maps = maps.to(self._pilot.dtype)
        if not math.isfinite(maps.sum().item()):
            raise InputError(f"layer {self.name!r}: its input contains NaN or infinite values")
        if self.count < self.window.d:
            # In the order of the kernel, whatever the layout in memory.
            self._kept.append(maps.clone(memory_format=torch.contiguous_format))
            return
        # From here on the gram is smaller than the rows.
        self._stop_keeping()
        self._push(maps)

    def _stop_keeping(self) -> None:
        """Switch from rows to sums."""
        kept, self._kept, self._keeps_rows = self._kept, [], False
        if not kept:
            return
        while kept:
            self._push(kept.pop(0))
        # Rows that came in small parts stay with the C library otherwise, beside the sums that took their place.
        give_back()


def _widen(x: Tensor) -> Tensor:
    """Half precision in float32, everything else as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def prefers_lags(window: Window, size: Sequence[int]) -> bool:
    """Whether sums by lag are cheaper than unfolding, for maps of this size.

    >>> from torch import nn
    >>> window = Window.of(Geometry.of(nn.Conv2d(64, 64, 3, padding=1)))
    >>> prefers_lags(window, (28, 28)), prefers_lags(window, (2, 2))
    (True, False)
    """
    if not LagSums.applies(window, size):
        return False
    # As many maps as are buffered; what is done once for all of them is dear where they are large and few.
    n_maps = max(1, min(64, PENDING_BYTES // (4 * window.channels * math.prod(size))))
    return LagSums.flops(window, size, n_maps) < UnfoldSums.flops(window, size)

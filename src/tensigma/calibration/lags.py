"""Sums of patch products by lag: for stride 1, tap a times tap b depends on b − a alone, but for strips at the border.

Notation: x the zero-padded map, a and b taps, δ = dilation·(b − a) their lag, y the position under tap a. Then

    Σ_z x(z+a) x(z+b)ᵀ = Σ_{all y} x(y) x(y+δ)ᵀ − (the y that no window puts under a while a and b are on the map),

and the second term is made of whole rows and whole columns (their crossings counted once too often). The first term
is a correlation, read from the Fourier transform at the few lags that a kernel has. The transform is a pair of matrix
products: maps are small, only exact zero-padding by the largest lag is needed, and the result comes out in the layout
that the next product wants, one (image, channel) matrix per frequency.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tensigma.calibration.scratch import Scratch, accumulate
from tensigma.calibration.window import Window

# Spectra and products are made in pieces of about this size, so that they stay in cache.
PIECE_BYTES = 2 * 2**20
TILE = 64
MAX_TILES = 4

Edge = tuple[int, ...]  # positions along one axis, negative ones counted from the end


@dataclass(frozen=True)
class Strip:
    """Products x(y) x(y+δ)ᵀ summed over some rows, some columns, or their crossings; None stands for all of them."""

    rows: Edge | None
    columns: Edge | None
    lag: tuple[int, int]


@dataclass(frozen=True)
class Recipe:
    """Which sums to keep, and how the block of two taps is put together from them."""

    lags: tuple[tuple[int, int], ...]
    strips: tuple[Strip, ...]
    # (a, b) with a ≤ b → index of the lag, and (sign, index) of each strip.
    pairs: dict[tuple[int, int], tuple[int, tuple[tuple[int, int], ...]]]


def left_out(a: int, b: int, *, taps: int, dilation: int, pads: tuple[int, int]) -> Edge:
    """Positions y where taps a and b both lie on the map while no window puts a on y, for any long enough axis.

    >>> left_out(0, 0, taps=3, dilation=1, pads=(1, 1)), left_out(0, 1, taps=3, dilation=1, pads=(1, 1))
    ((-1,), ())
    """
    lag = dilation * (b - a)
    before = dilation * a - pads[0]  # windows put tap a on before … size − 1 − after
    after = dilation * (taps - 1 - a) - pads[1]
    low = range(max(0, -lag), before)
    high = range(max(0, lag), after)
    return (*low, *(-1 - position for position in high))


@lru_cache(maxsize=256)
def recipe(window: Window) -> Recipe:
    """The sums that hold everything about the second moment of ``window``: 29 of them for 3×3 with padding 1."""
    (kh, kw), (dh, dw), (ph, pw) = window.taps, window.dilation, window.pads
    lags: dict[tuple[int, int], int] = {}
    strips: dict[Strip, int] = {}
    pairs = {}
    for a in range(kh * kw):
        for b in range(a, kh * kw):
            (ah, aw), (bh, bw) = divmod(a, kw), divmod(b, kw)
            lag = (dh * (bh - ah), dw * (bw - aw))
            rows = left_out(ah, bh, taps=kh, dilation=dh, pads=ph)
            columns = left_out(aw, bw, taps=kw, dilation=dw, pads=pw)
            terms = []
            if rows:
                terms.append((-1, strips.setdefault(Strip(rows, None, lag), len(strips))))
            if columns:
                terms.append((-1, strips.setdefault(Strip(None, columns, lag), len(strips))))
            if rows and columns:
                terms.append((1, strips.setdefault(Strip(rows, columns, lag), len(strips))))
            pairs[a, b] = (lags.setdefault(lag, len(lags)), tuple(terms))
    return Recipe(tuple(lags), tuple(strips), pairs)


def as_plane(window: Window) -> Window | None:
    """The same window with two spatial axes; None where lags do not apply (other strides, three axes)."""
    if window.n_spatial not in (1, 2) or any(step != 1 for step in window.stride) or window.n_taps == 1:
        return None
    extra = 2 - window.n_spatial
    return Window(
        channels=window.channels,
        groups=window.groups,
        taps=(1,) * extra + window.taps,
        stride=(1, 1),
        dilation=(1,) * extra + window.dilation,
        pads=((0, 0),) * extra + window.pads,
    )


class LagSums:
    """Σ over rows of u uᵀ for stride 1 in one or two dimensions, kept as lags and strips in float64."""

    def __init__(self, window: Window, device: torch.device, scratch: Scratch) -> None:
        plane = as_plane(window)
        assert plane is not None
        self.window = plane
        self.recipe = recipe(plane)
        self.scratch = scratch
        g, s = plane.groups, plane.s
        self.lags = torch.zeros(g, len(self.recipe.lags), s, s, dtype=torch.float64, device=device)
        self.strips = torch.zeros(g, len(self.recipe.strips), s, s, dtype=torch.float64, device=device)

    @staticmethod
    def applies(window: Window, size: Sequence[int]) -> bool:
        """Whether the map is large enough for its two borders not to meet."""
        plane = as_plane(window)
        if plane is None:
            return False
        height, width = (1, *size)[-2:]
        spans = [dilation * (k - 1) for dilation, k in zip(plane.dilation, plane.taps, strict=True)]
        return height >= 2 * spans[0] and width >= 2 * spans[1] and min(plane.output_size((height, width))) > 0

    @staticmethod
    def n_bytes(window: Window) -> int:
        plane = as_plane(window)
        assert plane is not None
        plan = recipe(plane)
        return 8 * window.groups * (len(plan.lags) + len(plan.strips)) * window.s**2

    @staticmethod
    def flops(window: Window, size: Sequence[int], n_maps: int = 64) -> float:
        """Work for one map, in multiply-adds worth of a large matrix product."""
        plane = as_plane(window)
        assert plane is not None
        height, width = (1, *size)[-2:]
        plan = recipe(plane)
        (nh, _nw), wf = _spectrum(plane, height, width)
        s = window.s
        transform = s * height * width * 2 * wf + 4 * s * height * nh * wf
        products = s * s * nh * wf * (3 + 2 * len(plan.lags) / n_maps)
        strips = s * s * sum(_n_products(strip, height, width) + 40 / n_maps for strip in plan.strips)
        # Small products run at about half the speed of large ones.
        work = 1.6 * (transform + products + strips) + 100 * s * height
        # Starting an operation costs as much as some 3e5 multiply-adds, whatever its size.
        return window.groups * (work + 3e5 * (3 * len(plan.strips) + 6 * wf) / n_maps)

    def add(self, maps: Tensor) -> None:
        """Add the patches of ``maps`` (n, channels, *size), zero-padded as the window says."""
        window = self.window
        if maps.dim() == 3:
            maps = maps.unsqueeze(2)
        for group in range(window.groups):
            part = maps[:, group * window.s : (group + 1) * window.s]
            self._add_lags(part, self.lags[group])
            self._add_strips(part, self.strips[group])

    def _add_lags(self, maps: Tensor, sums: Tensor) -> None:
        _n, s, height, width = maps.shape
        (nh, nw), _wf = _spectrum(self.window, height, width)
        basis = _basis(height, width, nh, nw, self.recipe.lags, maps.dtype, maps.device)
        n_lags = len(self.recipe.lags)
        edges = _tiles(s)
        evens = [self._scratch(f"even{i}", maps, n_lags, (b - a) * (s - a)).zero_() for i, (a, b) in enumerate(edges)]
        odds = [self._scratch(f"odd{i}", maps, n_lags, (b - a) * s).zero_() for i, (a, b) in enumerate(edges)]
        self._add_spectra(maps, basis, edges, evens, odds)
        block = self._scratch("block", maps, s, s)
        for index in range(n_lags):
            for (first, last), even in zip(edges, evens, strict=True):
                upper = even[index].view(last - first, s - first)
                block[first:last, first:] = upper
                block[last:, first:last] = upper[:, last - first :].mT
            for (first, last), odd in zip(edges, odds, strict=True):
                rows = odd[index].view(last - first, s)
                block[first:last] += rows
                block[:, first:last] -= rows.mT
            accumulate(sums[index], block, self.scratch)

    def _add_spectra(
        self, maps: Tensor, basis: _Basis, edges: list[tuple[int, int]], evens: list[Tensor], odds: list[Tensor]
    ) -> None:
        n, s, height, width = maps.shape
        wf, nh = len(basis.across) // 2, len(basis.down_real) // 2
        # Along the rows: (2, wf, n·s·height), real parts before imaginary ones.
        half = self._scratch("half", maps, 2 * wf, n * s * height)
        torch.mm(basis.across, maps.reshape(-1, width).T, out=half)
        real, imag = half.view(2, wf, n * s, height)
        piece = nh * max(2 * n * s, (edges[0][1] - edges[0][0]) * s) * maps.element_size()
        step = max(1, PIECE_BYTES // piece)
        for start in range(0, wf, step):
            stop = min(wf, start + step)
            # Down the columns: one (2n, s) matrix per frequency, real parts of all images above imaginary ones.
            spectrum = self._scratch("spectrum", maps, stop - start, 2 * nh, n * s)
            torch.bmm(basis.down_real.expand(stop - start, -1, -1), real[start:stop].mT, out=spectrum)
            spectrum.baddbmm_(basis.down_imag.expand(stop - start, -1, -1), imag[start:stop].mT)
            both = spectrum.view((stop - start) * nh, 2 * n, s)
            cosines = basis.cosines[:, start * nh : stop * nh]
            sines = basis.sines[:, start * nh : stop * nh]
            for (first, last), even, odd in zip(edges, evens, odds, strict=True):
                # Re Y̅Yᵀ is symmetric, so half of it will do; Im Y̅Yᵀ is a product minus its transpose.
                product = self._scratch("product", maps, len(both), last - first, s - first)
                torch.bmm(both[:, :, first:last].mT, both[:, :, first:], out=product)
                even.addmm_(cosines, product.view(len(both), -1))
                product = self._scratch("product", maps, len(both), last - first, s)
                torch.bmm(both[:, n:, first:last].mT, both[:, :n], out=product)
                odd.addmm_(sines, product.view(len(both), -1))

    def _scratch(self, name: str, like: Tensor, *shape: int) -> Tensor:
        return self.scratch.get(name, shape, like.dtype, like.device)

    def _add_strips(self, maps: Tensor, sums: Tensor) -> None:
        _n, s, height, width = maps.shape
        lines: dict[tuple[int, int], Tensor] = {}

        def line(axis: int, position: int) -> Tensor:
            """One row (axis 0) or column (axis 1) of all maps, as (length, n, s)."""
            if (axis, position) not in lines:
                lines[axis, position] = maps.select(2 + axis, position).permute(2, 0, 1).contiguous()
            return lines[axis, position]

        total = self.scratch.get("strip", (s, s), maps.dtype, maps.device)
        for index, strip in enumerate(self.recipe.strips):
            dy, dx = strip.lag
            ys = None if strip.rows is None else [y % height for y in strip.rows]
            xs = None if strip.columns is None else [x % width for x in strip.columns]
            total.zero_()
            if ys is not None and xs is not None:
                for y in ys:
                    for x in xs:
                        total.addmm_(line(0, y)[x].T, line(0, y + dy)[x + dx])
            elif ys is not None:
                low, high = max(0, -dx), min(width, width - dx)
                for y in ys:
                    first, second = line(0, y)[low:high], line(0, y + dy)[low + dx : high + dx]
                    total.addmm_(first.reshape(-1, s).T, second.reshape(-1, s))
            elif xs is not None:
                low, high = max(0, -dy), min(height, height - dy)
                for x in xs:
                    first, second = line(1, x)[low:high], line(1, x + dx)[low + dy : high + dy]
                    total.addmm_(first.reshape(-1, s).T, second.reshape(-1, s))
            accumulate(sums[index], total, self.scratch)

    def rows(self, tap: int) -> Tensor:
        """The sums of one tap with all taps, (groups, s, s, k), in float64."""
        g, s, k = self.window.groups, self.window.s, self.window.n_taps
        found = self.lags.new_empty(g, s, s, k)
        for other in range(k):
            lag, terms = self.recipe.pairs[min(tap, other), max(tap, other)]
            block = self.lags[:, lag].clone()
            for sign, strip in terms:
                block.add_(self.strips[:, strip], alpha=sign)
            found[..., other] = block if tap <= other else block.mT
        return found


@dataclass(frozen=True, eq=False)
class _Basis:
    across: Tensor  # (2·wf, width)
    down_real: Tensor  # (2·nh, height), rows of each frequency: real part, imaginary part
    down_imag: Tensor
    cosines: Tensor  # (lags, wf·nh)
    sines: Tensor


@lru_cache(maxsize=64)
def _basis(
    height: int,
    width: int,
    nh: int,
    nw: int,
    lags: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> _Basis:
    wf = nw // 2 + 1
    tau = 2 * math.pi

    def angles(first: Tensor, second: Tensor, n: int) -> Tensor:
        # Reduced in whole numbers, so that large arguments lose nothing.
        return (first[:, None] * second[None, :] % n).double() * (tau / n)

    across = angles(torch.arange(wf), torch.arange(width), nw)
    down = angles(torch.arange(nh), torch.arange(height), nh)
    dy, dx = torch.tensor(lags).T
    down_lag = angles(dy % nh, torch.arange(nh), nh)  # (lags, nh)
    across_lag = angles(dx % nw, torch.arange(wf), nw)  # (lags, wf)
    turn = (across_lag[:, :, None] + down_lag[:, None, :]).flatten(1)  # (lags, wf·nh)
    weight = torch.full((wf,), 2.0, dtype=torch.float64)
    weight[0] = 1.0
    if nw % 2 == 0:
        weight[-1] = 1.0
    weight = (weight / (nh * nw)).repeat_interleave(nh)
    # e^{-iθ}(re + i·im) = (cos·re + sin·im) + i(cos·im − sin·re)
    down_real = torch.stack([down.cos(), -down.sin()], dim=1).flatten(0, 1)
    down_imag = torch.stack([down.sin(), down.cos()], dim=1).flatten(0, 1)
    parts = (
        torch.cat([across.cos(), -across.sin()]),
        down_real,
        down_imag,
        turn.cos() * weight,
        turn.sin() * weight,
    )
    return _Basis(*(part.to(dtype).to(device).contiguous() for part in parts))


def _spectrum(window: Window, height: int, width: int) -> tuple[tuple[int, int], int]:
    """Length of the transform along both axes, and how many frequencies of the second are needed."""
    spans = [dilation * (k - 1) for dilation, k in zip(window.dilation, window.taps, strict=True)]
    nh, nw = height + spans[0], width + spans[1]
    return (nh, nw), nw // 2 + 1


def _n_products(strip: Strip, height: int, width: int) -> int:
    n_rows = height if strip.rows is None else len(strip.rows)
    n_columns = width if strip.columns is None else len(strip.columns)
    return n_rows * n_columns


def _tiles(s: int) -> list[tuple[int, int]]:
    n = min(max(1, s // TILE), MAX_TILES)
    edges = [s * i // n for i in range(n + 1)]
    return list(itertools.pairwise(edges))

"""Sums of patch products by lag: tap a times tap b depends on b − a alone, but for strips at the border.

Notation: x the zero-padded map, a and b taps, δ = dilation·(b − a) their lag, y the position under tap a. Then

    Σ_z x(z+a) x(z+b)ᵀ = Σ_{all y} x(y) x(y+δ)ᵀ − (the y that no window puts under a while a and b are on the map),

and the second term is made of whole rows and whole columns (their crossings counted once too often). The first term is
a correlation, read from the Fourier transform at the few lags that a kernel has. The transform is a pair of matrix
products: maps are small, only exact zero-padding by the largest lag is needed, and the result comes out in the layout
that the next product wants, one (image, channel) matrix per frequency.

With stride S, position S·j + ρ of the map is position j of its phase ρ, every tap reads one phase with stride 1, and
the same holds for each pair of phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

import torch
from torch import Tensor

from tensigma.calibration.scratch import Scratch, accumulate
from tensigma.calibration.window import Window

# Spectra and products are made in pieces of about this size, so that they stay in cache.
PIECE_BYTES = 2 * 2**20
TILE = 64
MAX_TILES = 4

Pair = tuple[int, int]
Edge = tuple[int, ...]  # positions along one axis, negative ones counted from the end


@dataclass(frozen=True)
class Lag:
    """x(y) x(y+δ)ᵀ summed over all y, between two phases of the map."""

    phases: Pair
    lag: Pair


@dataclass(frozen=True)
class Strip:
    """The same summed over some rows, some columns, or their crossings; None stands for all of them."""

    phases: Pair
    lag: Pair
    rows: Edge | None
    columns: Edge | None


@dataclass(frozen=True)
class Recipe:
    """Which sums to keep, and how the block of two taps is put together from them."""

    phases: tuple[Pair, ...]
    lags: tuple[Lag, ...]  # those of one pair of phases beside each other
    strips: tuple[Strip, ...]
    # Two taps, in the order of their phases → index of the lag, and (sign, index) of each strip.
    pairs: dict[Pair, tuple[int, tuple[tuple[int, int], ...]]]
    spans: Pair  # largest lag along each axis
    needed: Pair  # length of a phase along each axis below which borders meet

    def jobs(self) -> list[tuple[Pair, slice]]:
        """Pairs of phases, and which of the lags are theirs."""
        found: list[tuple[Pair, slice]] = []
        for index, lag in enumerate(self.lags):
            if found and found[-1][0] == lag.phases:
                found[-1] = (lag.phases, slice(found[-1][1].start, index + 1))
            else:
                found.append((lag.phases, slice(index, index + 1)))
        return found


@dataclass(frozen=True)
class _Reach:
    """Where one tap reads along one axis: its phase, and how much of the phase it leaves out at both ends."""

    phase: int
    shift: int
    after: int

    def left_out(self, lag: int) -> Edge:
        """Positions y where this tap and one further by ``lag`` lie on the map, while no window puts this tap on y."""
        low = range(max(0, -lag), self.shift)
        high = range(max(0, lag), self.after)
        return (*low, *(-1 - position for position in high))


def _reaches(window: Window, axis: int, size: int) -> list[_Reach]:
    step, dilation, (before, after) = window.stride[axis], window.dilation[axis], window.pads[axis]
    n_out = (size + before + after - dilation * (window.taps[axis] - 1) - 1) // step + 1
    length = -(-size // step)
    found = []
    for tap in range(window.taps[axis]):
        shift, phase = divmod(dilation * tap - before, step)
        found.append(_Reach(phase, shift, length - shift - n_out))
    return found


@lru_cache(maxsize=256)
def recipe(window: Window, rest: Pair = (0, 0)) -> Recipe:
    """The sums that hold everything about the second moment of ``window``: 29 of them for 3×3 with padding 1.

    ``rest`` is the size of the map modulo the stride; nothing else about the size matters.
    """
    # Any size with this rest will do, as long as there is some output.
    sizes = [
        r + step * (dilation * k + 1)
        for r, step, dilation, k in zip(rest, window.stride, window.dilation, window.taps, strict=True)
    ]
    down, across = (_reaches(window, axis, size) for axis, size in enumerate(sizes))
    taps = [(h, w) for h in down for w in across]
    phases = sorted({(h.phase, w.phase) for h, w in taps})
    number = [phases.index((h.phase, w.phase)) for h, w in taps]
    lags: dict[Lag, int] = {}
    strips: dict[Strip, int] = {}
    raw: dict[Pair, tuple[Lag, tuple[tuple[int, int], ...]]] = {}
    for a, b in product(range(len(taps)), repeat=2):
        if (number[a], a) > (number[b], b):
            continue
        both = (number[a], number[b])
        lag = (taps[b][0].shift - taps[a][0].shift, taps[b][1].shift - taps[a][1].shift)
        rows, columns = (tap.left_out(step) for tap, step in zip(taps[a], lag, strict=True))
        found = []
        if rows:
            found.append((-1, strips.setdefault(Strip(both, lag, rows, None), len(strips))))
        if columns:
            found.append((-1, strips.setdefault(Strip(both, lag, None, columns), len(strips))))
        if rows and columns:
            found.append((1, strips.setdefault(Strip(both, lag, rows, columns), len(strips))))
        raw[a, b] = (Lag(both, lag), tuple(found))
    for entry in sorted({lag for lag, _ in raw.values()}, key=lambda entry: (entry.phases, entry.lag)):
        lags[entry] = len(lags)
    pairs = {taps_of: (lags[lag], terms) for taps_of, (lag, terms) in raw.items()}
    spans, needed = [], []
    for axis, reaches in enumerate((down, across)):
        span = max(abs(entry.lag[axis]) for entry in lags)
        edge = max(max(reach.shift, 0) for reach in reaches), max(max(reach.after, 0) for reach in reaches)
        spans.append(span)
        needed.append(max(span + max(edge), sum(edge), 1))
    return Recipe(tuple(phases), tuple(lags), tuple(strips), pairs, (spans[0], spans[1]), (needed[0], needed[1]))


def as_plane(window: Window) -> Window | None:
    """The same window with two spatial axes; None where lags do not apply (one tap, three axes)."""
    if window.n_spatial not in (1, 2) or window.n_taps == 1:
        return None
    extra = 2 - window.n_spatial
    return Window(
        channels=window.channels,
        groups=window.groups,
        taps=(1,) * extra + window.taps,
        stride=(1,) * extra + window.stride,
        dilation=(1,) * extra + window.dilation,
        pads=((0, 0),) * extra + window.pads,
    )


def rest_of(window: Window, size: Sequence[int]) -> Pair:
    """Size of a map modulo the stride."""
    height, width = (1, *size)[-2:]
    steps = (1, *window.stride)[-2:]
    return height % steps[0], width % steps[1]


class LagSums:
    """Σ over rows of u uᵀ in one or two dimensions, kept as lags and strips in float64."""

    def __init__(self, window: Window, rest: Pair, device: torch.device, scratch: Scratch) -> None:
        plane = as_plane(window)
        assert plane is not None
        self.window = plane
        self.recipe = recipe(plane, rest)
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
        needed = recipe(plane, rest_of(plane, size)).needed
        length = _phase_size(plane, height, width)
        return length[0] >= needed[0] and length[1] >= needed[1] and min(plane.output_size((height, width))) > 0

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
        plan = recipe(plane, rest_of(plane, size))
        height, width = _phase_size(plane, *(1, *size)[-2:])
        nh, wf = height + plan.spans[0], (width + plan.spans[1]) // 2 + 1
        s, n_phases = window.s, len(plan.phases)
        transform = n_phases * s * (height * width * 2 * wf + 4 * height * nh * wf)
        products = (
            s * s * nh * wf * (sum(3 if a == b else 4 for (a, b), _ in plan.jobs()) + 2 * len(plan.lags) / n_maps)
        )
        strips = s * s * sum(_n_products(strip, height, width) + 40 / n_maps for strip in plan.strips)
        # Small products are somewhat slower than large ones.
        work = 1.3 * (transform + products + strips) + 100 * n_phases * s * height
        # Starting an operation costs as much as some 3e5 multiply-adds, whatever its size.
        return window.groups * (work + 3e5 * (3 * len(plan.strips) + 6 * wf * len(plan.jobs())) / n_maps)

    def add(self, maps: Tensor) -> None:
        """Add the patches of ``maps`` (n, channels, *size), zero-padded as the window says."""
        window = self.window
        if maps.dim() == 3:
            maps = maps.unsqueeze(2)
        for group in range(window.groups):
            part = self._phases(maps[:, group * window.s : (group + 1) * window.s])
            self._add_lags(part, self.lags[group])
            self._add_strips(part, self.strips[group])

    def _phases(self, maps: Tensor) -> Tensor:
        """The phases of each map as channels, (n, phases·s, *size of a phase)."""
        n, s, height, width = maps.shape
        steps = self.window.stride
        if steps == (1, 1):
            return maps
        length = _phase_size(self.window, height, width)
        found = self._scratch("phases", maps, n, len(self.recipe.phases), s, *length)
        for index, (top, left) in enumerate(self.recipe.phases):
            phase = maps[:, :, top :: steps[0], left :: steps[1]]
            if phase.shape[2:] != length:
                found[:, index].zero_()
            found[:, index, :, : phase.shape[2], : phase.shape[3]] = phase
        return found.flatten(1, 2)

    def _add_lags(self, maps: Tensor, sums: Tensor) -> None:
        s = self.window.s
        _, _, height, width = maps.shape
        plan = self.recipe
        size = (height + plan.spans[0], width + plan.spans[1])
        basis = _basis((height, width), size, tuple(entry.lag for entry in plan.lags), maps.dtype, maps.device)
        jobs = []
        for (first, second), which in plan.jobs():
            for top, bottom in _tiles(s):
                # Re Y̅Yᵀ of a phase with itself is symmetric, so half of it will do.
                left = top if first == second else 0
                n_lags = which.stop - which.start
                name = f"{first}-{second}-{top}"
                even = self._scratch("even" + name, maps, n_lags, (bottom - top) * (s - left)).zero_()
                odd = self._scratch("odd" + name, maps, n_lags, (bottom - top) * s).zero_()
                jobs.append(_Job((first, second), which, (top, bottom), left, even, odd))
        self._add_spectra(maps, basis, jobs)
        block = self._scratch("block", maps, s, s)
        for phases, which in plan.jobs():
            own = [job for job in jobs if job.phases == phases]
            for index in range(which.start, which.stop):
                self._assemble(block, own, index - which.start)
                accumulate(sums[index], block, self.scratch)

    def _assemble(self, block: Tensor, jobs: list[_Job], index: int) -> None:
        """One lag of one pair of phases, from its tiles."""
        s = self.window.s
        for job in jobs:
            top, bottom = job.tile
            even = job.even[index].view(bottom - top, s - job.left)
            block[top:bottom, job.left :] = even
            if job.is_symmetric:
                block[bottom:, top:bottom] = even[:, bottom - top :].mT
        for job in jobs:
            top, bottom = job.tile
            odd = job.odd[index].view(bottom - top, s)
            block[top:bottom] += odd
            if job.is_symmetric:
                block[:, top:bottom] -= odd.mT

    def _add_spectra(self, maps: Tensor, basis: _Basis, jobs: list[_Job]) -> None:
        n, channels, height, width = maps.shape
        s = self.window.s
        wf, nh = len(basis.across) // 2, len(basis.down_real) // 2
        # Along the rows: (2, wf, n·channels·height), real parts before imaginary ones.
        half = self._scratch("half", maps, 2 * wf, n * channels * height)
        torch.mm(basis.across, maps.reshape(-1, width).T, out=half)
        real, imag = half.view(2, wf, n * channels, height)
        widest = max(job.tile[1] - job.tile[0] for job in jobs)
        step = max(1, PIECE_BYTES // (nh * max(2 * n * channels, widest * s) * maps.element_size()))
        for start in range(0, wf, step):
            stop = min(wf, start + step)
            # Down the columns: one (2n, channels) matrix per frequency, real parts of all maps above imaginary ones.
            spectrum = self._scratch("spectrum", maps, stop - start, 2 * nh, n * channels)
            torch.bmm(basis.down_real.expand(stop - start, -1, -1), real[start:stop].mT, out=spectrum)
            spectrum.baddbmm_(basis.down_imag.expand(stop - start, -1, -1), imag[start:stop].mT)
            both = spectrum.view((stop - start) * nh, 2 * n, channels)
            frequencies = slice(start * nh, stop * nh)
            for job in jobs:
                top, bottom = (job.phases[0] * s + edge for edge in job.tile)
                left, right = job.phases[1] * s + job.left, (job.phases[1] + 1) * s
                found = self._scratch("product", maps, len(both), bottom - top, right - left)
                torch.bmm(both[:, :, top:bottom].mT, both[:, :, left:right], out=found)
                job.even.addmm_(basis.cosines[job.lags, frequencies], found.view(len(both), -1))
                # Of a phase with itself, Im Y̅Yᵀ is this product minus its transpose, which can wait.
                left = job.phases[1] * s
                found = self._scratch("product", maps, len(both), bottom - top, s)
                torch.bmm(both[:, n:, top:bottom].mT, both[:, :n, left:right], out=found)
                if not job.is_symmetric:
                    found.baddbmm_(both[:, :n, top:bottom].mT, both[:, n:, left:right], alpha=-1)
                job.odd.addmm_(basis.sines[job.lags, frequencies], found.view(len(both), -1))

    def _scratch(self, name: str, like: Tensor, *shape: int) -> Tensor:
        return self.scratch.get(name, shape, like.dtype, like.device)

    def _add_strips(self, maps: Tensor, sums: Tensor) -> None:
        s = self.window.s
        _, _, height, width = maps.shape
        lines: dict[Pair, Tensor] = {}

        def line(axis: int, position: int) -> Tensor:
            """One row (axis 0) or column (axis 1) of all maps, as (length, n, channels)."""
            if (axis, position) not in lines:
                lines[axis, position] = maps.select(2 + axis, position).permute(2, 0, 1).contiguous()
            return lines[axis, position]

        total = self.scratch.get("strip", (s, s), maps.dtype, maps.device)
        for index, strip in enumerate(self.recipe.strips):
            dy, dx = strip.lag
            one, other = (slice(phase * s, (phase + 1) * s) for phase in strip.phases)
            ys = None if strip.rows is None else [y % height for y in strip.rows]
            xs = None if strip.columns is None else [x % width for x in strip.columns]
            total.zero_()
            if ys is not None and xs is not None:
                for y, x in product(ys, xs):
                    total.addmm_(line(0, y)[x][:, one].T, line(0, y + dy)[x + dx][:, other])
            elif ys is not None:
                low, high = max(0, -dx), min(width, width - dx)
                for y in ys:
                    first, second = line(0, y)[low:high], line(0, y + dy)[low + dx : high + dx]
                    total.addmm_(first.flatten(0, 1)[:, one].T, second.flatten(0, 1)[:, other])
            elif xs is not None:
                low, high = max(0, -dy), min(height, height - dy)
                for x in xs:
                    first, second = line(1, x)[low:high], line(1, x + dx)[low + dy : high + dy]
                    total.addmm_(first.flatten(0, 1)[:, one].T, second.flatten(0, 1)[:, other])
            accumulate(sums[index], total, self.scratch)

    def rows(self, tap: int, out: Tensor) -> Tensor:
        """Write the sums of one tap with all taps, (groups, k, s, s) in float64, to ``out``."""
        for group, other in product(range(self.window.groups), range(self.window.n_taps)):
            in_order = (tap, other) in self.recipe.pairs
            lag, terms = self.recipe.pairs[(tap, other) if in_order else (other, tap)]
            block = self.lags[group, lag]
            out[group, other] = block if in_order else block.T
            for sign, strip in terms:
                part = self.strips[group, strip]
                out[group, other].add_(part if in_order else part.T, alpha=sign)
        return out


@dataclass(frozen=True, eq=False)
class _Job:
    """Some rows of the products of two phases, read at their lags."""

    phases: Pair
    lags: slice
    tile: Pair
    left: int
    even: Tensor
    odd: Tensor

    @property
    def is_symmetric(self) -> bool:
        return self.phases[0] == self.phases[1]


@dataclass(frozen=True, eq=False)
class _Basis:
    across: Tensor  # (2·wf, width)
    down_real: Tensor  # (2·nh, height), rows of each frequency: real part, imaginary part
    down_imag: Tensor
    cosines: Tensor  # (lags, wf·nh)
    sines: Tensor


@lru_cache(maxsize=64)
def _basis(map_size: Pair, size: Pair, lags: tuple[Pair, ...], dtype: torch.dtype, device: torch.device) -> _Basis:
    """Matrices of the transform from ``map_size`` to ``size``, and from there to the lags."""
    (height, width), (nh, nw) = map_size, size
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


def _phase_size(window: Window, height: int, width: int) -> Pair:
    return -(-height // window.stride[0]), -(-width // window.stride[1])


def _n_products(strip: Strip, height: int, width: int) -> int:
    n_rows = height if strip.rows is None else len(strip.rows)
    n_columns = width if strip.columns is None else len(strip.columns)
    return n_rows * n_columns


def _tiles(s: int) -> list[tuple[int, int]]:
    n = min(max(1, s // TILE), MAX_TILES)
    edges = [s * i // n for i in range(n + 1)]
    return list(pairwise(edges))

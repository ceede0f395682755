"""Sums of patch products by lag: tap a times tap b depends on b − a alone, except for strips at the border.

Notation: x the zero-padded map, a and b taps, δ = dilation·(b − a) their lag, y the position under tap a. Then

    Σ_z x(z+a) x(z+b)ᵀ = Σ_{all y} x(y) x(y+δ)ᵀ − (the y that no window puts under a while a and b are on the map),

and the second term is made of whole rows and whole columns (their crossings counted once too often). The first term is
a correlation, read from the Fourier transform at the few lags that a kernel has. The transform is a pair of matrix
products: maps are small, only exact zero-padding by the largest lag is needed, and the result has the layout that
the next product needs, one (image, channel) matrix per frequency.

With stride S, position S·j + ρ of the map is position j of its phase ρ, every tap reads one phase with stride 1, and
the same holds for each pair of phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor

from tensigma.calibration.lag_basis import Basis, basis_of
from tensigma.calibration.lag_recipe import Pair, Strip, as_plane, recipe, rest_of
from tensigma.calibration.scratch import Scratch, accumulate
from tensigma.calibration.window import Window

# Spectra and products are computed in pieces of about this size, so that they stay in cache.
PIECE_BYTES = 2 * 2**20
TILE = 64
MAX_TILES = 4
# Maps that a calibration adds, for an estimate of the work.
_MAPS = 256


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
        """Work for one map, in equivalent multiply-adds of a large matrix product."""
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
        # Starting an operation costs as much as some 3e5 multiply-adds, whatever its size. There are some for each
        # strip, for each product of spectra, and in the end, when hundreds of maps have been added, for each pair of
        # taps; and all of them for each group.
        started = (3 * len(plan.strips) + 6 * wf * len(plan.jobs())) / n_maps + 3 * window.n_taps**2 / _MAPS
        return window.groups * (work + 3e5 * started)

    def add(self, maps: Tensor) -> None:
        """Add the patches of ``maps`` (n, channels, *size), zero-padded as the window requires."""
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
        phases = self._scratch("phases", maps, n, len(self.recipe.phases), s, *length)
        for index, (top, left) in enumerate(self.recipe.phases):
            phase = maps[:, :, top :: steps[0], left :: steps[1]]
            if phase.shape[2:] != length:
                phases[:, index].zero_()
            phases[:, index, :, : phase.shape[2], : phase.shape[3]] = phase
        return phases.flatten(1, 2)

    def _add_lags(self, maps: Tensor, sums: Tensor) -> None:
        s = self.window.s
        _, _, height, width = maps.shape
        plan = self.recipe
        size = (height + plan.spans[0], width + plan.spans[1])
        basis = basis_of((height, width), size, tuple(entry.lag for entry in plan.lags), maps.dtype, maps.device)
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
            pair_jobs = [job for job in jobs if job.phases == phases]
            for index in range(which.start, which.stop):
                self._assemble(block, pair_jobs, index - which.start)
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

    def _add_spectra(self, maps: Tensor, basis: Basis, jobs: list[_Job]) -> None:
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
                products = self._scratch("product", maps, len(both), bottom - top, right - left)
                torch.bmm(both[:, :, top:bottom].mT, both[:, :, left:right], out=products)
                job.even.addmm_(basis.cosines[job.lags, frequencies], products.view(len(both), -1))
                # For a phase with itself, Im Y̅Yᵀ is this product minus its transpose, which _assemble subtracts.
                left = job.phases[1] * s
                products = self._scratch("product", maps, len(both), bottom - top, s)
                torch.bmm(both[:, n:, top:bottom].mT, both[:, :n, left:right], out=products)
                if not job.is_symmetric:
                    products.baddbmm_(both[:, :n, top:bottom].mT, both[:, n:, left:right], alpha=-1)
                job.odd.addmm_(basis.sines[job.lags, frequencies], products.view(len(both), -1))

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

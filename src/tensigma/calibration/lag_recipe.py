"""Which lags a window has, and which strips at the border must be subtracted; ``lags`` explains why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from tensigma.calibration.window import Window

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
    """Which sums to keep, and how the block of two taps is assembled from them."""

    phases: tuple[Pair, ...]
    lags: tuple[Lag, ...]  # grouped by pair of phases
    strips: tuple[Strip, ...]
    # Two taps, in the order of their phases → index of the lag, and (sign, index) of each strip.
    pairs: dict[Pair, tuple[int, tuple[tuple[int, int], ...]]]
    spans: Pair  # largest lag along each axis
    needed: Pair  # length of a phase along each axis below which borders meet

    def jobs(self) -> list[tuple[Pair, slice]]:
        """Pairs of phases, each with the slice of its lags."""
        jobs: list[tuple[Pair, slice]] = []
        for index, lag in enumerate(self.lags):
            if jobs and jobs[-1][0] == lag.phases:
                jobs[-1] = (lag.phases, slice(jobs[-1][1].start, index + 1))
            else:
                jobs.append((lag.phases, slice(index, index + 1)))
        return jobs


@dataclass(frozen=True)
class _Reach:
    """Where one tap reads along one axis: its phase, and how much of the phase it leaves out at both ends."""

    phase: int
    shift: int
    after: int

    def left_out(self, lag: int) -> Edge:
        """Positions y where this tap and the one ``lag`` further lie on the map, while no window puts this tap on y."""
        low = range(max(0, -lag), self.shift)
        high = range(max(0, lag), self.after)
        return (*low, *(-1 - position for position in high))


def _reaches(window: Window, axis: int, size: int) -> list[_Reach]:
    step, dilation, (before, after) = window.stride[axis], window.dilation[axis], window.pads[axis]
    n_out = (size + before + after - dilation * (window.taps[axis] - 1) - 1) // step + 1
    length = -(-size // step)
    reaches = []
    for tap in range(window.taps[axis]):
        shift, phase = divmod(dilation * tap - before, step)
        reaches.append(_Reach(phase, shift, length - shift - n_out))
    return reaches


@lru_cache(maxsize=256)
def recipe(window: Window, rest: Pair = (0, 0)) -> Recipe:
    """The sums that hold everything about the second moment of ``window``: 29 of them for 3×3 with padding 1.

    ``rest`` is the size of the map modulo the stride; nothing else about the size matters.
    """
    # Any size with this remainder will do, as long as there is some output.
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
        phase_pair = (number[a], number[b])
        lag = (taps[b][0].shift - taps[a][0].shift, taps[b][1].shift - taps[a][1].shift)
        rows, columns = (tap.left_out(step) for tap, step in zip(taps[a], lag, strict=True))
        terms = []
        if rows:
            terms.append((-1, strips.setdefault(Strip(phase_pair, lag, rows, None), len(strips))))
        if columns:
            terms.append((-1, strips.setdefault(Strip(phase_pair, lag, None, columns), len(strips))))
        if rows and columns:
            terms.append((1, strips.setdefault(Strip(phase_pair, lag, rows, columns), len(strips))))
        raw[a, b] = (Lag(phase_pair, lag), tuple(terms))
    for entry in sorted({lag for lag, _ in raw.values()}, key=lambda entry: (entry.phases, entry.lag)):
        lags[entry] = len(lags)
    pairs = {tap_pair: (lags[lag], signed) for tap_pair, (lag, signed) in raw.items()}
    spans, needed = [], []
    for axis, reaches in enumerate((down, across)):
        span = max(abs(entry.lag[axis]) for entry in lags)
        edge = max(max(reach.shift, 0) for reach in reaches), max(max(reach.after, 0) for reach in reaches)
        spans.append(span)
        needed.append(max(span + max(edge), sum(edge), 1))
    return Recipe(tuple(phases), tuple(lags), tuple(strips), pairs, (spans[0], spans[1]), (needed[0], needed[1]))


def as_plane(window: Window) -> Window | None:
    """The same window with two spatial axes; None if lags do not apply (one tap, three axes)."""
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

"""How much memory a calibration needs, and how to need less: layers in several passes over the data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tensigma.calibration.lag_recipe import as_plane
from tensigma.calibration.lags import LagSums
from tensigma.calibration.moments import WIDE
from tensigma.calibration.unfold import BLOCK_BYTES, UnfoldSums
from tensigma.calibration.window import Window
from tensigma.errors import InputError
from tensigma.layers import Geometry

# Buffered maps: of all layers together, and of one layer.
PENDING_TOTAL = 384 * 2**20
PENDING_LAYER = 28 * 2**20

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Upper bounds in bytes, beyond the model and its own forward pass."""

    #: Running sums of each layer, in float64.
    sums: dict[str, int]
    #: Finished statistics of each layer, which stay in memory.
    results: dict[str, int]
    #: Buffered inputs of one layer (at least one map, however large).
    pending: int
    #: Work space shared by all layers.
    scratch: int

    def working(self, names: Sequence[str]) -> int:
        """What a pass over these layers takes besides finished results."""
        return self.scratch + sum(self.sums[name] + self.pending for name in names)

    @property
    def total(self) -> int:
        """All layers in one pass. Sums are freed layer by layer as results are computed: the larger of both counts."""
        both = sum(max(self.sums[name] + self.pending, self.results[name]) for name in self.sums)
        return self.scratch + both


def parse_bytes(size: int | str) -> int:
    """A number of bytes, or text such as "4GB", "512 MiB".

    >>> parse_bytes("4GB"), parse_bytes("1.5 KiB"), parse_bytes(100)
    (4000000000, 1536, 100)
    """
    if isinstance(size, int):
        n_bytes: float = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?I?)B?\s*", size, flags=re.IGNORECASE)
        if not match or match[2].upper() not in UNITS:
            raise InputError(
                '{memory} is not a size; write a number of bytes, or text such as "4GB" or "512MiB"',
                parameters=(f"memory={size!r}",),
            )
        n_bytes = float(match[1]) * UNITS[match[2].upper()]
    if n_bytes <= 0:
        raise InputError("{memory} must be positive", parameters=(f"memory={size!r}",))
    return int(n_bytes)


def estimate_memory(
    targets: Mapping[str, nn.Module], *, max_samples: int | None = None, memory: int | None = None
) -> MemoryEstimate:
    """Bounds on the memory for the moments of ``targets`` (name → layer), known before anything runs.

    ``max_samples`` tells how many rows a very wide Linear layer will keep (one for each sample); without it, enough for
    its gram is assumed.

    >>> estimate = estimate_memory({"conv": nn.Conv2d(64, 64, 3, padding=1)})
    >>> estimate.results["conv"] == 4 * 576**2, estimate.sums["conv"] <= 8 * 576**2
    (True, True)
    """
    sums, results = {}, {}
    blocks, products, most_taps = 0, 0, 1
    for name, module in targets.items():
        geometry = Geometry.of(module)
        window = Window.of(geometry)
        itemsize = 8 if module.weight.dtype == torch.float64 else 4  # of the results
        if geometry.kind == "linear" and window.d >= WIDE and max_samples is not None and max_samples < window.d:
            sums[name] = results[name] = itemsize * window.d * max_samples
            continue
        lags = LagSums.n_bytes(window) if as_plane(window) else 0
        sums[name] = max(lags, UnfoldSums.n_bytes(window))
        results[name] = itemsize * window.groups * window.d**2
        # Products of one layer before they are added, and one tap with all taps for the result.
        blocks = max(blocks, lags // window.groups, UnfoldSums.n_bytes(window) // window.n_taps)
        if window.d >= WIDE:  # elsewhere small beside the rest
            products = max(products, UnfoldSums.block_bytes(window, itemsize))
        most_taps = max(most_taps, window.n_taps)
    pending = min(PENDING_LAYER, PENDING_TOTAL // max(1, len(targets)))
    if memory is not None:
        free = memory - sum(results.values())
        # Buffers only make it faster; what sums and products leave is enough for them.
        left = free - blocks - products - max(sums.values(), default=0)
        pending = max(0, min(pending, free // 16 // max(1, len(targets)), left // (4 + most_taps)))
    # Spectra take about three times the maps they are made from, unfolded maps once for every tap.
    scratch = blocks + products + 3 * pending + min(BLOCK_BYTES, most_taps * pending)
    return MemoryEstimate(sums=sums, results=results, pending=pending, scratch=scratch)


def plan_passes(estimate: MemoryEstimate, memory: int | None) -> list[list[str]]:
    """Layers in as few passes as fit into ``memory`` bytes, in the order of the model.

    >>> estimate = MemoryEstimate(sums={"a": 8, "b": 8, "c": 8}, results={"a": 4, "b": 4, "c": 4}, pending=1, scratch=2)
    >>> plan_passes(estimate, 35), plan_passes(estimate, None)
    ([['a', 'b'], ['c']], [['a', 'b', 'c']])
    """
    names = list(estimate.sums)
    if memory is None:
        return [names]
    free = memory - sum(estimate.results.values())
    hardest = max(names, key=lambda name: estimate.sums[name])
    if estimate.working([hardest]) > free:
        results = sum(estimate.results.values())
        need = results + estimate.working([hardest])
        raise InputError(
            f"{{memory}} is too little: layer {hardest!r} needs {_readable(estimate.sums[hardest])} of sums, and the "
            f"results of all {len(names)} layers {_readable(results)}; at least {_readable(_up(need))} in all. Choose "
            "fewer layers with {layers}, or allow more memory",
            parameters=(f"memory={_readable(memory)}", "layers"),
        )
    passes: list[list[str]] = [[]]
    for name in names:
        if estimate.working([*passes[-1], name]) > free:
            passes.append([])
        passes[-1].append(name)
    return passes


def _up(size: int) -> int:
    """Rounded up to three digits, so that who asks for what is shown gets enough.

    >>> _up(1_342_177_281), _up(999)
    (1350000000, 999)
    """
    unit = 10 ** max(0, len(str(size)) - 3)
    return -(-size // unit) * unit


def _readable(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError

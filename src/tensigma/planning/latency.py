"""A budget of time: how long each option of a layer takes on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import mul
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from tensigma.errors import InputError
from tensigma.layers import Format, Geometry
from tensigma.linalg import RankTuple
from tensigma.planning.budgets import CostBudget
from tensigma.planning.curves import Measure, Option
from tensigma.planning.entry import CompressedEntry, DenseEntry
from tensigma.running import RUNTIMES, Chain, Listener, Progress, TimeTable, runtime_of
from tensigma.solving import Candidate, Method

# Ranks at which a layer is timed, as shares of the largest on its curve; times between them are interpolated.
_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
# Runtimes compute channels in blocks of 8 or 16: a rank of 15 takes longer than one of 16.
_BLOCK = 16


@dataclass(frozen=True)
class Latency(CostBudget):
    """At most ``share`` of the time that the convolutions and Linear layers take on this machine, one thread.

    Each distinct shape is timed once, dense and at a few ranks of every format, and the times are kept in a file. The
    original's time is the sum over its layers measured in the same way; what lies between them (activations, pooling,
    additions) is not counted and stays as it is, so the time of the whole model falls by a little less. Ranks are
    whole blocks of channels, because others take longer than the next block.

    Args:
        share: What may remain: 0.6 means sixty per cent.
        runtime: ``"onnxruntime"``, ``"openvino"``, ``"eager"`` (PyTorch itself, on the model's device), or ``"auto"``:
            ONNX Runtime where it is installed and the model is on the CPU.
        batch: Samples at a time. What is fast one by one need not be fast in batches.
        cache: A folder for the times; ``$TENSIGMA_CACHE`` or the user's cache folder by default.

    >>> Latency(0.6, runtime="eager", batch=8)
    Latency(share=0.6, runtime='eager', batch=8, cache=None)
    """

    unit: ClassVar[str] = "seconds"
    field: ClassVar[Measure] = "seconds"
    _: KW_ONLY
    runtime: Literal["auto", "onnxruntime", "openvino", "eager"] = "auto"
    batch: int = 1
    cache: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.runtime not in RUNTIMES:
            raise InputError(f"runtime {self.runtime!r} is unknown; choose one of {', '.join(map(repr, RUNTIMES))}")
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise InputError(f"batch is a whole number of at least 1, got {self.batch!r}")

    def show(self, amount: float) -> str:
        return f"{1000 * amount:,.3g} ms"


@dataclass(frozen=True, kw_only=True)
class TimingProgress(Progress):
    """The shape of some layers has been timed at several ranks.

    >>> print(TimingProgress(shape="conv 64 → 64, 3×3", done=2, total=9, seconds=1.0))
    time of shape 2 of 9, conv 64 → 64, 3×3
    """

    title: ClassVar[str] = "planning"

    shape: str

    def __str__(self) -> str:
        return f"time of shape {self.done} of {self.total}, {self.shape}"


class Clock:
    """Times of layers as a budget asks for them."""

    def __init__(self, budget: Latency, device: torch.device | None) -> None:
        self.table = TimeTable(runtime_of(budget.runtime, device), budget.cache)
        self.batch = budget.batch

    def price(
        self, layers: Sequence[Candidate], curves: Mapping[str, Sequence[Option]], report: Listener
    ) -> dict[str, list[Option]]:
        """The options of every layer with ranks in whole blocks, timed; the layer as it is comes first."""
        start = time.perf_counter()
        # Layers of one shape share their times and are reported once.
        shapes: dict[Any, list[Candidate]] = {}
        for layer in layers:
            shapes.setdefault((layer.geometry, layer.input_size), []).append(layer)
        priced: dict[str, list[Option]] = {}
        for done, (key, alike) in enumerate(shapes.items(), start=1):
            for layer in alike:
                priced[layer.name] = self._price(layer, curves[layer.name])
            seconds = time.perf_counter() - start
            report(TimingProgress(shape=_shape(key[0]), done=done, total=len(shapes), seconds=seconds))
        return {layer.name: priced[layer.name] for layer in layers}

    def entries(self, entries: Sequence[DenseEntry | CompressedEntry]) -> tuple[float, float]:
        """Time of layers whose treatment is settled, before and after."""
        sized = [entry for entry in entries if entry.geometry is not None and entry.input_size is not None]
        if not sized:
            return 0.0, 0.0
        before = [self._chain(entry, None) for entry in sized]
        after = [self._chain(entry, entry.format) for entry in sized]
        seconds = self.table.seconds([*before, *after])
        calls = [entry.calls for entry in sized]
        return sum(map(mul, calls, seconds)), sum(map(mul, calls, seconds[len(sized) :]))

    def _price(self, layer: Candidate, options: Sequence[Option]) -> list[Option]:
        blocks = _in_blocks(layer, options)
        methods = dict.fromkeys(option.method for option in blocks if option.method)
        paths = {method: _path(method, blocks, layer.geometry.kernel_shape) for method in methods}
        dense = self._chain(layer, None)
        chains = {
            method: [self._chain(layer, method.format(ranks)) for ranks in path] for method, path in paths.items()
        }
        # All chains of a shape at once: times that are compared are measured in turns.
        self.table.seconds([dense, *(chain for path in chains.values() for chain in path)])
        priced = [replace(options[0], seconds=layer.calls * self.table.seconds([dense])[0])]
        for option in blocks:
            assert option.method is not None
            assert option.ranks is not None
            timed = chains[option.method]
            macs = self._chain(layer, option.method.format(option.ranks)).macs
            seconds = layer.calls * _between(macs, timed, self.table.seconds(timed))
            priced.append(replace(option, seconds=seconds))
        return priced

    def _chain(self, layer: Candidate | DenseEntry | CompressedEntry, format: Format | None) -> Chain:
        assert layer.geometry is not None
        assert layer.input_size is not None
        bias = layer.geometry.bias or (format is not None and layer.norm.moves_bias)
        return Chain.of(layer.geometry, format, layer.input_size, batch=self.batch, bias=bias)


def in_blocks(rank: int, largest: int) -> int:
    """The next whole block of channels, or 8 where that is enough, but no more than ``largest``.

    >>> [in_blocks(rank, 50) for rank in (3, 8, 9, 17, 40, 49)]
    [8, 8, 16, 32, 48, 50]
    """
    return min(largest, _BLOCK // 2 if rank <= _BLOCK // 2 else -(-rank // _BLOCK) * _BLOCK)


def _in_blocks(layer: Candidate, options: Sequence[Option]) -> list[Option]:
    """Options with ranks raised to whole blocks. Each takes the lowest error among the options raised to it, which is
    no lower than its own."""
    best: dict[tuple[Method, RankTuple], Option] = {}
    shape = layer.geometry.kernel_shape
    for option in options:
        if option.method is None or option.ranks is None:
            continue
        largest = option.method.max_ranks(shape)
        blocks = tuple(in_blocks(rank, most) for rank, most in zip(option.ranks, largest, strict=True))
        ranks = option.method.cap_ranks(blocks, shape)
        key = (option.method, ranks)
        if key not in best or option.error2 < best[key].error2:
            price = layer.cost_in(option.method.format(ranks))
            best[key] = replace(option, ranks=ranks, cost=price)
    return list(best.values())


def _path(method: Method, options: Sequence[Option], shape: tuple[int, ...]) -> list[RankTuple]:
    """The ranks at which a method is timed, rising together towards the largest."""
    largest = [
        max(column) for column in zip(*(o.ranks for o in options if o.method == method and o.ranks), strict=True)
    ]
    path = (tuple(in_blocks(max(1, round(share * most)), most) for most in largest) for share in _SHARES)
    return list(dict.fromkeys(method.cap_ranks(ranks, shape) for ranks in path))


def _between(macs: int, chains: Sequence[Chain], seconds: Sequence[float]) -> float:
    """Time at ``macs`` multiply-adds, on a line through the timed chains that never falls.

    Ranks that do not rise together, as in Tucker-2, take the time of those that do with as many multiply-adds.
    """
    points = sorted(zip((chain.macs for chain in chains), seconds, strict=True))
    rising = np.maximum.accumulate([second for _, second in points])
    return float(np.interp(macs, [count for count, _ in points], rising))


def _shape(geometry: Geometry) -> str:
    taps = "" if geometry.kind == "linear" else ", " + "×".join(map(str, geometry.kernel_size))
    return f"{geometry.kind.replace('_', ' ')} {geometry.in_channels} → {geometry.out_channels}{taps}"

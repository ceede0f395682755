"""Fitting layer by layer: each on its inputs in the compressed network, towards the outputs of the original layer.

Let x̃ be the input of a layer in the network compressed so far, and y the output of the original layer in the original
network on the same sample. The dense layer that gives y from x̃ best, with the moments of x̃, is what is decomposed: it
compensates for errors of earlier layers as far as one layer can.

One pass of each network over the data is enough: the passes of all batches halt at a layer, it is solved and replaced,
and all passes continue. Where maps become smaller more passes fit in memory, and more batches join: late layers have
fewer rows per sample and need them most. Networks that do not call each layer once and in the same order for every
batch run over the data once per layer instead.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tensigma.calibration import LayerStats
from tensigma.compression.targets import Activations, pair_moments, target_layer
from tensigma.errors import InputError
from tensigma.layers import Geometry, replace_
from tensigma.planning import Plan
from tensigma.running import (
    Batch,
    Batches,
    HaltedPasses,
    Listener,
    OutOfOrder,
    all_notes,
    borrowed,
    call,
    copied,
    device_of,
    halted_passes,
    live_bytes,
    moved,
    process_group,
    run,
    silent,
    together,
)
from tensigma.solving import CompressionProgress, Job, Solution, Solutions, run_first

logger = logging.getLogger(__name__)

#: Bytes that the live activations of the halted passes may take together.
MEMORY = 1_250_000_000


@dataclass(frozen=True)
class FittedInSequence:
    """Solutions, in the order of the plan, each with whether it was known already; and the samples fitted on.

    Layers were fitted on ``samples`` of them, the first ones, where memory was short, on ``first_samples``.
    """

    solutions: Mapping[str, tuple[Solution, bool]]
    samples: int
    first_samples: int


def fit_in_sequence(
    model: nn.Module,
    plan: Plan,
    batches: Batches,
    *,
    fewer: Batches | None = None,
    stats: Mapping[str, LayerStats] | None = None,
    solutions: Solutions | None = None,
    memory: int = MEMORY,
    report: Listener = silent,
) -> FittedInSequence:
    """Solutions of all compressed layers of ``plan``, solved in the order in which ``model`` calls the layers.

    Both networks run over the data once, halting at every layer, with as many samples as keep the live activations of
    all halted passes within ``memory`` bytes at that layer. ``model`` stays as it is. Networks that do not allow this
    run over ``fewer`` batches, if given, once per layer. Layers that some batches call more often than others, or not
    at all, are fitted to ``stats`` alone, before all others.

    Under ``torchrun`` each process has its own share of the batches, and ``memory`` bytes. Moments are those of all
    shares, the first process solves, and all continue with its solution.
    """
    batches.check_rereadable("sequential fitting (sequential=False avoids it)")
    with process_group(device_of(model)), borrowed(model), torch.no_grad():
        try:
            return _InOnePass(model, plan, stats, solutions or Solutions(), report, memory).fit(batches)
        except OutOfOrder as error:
            logger.info(
                "not every layer is called once and in the same order, so the data is read once per layer: %s", error
            )
        return _LayerByLayer(model, plan, stats, solutions or Solutions(), report).fit(fewer or batches)


@dataclass
class _Sequence:
    """Shared by both ways of fitting in sequence: a network that is compressed layer by layer."""

    model: nn.Module
    plan: Plan
    stats: Mapping[str, LayerStats] | None
    solutions: Solutions
    report: Listener
    small: nn.Module = field(init=False)
    solved: dict[str, tuple[Solution, bool]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.small = copied(self.model).eval()
        self._start = time.perf_counter()

    def fit_alone(self, names: Iterable[str]) -> None:
        """Fit layers to their statistics, independently of other layers."""
        for name in names:
            layer_stats = _stats_of(name, self.stats)
            self._solve(name, self.model.get_submodule(name), layer_stats)
            self._replace(name)

    def fit_to(self, name: str, activations: Iterable[Activations]) -> None:
        """Fit a layer to its activations in both networks."""
        layer, treatment = self.model.get_submodule(name), self.plan.treatments[name]
        layer_stats, cross, output = pair_moments(name, layer, activations)
        self._solve(name, target_layer(treatment, layer, layer_stats, cross, output), layer_stats)

    def result(self, samples: int, first_samples: int | None = None) -> FittedInSequence:
        """All solutions, fitted on so many samples of this process and on those of all others."""
        solutions = {name: self.solved[name] for name in self.plan.treatments}
        counts = all_notes((samples, samples if first_samples is None else first_samples))
        return FittedInSequence(solutions, *map(sum, zip(*counts, strict=True)))

    def _solve(self, name: str, target: nn.Module, layer_stats: LayerStats) -> None:
        job = Job(name, self.plan.treatments[name], target, layer_stats)
        self.solved[name] = run_first(job, self.solutions, keep=False)
        total = len(self.plan.treatments)
        self.report(
            CompressionProgress(
                layer=name,
                done=len(self.solved),
                total=total,
                work=len(self.solved) / total,
                seconds=time.perf_counter() - self._start,
                error=self.solved[name][0].error,
                cached=self.solved[name][1],
            )
        )

    def _replace(self, name: str) -> None:
        # A copy, because replacing moves modules to the model's device and dtype.
        replace_(self.small, {name: copy.deepcopy(self.solved[name][0].modules)})
        self.small.eval()


@dataclass
class _InOnePass(_Sequence):
    """All passes halt at a layer, it is fitted, and they continue with its replacement."""

    memory: int = MEMORY

    def fit(self, batches: Batches) -> FittedInSequence:
        names = list(self.plan.treatments)
        limits = together(lambda: self._limits(next(iter(batches)), names), alike=(OutOfOrder,))
        order = list(limits)
        if any(other != order for other in all_notes(order)):
            raise OutOfOrder("processes call the layers in different orders")
        waiting = _Waiting(batches)
        sizes: list[int] = []
        first_samples = 0
        self.fit_alone(name for name in names if name not in limits)
        with (
            halted_passes(self.model, [], order, after=True) as original,
            halted_passes(self.small, [], order, after=False) as small,
        ):
            for name in order:
                joining = waiting.up_to(limits[name])
                original.join(joining)
                small.join(joining)
                sizes += map(len, joining)
                first_samples = first_samples or sum(sizes)
                unbias = _unbias(self.model.get_submodule(name))
                outputs, inputs = together(partial(_advanced, original, small, name), alike=(OutOfOrder,))
                triples = zip(inputs, outputs, sizes, strict=True)
                self.fit_to(name, (([x], [unbias(y)], size) for x, y, size in triples))
                small.substitute(name, self._substitute(name))
        logger.info("layers were fitted on %d to %d samples", first_samples, sum(sizes))
        return self.result(sum(sizes), first_samples)

    def _limits(self, first: Batch, names: Sequence[str]) -> dict[str, int]:
        """How many samples may have joined when the passes stand at each layer, in the order of their calls.

        Samples stay to the end, so what a later layer allows limits the earlier ones too.
        """
        calls = call_counts(self.model, names, [first])
        if any(count > 1 for count in calls.values()):
            raise OutOfOrder("some layers are called more than once")
        order = list(calls)
        live = live_bytes(self.model, first, order)
        inputs = sum(leaf.nbytes for leaf in tree_leaves(first.inputs) if isinstance(leaf, Tensor))
        limits: dict[str, int] = {}
        least = sys.maxsize
        for name in reversed(order):
            per_sample = (inputs + 2 * live[name]) / len(first)
            least = min(least, max(len(first), int(self.memory / max(per_sample, 1))))
            limits[name] = least
        return {name: limits[name] for name in order}

    def _substitute(self, name: str) -> nn.Module:
        weight = self.small.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        return copy.deepcopy(self.solved[name][0].modules).to(weight).eval()


class _Waiting:
    """Batches that have not joined yet."""

    def __init__(self, batches: Batches) -> None:
        self._rest = iter(batches)
        self._next = next(self._rest, None)
        self._joined = 0

    def up_to(self, samples: int) -> list[Batch]:
        """The next batches, as long as no more samples than these have joined in all; at least one at first."""
        joining = []
        while self._next is not None and (not self._joined or self._joined + len(self._next) <= samples):
            joining.append(self._next)
            self._joined += len(self._next)
            self._next = next(self._rest, None)
        return joining


class _LayerByLayer(_Sequence):
    """Both networks run over the data once per layer, up to that layer."""

    def fit(self, batches: Batches) -> FittedInSequence:
        names = list(self.plan.treatments)
        calls = _common(all_notes(together(lambda: dict(call_counts(self.model, names, batches)))))
        self.fit_alone(name for name in names if name not in calls)
        for name, count in calls.items():
            self.fit_to(name, self._activations(name, count, batches))
            self._replace(name)
        return self.result(sum(map(len, batches)))

    def _activations(self, name: str, calls: int, batches: Batches) -> Iterable[Activations]:
        unbias = _unbias(self.model.get_submodule(name))
        for batch in batches:
            outputs = _recorded(self.model, name, calls, batch, lambda _, output: unbias(output))
            inputs = _recorded(self.small, name, calls, batch, lambda input, _: input)
            if len(inputs) != len(outputs):
                raise InputError(
                    f"{name}: called {len(outputs)} times by the original and {len(inputs)} times by the compressed "
                    "network on the same batch; pass {sequential} for such networks",
                    parameters=("sequential=False",),
                )
            yield inputs, outputs, len(batch)


def _advanced(original: HaltedPasses, small: HaltedPasses, name: str) -> tuple[list[Tensor], list[Tensor]]:
    return original.advance(name), small.advance(name)


def _common(calls: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The layers that all processes call equally often, in the order of the first process."""
    return {name: count for name, count in calls[0].items() if all(other.get(name) == count for other in calls)}


def _stats_of(name: str, stats: Mapping[str, LayerStats] | None) -> LayerStats:
    if stats is None or name not in stats:
        raise InputError(
            f"{name}: not every batch calls this layer equally often, so it cannot be fitted in sequence, and it "
            "has no statistics; pass {stats} or {sequential}",
            parameters=("stats", "sequential=False"),
        )
    return stats[name]


class _Reached(Exception):
    """The layer has been called; the rest of the pass is not needed."""


def _unbias(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that subtracts the layer's bias from its output."""
    bias, n_spatial = layer.bias, Geometry.of(layer).n_spatial
    if not isinstance(bias, Tensor):
        return lambda output: output
    shape = (-1, *[1] * n_spatial)
    return lambda output: output - bias.reshape(shape)


def _recorded(
    model: nn.Module, name: str, calls: int, batch: Batch, keep: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """What ``keep`` takes of the input and output of a layer in ``model``, one item per call."""
    recorded: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        kept = keep(args[0] if args else kwargs["input"], result)
        # Modules after an earlier call may change its tensors in place before they are read.
        recorded.append(kept if calls == 1 else kept.clone())
        if len(recorded) == calls:
            raise _Reached

    handle = model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
    try:
        call(model, moved(batch.inputs, device_of(model)))
    except _Reached:
        pass
    finally:
        handle.remove()
    return recorded


def call_counts(model: nn.Module, names: Sequence[str], batches: Iterable[Batch]) -> Mapping[str, int]:
    """How often each batch calls each layer, in order of first calls; layers whose count varies are left out."""
    counts: dict[str, int] = {}
    common: dict[str, int] | None = None

    def count(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    handles = [model.get_submodule(name).register_forward_hook(count(name)) for name in names]
    try:
        for batch in batches:
            counts.clear()
            run(model, batch)
            common = dict(counts) if common is None else common
            common = {name: calls for name, calls in common.items() if counts.get(name) == calls}
    finally:
        for handle in handles:
            handle.remove()
    return common or {}

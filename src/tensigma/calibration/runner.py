"""One calibration over its batches: passes, checkpoints, and going on from one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from tensigma.calibration.checkpoint import Checkpoint, State, remove_checkpoint
from tensigma.calibration.collector import Collector
from tensigma.calibration.followers import Followers
from tensigma.calibration.keeping import InputsDigest
from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.memory import MemoryEstimate
from tensigma.calibration.reduction import reduce_stats
from tensigma.errors import StoreError
from tensigma.running import (
    Batches,
    Key,
    Progress,
    device_of,
    is_batch,
    moved,
    run,
    safe_backward,
    samples_per_second,
    target_labels,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CalibrationProgress(Progress):
    """Progress after each batch; steps count the batches of all passes.

    >>> print(CalibrationProgress(done=5, total=20, samples=80, seconds=2.0))
    batch 5 of 20, 40 samples/s
    """

    title: ClassVar[str] = "calibration"

    #: Samples of this process in this pass.
    samples: int
    passes: int = 1
    #: Bytes that the run may take beyond the model's own forward pass.
    memory: int = 0

    def __str__(self) -> str:
        total = "" if self.total is None else f" of {self.total}"
        return f"batch {self.done}{total}, {samples_per_second(self.samples, self.seconds)}"


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One calibration: passes over the data, batch by batch, with checkpoints in between."""

    model: nn.Module
    batches: Any
    targets: Mapping[str, nn.Module]
    passes: list[list[str]]
    limits: tuple[int | None, int | None]  # samples, batches
    input: Key
    fisher: Literal["model", "labels"] | None
    seed: int
    report: Callable[[Any], None]
    estimate: MemoryEstimate
    checkpoint: Checkpoint | None
    checkpoint_every: int
    followers: Followers
    #: Whether to compute a digest of the batches.
    notes_inputs: bool

    def run(self, state: State) -> State:
        """Continue from ``state`` to the end."""
        generators = _loader_generators(self.batches)
        for number in range(state.finished_passes, len(self.passes)):
            # The same order of batches in every pass.
            torch.set_rng_state(state.rng)
            for generator, start in generators:
                generator.set_state(start)
            state = self._run_pass(number, state)
            if self.checkpoint and number + 1 < len(self.passes):
                self.checkpoint.save(state)
        return state

    def _run_pass(self, number: int, start: State) -> State:
        names = self.passes[number]
        finished = {name: stats for name, stats in start.layers.items() if name not in names}
        before = {name: stats for name, stats in start.layers.items() if name in names}
        collector = Collector({name: self.targets[name] for name in names}, before, self.estimate.pending)
        with collector.attached(), safe_backward(*([self.model] if self.fisher else [])):
            inputs = self._run_batches(number, start, collector, finished)
        return replace(
            start,
            layers={**finished, **collector.finish()},
            finished_passes=number + 1,
            batches=0,
            samples=0,
            inputs=inputs,
        )

    def _run_batches(
        self, number: int, start: State, collector: Collector, finished: dict[str, LayerStats]
    ) -> str | None:
        """Run over the batches that ``start`` has not seen; the digest of all, if it is wanted."""
        max_samples, max_batches = self.limits
        # Weights that are computed from others (parametrised, pruned) are left dense and need no gradients.
        weights = {
            name: cast(Tensor, module.weight)
            for name, module in collector.targets.items()
            if module._parameters.get("weight") is not None
        }
        if self.fisher:
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)
            for weight in weights.values():
                weight.requires_grad_(True)
        batches = Batches(self.batches, input=self.input, max_samples=max_samples)
        total = _smaller(batches.n_batches, max_batches)
        clock = time.perf_counter()
        done = samples = 0
        watched = False
        seen = InputsDigest(labels=self.fisher == "labels") if self.notes_inputs else None
        for batch in batches:
            if batch.index == 0 and max_samples is not None:
                total = _smaller(total, -(-max_samples // len(batch)))
            done, samples = batch.index + 1, samples + len(batch)
            if seen is not None:
                seen.add(batch)
                if done == start.batches:
                    self._check_inputs(start, seen.text)
            if done <= start.batches and not watched:
                # A checkpoint holds moments, but not who reads a weight or what follows a layer; there may be no other
                # batch to see that in.
                with collector.deaf(), self.followers.watching():
                    self.followers.see(run(self.model, batch))
                watched = True
            if done > start.batches:
                with nullcontext() if watched else self.followers.watching():
                    self.followers.see(run(self.model, batch))
                watched = True
                if self.fisher:
                    labels = target_labels(batch.item, batch.index)[: len(batch)] if self.fisher == "labels" else None
                    inputs = moved(batch.inputs, device_of(self.model))
                    collector.add_fisher(self.model, weights, inputs, labels, self.seed + batch.index)
                collector.end_batch(len(batch))
                self._report_progress(
                    number, done, total, samples - start.samples, start.batches, time.perf_counter() - clock
                )
                if self.checkpoint and done % self.checkpoint_every == 0:
                    so_far = {**finished, **collector.peek()}
                    inputs = None if seen is None else seen.text
                    self.checkpoint.save(replace(start, layers=so_far, batches=done, samples=samples, inputs=inputs))
            if done == max_batches:
                break
        if seen is not None and done < start.batches:
            self._check_inputs(start, seen.text)
        return None if seen is None else seen.text

    def check_between_passes(self, start: State) -> None:
        """The same at once where ``start`` has seen all batches in an earlier pass."""
        if start.finished_passes and not start.batches and start.inputs is not None:
            self._check_inputs(start, digest_of(self.batches, self.input, self.limits, self.fisher, start.rng))

    def _check_inputs(self, start: State, seen: str) -> None:
        """Refuse to go on with other batches than those that ``start`` has seen."""
        if self.checkpoint is not None and start.inputs not in (None, seen):
            raise self.checkpoint.other_batches()

    def _report_progress(
        self, number: int, done: int, total: int | None, samples: int, first: int, seconds: float
    ) -> None:
        n_passes = len(self.passes)
        self.report(
            CalibrationProgress(
                done=number * (total or 0) + done,
                total=None if total is None else n_passes * max(total, done),
                samples=samples,
                seconds=seconds,
                first=number * (total or 0) + first,
                passes=n_passes,
                memory=self.estimate.total,
            )
        )


def run_calibration(
    runner: Runner, *, resume: bool, spare: bool, distributed: bool
) -> tuple[Mapping[str, LayerStats], str | None]:
    """The statistics of one calibration, of all its processes together, and the digest of the batches of this one.

    With ``spare``, a checkpoint that cannot be used is passed over.
    """
    failure: BaseException | None = None
    state = State()
    try:
        state = _resumed(runner, state, resume=resume, spare=spare)
    except Exception as error:
        if not distributed:
            raise
        failure = error
    return (reduce_stats(state.layers, failure) if distributed else state.layers), state.inputs


def _resumed(runner: Runner, fresh: State, *, resume: bool, spare: bool) -> State:
    """The state at the end of a run that continues from its checkpoint, or begins with ``fresh``."""
    if runner.checkpoint is None:
        return runner.run(fresh)
    generators = _loader_generators(runner.batches)
    try:
        saved = runner.checkpoint.load(resume=resume)
        if saved is not None:
            runner.check_between_passes(saved)
        return runner.run(saved or fresh)
    except StoreError as error:
        if not spare:
            raise
        logger.warning("the unfinished calibration in the cache is not used: %s", error)
    remove_checkpoint(runner.checkpoint.folder)
    for generator, start in generators:
        generator.set_state(start)
    return runner.run(fresh)


def digest_of(
    batches: Any, input: Key, limits: tuple[int | None, int | None], fisher: str | None, rng: Tensor | None = None
) -> str:
    """The digest of what calibration reads, from this state of torch's generator on; generators stay as they were."""
    generators, before = _loader_generators(batches), torch.get_rng_state()
    max_samples, max_batches = limits
    torch.set_rng_state(before if rng is None else rng)
    digest = InputsDigest(labels=fisher == "labels")
    for batch in Batches(batches, input=input, max_samples=max_samples):
        digest.add(batch)
        if batch.index + 1 == max_batches:
            break
    torch.set_rng_state(before)
    for generator, start in generators:
        generator.set_state(start)
    return digest.text


def _smaller(first: int | None, second: int | None) -> int | None:
    """The smaller of two numbers; None stands for unknown."""
    return min((number for number in (first, second) if number is not None), default=None)


def _loader_generators(batches: Any) -> list[tuple[torch.Generator, Tensor]]:
    """Generators that loaders shuffle with, and their current states."""
    loaders = batches if isinstance(batches, tuple | list) else [batches]
    generators = [getattr(loader, "generator", None) for loader in loaders if not is_batch(loader)]
    return [(generator, generator.get_state()) for generator in generators if isinstance(generator, torch.Generator)]

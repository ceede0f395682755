"""Run a model over data and gather the moments of its layers' inputs."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from tensigma.calibration.checkpoint import Checkpoint, State, remove_checkpoint
from tensigma.calibration.collector import Collector
from tensigma.calibration.followers import Followers
from tensigma.calibration.keeping import InputsDigest, KeptStatistics
from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.memory import MemoryEstimate, estimate_memory, parse_bytes, plan_passes
from tensigma.calibration.normalisation import FirstNorm
from tensigma.calibration.reduction import reduce_stats
from tensigma.calibration.stats import Calibration
from tensigma.errors import CalibrationWarning, InputError, StoreError
from tensigma.layers import fingerprint, measurable, select, weight_reads
from tensigma.running import (
    Batches,
    Key,
    Progress,
    Wanted,
    all_notes,
    borrowed,
    check_gradients,
    device_of,
    is_batch,
    is_one_shot,
    moved,
    process_group,
    rank_and_size,
    reporter,
    run,
    safe_backward,
    samples_per_second,
    target_labels,
    weights_digest,
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


def calibrate(
    model: nn.Module,
    batches: Any,
    *,
    layers: str | Sequence[str] | None = None,
    max_samples: int | None = None,
    max_batches: int | None = None,
    memory: int | str | None = None,
    fisher: Literal["model", "labels"] | None = None,
    input: Key = None,
    device: torch.device | str | None = None,
    progress: Wanted = False,
    data_name: str | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int = 50,
    resume: bool = False,
    cache: str | PathLike[str] | None = None,
    seed: int = 0,
) -> Calibration:
    """Gather the moments of the input of every convolution and Linear layer while ``model`` runs over ``batches``.

    Labels are never read, unless ``fisher="labels"``. The model runs in evaluation mode. Mode, hooks, gradients, device
    and random number generators are restored afterwards, also after an error.

    Args:
        batches: any iterable of tensors, tuples (first item is the input) or dicts (``input`` names the entry), or a
            list of several such loaders. An input may also be a list of images of different sizes.
        input: the key or position of the model's input in a batch. Several in a tuple are passed together: those at
            positions in order, those under keys by name. ``"*"`` calls ``model(*batch)``, ``"**"`` ``model(**batch)``.
        layers: names or patterns such as ``"layer1.*"``; all layers by default.
        max_samples: stop after this many samples, cutting the last batch short; ``max_batches`` limits batches. With
            several processes, each counts its own.
        memory: limit on sums and results together, beyond the model's own forward pass, in bytes or as text such as
            ``"4GB"``. Layers are then gathered in as many passes over ``batches`` as needed, with the same result.
        fisher: also gather the mean squared gradient of each weight, with labels drawn from the predictions of the
            model (``"model"``, drawn with ``seed``) or taken from the batches (``"labels"``).
        device: where to run; by default where the model is.
        progress: True for lines in the log, or a function that is called with a :class:`CalibrationProgress` after
            each batch.
        data_name: name of the data, kept in the statistics.
        checkpoint: a folder for the state of the run, written every ``checkpoint_every`` batches. With ``resume`` a
            killed run continues from there; the loader must then give the same batches in the same order, as one that
            shuffles with torch's own generator does, and others are refused. The folder can be removed once the
            statistics are saved.
        cache: a folder in which statistics are kept, finished or, every ``checkpoint_every`` batches, unfinished. The
            same call with the same weights only reads the batches again, as far as they are the same, and goes on from
            there. With several processes, and for iterators that can be read once, nothing is kept.

    Under ``torchrun`` each process passes its own share of the data and all receive the statistics of all shares.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10))
    >>> stats = calibrate(model, [torch.randn(4, 3, 4, 4) for _ in range(2)])
    >>> {name: (layer.d, layer.count) for name, layer in stats.items()}
    {'0': (27, 128), '3': (128, 8)}
    """
    _check_counts(max_samples=max_samples, max_batches=max_batches, checkpoint_every=checkpoint_every)
    if fisher not in (None, "model", "labels"):
        raise InputError(f'fisher={fisher!r} is not known; use "model", "labels" or None')
    if fisher is not None:
        check_gradients(model, "the norm 'fisher'", "Take norm='centred', the default, which needs none.")
    targets = select_layers(model, layers)
    limit = None if memory is None else parse_bytes(memory)
    estimate = estimate_memory(targets, max_samples=max_samples, memory=limit)
    passes = plan_passes(estimate, limit)
    if len(passes) > 1 and is_one_shot(batches):
        raise InputError(
            f"{{memory}} needs {len(passes)} passes over the data, but batches is an iterator that can be read once; "
            "pass a list or a DataLoader, or allow more memory",
            parameters=(f"memory={memory}",),
        )
    logger.info("calibration of %d layers needs up to %.2f GB", len(targets), estimate.total / 1e9)
    options: dict[str, Any] = {
        "passes": passes,
        "max_samples": max_samples,
        "max_batches": max_batches,
        "fisher": fisher,
        "seed": seed,
    }
    with (
        borrowed(model, device),
        torch.no_grad(),
        process_group(device_of(model)) as distributed,
        ExitStack() as stack,
    ):
        kept = None
        spare = False
        if cache is not None and not distributed and not is_one_shot(batches):
            facts = {**options, "passes": list(targets), "input": input, "data": data_name}
            kept = KeptStatistics(Path(cache), [facts, fingerprint(model), weights_digest(model)])
            known = kept.load()
            if known is not None and known.inputs == _read(batches, input, (max_samples, max_batches), fisher):
                logger.info("the statistics are those of %s", kept.folder)
                _warn_unreached(known.unreached)
                return known
            # A checkpoint that the caller asked for comes first.
            if checkpoint is None:
                checkpoint, resume, spare = stack.enter_context(kept.checkpoint()), True, True
        store = None
        if checkpoint is not None:
            rank, size = rank_and_size()
            folder = Path(checkpoint) / f"rank-{rank}-of-{size}" if distributed else Path(checkpoint)
            options["weights"] = weights_digest(model)
            store = Checkpoint(folder, fingerprint=fingerprint(model), options=options)
        runner = Runner(
            model=model,
            batches=batches,
            targets=targets,
            passes=passes,
            limits=(max_samples, max_batches),
            input=input,
            fisher=fisher,
            seed=seed,
            report=reporter(progress),
            estimate=estimate,
            checkpoint=store,
            checkpoint_every=checkpoint_every,
            followers=Followers(model, targets),
            notes_inputs=checkpoint is not None or kept is not None,
        )
        first_norm = FirstNorm(model)
        with first_norm.listening(), weight_reads(model, {**targets, **first_norm.layers}) as read:
            stats, inputs = _run(runner, resume=resume, spare=spare, distributed=distributed)
        doubt = first_norm.doubt()
        pairs = {layer: norm for layer, norm in runner.followers.found().items() if not {layer, norm} & read}
        seen = all_notes(pairs)
        weights = weights_digest(model)
    if doubt is not None:
        warnings.warn(doubt, CalibrationWarning, stacklevel=2)
    ordered = {name: stats[name] for name in targets if name in stats}
    unreached = tuple(name for name in targets if name not in stats)
    _warn_unreached(unreached)
    result = Calibration(
        ordered,
        fingerprint=fingerprint(model),
        weights=weights,
        data=data_name,
        unreached=unreached,
        read_elsewhere=tuple(name for name in targets if name in read),
        normalised_by={layer: norm for layer, norm in pairs.items() if all(p.get(layer) == norm for p in seen)},
        inputs=None if kept is None else inputs,
    )
    # In doubt they are gathered, and doubted, again.
    if kept is not None and doubt is None:
        kept.save(result)
    return result


def _read(
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


def _warn_unreached(unreached: Sequence[str]) -> None:
    if unreached:
        warnings.warn(
            f"no batch reached {_listing(unreached)}: the forward pass of the model does not call "
            + ("it" if len(unreached) == 1 else "them"),
            CalibrationWarning,
            stacklevel=3,
        )


def _check_counts(**counts: int | None) -> None:
    for option, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"{option}={value} must be at least 1")


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
            self._check_inputs(start, _read(self.batches, self.input, self.limits, self.fisher, start.rng))

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


def _run(
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


def select_layers(model: nn.Module, layers: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """The layers of ``model`` that can be measured and match one of the names or patterns, in the order of the model.

    >>> list(select_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(2, 2)), "2"))
    ['2']
    """
    candidates = dict(measurable(model))
    if not candidates:
        raise InputError(f"{type(model).__name__} has no convolution or Linear layer that Tensigma can read")
    if layers is None:
        return candidates
    chosen = select(layers, candidates, what="layers")
    return {name: module for name, module in candidates.items() if name in chosen}


def _smaller(first: int | None, second: int | None) -> int | None:
    """The smaller of two numbers; None stands for unknown."""
    return min((number for number in (first, second) if number is not None), default=None)


def _loader_generators(batches: Any) -> list[tuple[torch.Generator, Tensor]]:
    """Generators that loaders shuffle with, and their current states."""
    loaders = batches if isinstance(batches, tuple | list) else [batches]
    generators = [getattr(loader, "generator", None) for loader in loaders if not is_batch(loader)]
    return [(generator, generator.get_state()) for generator in generators if isinstance(generator, torch.Generator)]


def _listing(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")

"""Running a model over data and gathering the moments of its layers."""

from __future__ import annotations

import difflib
import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tensigma.calibration.architecture import compressible, fingerprint
from tensigma.calibration.batches import count_batches, input_of, is_batch, is_one_shot, iterate, labels_of
from tensigma.calibration.checkpoint import Checkpoint, State
from tensigma.calibration.collector import Collector
from tensigma.calibration.distributed import process_group, rank_and_size, reduce_stats
from tensigma.calibration.guard import borrowed, device_of
from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.memory import MemoryEstimate, estimate_memory, parse_bytes, plan_passes
from tensigma.calibration.progress import Progress, reporter
from tensigma.calibration.stats import Calibration
from tensigma.errors import CalibrationWarning, InputError, TensigmaError

logger = logging.getLogger(__name__)


def calibrate(
    model: nn.Module,
    batches: Any,
    *,
    layers: str | Sequence[str] | None = None,
    max_samples: int | None = None,
    max_batches: int | None = None,
    memory: int | str | None = None,
    fisher: Literal["model", "labels"] | None = None,
    input: str | int | None = None,
    device: torch.device | str | None = None,
    progress: bool | Callable[[Progress], None] = False,
    data_name: str | None = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int = 50,
    resume: bool = False,
    seed: int = 0,
) -> Calibration:
    """Gather the moments of the input of every convolution and Linear layer while ``model`` runs over ``batches``.

    Labels are never read, unless ``fisher="labels"``. The model runs in evaluation mode and comes back as it was: mode,
    hooks, gradients, device and random number generators, whatever happens in between.

    Args:
        batches: any iterable of tensors, tuples (first item is the input) or dicts (``input`` names the entry), or a
            list of several such loaders.
        layers: names or patterns such as ``"layer1.*"``; all layers by default.
        max_samples: stop after this many samples, cutting the last batch; ``max_batches`` likewise. In each process, if
            there are several.
        memory: bytes, or text such as ``"4GB"``, that sums and results may take together beyond the model's own forward
            pass. Layers are then gathered in as many passes over ``batches`` as it takes, with the same result.
        fisher: also gather the mean squared gradient of each weight, with labels drawn from the predictions of the
            model (``"model"``, drawn with ``seed``) or taken from the batches (``"labels"``).
        device: where to run; by default where the model is.
        progress: True for lines in the log, or a function that is called with a :class:`Progress` after each batch.
        data_name: what to call the data in the statistics.
        checkpoint: a folder for the state of the run, written every ``checkpoint_every`` batches. With ``resume`` a
            killed run goes on from there; the loader must then give the same batches in the same order, as one that
            shuffles by torch's own generator does. The folder may be removed once the statistics are saved.

    Under ``torchrun`` each process passes its own share of the data and all receive the statistics of the whole.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10))
    >>> stats = calibrate(model, [torch.randn(4, 3, 4, 4) for _ in range(2)])
    >>> {name: (layer.d, layer.count) for name, layer in stats.items()}
    {'0': (27, 128), '3': (128, 8)}
    """
    counts = {"max_samples": max_samples, "max_batches": max_batches, "checkpoint_every": checkpoint_every}
    for option, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"{option}={value} must be at least 1")
    if fisher not in (None, "model", "labels"):
        raise InputError(f'fisher={fisher!r} is not known; use "model", "labels" or None')
    targets = select_layers(model, layers)
    limit = None if memory is None else parse_bytes(memory)
    estimate = estimate_memory(targets, max_samples=max_samples, memory=limit)
    passes = plan_passes(estimate, limit)
    if len(passes) > 1 and is_one_shot(batches):
        raise InputError(
            f"memory={memory} needs {len(passes)} passes over the data, but batches is an iterator that can be read"
            " once; pass a list or a DataLoader, or allow more memory"
        )
    logger.info("calibration of %d layers needs up to %.2f GB", len(targets), estimate.total / 1e9)
    options: dict[str, Any] = {
        "passes": passes,
        "max_samples": max_samples,
        "max_batches": max_batches,
        "fisher": fisher,
        "seed": seed,
    }
    with borrowed(model, device), torch.no_grad(), process_group(device_of(model)) as many:
        saves = None
        if checkpoint is not None:
            rank, size = rank_and_size()
            folder = Path(checkpoint) / f"rank-{rank}-of-{size}" if many else Path(checkpoint)
            options["weights"] = checksum(model)
            saves = Checkpoint(folder, fingerprint=fingerprint(model), options=options)
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
            checkpoint=saves,
            checkpoint_every=checkpoint_every,
        )
        failure: BaseException | None = None
        found: Mapping[str, LayerStats] = {}
        try:
            found = runner.run((saves.load(resume=resume) if saves else None) or State())
        except Exception as error:
            if not many:
                raise
            failure = error
        if many:
            found = reduce_stats(found, failure)
    ordered = {name: found[name] for name in targets if name in found}
    unreached = tuple(name for name in targets if name not in found)
    if unreached:
        warnings.warn(
            f"no batch reached {_listing(unreached)}: the forward pass of the model does not call "
            + ("it" if len(unreached) == 1 else "them"),
            CalibrationWarning,
            stacklevel=2,
        )
    return Calibration(ordered, fingerprint=fingerprint(model), data=data_name, unreached=unreached)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One calibration: passes over the data, batch by batch, with checkpoints in between."""

    model: nn.Module
    batches: Any
    targets: Mapping[str, nn.Module]
    passes: list[list[str]]
    limits: tuple[int | None, int | None]  # samples, batches
    input: str | int | None
    fisher: Literal["model", "labels"] | None
    seed: int
    report: Callable[[Progress], None]
    estimate: MemoryEstimate
    checkpoint: Checkpoint | None
    checkpoint_every: int

    def run(self, state: State) -> Mapping[str, LayerStats]:
        """Go on from ``state`` to the end."""
        generators = _loader_generators(self.batches)
        for number in range(state.finished_passes, len(self.passes)):
            # The same order of batches in every pass.
            torch.set_rng_state(state.rng)
            for generator, start in generators:
                generator.set_state(start)
            state = self._pass(number, state)
            if self.checkpoint and number + 1 < len(self.passes):
                self.checkpoint.save(state)
        return state.layers

    def _pass(self, number: int, start: State) -> State:
        names = self.passes[number]
        finished = {name: stats for name, stats in start.layers.items() if name not in names}
        before = {name: stats for name, stats in start.layers.items() if name in names}
        collector = Collector({name: self.targets[name] for name in names}, before, self.estimate.pending)
        with collector.attached():
            state = self._batches(number, start, collector, finished)
        if not state.batches:
            raise InputError("no batches: the iterable given as batches is empty")
        return replace(
            state, layers={**finished, **collector.finish()}, finished_passes=number + 1, batches=0, samples=0
        )

    def _batches(self, number: int, start: State, collector: Collector, finished: dict[str, LayerStats]) -> State:
        max_samples, max_batches = self.limits
        device = device_of(self.model)
        weights = {name: cast(Tensor, module.weight) for name, module in collector.targets.items()}
        if self.fisher:
            for parameter in self.model.parameters():
                parameter.requires_grad_(False)
            for weight in weights.values():
                weight.requires_grad_(True)
        total = _total_batches(self.batches, max_batches)
        clock = time.perf_counter()
        done = samples = 0
        for index, batch in enumerate(iterate(self.batches)):
            x = input_of(batch, self.input, index)
            if max_samples is not None:
                if index == 0 and len(x):
                    enough = -(-max_samples // len(x))
                    total = enough if total is None else min(total, enough)
                x = x[: max_samples - samples]
            done, samples = done + 1, samples + len(x)
            if done > start.batches and len(x):
                x = x if device is None else x.to(device)
                forward(self.model, x, index)
                if self.fisher:
                    labels = labels_of(batch, index)[: len(x)] if self.fisher == "labels" else None
                    collector.add_fisher(self.model, weights, x, labels, self.seed + index)
                collector.end_batch(len(x))
                n_passes = len(self.passes)
                self.report(
                    Progress(
                        done=number * (total or 0) + done,
                        total=None if total is None else n_passes * max(total, done),
                        samples=samples - start.samples,
                        seconds=time.perf_counter() - clock,
                        first=number * (total or 0) + start.batches,
                        passes=n_passes,
                        memory=self.estimate.total,
                    )
                )
                if self.checkpoint and done % self.checkpoint_every == 0:
                    so_far = {**finished, **collector.peek()}
                    self.checkpoint.save(replace(start, layers=so_far, batches=done, samples=samples))
            if done == max_batches or samples == max_samples:
                break
        if done and not samples:
            raise InputError("all batches are empty")
        return replace(start, batches=done, samples=samples)


def select_layers(model: nn.Module, layers: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """The compressible layers of ``model`` that match one of the names or patterns, in the order of the model.

    >>> list(select_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Linear(2, 2)), "2"))
    ['2']
    """
    every = dict(compressible(model))
    if not every:
        raise InputError(f"{type(model).__name__} has no convolution or Linear layer that Tensigma can read")
    if layers is None:
        return every
    patterns = [layers] if isinstance(layers, str) else list(layers)
    chosen: set[str] = set()
    for pattern in patterns:
        matches = [name for name in every if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            close = difflib.get_close_matches(pattern, every, n=3, cutoff=0.4) or list(every)[:3]
            raise InputError(
                f"no layer is called {pattern!r}; close names: {', '.join(close)} (of {len(every)} layers)"
            )
        chosen.update(matches)
    return {name: module for name, module in every.items() if name in chosen}


def forward(model: nn.Module, x: Tensor, index: int) -> Any:
    try:
        return model(x)
    except TensigmaError:
        raise
    except Exception as error:
        kind = f"shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"
        raise InputError(f"the model rejected batch {index} ({kind}): {type(error).__name__}: {error}") from error


def checksum(model: nn.Module) -> list[float]:
    """A few numbers that change when weights do."""
    sums = [
        tensor.detach().double().abs().sum().item()
        for tensor in model.state_dict().values()
        if tensor.is_floating_point()
    ]
    return [len(sums), sum(sums), sum(value * (index % 97 + 1) for index, value in enumerate(sums))]


def _total_batches(batches: Any, most: int | None) -> int | None:
    total = count_batches(batches)
    if most is None:
        return total
    return most if total is None else min(total, most)


def _loader_generators(batches: Any) -> list[tuple[torch.Generator, Tensor]]:
    """Generators that loaders shuffle with, and their present states."""
    loaders = batches if isinstance(batches, tuple | list) else [batches]
    generators = [getattr(loader, "generator", None) for loader in loaders if not is_batch(loader)]
    return [(generator, generator.get_state()) for generator in generators if isinstance(generator, torch.Generator)]


def _listing(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")

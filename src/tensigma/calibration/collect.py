"""Run a model over data and gather the moments of its layers' inputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tensigma.calibration.checkpoint import Checkpoint
from tensigma.calibration.followers import Followers
from tensigma.calibration.keeping import KeptStatistics
from tensigma.calibration.memory import estimate_memory, parse_bytes, plan_passes
from tensigma.calibration.normalisation import FirstNorm
from tensigma.calibration.runner import Runner, digest_of, run_calibration
from tensigma.calibration.stats import Calibration
from tensigma.errors import CalibrationWarning, InputError
from tensigma.layers import fingerprint, measurable, select, weight_reads
from tensigma.running import (
    Key,
    Wanted,
    all_notes,
    borrowed,
    check_gradients,
    device_of,
    is_one_shot,
    process_group,
    rank_and_size,
    reporter,
    weights_digest,
)

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
            if known is not None and known.inputs == digest_of(batches, input, (max_samples, max_batches), fisher):
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
            stats, inputs = run_calibration(runner, resume=resume, spare=spare, distributed=distributed)
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


def _listing(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")

"""Fine-tuning: a few epochs that recover accuracy, from labels or from the answers of the original."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from torch import nn

from tensigma.errors import InputError
from tensigma.finetuning.history import Epoch, FineTuning, FineTuningProgress, RateHistory
from tensigma.finetuning.objectives import Given, Labels, LossFunction, Objective, Teacher
from tensigma.finetuning.sweep import Sweep
from tensigma.finetuning.team import Team
from tensigma.finetuning.tuner import OPTIMIZERS, Settings, Tuner, fill_, judge
from tensigma.finetuning.unfinished import Unfinished
from tensigma.running import (
    Key,
    Listener,
    Pair,
    Pairs,
    Wanted,
    Wish,
    borrowed,
    check_gradients,
    copied,
    count_batches,
    device_of,
    hold_out,
    kept_rng,
    process_group,
    reporter,
    together,
    weights_digest,
)


def finetune(
    model: nn.Module,
    batches: Any,
    *,
    validation: Any = None,
    epochs: int = 30,
    learning_rates: float | Sequence[float] = (1e-3, 1e-4, 1e-5),
    optimizer: str = "adam",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    teacher: nn.Module | None = None,
    temperature: float = 4.0,
    loss: LossFunction | None = None,
    answers: Wish = None,
    patience: int | None = None,
    eliminate: bool = False,
    validation_share: float = 0.1,
    freeze_bn: bool = False,
    mix: int = 1,
    input: Key = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Wanted = False,
) -> tuple[nn.Module, FineTuning]:
    """Train a copy of ``model`` at several learning rates, and return the best epoch of all, with the whole history.

    Epochs are compared on validation samples that no rate trains on: by the share of correct answers, or with a
    ``teacher`` by the share of equal answers; for other answers than classes, by what takes the place of that share
    (see :func:`tensigma.evaluate`). Ties are broken by the loss. If no epoch is better than ``model``, an
    unchanged copy is returned. ``model`` stays as it is.

    Args:
        model: Any model, compressed or not, on the device to train on. Only parameters that require gradients are
            trained.
        batches: As :func:`tensigma.calibrate` takes them, but readable more than once, and with labels unless there is
            a ``teacher``. A loader that shuffles does so anew in every epoch.
        validation: Batches to compare epochs on. Without it, ``validation_share`` of the samples is held out.
        epochs: The most epochs for each rate.
        learning_rates: One or several; all start from ``model`` and see the samples in the same order.
        optimizer: ``"adam"`` or ``"sgd"``, the latter with ``momentum``; both with ``weight_decay``.
        teacher: The original model. Its answers, softened by ``temperature``, replace labels. Of a detector, the raw
            outputs behind the boxes are compared, and the model is trained in evaluation mode.
        loss: Instead, a function of the model, in training mode, and an (inputs, labels) pair that returns the loss.
        answers: What the model answers, as :func:`tensigma.evaluate` takes it; by default it is guessed.
        patience: Stop a rate after this many epochs without a new best.
        eliminate: After each epoch drop the worst rate, until one is left.
        freeze_bn: Keep the running mean and variance of BatchNorm layers, and normalise by them. By default training
            normalises by each batch and moves them, which suits batches of 16 samples or more.
        mix: Shuffle the samples of this many consecutive batches, anew in every epoch, for sources in a fixed order; 1
            leaves batches as they are.
        input: The entry or position of the model's input in a batch.
        seed: For the split, the order and everything else that is random. On a CPU the same seed gives the same bits.
        checkpoint: A folder for the state after each epoch, written by the first process only. A killed run that is
            started again with the same arguments resumes with the epoch it was in, and ends with the same result.
        progress: True for lines in the log, or a function called with a
            :class:`~tensigma.finetuning.FineTuningProgress` after each batch.

    Under ``torchrun`` all processes call this with the same arguments, data included, and return the same model. Each
    trains on its part of every batch, and BatchNorm layers normalise by the whole batch, so the result is that of one
    process to rounding, as far as the loss is a mean over the samples of a batch and nothing is drawn at random. All of
    them read all batches, and judge all validation samples.

    >>> import torch
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> batches = [(part, part[:, :3].argmax(1)) for part in x.split(16)]
    >>> model = nn.Linear(8, 3)
    >>> _ = nn.init.zeros_(model.weight)
    >>> tuned, history = finetune(model, batches, epochs=8, learning_rates=(0.1, 1e-6))
    >>> history.learning_rate, history.best.score > history.start.score
    (0.1, True)
    """
    begin = time.perf_counter()
    check_gradients(
        model,
        "fine-tuning",
        "Fine-tune the PyTorch model that the file was exported from, or compress with a larger budget or more data.",
    )
    rates = _rates(learning_rates)
    _check(epochs=epochs, optimizer=optimizer, temperature=temperature, patience=patience, mix=mix)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("no parameter of the model requires gradients; call model.requires_grad_(True) first")
    sweep = Sweep(n_rates=len(rates), epochs=epochs, patience=patience, eliminate=eliminate)
    settings = Settings(
        optimizer=optimizer, momentum=momentum, weight_decay=weight_decay, freeze_bn=freeze_bn, mix=mix, seed=seed
    )
    objective: Objective = Labels(answers) if teacher is None else Teacher(teacher, temperature, answers)
    if loss is not None:
        objective = Given(loss, teacher, answers)
    training: Iterable[Pair]
    held_out: Iterable[Pair]
    if validation is None:
        training, held_out = hold_out(batches, input, share=validation_share, seed=seed)
    else:
        training, held_out = Pairs(batches, input), Pairs(validation, input, "validation")
    with (
        process_group(device_of(model)),
        kept_rng(),
        borrowed(teacher if teacher is not None else nn.Identity()),
    ):
        team = Team()
        team.check_same(model)
        first_loss, score, n_validation = judge(model, objective, held_out, seed)
        start = Epoch(
            epoch=0,
            loss=None,
            validation_loss=first_loss if math.isfinite(first_loss) else None,
            score=score,
            samples=0,
            seconds=time.perf_counter() - begin,
        )
        start = team.agreed(start)
        tuners = [Tuner(model, rate, objective, settings, team) for rate in rates]
        store = None
        if checkpoint is not None:
            facts = {
                **vars(settings),
                **vars(sweep),
                "learning_rates": list(rates),
                "temperature": None if teacher is None else temperature,
                "validation_share": None if validation is not None else validation_share,
                "answers": str(objective.reading),
                "loss": None if loss is None else getattr(loss, "__name__", "given"),
                "model": weights_digest(model),
                "teacher": None if teacher is None else weights_digest(teacher),
            }
            # Only the first process reads and writes the folder, which the others may not even have.
            store = together(lambda: Unfinished(checkpoint, facts, start) if team.leads else None)
            _restore(tuners, store, team)
        ended = _run(sweep, rates, tuners, training, held_out, store, start, count_batches(batches), reporter(progress))
    tuned, best_rate, best_epoch = _best(model, rates, tuners, start)
    histories = zip(rates, tuners, ended, strict=True)
    return tuned, FineTuning(
        measure=objective.measure,
        answers=str(objective.reading),
        optimizer=optimizer,
        start=start,
        rates=tuple(RateHistory(learning_rate=r, epochs=tuple(t.history), ended=why) for r, t, why in histories),
        learning_rate=best_rate,
        epoch=best_epoch.epoch,
        validation_samples=n_validation,
        seconds=time.perf_counter() - begin,
        library=version("tensigma"),
    )


def _restore(tuners: Sequence[Tuner], store: Unfinished | None, team: Team) -> None:
    for index, tuner in enumerate(tuners):
        state = team.agreed(together(lambda index=index: None if store is None else store.load(index)))  # type: ignore[misc]
        if state is not None:
            tuner.restore(*state)


def _best(
    model: nn.Module, rates: Sequence[float], tuners: Sequence[Tuner], start: Epoch
) -> tuple[nn.Module, float | None, Epoch]:
    """A copy of ``model`` with the weights of the best epoch, and the rate and epoch they come from."""
    tuned = copied(model)
    best_rate, best_epoch = None, start
    for rate, tuner in zip(rates, tuners, strict=True):
        candidate = max(tuner.history, key=lambda epoch: epoch.key)
        if candidate.key > best_epoch.key:
            best_rate, best_epoch = rate, candidate
            fill_(tuned, tuner.best)
    return tuned, best_rate, best_epoch


def _run(
    sweep: Sweep,
    rates: Sequence[float],
    tuners: Sequence[Tuner],
    training: Iterable[Pair],
    validation: Iterable[Pair],
    store: Unfinished | None,
    start: Epoch,
    n_batches: int | None,
    report: Listener,
) -> list[str]:
    """Train until the sweep is done, and return why each rate ended."""
    begin = time.perf_counter()
    first = done = sum(len(tuner.history) for tuner in tuners)
    samples = 0

    def report_progress(index: int, epoch: int, loss: float, *, steps: float, total: float, seen: int) -> None:
        reached = [past.score for tuner in tuners for past in tuner.history]
        state = FineTuningProgress(
            learning_rate=rates[index],
            epoch=epoch,
            epochs=sweep.epochs,
            done=steps,
            total=total,
            loss=loss,
            score=max([start.score, *reached]),
            samples=seen,
            seconds=time.perf_counter() - begin,
            first=first,
        )
        report(state)

    decision = sweep.decide([tuner.history for tuner in tuners])
    while decision.next is not None:
        index, tuner = decision.next, tuners[decision.next]
        epoch = len(tuner.history) + 1
        for batch, (seen, loss) in enumerate(tuner.run(training, validation), 1):
            part = 0.0 if not n_batches else min(batch / n_batches, 0.99)
            report_progress(index, epoch, loss, steps=done + part, total=sweep.n_steps, seen=samples + seen)
        done, samples = done + 1, samples + tuner.history[-1].samples
        if store is not None:
            store.save(index, tuner.tensors(), tuner.history)
        decision = sweep.decide([trained.history for trained in tuners])
        for ended in decision.ended:
            tuners[ended].release()
        if decision.next is None:
            # Rates may have ended before their last epoch: this is all there will be.
            report_progress(index, epoch, tuner.history[-1].loss or math.nan, steps=done, total=done, seen=samples)
    return [decision.ended[index] for index in range(len(tuners))]


def _rates(learning_rates: float | Sequence[float]) -> tuple[float, ...]:
    rates = tuple(learning_rates) if isinstance(learning_rates, Sequence) else (learning_rates,)
    numbers = all(isinstance(rate, int | float) and math.isfinite(rate) and rate > 0 for rate in rates)
    if not rates or not numbers or len(set(rates)) < len(rates):
        raise InputError(
            f"learning_rates takes one or several different numbers above 0, such as 1e-4, got {learning_rates!r}"
        )
    return tuple(map(float, rates))


def _check(*, epochs: Any, optimizer: Any, temperature: Any, patience: Any, mix: Any) -> None:
    for name, value in (("epochs", epochs), ("mix", mix), ("patience", 1 if patience is None else patience)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"got {name}={value!r}; give a whole number of at least 1")
    if optimizer not in OPTIMIZERS:
        raise InputError(f"got optimizer={optimizer!r}; choose one of {', '.join(OPTIMIZERS)}")
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise InputError(
            "got {temperature}; give a number above 0, such as 4", parameters=(f"temperature={temperature!r}",)
        )

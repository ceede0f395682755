"""The demonstration: a small CNN learns handwritten digits and is compressed in several ways at several rates.

All ways of one rate get the same ranks, by the paper's rule (VBMF, from the weights alone), so that nothing but the
norm differs; the library's own choice, one budget shared out by functional energy, gets as many parameters.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from tensigma.calibration import Calibration
from tensigma.compression import Report, compress
from tensigma.evaluation import Evaluation, evaluate
from tensigma.files import whole_file
from tensigma.planning import VBMF, Front, Params, Plan, plan
from tensigma.report import Run
from tensigma.running import Progress, Wanted
from tensigma.zoo import load_model

MODEL = "zoo:digits-cnn"
#: Seven tenths of the images train and calibrate; the rest is used only for the evaluation.
TRAIN = "digits:?split=train&holdout=0.3"
TEST = "digits:?split=val&holdout=0.3"
#: The paper's rank parameter; more is smaller.
ALPHAS = (0.6, 0.7, 0.8, 0.9)

#: Name of each way, and the norm it minimises.
NORMS = {"Frobenius": "frobenius", "Σ (paper)": "sigma", "Σ centred": "centred"}
DEFAULT = "Tensigma default"

_EPOCHS = 8
_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class TrainingProgress(Progress):
    """An epoch has been trained.

    >>> print(TrainingProgress(done=2, total=8, loss=0.5, seconds=1.0))
    epoch 2 of 8, loss 0.500
    """

    title: ClassVar[str] = "training"

    loss: float

    def __str__(self) -> str:
        return f"epoch {self.done} of {self.total}, loss {self.loss:.3f}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way at one rate, with everything it left behind."""

    run: Run
    model: nn.Module
    plan: Plan
    report: Report
    evaluation: Evaluation


def train(
    data: Any, *, seed: int = 0, epochs: int = _EPOCHS, progress: Callable[[TrainingProgress], None] | None = None
) -> nn.Module:
    """Teach the demonstration's network the digits in ``data``, in a few seconds."""
    start = time.perf_counter()
    batches = list(data)
    images, labels = torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = load_model(MODEL).train()
        n_steps = epochs * (len(images) // _BATCH)
        optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=n_steps)
        for epoch in range(epochs):
            total = 0.0
            # The last few images of each order are left for the next epoch: batches of equal size.
            order = torch.randperm(len(images))[: len(images) // _BATCH * _BATCH]
            for chosen in order.split(_BATCH):
                loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
                total += loss.item()
            if progress is not None:
                mean = total * _BATCH / len(order)
                seconds = time.perf_counter() - start
                progress(TrainingProgress(done=epoch + 1, total=epochs, loss=mean, seconds=seconds))
    return model.eval()


def train_once(weights: Path, data: Any, **options: Any) -> nn.Module:
    """The trained network: from the file ``weights`` where that is there, otherwise trained and kept there."""
    if weights.is_file():
        return load_model(MODEL, weights)
    model = train(data, **options)
    with whole_file(weights) as partial:
        weights.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), partial)
    return model


def find_front(model: nn.Module, stats: Calibration, *, progress: Wanted = False) -> Front:
    """The curves by which the library shares out a budget, found once for all budgets."""
    return plan(model, stats, budget=Params(0.5), progress=progress).front()


def compare(
    model: nn.Module,
    stats: Calibration,
    test: Any,
    front: Front,
    *,
    alphas: Sequence[float] = ALPHAS,
    cache: str | os.PathLike[str] | None = None,
) -> Iterator[Trial]:
    """Compress ``model`` in every way at every rate, one trial after another."""
    for alpha in alphas:
        params = 0
        for series, norm in NORMS.items():
            made = plan(model, stats, ranks=VBMF(alpha), method="tucker2", norm=norm, layers="spatial")
            trial = _trial(model, made, stats, test, series, f"vbmf={alpha:g}", cache)
            params = params or trial.run.params
            yield trial
        # As many parameters as the smallest of the three: a moved bias counts.
        share = params / sum(parameter.numel() for parameter in model.parameters())
        yield _trial(model, front.plan(Params(share)), stats, test, DEFAULT, f"params={share:.3g}", cache)


def n_trials(alphas: Sequence[float] = ALPHAS) -> int:
    """How many trials :func:`compare` will make."""
    return len(alphas) * (len(NORMS) + 1)


def _trial(model: nn.Module, made: Plan, stats: Calibration, test: Any, series: str, setting: str, cache: Any) -> Trial:
    start = time.perf_counter()
    small, report = compress(model, made, stats, cache=cache)
    seconds = time.perf_counter() - start
    found = evaluate(small, test, original=model)
    run = Run(
        series=series,
        setting=setting,
        rate=report.rate,
        params=report.after.params,
        macs=report.after.macs,
        top1=found.top1,
        agreement=found.agreement,
        seconds=seconds,
    )
    return Trial(run=run, model=small, plan=made, report=report, evaluation=found)

"""Refining a compressed model without labels: a few steps of an optimiser towards what the original computes.

The loss has two parts: the distance of the answers from those of the original, and that of the outputs of the blocks
that hold compressed layers. The second gives every layer a nearby target, so that few steps are enough.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tensigma.compression.grid_training import trained_on_grids
from tensigma.compression.likeness import Likeness
from tensigma.errors import InputError
from tensigma.layers import grid_of, set_grid_
from tensigma.running import (
    Batches,
    Inputs,
    Key,
    Listener,
    Progress,
    Wanted,
    Wish,
    borrowed,
    channels_last,
    copied,
    device_of,
    kept_rng,
    mapped,
    moved,
    n_samples,
    reporter,
    safe_backward,
    samples_per_second,
    split,
)

logger = logging.getLogger(__name__)

#: Samples on which the loss is measured before and after: at most so many, and at most so large a share of the passes,
#: for measuring twice should cost little beside training.
_PROBE, _PROBE_SHARE = 1_000, 1 / 8
# Adam moves every weight by about the learning rate at each step, whether or not its gradient is mostly noise. Many
# steps average noise out, few do not. 40 steps for a ResNet-20 at a rate of 3.5, agreement on other images, 96.1
# before: 95.6 at 3e-4, 96.1 at 1e-4, 96.2 at 3e-5.
_RATE, _STEPS = 3e-4, 300
# Where batches as they come would leave fewer steps than that, they are split, but not into fewer samples than this: a
# step costs time of its own.
_LEAST_BATCH = 16
# As every weight moves by as much, what a row of weights computes moves by as much as its length, for inputs behind a
# ReLU are all positive. Rows up to this long take the full rate.
_FULL_RATE_ROW = 64
# A learning rate that nobody set is tried on this share of the passes, from its rise to its fall: what a high rate does
# before it has fallen is mostly noise. If the loss is higher then, all is put back and so small a part of the rate
# tried, so many times at most. A ResNet-50 needs it.
_TRIAL, _BACK_OFF, _TRIALS = 0.1, 0.25, 4
# Fewer steps show nothing: all passes then go into training.
_LEAST_STEPS = 3
# Adam divides gradients by their size so far. After a few steps that is hardly known, and what is divided by too little
# moves by far too much: the loss of a ResNet-50 at a third of its parameters, 1.14, rose to 1.47 in 12 steps, and to
# 1.25 after ten at a rate of 0. So for this share of the passes gradients are only looked at.
_LOOKING = 0.06
#: Optimiser steps are too small for these, and gradients too large.
_HALVES = (torch.float16, torch.bfloat16)


#: What to do with a model that has no gradients.
WITHOUT_REFINEMENT = (
    "Leave refinement out: layers are fitted one after another all the same, and more calibration data or a larger "
    "budget bring answers nearer. Or refine the PyTorch model that the file was exported from."
)


@dataclass(frozen=True, kw_only=True)
class Refine:
    """How a compressed model is refined.

    >>> Refine.of(20_000).passes
    20000
    """

    #: Samples passed through the small model, summed over all rounds over the data.
    passes: int = 20_000
    #: Samples in a step of the optimiser at most. By default batches as they come, split into no fewer than 16 samples
    #: where there would be fewer than 300 steps.
    batch: int | None = None
    #: Peak learning rate of Adam for rows of up to 64 weights, and less for longer ones, in proportion; it rises for a
    #: tenth of the steps and falls to 0 along a cosine. By default 3e-4, less for fewer than 300 steps, in proportion,
    #: and a fourth, as often as it takes, where a tenth of the passes does not lower the loss.
    learning_rate: float | None = None
    #: Scores are divided by this before they are compared; above 1, less likely classes count more. By default what
    #: leaves the original's first class a mean probability of 0.8, from 1 to 4.
    temperature: float | None = None
    #: Weight of the outputs of blocks relative to the answers of the model.
    features: float = 5.0
    #: Largest norm of the gradient, so that one odd batch cannot undo a fit.
    clip: float = 1.0
    #: A function of the outputs of both models, the small one's first, that returns one number, as a tensor with a
    #: gradient. It is made small in place of the distance of answers.
    loss: Callable[[Any, Any], Tensor] | None = None
    #: Applied to each batch before both models see it, such as :class:`Views`; None for the batch as it is.
    augment: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("passes", *(("batch",) if self.batch is not None else ())):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InputError(f"Refine: {name} is a whole number of samples of at least 1, got {count!r}")
        for name in ("learning_rate", "temperature", "clip"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InputError(f"Refine: {name} is above 0, got {getattr(self, name)!r}")
        if not self.features >= 0:
            raise InputError(f"Refine: features is at least 0, got {self.features!r}")

    @classmethod
    def of(cls, wish: int | Refine) -> Refine:
        """The settings themselves, or those for a number of passes."""
        return wish if isinstance(wish, Refine) else cls(passes=wish)

    def settled(self, batch: int) -> Refine:
        """With a batch and a learning rate for batches of so many samples, where it has none.

        >>> settled = map(Refine.settled, map(Refine.of, (2_550, 7_500, 50_000)), (50, 50, 50))
        >>> tuple((each.batch, each.learning_rate) for each in settled)
        ((17, 0.00015), (25, 0.0003), (50, 0.0003))
        """
        if self.batch is None:
            pieces = max(1, batch // max(_LEAST_BATCH, self.passes // _STEPS))
        else:
            pieces = math.ceil(batch / self.batch)
        in_step = math.ceil(batch / pieces)
        rate = self.learning_rate or _RATE * min(1.0, self.passes / in_step / _STEPS)
        return replace(self, batch=in_step, learning_rate=rate)


@dataclass(frozen=True, kw_only=True)
class RefinementProgress(Progress):
    """A batch has been trained on; steps are samples.

    >>> print(RefinementProgress(done=1000, total=4000, loss=0.25, seconds=2.0))
    refining, 1,000 of 4,000 samples, 500 samples/s, loss 0.25
    """

    title: ClassVar[str] = "refinement"

    loss: float

    def __str__(self) -> str:
        rate = samples_per_second(self.done, self.seconds)
        return f"refining, {self.done:,} of {self.total:,} samples, {rate}, loss {self.loss:.3g}"


def refine_(
    small: nn.Module,
    original: nn.Module,
    batches: Any,
    settings: Refine,
    *,
    blocks: list[str],
    input: Key = None,
    answers: Wish = None,
    progress: Wanted = False,
) -> dict[str, Any]:
    """Train the parameters of ``small`` in place on ``settings.passes`` samples; returns settings and losses.

    Both models run in evaluation mode: BatchNorm statistics stay, its scales and shifts are trained. Parameters that
    require no gradient stay too, unless none does, as in a model meant only for inference. ``blocks`` are names of
    modules, in both models, whose outputs are compared. The loss on the first samples of the data, augmented, is
    measured before and after: if it did not fall, ``small`` stays as it was. A step whose loss or gradient is not
    finite is skipped. A learning rate that was not set is lowered until it lowers the loss. ``answers`` says what is
    compared; by default it is guessed. Models in half precision are refined in single precision and rounded afterwards.
    Weights on grids of few bits stay on grids of as many bits.
    """
    if any(parameter.dtype in _HALVES for parameter in small.parameters()):
        single, reference = (copied(model).float() for model in (small, original))
        facts = refine_(
            single, reference, batches, settings, blocks=blocks, input=input, answers=answers, progress=progress
        )
        small.load_state_dict(single.state_dict())
        return facts
    report = reporter(progress)
    former = copy.deepcopy(small.state_dict())
    former_grids = {layer: grid for layer in small.modules() if (grid := grid_of(layer)) is not None}
    start = time.perf_counter()
    with borrowed(small), borrowed(original), kept_rng(), trained_on_grids(small), ExitStack() as layouts:
        # Kept, because shuffled data would give other samples the second time.
        samples = min(_PROBE, math.ceil(_PROBE_SHARE * settings.passes))
        probe = list(_rounds(batches, samples, input, device_of(small)))
        if settings.augment is not None:
            # Layers were fitted to these very samples: that fit gets worse where unseen ones gain.
            probe = [settings.augment(x) for x in probe]
        layouts.enter_context(channels_last(small, original, example=probe[0]))
        layouts.enter_context(safe_backward(small))
        loss_of = Likeness(
            small,
            original,
            blocks,
            probe,
            temperature=settings.temperature,
            features=settings.features,
            answers=answers,
            loss=settings.loss,
        )
        rate = settings.learning_rate
        rounds = _rounds(batches, settings.passes, input, device_of(small))
        first = next(rounds)
        settings = replace(settings.settled(n_samples(first)), temperature=loss_of.temperature)
        losses = [loss_of.value(x) for x in probe]
        measurable = [x for x, loss in zip(probe, losses, strict=True) if math.isfinite(loss)]
        before = _mean([loss for loss in losses if math.isfinite(loss)], measurable)
        frozen = not any(parameter.requires_grad for parameter in small.parameters())
        parameters = [
            parameter.requires_grad_() for parameter in small.parameters() if frozen or parameter.requires_grad
        ]

        def loss_now() -> float:
            return _mean([loss_of.value(x) for x in measurable], measurable)

        assert settings.batch is not None
        steps = (part for x in chain([first], rounds) for part in split(x, settings.batch))
        training = _Training(parameters, loss_of, steps, settings, report, start)
        training.look(settings.batch)
        if rate is None:
            training.find_rate_(settings.batch, lambda: loss_now() < before)
        training.run_(settings.passes - training.done)
        after = loss_now()
    kept = after < before  # False also for NaN
    if not kept:
        small.load_state_dict(former)
        for layer, grid in former_grids.items():
            set_grid_(layer, grid)
        logger.warning("refinement: the loss went from %.3g to %.3g, so the model is kept as it was", before, after)
    if training.skipped:
        logger.warning("refinement: %d of %d samples gave no finite loss or gradient", training.skipped, training.done)
    plain_settings = {key: value for key, value in asdict(settings).items() if key not in ("augment", "loss")}
    return {
        **plain_settings,
        "learning_rate": training.rate,
        "answers": str(loss_of.reading) if settings.loss is None else "compared by a loss function",
        "augmented": settings.augment is not None,
        "loss_before": before if math.isfinite(before) else None,
        "loss_after": after if math.isfinite(after) else None,
        "kept": kept,
        "skipped": training.skipped,
        "seconds": time.perf_counter() - start,
    }


class _Training:
    """Steps of Adam on batches as they come."""

    def __init__(
        self,
        parameters: list[Tensor],
        loss_of: Likeness,
        inputs: Iterator[Inputs],
        settings: Refine,
        report: Listener,
        start: float,
    ) -> None:
        assert settings.learning_rate is not None
        self._parameters, self._loss_of, self._inputs = parameters, loss_of, inputs
        self._settings, self._report, self._start = settings, report, start
        self.rate = settings.learning_rate
        self._optimizer = _adam(parameters)
        #: Samples in all, and those that were skipped.
        self.done = self.skipped = 0

    def look(self, batch: int) -> None:
        """Let the optimiser see the size of gradients before it moves anything, if that is worth a ``batch``."""
        passes = int(_LOOKING * self._settings.passes)
        if passes >= batch:
            rate, self.rate = self.rate, 0.0
            self.run_(passes)
            self.rate = rate

    def find_rate_(self, batch: int, lowered: Callable[[], bool]) -> None:
        """Lower the rate until a share of the passes, in batches of ``batch``, has ``lowered`` the loss; what was
        trained at that rate stays."""
        passes = math.ceil(_TRIAL * self._settings.passes)
        if passes < _LEAST_STEPS * batch:
            return
        before = [parameter.detach().clone() for parameter in self._parameters]
        for _ in range(_TRIALS):
            self.run_(passes)
            if lowered():
                return
            _put_back_(self._parameters, before)
            self._forget_direction()
            self.rate *= _BACK_OFF
            logger.info("refinement: the loss rose; once more at a learning rate of %.1e", self.rate)

    def _forget_direction(self) -> None:
        for state in self._optimizer.state.values():
            state["exp_avg"].zero_()

    def run_(self, passes: int) -> None:
        """Train on so many samples, or a few more to end with a whole batch, while the rate rises and falls."""
        begun = self.done
        while self.done - begun < passes and (batch := next(self._inputs, None)) is not None:
            x = batch if self._settings.augment is None else self._settings.augment(batch)
            share = (self.done - begun + n_samples(x) / 2) / passes
            for group in self._optimizer.param_groups:
                group["lr"] = self.rate * group["share"] * _schedule(min(share, 1.0))
            loss = self._loss_of(x)
            self._optimizer.zero_grad()
            loss.backward()
            gradient_norm = nn.utils.clip_grad_norm_(self._parameters, self._settings.clip)
            if math.isfinite(loss.item()) and math.isfinite(gradient_norm.item()):
                self._optimizer.step()
            else:
                self.skipped += n_samples(x)
            self.done += n_samples(x)
            self._report(
                RefinementProgress(
                    done=self.done,
                    total=self._settings.passes,
                    loss=loss.item(),
                    seconds=time.perf_counter() - self._start,
                )
            )
        self._optimizer.zero_grad()


def _adam(parameters: list[Tensor]) -> torch.optim.Adam:
    """Adam with a share of the learning rate for each parameter: less for weights with long rows."""
    rows = [parameter[0].numel() if parameter.ndim > 1 else 1 for parameter in parameters]
    return torch.optim.Adam(
        [
            {"params": [parameter], "share": min(1.0, _FULL_RATE_ROW / row)}
            for parameter, row in zip(parameters, rows, strict=True)
        ]
    )


@torch.no_grad()
def _put_back_(parameters: list[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def blocks_around(model: nn.Module, names: list[str]) -> list[str]:
    """The modules that directly hold these layers, except the model itself, in the order of the model.

    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
    >>> blocks_around(model, ["0", "1.0"])
    ['1']
    """
    parents = {name.rpartition(".")[0] for name in names} - {""}
    return [name for name, _ in model.named_modules() if name in parents]


def _schedule(share: float) -> float:
    return min(1.0, share / 0.1) * (0.5 + 0.5 * math.cos(math.pi * share))


def _rounds(batches: Any, passes: int, key: Key, device: torch.device | None) -> Iterator[Inputs]:
    """Inputs, in repeated rounds over the data, until there were ``passes`` samples."""
    done = 0
    while done < passes:
        for batch in Batches(batches, input=key, max_samples=passes - done, name="data"):
            done += len(batch)
            single = mapped(batch.inputs, lambda x: x.float() if x.dtype in _HALVES else x)
            yield moved(single, device)


def _mean(losses: list[float], batches: list[Inputs]) -> float:
    """The mean over samples; NaN without any."""
    samples = sum(map(n_samples, batches))
    return sum(loss * n_samples(x) for loss, x in zip(losses, batches, strict=True)) / samples if samples else math.nan

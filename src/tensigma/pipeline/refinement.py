"""Refining a compressed model without labels: a few steps of an optimiser towards what the original computes.

The loss has two parts: how far the answers are from those of the original, and how far the outputs of the blocks that
hold compressed layers are. The second gives every layer a target of its own, near by, so that few steps go a long way.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensigma.calibration.batches import input_of, iterate
from tensigma.calibration.guard import borrowed, device_of, kept_rng
from tensigma.errors import InputError

logger = logging.getLogger(__name__)

#: Samples on which the loss is measured before and after.
_PROBE = 1_000


@dataclass(frozen=True, kw_only=True)
class Refine:
    """How a compressed model is refined.

    >>> Refine.of(20_000).passes
    20000
    """

    #: Samples passed through the small model, those of all rounds over the data together.
    passes: int = 20_000
    #: Where the learning rate of Adam is highest; it rises for a tenth of the steps and falls to 0 like a cosine.
    learning_rate: float = 3e-4
    #: By which scores are divided before they are compared: more than 1 makes the lesser classes count more.
    temperature: float = 4.0
    #: Weight of the outputs of blocks beside the answers of the model.
    features: float = 5.0
    #: Longest gradient, so that one odd batch cannot undo a fit.
    clip: float = 1.0
    #: Applied to each batch before both models see it, such as a random flip; None for the batch as it is.
    augment: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.passes, bool) or not isinstance(self.passes, int) or self.passes < 1:
            raise InputError(f"Refine: passes is a whole number of samples of at least 1, got {self.passes!r}")
        for name in ("learning_rate", "temperature", "clip"):
            if not getattr(self, name) > 0:
                raise InputError(f"Refine: {name} is above 0, got {getattr(self, name)!r}")
        if not self.features >= 0:
            raise InputError(f"Refine: features is at least 0, got {self.features!r}")

    @classmethod
    def of(cls, wish: int | Refine) -> Refine:
        """The settings that a number of passes stands for."""
        return wish if isinstance(wish, Refine) else cls(passes=wish)


@dataclass(frozen=True, kw_only=True)
class RefinementProgress:
    """Samples passed so far."""

    samples: int
    total: int
    loss: float
    seconds: float

    @property
    def remaining(self) -> float:
        """Seconds to go at the present rate."""
        return self.seconds / max(self.samples, 1) * (self.total - self.samples)


def refine_(
    small: nn.Module,
    original: nn.Module,
    batches: Any,
    settings: Refine,
    *,
    blocks: list[str],
    input: str | int | None = None,
    progress: bool | Callable[[Any], None] = False,
) -> dict[str, Any]:
    """Train the parameters of ``small`` in place until ``settings.passes`` samples have gone through; gives the facts.

    Both models run in evaluation mode: statistics of BatchNorm stay, its scales and shifts are trained. ``blocks`` are
    names of modules, in both models, whose outputs are compared. The loss on the first samples of the data, as they
    are, is measured before and after: where it did not fall, ``small`` stays as it was.
    """
    report = _reporter(progress)
    former = copy.deepcopy(small.state_dict())
    start = time.perf_counter()
    loss_of = _Loss(small, original, blocks, settings)
    with borrowed(small), borrowed(original), kept_rng():
        before = loss_of.mean(_rounds(batches, min(_PROBE, settings.passes), input, device_of(small)))
        parameters = list(small.parameters())
        for parameter in parameters:
            parameter.requires_grad_(True)
        optimizer = torch.optim.Adam(parameters, settings.learning_rate)
        done = 0
        for x in _rounds(batches, settings.passes, input, device_of(small)):
            if settings.augment is not None:
                x = settings.augment(x)
            share = (done + len(x) / 2) / settings.passes
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(share)
            loss = loss_of(x)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, settings.clip)
            optimizer.step()
            done += len(x)
            report(
                RefinementProgress(
                    samples=done, total=settings.passes, loss=loss.item(), seconds=time.perf_counter() - start
                )
            )
        optimizer.zero_grad()
        after = loss_of.mean(_rounds(batches, min(_PROBE, settings.passes), input, device_of(small)))
    kept = after < before  # false for a loss that is no longer a number, too
    if not kept:
        small.load_state_dict(former)
        logger.warning("refinement: the loss went from %.3g to %.3g, so the model is kept as it was", before, after)
    facts = {key: value for key, value in asdict(settings).items() if key != "augment"}
    return {
        **facts,
        "augmented": settings.augment is not None,
        "loss_before": before,
        "loss_after": after if math.isfinite(after) else None,
        "kept": kept,
        "seconds": time.perf_counter() - start,
    }


def blocks_around(model: nn.Module, names: list[str]) -> list[str]:
    """The modules that directly hold these layers, but for the model itself, in the order of the model.

    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()))
    >>> blocks_around(model, ["0", "1.0"])
    ['1']
    """
    parents = {name.rpartition(".")[0] for name in names} - {""}
    return [name for name, _ in model.named_modules() if name in parents]


def _schedule(share: float) -> float:
    return min(1.0, share / 0.1) * (0.5 + 0.5 * math.cos(math.pi * share))


def _rounds(batches: Any, passes: int, key: str | int | None, device: torch.device | None) -> Iterator[Tensor]:
    """Inputs, round after round over the data, until there were ``passes`` samples."""
    done = 0
    while done < passes:
        before = done
        for index, batch in enumerate(iterate(batches)):
            x = input_of(batch, key, index)[: passes - done]
            if len(x):
                yield x if device is None else x.to(device)
                done += len(x)
            if done == passes:
                return
        if done == before:
            raise InputError("no batches: the iterable given as data is empty")


class _Loss:
    """How far the small model is from the original on a batch."""

    def __init__(self, small: nn.Module, original: nn.Module, blocks: list[str], settings: Refine) -> None:
        self._small, self._original, self._settings = small, original, settings
        self._blocks = blocks if settings.features else []

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad(), _outputs(self._original, self._blocks) as wanted:
            target = _tensors(self._original(x))
        with _outputs(self._small, list(wanted)) as given:
            answers = zip(_tensors(self._small(x)), target, strict=True)
            loss = torch.stack([_distance(y, t, self._settings.temperature) for y, t in answers]).sum()
        for name in wanted:
            loss = loss + self._settings.features / len(wanted) * _relative(given[name], wanted[name])
        return loss

    def mean(self, inputs: Iterator[Tensor]) -> float:
        """The same over many batches, without gradients."""
        total, samples = 0.0, 0
        with torch.no_grad():
            for x in inputs:
                total, samples = total + self(x).item() * len(x), samples + len(x)
        return total / samples


@contextmanager
def _outputs(model: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs of these modules in the calls inside, where they are tensors."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                found[name] = output

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(keep(name)).remove)
        yield found


def _tensors(output: Any) -> list[Tensor]:
    """All tensors with a gradient to speak of in the answer of a model."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return [tensor for item in output for tensor in _tensors(item)]
    return []


def _distance(given: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Divergence of class probabilities for scores of (batch, classes), squared relative error for anything else."""
    if wanted.dim() == 2 and wanted.shape[1] > 1:
        own, other = ((scores / temperature).log_softmax(1) for scores in (given, wanted))
        # T² keeps gradients at the scale they have at T = 1.
        return functional.kl_div(own, other, reduction="batchmean", log_target=True) * temperature**2
    return _relative(given, wanted)


def _relative(given: Tensor, wanted: Tensor) -> Tensor:
    return (given - wanted).square().mean() / wanted.var().clamp_min(torch.finfo(wanted.dtype).tiny)


def _reporter(progress: bool | Callable[[Any], None]) -> Callable[[RefinementProgress], None]:
    if callable(progress):
        return progress
    if not progress:
        return lambda state: None
    return lambda state: logger.info("refinement: %d of %d samples, loss %.4f", state.samples, state.total, state.loss)

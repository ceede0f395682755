"""How far the answers of a model are from the original's, on some samples that are kept for it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensigma.calibration.batches import input_of, iterate
from tensigma.calibration.collect import forward
from tensigma.calibration.guard import borrowed, device_of
from tensigma.errors import InputError

# Inputs are kept and run in pieces of so many samples, and no more of them than so many bytes.
_PIECE, _BYTES = 64, 256 * 2**20


class Probe:
    """The first ``samples`` samples of ``batches``, in memory, with what ``original`` answers to them. No labels.

    Fewer are kept where they would take more than 256 MiB.

    >>> model = nn.Linear(3, 4)
    >>> probe = Probe(model, [torch.randn(8, 3)], samples=5)
    >>> probe.samples, probe.divergence(model) < 1e-6, probe.divergence(nn.Linear(3, 4)) > 0.001
    (5, True, True)
    """

    def __init__(self, original: nn.Module, batches: Any, *, samples: int, input: str | int | None = None) -> None:
        self.samples = 0
        self._inputs: list[Tensor] = []
        for index, batch in enumerate(iterate(batches)):
            x = input_of(batch, input, index)[: samples - self.samples]
            for piece in x.split(_PIECE):
                full = sum(kept.nbytes for kept in self._inputs) + piece.nbytes > _BYTES
                if self._inputs and full:
                    samples = self.samples
                    break
                # A copy, so that the rest of a large batch need not be kept.
                self._inputs.append(piece.clone())
                self.samples += len(piece)
            if self.samples >= samples:
                break
        if not self.samples:
            raise InputError("no batches: the iterable given as data is empty")
        self._wanted = self._answers(original)

    def divergence(self, model: nn.Module) -> float:
        """The mean over samples: the Kullback–Leibler divergence of class probabilities for scores of (batch, classes),
        the squared error relative to the variance for all else; infinite where an answer is no number.
        """
        total = 0.0
        for given, wanted in zip(self._answers(model), self._wanted, strict=True):
            total += sum(_distance(own, target) for own, target in zip(given, wanted, strict=True))
        return total / self.samples if math.isfinite(total) else math.inf

    def first(self, samples: int) -> Probe:
        """The same with about so many samples: whole pieces of them, and at least one.

        >>> Probe(nn.Linear(3, 4), [torch.randn(200, 3)], samples=200).first(100).samples
        64
        """
        other = copy.copy(self)
        pieces = max(1, samples // _PIECE)
        other._inputs, other._wanted = self._inputs[:pieces], self._wanted[:pieces]
        other.samples = sum(map(len, other._inputs))
        return other

    @property
    def is_silent(self) -> bool:
        """Whether the original answers with no number that could differ."""
        return not any(self._wanted)

    @torch.inference_mode()
    def _answers(self, model: nn.Module) -> list[list[Tensor]]:
        device = device_of(model)
        with borrowed(model):
            inputs = enumerate(x if device is None else x.to(device) for x in self._inputs)
            return [floats_of(forward(model, x, index)) for index, x in inputs]


def _distance(given: Tensor, wanted: Tensor) -> float:
    """The distance of the answers to a batch, summed over its samples."""
    given, wanted = given.double(), wanted.double()
    if wanted.dim() == 2 and wanted.shape[1] > 1:
        own, other = given.log_softmax(1), wanted.log_softmax(1)
        return functional.kl_div(own, other, reduction="sum", log_target=True).item()
    variance = wanted.var(correction=0).clamp_min(torch.finfo(wanted.dtype).tiny)
    return ((given - wanted).square().mean() / variance).item() * (len(wanted) if wanted.dim() else 1)


def floats_of(output: Any) -> list[Tensor]:
    """All tensors of real numbers in what a model returned, in order.

    >>> [each.tolist() for each in floats_of({"a": torch.ones(1), "b": (torch.ones(1).long(), [torch.zeros(1)])})]
    [[1.0], [0.0]]
    """
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, tuple | list):
        return [tensor for item in output for tensor in floats_of(item)]
    return []

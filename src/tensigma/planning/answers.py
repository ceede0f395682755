"""What a classifier answers to a batch, and what the batch says is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration.batches import LABEL_KEYS
from tensigma.calibration.collect import forward
from tensigma.calibration.guard import device_of
from tensigma.errors import InputError


def scores_of(model: nn.Module, x: Tensor, index: int) -> Tensor:
    """What a classifier answers to batch ``index``: (batch, classes), wherever in its output that is."""
    output = forward(model, x.to(device_of(model) or x.device), index)
    if isinstance(output, Mapping):
        output = output.get("logits", next(iter(output.values()), None))
    elif isinstance(output, tuple | list):
        output = output[0]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor) or output.dim() != 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise InputError(f"batch {index}: the model must return scores of shape (batch, classes); it returned {shape}")
    return output


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
    return floats_of(output.logits) if isinstance(getattr(output, "logits", None), Tensor) else []


def answered(scores: Tensor) -> Tensor:
    """Which rows of scores are an answer: the largest is a number. Others may be −∞, as masks have it.

    >>> answered(torch.tensor([[1.0, -torch.inf], [torch.nan, 2.0], [torch.inf, 0.0]])).tolist()
    [True, False, False]
    """
    return scores.amax(1).isfinite()


def class_labels(batch: Any) -> Tensor | None:
    """Class numbers of a batch, or None where it has none.

    >>> class_labels((torch.zeros(2, 3), [1, 0])), class_labels(torch.zeros(2, 3))
    (tensor([1, 0]), None)
    """
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        found = batch[1]
    if found is not None and not isinstance(found, Tensor):
        found = torch.as_tensor(found)
    if found is None or found.dim() != 1 or found.is_floating_point():
        return None
    return found

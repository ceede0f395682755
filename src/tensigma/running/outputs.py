"""The tensors in the output of a model, whatever it is made of, and the class scores among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from tensigma.errors import InputError


def items_of(output: Any) -> list[tuple[Any, Any]] | None:
    """The parts of an output by key or position; None if it is not made of parts.

    Mappings, tuples, lists and dataclasses are. Of other objects the attribute ``logits`` is taken, where some
    libraries keep the scores.
    """
    if isinstance(output, Mapping):
        return list(output.items())
    if isinstance(output, tuple | list):
        return list(enumerate(output))
    if is_dataclass(output) and not isinstance(output, type):
        return [(field.name, getattr(output, field.name)) for field in fields(output)]
    logits = None if isinstance(output, Tensor) else getattr(output, "logits", None)
    return None if logits is None else [("logits", logits)]


def leaves(output: Any) -> dict[str, Tensor]:
    """All tensors in the output of a model, in order, by their path.

    >>> list(leaves({"a": torch.ones(1), "b": (torch.ones(1), [torch.ones(1)])})), list(leaves(torch.ones(1)))
    (['a', 'b.0', 'b.1.0'], [''])
    """
    return {".".join(map(str, path)): tensor for path, tensor in _leaves(output, ())}


def _leaves(output: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(output, Tensor):
        return [(path, output)]
    return [leaf for key, item in items_of(output) or () for leaf in _leaves(item, (*path, key))]


def dense_scores_of(output: Any) -> Tensor:
    """Class scores at any number of positions, (batch, classes, …): the first tensor, or the one named logits.

    >>> dense_scores_of({"features": torch.ones(2, 9), "logits": torch.ones(2, 5)}).shape
    torch.Size([2, 5])
    """
    tensors = leaves(output)
    scores = tensors.get("logits", next(iter(tensors.values()), None))
    if scores is None or scores.dim() < 2 or not scores.is_floating_point():
        shape = type(output).__name__ if scores is None else str(tuple(scores.shape))
        raise InputError(f"the model must return class scores of shape (batch, classes, …); it returned {shape}")
    return scores


def drawn_labels(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Labels drawn from the model's own predictions, one per position of scores (batch, classes, …).

    >>> drawn_labels(torch.tensor([[0.0, 100.0], [100.0, 0.0]]), torch.Generator().manual_seed(0)).tolist()
    [1, 0]
    """
    last = scores.detach().movedim(1, -1)
    probabilities = last.reshape(-1, last.shape[-1]).double().softmax(-1).cpu()
    labels = torch.multinomial(probabilities, 1, generator=generator)
    return labels.reshape(last.shape[:-1]).to(scores.device)

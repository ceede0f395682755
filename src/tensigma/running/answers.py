"""Reading the output of a model: its tensors, and the class scores among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tensigma.errors import InputError


def leaves(output: Any) -> dict[str, Tensor]:
    """All tensors in the output of a model, in order, by their path.

    >>> list(leaves({"a": torch.ones(1), "b": (torch.ones(1), [torch.ones(1)])})), list(leaves(torch.ones(1)))
    (['a', 'b.0', 'b.1.0'], [''])
    """
    return {".".join(map(str, path)): tensor for path, tensor in _leaves(output, ())}


def _leaves(output: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(output, Tensor):
        return [(path, output)]
    items: Any = ()
    if isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, tuple | list):
        items = enumerate(output)
    return [leaf for key, item in items for leaf in _leaves(item, (*path, key))]


def floats_of(output: Any) -> list[Tensor]:
    """All tensors of real numbers in the output of a model, in order.

    >>> [tensor.tolist() for tensor in floats_of({"a": torch.ones(1), "b": (torch.ones(1).long(), [torch.zeros(1)])})]
    [[1.0], [0.0]]
    """
    if not isinstance(output, Tensor | Mapping | tuple | list):
        # Some libraries return their own objects, with the scores in this attribute.
        output = getattr(output, "logits", None)
    return [tensor for tensor in leaves(output).values() if tensor.is_floating_point()]


def scores_of(output: Any, index: int = 0) -> Tensor:
    """The class scores, (batch, classes), in the output of a classifier for batch ``index``.

    >>> scores_of({"logits": torch.ones(2, 5), "features": torch.ones(2, 9)}).shape
    torch.Size([2, 5])
    """
    scores = _scores(output)
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        raise InputError(
            f"batch {index}: the model must return scores of shape (batch, classes); it returned {_shape(scores)}"
        )
    return scores


def dense_scores_of(output: Any) -> Tensor:
    """Class scores at any number of positions, (batch, classes, …)."""
    scores = _scores(output)
    if not isinstance(scores, Tensor) or scores.dim() < 2:
        raise InputError(
            f"the model must return class scores of shape (batch, classes, …); it returned {_shape(scores)}"
        )
    return scores


def _shape(output: Any) -> str:
    return str(tuple(output.shape)) if isinstance(output, Tensor) else type(output).__name__


def _scores(output: Any) -> Any:
    """The first item of an output, or the one named logits."""
    if isinstance(output, Mapping):
        output = output.get("logits", next(iter(output.values()), None))
    elif isinstance(output, tuple | list):
        output = output[0] if output else None
    return getattr(output, "logits", output)


def drawn_labels(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Labels drawn from the model's own predictions, one per position of scores (batch, classes, …).

    >>> drawn_labels(torch.tensor([[0.0, 100.0], [100.0, 0.0]]), torch.Generator().manual_seed(0)).tolist()
    [1, 0]
    """
    last = scores.detach().movedim(1, -1)
    probabilities = last.reshape(-1, last.shape[-1]).double().softmax(-1).cpu()
    labels = torch.multinomial(probabilities, 1, generator=generator)
    return labels.reshape(last.shape[:-1]).to(scores.device)

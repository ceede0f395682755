"""What an answer means, as far as its shape, its name and the layer it comes from tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensigma.running.batches import Batch
from tensigma.running.heads import Head
from tensigma.running.kinds import Boxes, Kind, Numbers, Scores, are_probabilities
from tensigma.running.outputs import items_of, leaves

_NAMES_OF_SCORES = ("logits", "scores", "probabilities", "probs")


def floats_in(output: Any) -> dict[str, Tensor]:
    """All tensors of real numbers in an output that have a sample in them, by their path.

    >>> import torch
    >>> list(floats_in({"a": torch.ones(1), "b": (torch.ones(1).long(), [torch.zeros(1)]), "loss": torch.ones(())}))
    ['a', 'b.1.0']
    """
    return {
        path: tensor
        for path, tensor in leaves(output).items()
        if tensor.is_floating_point() and tensor.dim() and tensor.numel()
    }


def boxes_in(output: Any, kind: Boxes) -> list[str]:
    """The paths of boxes with scores: of the output itself, or of some of its parts.

    >>> import torch
    >>> boxes_in([{"boxes": torch.zeros(0, 4), "scores": torch.zeros(0)}], Boxes()), boxes_in(torch.ones(2, 4), Boxes())
    ([''], [])
    """
    if kind.fits(output):
        return [""]
    return [str(key) for key, part in items_of(output) or () if kind.fits(part)]


def is_by_sample(output: Any, n_samples: int) -> bool:
    """Whether this is a list with a tensor for each sample, as for images of different sizes.

    >>> import torch
    >>> is_by_sample([torch.ones(5, 7), torch.ones(5, 9)], 2), is_by_sample([torch.ones(2, 7), torch.ones(2, 9)], 2)
    (True, False)
    """
    if not isinstance(output, list) or len(output) != n_samples:
        return False
    # With a row for each sample they would be parts of the answer.
    return all(isinstance(item, Tensor) and item.dim() > 0 and len(item) != n_samples for item in output)


def guess(path: str, tensor: Tensor, batch: Batch, head: Head, labels: Any = None) -> Kind | None:
    """What one tensor of an answer means; None if it may be class scores or an embedding.

    ``labels`` that are class numbers, if given, decide.

    >>> import torch
    >>> batch = Batch(0, torch.zeros(2, 3), None)
    >>> guess("", torch.ones(2, 4), batch, Head(4, linear=True, pointwise=True))
    Scores(axis=1, least=0.95)
    >>> guess("", torch.ones(2), batch, Head()), guess("", torch.ones(2, 4), batch, Head())
    (Numbers(), None)
    """
    classes = labels if _are_classes(labels) else None
    if tensor.dim() < 2 or max(tensor.shape[1:]) < 2:
        return Numbers()
    named = _is_named(path)
    if tensor.dim() == 2:
        clear = named or _tell_probabilities(tensor) or (classes is not None and classes.shape == tensor.shape[:1])
        return Scores() if clear or (head.gives(tensor.shape[1]) and not _are_directions(tensor)) else None
    axes = [-1, 1] if head.linear else [1, -1]
    for axis in (axis for axis in axes if tensor.shape[axis] > 1):
        positions = [size for index, size in enumerate(tensor.shape) if index != axis % tensor.dim()]
        if classes is not None and list(classes.shape) == positions:
            return Scores(axis)
        # An output of the shape of the input is more likely an image than scores of three classes.
        like_input = isinstance(batch.inputs, Tensor) and batch.inputs.shape == tensor.shape
        if named or (axis == axes[0] and head.gives(tensor.shape[axis]) and not like_input):
            return Scores(axis)
    return Numbers()


def is_told(path: str, scores: Tensor, axis: int, head: Head, labels: Any = None) -> bool:
    """Whether anything but the width of the last layer says that these are class scores.

    That is a name (of the part, of the layer or of an attribute that counts classes), labels that are class numbers, or
    values that are probabilities or their logarithms.

    >>> import torch
    >>> rows, head = torch.eye(4), Head(4, linear=True, pointwise=True)
    >>> is_told("", 2 * rows, 1, head), is_told("logits", 2 * rows, 1, head), is_told("", rows.log_softmax(1), 1, head)
    (False, True, True)
    """
    if head.classifies or _is_named(path) or _tell_probabilities(scores, axis):
        return True
    positions = [size for index, size in enumerate(scores.shape) if index != axis % scores.dim()]
    return _are_classes(labels) and list(labels.shape) == positions


def _is_named(path: str) -> bool:
    return path.rpartition(".")[2].lower() in _NAMES_OF_SCORES


def _are_classes(labels: Any) -> bool:
    return isinstance(labels, Tensor) and not labels.is_floating_point()


def _tell_probabilities(scores: Tensor, axis: int = 1) -> bool:
    """Whether these are probabilities or their logarithms."""
    return are_probabilities(scores.double().exp() if bool((scores <= 0).all()) else scores, axis)


def _are_directions(rows: Tensor) -> bool:
    """Whether all rows have length 1, as embeddings that are compared by their angle."""
    return bool(((rows.double().norm(dim=1) - 1).abs() < 1e-3).all())


def first_path(paths: Sequence[str]) -> str:
    """The path of the scores among several: the one named logits, or the first."""
    return next((path for path in paths if path.rpartition(".")[2] == "logits"), paths[0] if paths else "")

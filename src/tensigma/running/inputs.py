"""What a model is called with: one tensor, a list of images of different sizes, or several arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Several:
    """Several arguments of one call, by position and by name.

    >>> several = Several((torch.zeros(4, 3),), {"mask": torch.ones(4), "strict": True})
    >>> len(several), n_samples(several[:2]), several[:2].kwargs["strict"]
    (4, 2, True)
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> list[Any]:
        """All arguments."""
        return [*self.args, *self.kwargs.values()]

    def __len__(self) -> int:
        for value in self.values:
            if _is_rows(value):
                return len(value)
        return 0

    def map(self, function: Callable[[Any], Any]) -> Several:
        """The same call with every argument changed."""
        args = tuple(map(function, self.args))
        return Several(args, {name: function(value) for name, value in self.kwargs.items()})

    def __getitem__(self, rows: Any) -> Several:
        size = len(self)
        # Arguments that are not one entry a sample, such as a flag, belong to every sample.
        return self.map(lambda value: taken(value, rows) if _is_rows(value) and len(value) == size else value)


#: What a model may be called with.
Inputs = Tensor | list[Tensor] | Several


def _is_rows(value: Any) -> bool:
    """Whether an argument has one entry for each sample."""
    return (isinstance(value, Tensor) and value.dim() > 0) or is_images(value)


def is_images(value: Any) -> bool:
    """Whether this is a list of tensors, one for each sample, as detectors take images of different sizes."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Tensor) for item in value)


def n_samples(inputs: Inputs) -> int:
    """How many samples there are.

    >>> n_samples(torch.zeros(4, 3)), n_samples([torch.zeros(3, 8, 8), torch.zeros(3, 9, 7)])
    (4, 2)
    """
    return len(inputs)


def taken(inputs: Any, rows: Any) -> Any:
    """Some of the samples: by a slice, a list of positions, or a mask.

    >>> [image.item() for image in taken([torch.tensor(n) for n in range(4)], torch.tensor([True, False, False, True]))]
    [0, 3]
    """
    if isinstance(inputs, Tensor):
        return inputs[rows.to(inputs.device) if isinstance(rows, Tensor) else rows]
    if isinstance(inputs, Several):
        return inputs[rows]
    if isinstance(rows, slice):
        return inputs[rows]
    if isinstance(rows, Tensor) and rows.dtype == torch.bool:
        rows = rows.nonzero().flatten()
    return [inputs[int(row)] for row in rows]


def mapped(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor changed."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Several):
        return inputs.map(lambda value: mapped(value, function))
    if isinstance(inputs, Mapping):
        return {key: mapped(value, function) for key, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return [mapped(value, function) for value in inputs]
    return inputs


def moved(inputs: Any, device: torch.device | str | None) -> Any:
    """The same on a device; None leaves it where it is."""
    return inputs if device is None else mapped(inputs, lambda tensor: tensor.to(device))


def tensors_in(inputs: Any) -> list[Tensor]:
    """All tensors, in order.

    >>> [tensor.shape[0] for tensor in tensors_in(Several((torch.zeros(2),), {"images": [torch.ones(3)], "flag": 1}))]
    [2, 3]
    """
    found: list[Tensor] = []
    mapped(inputs, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def split(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """Pieces of at most ``size`` samples.

    >>> [len(piece) for piece in split([torch.zeros(1)] * 5, 2)]
    [2, 2, 1]
    """
    if isinstance(inputs, Tensor):
        yield from inputs.split(size)
        return
    for start in range(0, n_samples(inputs), size):
        yield taken(inputs, slice(start, start + size))


def joined(parts: Sequence[Any]) -> Any:
    """Several inputs of the same form as one."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Several):
        columns = [[part.values[index] for part in parts] for index in range(len(first.values))]
        values = [joined(column) if _is_rows(column[0]) else column[0] for column in columns]
        named = zip(first.kwargs, values[len(first.args) :], strict=True)
        return Several(tuple(values[: len(first.args)]), dict(named))
    return [image for part in parts for image in part]


def call(model: nn.Module | Callable[..., Any], inputs: Inputs) -> Any:
    """The output of ``model``.

    >>> call(lambda x, scale: x * scale, Several((torch.ones(2),), {"scale": 3})).tolist()
    [3.0, 3.0]
    """
    if isinstance(inputs, Several):
        return model(*inputs.args, **inputs.kwargs)
    return model(inputs)


def shape_of(inputs: Any) -> str:
    """What the inputs are, for messages.

    >>> shape_of(torch.zeros(2, 3)), shape_of([torch.zeros(3, 8, 8), torch.zeros(3, 9, 7)])
    ('shape (2, 3), float32', '2 images, the first of shape (3, 8, 8), float32')
    """
    if isinstance(inputs, Tensor):
        return f"shape {tuple(inputs.shape)}, {str(inputs.dtype).removeprefix('torch.')}"
    if isinstance(inputs, Several):
        named = [*map(str, range(len(inputs.args))), *inputs.kwargs]
        values = zip(named, inputs.values, strict=True)
        return "; ".join(f"{name}: {shape_of(value)}" for name, value in values)
    if is_images(inputs):
        return f"{len(inputs)} images, the first of {shape_of(inputs[0])}"
    return type(inputs).__name__

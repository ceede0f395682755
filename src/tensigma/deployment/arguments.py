"""The arguments of the call that is exported: their names, and which of their sizes are the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.errors import InputError
from tensigma.running import Inputs, Several, shape_of


def call_of(model: nn.Module, inputs: Inputs) -> Several:
    """The inputs as arguments of a call of ``model``, which must be tensors; those by name in the order of ``forward``.

    >>> list(call_of(nn.Bilinear(2, 2, 1), Several((), {"input2": torch.ones(1), "input1": torch.ones(1)})).kwargs)
    ['input1', 'input2']
    >>> call_of(nn.ReLU(), [torch.zeros(3, 4, 4), torch.zeros(3, 5, 4)])
    Traceback (most recent call last):
    ...
    tensigma.errors.InputError: only models whose inputs are tensors can be exported; the example is 2 images, the \
first of shape (3, 4, 4), float32. Of a detector, export the part that takes one tensor, such as model.backbone, or \
write an archive with ts.save
    """
    call = inputs if isinstance(inputs, Several) else Several((inputs,))
    if not all(isinstance(value, Tensor) for value in call.values):
        raise InputError(
            f"only models whose inputs are tensors can be exported; the example is {shape_of(inputs)}. Of a detector, "
            "export the part that takes one tensor, such as model.backbone, or write an archive with ts.save"
        )
    # Exporters number named inputs as they come, and a file would have them in another order than its names.
    order = [name for name in inspect.signature(model.forward).parameters if name in call.kwargs]
    named = {name: call.kwargs[name] for name in dict.fromkeys([*order, *call.kwargs])}
    return Several(call.args, named)


def names_of(model: nn.Module, call: Several) -> list[str]:
    """The names of the arguments: "input" for a single one, otherwise those of ``forward``.

    >>> names_of(nn.Bilinear(2, 2, 1), Several((torch.zeros(2, 2),), {"input2": torch.zeros(2, 2)}))
    ['input1', 'input2']
    """
    if len(call.values) == 1 and not call.kwargs:
        return ["input"]
    names: list[str] = []
    for name, value in _bound(model, call).items():
        if isinstance(value, Mapping):
            names += value
        else:
            names += [f"{name}_{index}" for index in range(len(value))] if isinstance(value, tuple) else [name]
    return names


def batch_axes(model: nn.Module, call: Several) -> dict[str, Any]:
    """What :func:`torch.export.export` takes as ``dynamic_shapes``: the first axis of tensors that have a row a sample.

    >>> axes = batch_axes(nn.Bilinear(2, 2, 1), Several((torch.zeros(3, 2), torch.zeros(3, 2))))
    >>> {name: list(axis) for name, axis in axes.items()}
    {'input1': [0], 'input2': [0]}
    """
    batch, size = torch.export.Dim("batch"), len(call)

    def axes(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(axes, value))
        if isinstance(value, Mapping):
            return {name: axes(item) for name, item in value.items()}
        return {0: batch} if value.dim() and len(value) == size else None

    return {name: axes(value) for name, value in _bound(model, call).items()}


def _bound(model: nn.Module, call: Several) -> dict[str, Any]:
    """The arguments by the parameters of ``forward``."""
    return dict(inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments)

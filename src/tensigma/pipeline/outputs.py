"""What a model returns: tensors in a row, and their names in an ONNX file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def leaves(output: Any) -> list[Tensor]:
    """All tensors that a model returned, in order.

    >>> import torch
    >>> [int(each) for each in leaves({"a": torch.tensor(1), "b": (torch.tensor(2), [torch.tensor(3)])})]
    [1, 2, 3]
    """
    return list(_named(output).values())


def leaf_names(output: Any) -> list[str]:
    """A name for each of them: its key where it is in a dict, its number elsewhere.

    >>> import torch
    >>> leaf_names({"a": torch.tensor(1), "b": (torch.tensor(2), [torch.tensor(3)])}), leaf_names(torch.tensor(1))
    (['a', 'b.0', 'b.1.0'], [''])
    """
    return [".".join(map(str, path)) for path in _named(output)]


def usual_names(count: int) -> list[str]:
    """The names in a file of outputs that have none of their own.

    >>> usual_names(1), usual_names(2)
    (['output'], ['output0', 'output1'])
    """
    return ["output"] if count == 1 else [f"output{index}" for index in range(count)]


def rename_outputs(graph: Any, names: Sequence[str]) -> None:
    """Give the outputs of an ONNX graph these names, unless something else in it has one of them already."""
    former = [each.name for each in graph.output]
    values = {name for node in graph.node for name in (*node.input, *node.output)}
    given = {each.name for each in (*graph.input, *graph.initializer)}
    if len({*names}) < len(names) or not given.isdisjoint(names) or not (values - {*former}).isdisjoint(names):
        return
    new = dict(zip(former, names, strict=True))
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in (*graph.output, *graph.value_info):
        value.name = new.get(value.name, value.name)


def _named(output: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Tensor]:
    if isinstance(output, Tensor):
        return {path: output}
    items: Any = ()
    if isinstance(output, Mapping):
        items = output.items()
    elif isinstance(output, tuple | list):
        items = enumerate(output)
    return {own: tensor for key, item in items for own, tensor in _named(item, (*path, key)).items()}

"""The names of a model's outputs in an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def usual_names(count: int) -> list[str]:
    """The default names of outputs in a file.

    >>> usual_names(1), usual_names(2)
    (['output'], ['output0', 'output1'])
    """
    return ["output"] if count == 1 else [f"output{index}" for index in range(count)]


def rename_outputs(graph: Any, names: Sequence[str]) -> None:
    """Give the outputs of an ONNX graph these names, unless something else in it already has one of them."""
    former = [output.name for output in graph.output]
    values = {name for node in graph.node for name in (*node.input, *node.output)}
    taken = {value.name for value in (*graph.input, *graph.initializer)}
    if len({*names}) < len(names) or not taken.isdisjoint(names) or not (values - {*former}).isdisjoint(names):
        return
    new = dict(zip(former, names, strict=True))
    for node in graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
        node.output[:] = [new.get(name, name) for name in node.output]
    for value in (*graph.output, *graph.value_info):
        value.name = new.get(value.name, value.name)

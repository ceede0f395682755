"""Weights of few bits in a graph that an exporter wrote in single precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from tensigma.graphs import FewBits, onnx_module
from tensigma.layers import grid_of


def weights_of_few_bits(model: nn.Module) -> dict[str, FewBits]:
    """The weights of ``model`` that lie on a grid, by name."""
    weights = {}
    for name, layer in model.named_modules():
        grid = grid_of(layer)
        if grid is not None:
            assert isinstance(layer.weight, Tensor)
            weights[f"{name}.weight" if name else "weight"] = FewBits.of(layer.weight, grid)
    return weights


def matching(name: str, array: np.ndarray, weights: Mapping[str, FewBits]) -> tuple[FewBits, bool] | None:
    """The weight of few bits that a stored ``array`` is, rescaled if need be, and whether it is stored transposed.

    Exporters scale weights, when they fold BatchNorm into them, and transpose and rename some of them.
    """
    for key in sorted(weights, key=lambda key: key != name):
        few = weights[key].rescaled_to(array)
        if few is not None:
            return few, False
        few = weights[key].rescaled_to(array.T) if array.ndim == 2 else None
        if few is not None:
            return few, True
    return None


def stored_weights(proto: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """The matrices and kernels that a model stores in single precision."""
    onnx = onnx_module("onnx")
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1:
            yield tensor, onnx.numpy_helper.to_array(tensor)


def pack_(proto: Any, weights: Mapping[str, FewBits], *, int4: bool) -> None:
    """Store those of ``weights`` that the graph holds in few bits, in place.

    A weight that an exporter changed otherwise than by a factor for each row stays as it is.
    """
    if not weights:
        return
    graph = proto.graph
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    names |= {tensor.name for tensor in graph.initializer}

    def new(name: str) -> str:
        free = name
        while free in names:
            free += "_"
        names.add(free)
        return free

    kept, unpacking = [], []
    found = {tensor.name: matching(tensor.name, array, weights) for tensor, array in stored_weights(proto)}
    for tensor in graph.initializer:
        match = found.get(tensor.name)
        if match is None:
            kept.append(tensor)
            continue
        few, transposed = match
        tensors, nodes, _ = few.written(tensor.name, new, int4=int4, transposed=transposed)
        kept += tensors
        unpacking += nodes
    operators = list(graph.node)
    for field, items in ((graph.initializer, kept), (graph.node, [*unpacking, *operators])):
        copies = [type(item).FromString(item.SerializeToString()) for item in items]
        del field[:]
        field.extend(copies)

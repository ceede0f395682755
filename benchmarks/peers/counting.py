"""Multiply-adds of an ONNX graph for one image: one counter for all tools."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnx

_PRODUCTS = ("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul")
_CONVOLUTIONS = ("Conv", "ConvInteger", "QLinearConv")
#: Would count for something, and appear in none of the graphs so far.
_UNKNOWN = ("ConvTranspose", "Einsum", "LSTM", "GRU", "RNN", "Attention", "FusedConv", "FusedMatMul")


def macs_of(file: Path) -> int:
    """Multiply-adds of all convolutions and matrix products, additions of a bias left out."""
    model = onnx.load(file)
    of_one_image_(model.graph)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    shapes = shapes_of(model.graph)
    total = 0
    for node in model.graph.node:
        if node.op_type in _UNKNOWN:
            raise ValueError(f"{file}: {node.op_type} is not counted; add it to {__name__}")
        if node.op_type in _CONVOLUTIONS:
            # QLinearConv has scale and zero point of its input before its weight.
            weight = shapes[node.input[3 if node.op_type == "QLinearConv" else 1]]
            total += positive(file, node, math.prod(shapes[node.output[0]]) * math.prod(weight[1:]))
        elif node.op_type in _PRODUCTS:
            total += positive(file, node, math.prod(shapes[node.output[0]]) * inner_size(node, shapes))
    return total


def of_one_image_(graph: Any) -> None:
    """A batch of any size becomes one of 1, and sizes that follow from it are forgotten."""
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        first = value.type.tensor_type.shape.dim[0]
        if first.dim_param:
            first.dim_value = 1


def positive(file: Path, node: Any, count: int) -> int:
    """A size that is not known is written as 0."""
    if count <= 0:
        raise ValueError(f"{file}: the size of {node.output[0]} is not known")
    return count


def inner_size(node: Any, shapes: dict[str, tuple[int, ...]]) -> int:
    """The length of the sums of a matrix product."""
    shape = shapes[node.input[0]]
    transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return shape[-2] if transposed else shape[-1]


def shapes_of(graph: Any) -> dict[str, tuple[int, ...]]:
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        shapes[value.name] = tuple(dimension.dim_value for dimension in value.type.tensor_type.shape.dim)
    return shapes

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
    model = onnx.shape_inference.infer_shapes(onnx.load(file), data_prop=True)
    shapes = shapes_of(model.graph)
    total = 0
    for node in model.graph.node:
        if node.op_type in _UNKNOWN:
            raise ValueError(f"{file}: {node.op_type} is not counted; add it to {__name__}")
        if node.op_type in _CONVOLUTIONS:
            # QLinearConv has scale and zero point of its input before its weight.
            weight = shapes[node.input[3 if node.op_type == "QLinearConv" else 1]]
            total += math.prod(shapes[node.output[0]]) * math.prod(weight[1:])
        elif node.op_type in _PRODUCTS:
            total += math.prod(shapes[node.output[0]]) * inner_size(node, shapes)
    return total


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

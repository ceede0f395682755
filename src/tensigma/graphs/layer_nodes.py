"""Nodes that are layers: Conv, ConvTranspose, Gemm and MatMul whose weights are constant, as plain PyTorch layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensigma.graphs.packages import onnx_module
from tensigma.graphs.padding import Padding
from tensigma.graphs.source import Source, subgraphs
from tensigma.layers import Geometry

#: Operators that have weights to compress.
OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_FLOATS = {torch.float16, torch.float32, torch.float64}


@dataclass(frozen=True, eq=False)
class LayerNode:
    """A node as a layer: what it reads, the plain layer that computes the same, and zeros to add before that."""

    node: Any
    weight: str
    geometry: Geometry
    padding: Padding | None = None

    @property
    def input(self) -> str:
        """The value that the layer is applied to."""
        return str(self.node.input[0])

    @property
    def output(self) -> str:
        """The value that it computes."""
        return str(self.node.output[0])


class _NotALayer(Exception):
    """Why a node stays as it is."""


def layer_node(source: Source, node: Any) -> LayerNode | str | None:
    """A node as a layer; why it is none although it has weights; or None if it has none."""
    if node.domain not in ("", "ai.onnx"):
        if _is_function_with_layers(source, node):
            return (
                f"{node.op_type} is a function of the file, and layers inside functions are left alone; "
                "onnx.inliner.inline_local_functions puts them into the graph"
            )
        if node.op_type in OPERATORS or "Conv" in node.op_type:
            return f"operators of {node.domain} are left as they are"
        return None
    inside = sum(_count(graph) for graph in subgraphs(node))
    if inside:
        what = "layer inside it is" if inside == 1 else f"{inside} layers inside it are"
        return f"{node.op_type} decides at run time what it computes, so the {what} left alone"
    if node.op_type not in OPERATORS:
        return None
    try:
        layer = _READERS[node.op_type](source, node)
    except _NotALayer as reason:
        return str(reason)
    other = None if layer is None else source.other_reader(node, layer.weight)
    return layer if other is None else f"its weight is read by {other} too, and has to stay as it is"


def to_module(source: Source, layer: LayerNode) -> nn.Module:
    """The plain layer with the weights of the node."""
    weight, bias = weights_of(source, layer)
    module = layer.geometry.to_module()
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module.eval()


def weights_of(source: Source, layer: LayerNode) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the node, as a plain layer of its kind stores them."""
    node, weight = layer.node, _tensor(source, layer.weight)
    bias = _tensor(source, node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if node.op_type == "MatMul":
        return weight.T.contiguous(), None
    if node.op_type == "Gemm":
        alpha, beta = (attribute(node, name, 1.0) for name in ("alpha", "beta"))
        weight = weight if attribute(node, "transB", 0) else weight.T.contiguous()
        weight = weight if alpha == 1 else weight * alpha
        if bias is not None:
            bias = (bias if beta == 1 else bias * beta).reshape(-1).expand(len(weight)).contiguous()
    return weight, bias


def attribute(node: Any, name: str, default: Any) -> Any:
    """An attribute of a node, or its default."""
    helper = onnx_module("onnx").helper
    item = next((item for item in node.attribute if item.name == name), None)
    return default if item is None else helper.get_attribute_value(item)


def _conv(source: Source, node: Any) -> LayerNode:
    shape, weight = _weight(source, node)
    taps = shape[2:]
    strides, dilations = _axes(node, "strides", taps), _axes(node, "dilations", taps)
    padding = _padding(node, taps, strides, dilations)
    equal = padding.kind == "NOTSET" and all(before == after for before, after in padding.fixed)
    groups = attribute(node, "group", 1)
    geometry = Geometry(
        kind="conv",
        in_channels=shape[1] * groups,
        out_channels=shape[0],
        kernel_size=taps,
        stride=strides,
        padding=tuple(before for before, _ in padding.fixed) if equal else (0,) * len(taps),
        dilation=dilations,
        groups=groups,
        output_padding=(0,) * len(taps),
        bias=_has_bias(source, node),
    )
    return LayerNode(node, weight, geometry, None if equal else padding)


def _conv_transpose(source: Source, node: Any) -> LayerNode:
    shape, weight = _weight(source, node)
    taps = shape[2:]
    strides, dilations = _axes(node, "strides", taps), _axes(node, "dilations", taps)
    if attribute(node, "output_shape", None) is not None:
        raise _NotALayer("its output_shape decides the padding, which no PyTorch layer does")
    padding = _padding(node, taps, strides, dilations)
    if padding.kind != "NOTSET":
        raise _NotALayer(f"auto_pad={padding.kind} of a transposed convolution has no PyTorch layer")
    extra = attribute(node, "output_padding", None) or (0,) * len(taps)
    # Fewer cut off at the end than at the beginning is what PyTorch calls output padding.
    more = tuple(e + before - after for e, (before, after) in zip(extra, padding.fixed, strict=True))
    limits = [max(pair) for pair in zip(strides, dilations, strict=True)]
    if not all(0 <= e < limit for e, limit in zip(more, limits, strict=True)):
        raise _NotALayer(f"pads {list(attribute(node, 'pads', []))} of a transposed convolution have no PyTorch layer")
    groups = attribute(node, "group", 1)
    geometry = Geometry(
        kind="conv_transpose",
        in_channels=shape[0],
        out_channels=shape[1] * groups,
        kernel_size=taps,
        stride=strides,
        padding=tuple(before for before, _ in padding.fixed),
        dilation=dilations,
        groups=groups,
        output_padding=more,
        bias=_has_bias(source, node),
    )
    return LayerNode(node, weight, geometry)


def _gemm(source: Source, node: Any) -> LayerNode:
    shape, weight = _weight(source, node, sizes=(2,))
    if attribute(node, "transA", 0):
        raise _NotALayer("transA=1: it is applied to columns")
    n_in, n_out = reversed(shape) if attribute(node, "transB", 0) else shape
    has_bias = _has_bias(source, node)
    if has_bias:
        bias = source.array(node.input[2]).shape
        if bias not in ((), (1,), (n_out,), (1, 1), (1, n_out)):
            raise _NotALayer(f"its third input has shape {bias}, which is no bias of {n_out} outputs")
    return LayerNode(node, weight, Geometry(kind="linear", in_channels=n_in, out_channels=n_out, bias=has_bias))


def _matmul(source: Source, node: Any) -> LayerNode | None:
    if node.input[1] not in source.constants:
        if node.input[0] in source.constants:
            raise _NotALayer("its constant is the first factor and not the second")
        # A product of two activations has no weights.
        return None
    shape, weight = _weight(source, node, sizes=(2,))
    return LayerNode(node, weight, Geometry(kind="linear", in_channels=shape[0], out_channels=shape[1], bias=False))


_READERS: dict[str, Callable[[Source, Any], LayerNode | None]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
}


def _weight(source: Source, node: Any, sizes: tuple[int, ...] = (3, 4, 5)) -> tuple[tuple[int, ...], str]:
    """Shape and name of a node's weight."""
    name = node.input[1]
    if node.input[0] in source.constants:
        raise _NotALayer("everything it reads is constant")
    if name not in source.constants:
        raise _NotALayer("its weight is computed at run time")
    array = source.array(name)
    if array.ndim not in sizes:
        raise _NotALayer(f"its weight has shape {array.shape}")
    if array.dtype not in (np.float16, np.float32, np.float64):
        raise _NotALayer(f"its weight is of type {array.dtype}")
    return tuple(int(size) for size in array.shape), name


def _has_bias(source: Source, node: Any) -> bool:
    if len(node.input) < 3 or not node.input[2]:
        return False
    if node.input[2] not in source.constants:
        raise _NotALayer("its bias is computed at run time")
    return True


def _axes(node: Any, name: str, taps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(attribute(node, name, None) or (1,) * len(taps))


def _padding(node: Any, taps: tuple[int, ...], strides: tuple[int, ...], dilations: tuple[int, ...]) -> Padding:
    kind = attribute(node, "auto_pad", b"NOTSET").decode()
    if kind in ("SAME_UPPER", "SAME_LOWER"):
        return Padding(kind, (), taps, strides, dilations).simplest
    pads = attribute(node, "pads", None) if kind == "NOTSET" else None
    values = list(pads or [0] * 2 * len(taps))
    return Padding("NOTSET", tuple(zip(values[: len(taps)], values[len(taps) :], strict=True)))


def _tensor(source: Source, name: str) -> Tensor:
    # A copy: arrays of a file may be read-only views of it.
    return torch.from_numpy(np.array(source.array(name)))


def _is_function_with_layers(source: Source, node: Any) -> bool:
    called = (node.domain, node.op_type)
    return any(_count(function) for function in source.model.functions if (function.domain, function.name) == called)


def _count(graph: Any) -> int:
    """Nodes with weights in a graph or a function, at any depth."""
    inside = sum(_count(inner) for node in graph.node for inner in subgraphs(node))
    return inside + sum(node.op_type in OPERATORS for node in graph.node)

"""Layers in a row, to be timed: what they are, their name in a table of times, and a graph that runtimes read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tensigma.layers import Format, Geometry


@dataclass(frozen=True)
class Chain:
    """Plain layers in a row and the size of their input: a dense layer, or the layers that replace it.

    >>> from torch import nn
    >>> chain = Chain.of(Geometry.of(nn.Conv2d(8, 16, 3, padding=1, bias=False)), None, (14, 14))
    >>> chain.key, chain.macs
    ('1×14×14 conv 8>16 k3x3 s1x1 p1x1 d1x1 g1', 225792)
    """

    stages: tuple[Geometry, ...]
    #: Spatial size of one input; for Linear, its leading shape.
    size: tuple[int, ...]
    batch: int = 1

    @classmethod
    def of(
        cls, geometry: Geometry, format: Format | None, size: Sequence[int], *, batch: int = 1, bias: bool | None = None
    ) -> Chain:
        """The chain of a layer in ``format`` (None: dense)."""
        layer = geometry if bias is None else replace(geometry, bias=bias)
        stages = (layer,) if format is None else tuple(format.stages(layer).values())
        return cls(stages, tuple(size), batch)

    @property
    def macs(self) -> int:
        """Multiply-adds for one sample."""
        total, size = 0, self.size
        for stage in self.stages:
            total += stage.macs_from(size)
            size = stage.output_size(size)
        return total

    @property
    def input_shape(self) -> tuple[int, ...]:
        first = self.stages[0]
        if first.kind == "linear":
            return (self.batch, *self.size, first.in_channels)
        return (self.batch, first.in_channels, *self.size)

    @property
    def key(self) -> str:
        """All that its time depends on, as text."""
        return f"{'×'.join(map(str, (self.batch, *self.size)))} " + "; ".join(map(_words, self.stages))


def _words(stage: Geometry) -> str:
    text = f"{stage.kind} {stage.in_channels}>{stage.out_channels}"
    if stage.kind != "linear":
        pads = "x".join(str(a) if a == b else f"{a}+{b}" for a, b in stage.pads)
        axes = (("k", stage.kernel_size), ("s", stage.stride), ("d", stage.dilation))
        kernel, stride, dilation = (letter + "x".join(map(str, values)) for letter, values in axes)
        text += f" {kernel} {stride} p{pads} {dilation} g{stage.groups}"
    return text + " bias" * stage.bias


# Old enough for every ONNX Runtime that the extra allows, and new enough for every node below.
_OPSET, _IR = 17, 8


def onnx_graph(chain: Chain) -> bytes:
    """A chain of layers with random weights as a serialised ONNX graph with one input ``x``: enough to be timed."""
    from onnx import TensorProto, helper

    nodes: list[Any] = []
    weights: list[Any] = []
    tensor = "x"
    for index, stage in enumerate(chain.stages):
        tensor = _append(stage, index, tensor, nodes, weights)
    into = helper.make_tensor_value_info("x", TensorProto.FLOAT, chain.input_shape)
    out = helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "chain", [into], [out], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
    return bytes(model.SerializeToString())


def _append(stage: Geometry, index: int, tensor: str, nodes: list[Any], weights: list[Any]) -> str:
    """Append the nodes of one layer; returns the name of its output. Padding is with zeros, whatever its mode."""
    from onnx import helper, numpy_helper

    def weight(name: str, *shape: int) -> str:
        values = torch.randn(shape) * (shape[-1] ** -0.5)
        weights.append(numpy_helper.from_array(values.numpy(), f"{name}{index}"))
        return f"{name}{index}"

    out = f"y{index}"
    if stage.kind == "linear":
        product = out if not stage.bias else f"product{index}"
        nodes.append(
            helper.make_node("MatMul", [tensor, weight("w", stage.in_channels, stage.out_channels)], [product])
        )
        if stage.bias:
            nodes.append(helper.make_node("Add", [product, weight("b", stage.out_channels)], [out]))
        return out
    transposed = stage.kind == "conv_transpose"
    channels = (stage.in_channels, stage.out_channels) if transposed else (stage.out_channels, stage.in_channels)
    inputs = [tensor, weight("w", channels[0], channels[1] // stage.groups, *stage.kernel_size)]
    if stage.bias:
        inputs.append(weight("b", stage.out_channels))
    befores, afters = zip(*stage.pads, strict=True)
    attributes: dict[str, Any] = {
        "kernel_shape": stage.kernel_size,
        "strides": stage.stride,
        "dilations": stage.dilation,
        "group": stage.groups,
        "pads": [*befores, *afters],
    }
    if transposed:
        attributes["output_padding"] = stage.output_padding
    nodes.append(helper.make_node("ConvTranspose" if transposed else "Conv", inputs, [out], **attributes))
    return out

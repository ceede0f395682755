"""A chain of layers as an ONNX graph with random weights: enough to be timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensigma.layers import Geometry

if TYPE_CHECKING:
    from tensigma.planning.timing import Chain

# Old enough for every ONNX Runtime that the extra allows, and new enough for every node below.
_OPSET, _IR = 17, 8


def onnx_graph(chain: Chain) -> bytes:
    """The serialised graph, with one input ``x``."""
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
    """The nodes of one layer; returns the name of what comes out. Borders are zeros whatever the mode of padding."""
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

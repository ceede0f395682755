"""Every kind of node with weights: read as a layer, compressed, and written back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tensigma as ts
from support_graphs import FLOAT, answers_of, assert_same, graph_of, inputs_for, node, weights, written

W = weights(6, 4, 3, 3)
B = weights(6)


def conv(weight: np.ndarray = W, *, bias: bool = False, input: Any = ("n", 4, 9, 7), **attributes: Any) -> Any:
    inputs = "x w b" if bias else "x w"
    tensors = {"w": weight} | ({"b": weights(len(weight))} if bias else {})
    return graph_of([node("Conv", inputs, "c", **attributes), node("Relu", "c")], tensors, input=input)


def transposed(weight: np.ndarray, **attributes: Any) -> Any:
    return graph_of([node("ConvTranspose", "x w b", **attributes)], {"w": weight, "b": weights(6)})


def linear(nodes: list[Any], input: Any = ("n", 8), **tensors: np.ndarray) -> Any:
    return graph_of(nodes, tensors, input=input)


CASES = {
    "conv": conv(bias=True, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 1], dilations=[1, 2]),
    "no kernel_shape": conv(),
    "no bias": conv(kernel_shape=[3, 3]),
    "asymmetric pads": conv(bias=True, pads=[0, 2, 1, 1], strides=[2, 2]),
    "padded in one axis only": conv(weights(6, 4, 1, 3), pads=[1, 1, 0, 2], strides=[2, 1]),
    "bias as an addition": graph_of(
        [node("Conv", "x w", "c"), node("Add", "c b", "a"), node("Relu", "a")], {"w": W, "b": weights(6, 1, 1)}
    ),
    "dilation": conv(bias=True, pads=[2, 3, 2, 3], dilations=[2, 3]),
    "same upper": conv(bias=True, auto_pad="SAME_UPPER", strides=[2, 2]),
    "same lower": conv(auto_pad="SAME_LOWER", strides=[2, 3]),
    "same, stride 1": conv(weights(6, 4, 2, 3), auto_pad="SAME_UPPER"),
    "valid": conv(auto_pad="VALID", strides=[2, 1]),
    "groups": conv(weights(6, 2, 3, 3), bias=True, group=2, pads=[1, 1, 1, 1]),
    "pointwise": conv(weights(6, 4, 1, 1), bias=True, strides=[2, 2]),
    "one axis": conv(weights(6, 4, 5), bias=True, input=("n", 4, 19), pads=[2, 1]),
    "three axes": conv(weights(6, 4, 3, 3, 3), input=("n", 4, 5, 6, 5), pads=[1, 1, 1, 1, 1, 1]),
    "transposed": transposed(weights(4, 6, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 0]),
    "transposed, asymmetric": transposed(weights(4, 6, 3, 2), strides=[2, 2], pads=[1, 0, 0, 0]),
    "transposed, groups": transposed(weights(4, 3, 2, 2), strides=[2, 2], group=2),
    "gemm": linear([node("Gemm", "x w b")], w=weights(8, 5), b=weights(5)),
    "gemm, transposed and scaled": linear(
        [node("Gemm", "x w b", transB=1, alpha=0.5, beta=2.0)], w=weights(5, 8), b=weights(1, 5)
    ),
    "gemm, one number as bias": linear([node("Gemm", "x w b")], w=weights(8, 5), b=weights(1)),
    "gemm, no bias": linear([node("Gemm", "x w", transB=1)], w=weights(5, 8)),
    "matmul": linear([node("MatMul", "x w")], w=weights(8, 5)),
    "matmul over positions": linear([node("MatMul", "x w")], ("n", 3, "t", 8), w=weights(8, 5)),
    "matmul and bias": linear(
        [node("MatMul", "x w", "m"), node("Add", "b m", "a"), node("Relu", "a")], w=weights(8, 5), b=weights(5)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_what_its_node_does_also_when_replaced(name: str, tmp_path: Path):
    file = written(CASES[name], tmp_path)
    network = ts.load_onnx(file)
    assert len(network.layers) == 1
    assert not network.left_alone
    x = inputs_for(network)
    expected = answers_of(file, x)
    assert_same(network, x, expected)
    # At full rank the factors are the layer.
    plan = ts.plan(network, ranks=ts.Ranks({"*": 99}), norm="frobenius", skip=(), saving="none")
    small, _ = ts.compress(network, plan)
    assert_same(small, x, expected)
    ts.export(small, tmp_path / "small.onnx", x)
    assert_same(ts.load_onnx(tmp_path / "small.onnx"), x, expected)
    operators = [item.op_type for item in onnx.load(tmp_path / "small.onnx").graph.node]
    assert len(operators) > len(CASES[name].graph.node)
    # A bias of its own would be an addition of its own.
    assert operators.count("Add") == (name in ("matmul and bias", "bias as an addition"))


@pytest.mark.parametrize("method", ["tucker2", "cp", "svd", "spatial-svd", "tensor-train"])
@pytest.mark.parametrize("name", ["same upper", "same lower", "asymmetric pads", "same, stride 1"])
def test_zeros_of_every_kind_go_with_every_format(name: str, method: str, tmp_path: Path):
    network = ts.load_onnx(written(CASES[name], tmp_path))
    x = inputs_for(network)
    plan = ts.plan(network, ranks=ts.Ranks({"*": 3}), method=method, norm="frobenius", skip=(), saving="none")
    small, report = ts.compress(network, plan)
    assert len(report.compressed) == 1
    # The file is kept only if it computes what the module computes.
    assert ts.export(small, tmp_path / "small.onnx", x).max_difference is not None


def stored(*nodes: Any, **tensors: np.ndarray) -> Any:
    return graph_of([*nodes, node("Conv", "x w b", "c", pads=[1, 1, 1, 1]), node("Relu", "c")], tensors | {"b": B})


def constant(name: str, array: np.ndarray) -> Any:
    return helper.make_node("Constant", [], [name], name=name, value=numpy_helper.from_array(array))


MADE_FROM = {
    "constant": stored(constant("w", W)),
    "transpose": stored(node("Transpose", "v", "w", perm=[3, 2, 0, 1]), v=W.transpose(2, 3, 1, 0).copy()),
    "reshape": stored(node("Reshape", "v s", "w"), v=W.reshape(24, 9), s=np.array([6, 4, 3, 3])),
    "cast": stored(node("Cast", "v", "w", to=FLOAT), v=W.astype(np.float16)),
    "identity": stored(node("Identity", "v", "w"), v=W),
    "unsqueeze": stored(node("Unsqueeze", "v a", "w"), v=weights(6, 4, 3), a=np.array([3])),
    "dequantize": stored(
        node("DequantizeLinear", "v s z", "w", axis=0),
        v=(W * 40).astype(np.int8),
        s=np.full(6, 1 / 40, np.float32),
        z=np.zeros(6, np.int8),
    ),
    "a chain": stored(
        node("Cast", "v", "c1", to=FLOAT),
        node("Identity", "c1", "c2"),
        node("Reshape", "c2 s", "w"),
        s=np.array(W.shape),
        v=W.astype(np.float16).ravel(),
    ),
}


@pytest.mark.parametrize("name", MADE_FROM)
def test_weights_may_be_made_from_constants(name: str, tmp_path: Path):
    file = written(MADE_FROM[name], tmp_path)
    network = ts.load_onnx(file)
    x = inputs_for(network)
    expected = answers_of(file, x)
    assert_same(network, x, expected)
    small, _ = ts.compress(network, ts.plan(network, ranks=ts.Ranks({"*": 2}), norm="frobenius", skip=()))
    ts.export(small, tmp_path / "small.onnx", x)
    graph = onnx.load(tmp_path / "small.onnx").graph
    # The former weight, and everything that made it, is gone.
    assert [item.op_type for item in graph.node][-1] == "Relu"
    assert {item.op_type for item in graph.node} == {"Conv", "Relu"}
    assert not {"v", "w", "s", "a", "z"} & {tensor.name for tensor in graph.initializer}


LEFT_ALONE = {
    "computed weight": (
        [node("Conv", "x v", "y"), node("Relu", "x", "u"), node("ReduceMean", "u", "v", axes=[0], keepdims=1)],
        "weight is computed at run time",
    ),
    "transA": ([node("Flatten", "x", "f"), node("Gemm", "f g", "y", transA=1)], "transA=1"),
    "first factor": ([node("MatMul", "q x", "y")], "first factor"),
    "batched factor": ([node("MatMul", "x p", "y")], r"shape \(4, 7, 5\)"),
    "third input": ([node("Flatten", "x", "f"), node("Gemm", "f d e", "y")], "no bias of 5 outputs"),
    "transposed, output_shape": (
        [node("ConvTranspose", "x t", "y", output_shape=[20, 14], strides=[2, 2])],
        "output_shape",
    ),
    "transposed, auto_pad": ([node("ConvTranspose", "x t", "y", auto_pad="SAME_UPPER", strides=[2, 2])], "auto_pad"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_no_layer_runs_as_it_is_and_says_why(name: str, tmp_path: Path):
    nodes, reason = LEFT_ALONE[name]
    tensors = {
        "g": weights(3, 5),
        "q": weights(9, 9),
        "p": weights(4, 7, 5),
        "d": weights(4 * 9 * 7, 5),
        "e": weights(3, 5),
        "t": weights(4, 6, 3, 3),
        "w": weights(6, 4, 1, 1),
    }
    # The constants that a case does not read are in the way of nothing.
    model = graph_of(
        [*sorted(nodes, key=lambda item: item.output[0] == "y"), node("Conv", "x w", "z")], tensors, outputs=("y", "z")
    )
    file = written(model, tmp_path)
    network = ts.load_onnx(file)
    assert list(network.layers) == ["the.z"]
    ((left, why),) = network.left_alone.items()
    assert left == "the.y"
    assert re.search(reason, why)
    x = inputs_for(network)
    assert_same(network, x, answers_of(file, x))

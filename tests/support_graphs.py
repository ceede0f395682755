"""Small ONNX models, made node by node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

import tensigma as ts

FLOAT = TensorProto.FLOAT


def weights(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Random numbers of about unit variance for sums over all axes but the first."""
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (values / math.prod(shape[1:]) ** 0.5).astype(dtype)


def graph_of(
    nodes: Sequence[Any],
    tensors: Mapping[str, np.ndarray],
    *,
    input: Sequence[Any] = ("n", 4, 9, 7),
    inputs: Mapping[str, Sequence[Any]] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
    ir_version: int = 8,
    domains: Sequence[str] = (),
    element: int = FLOAT,
) -> Any:
    """A model of these nodes, whose stored tensors are ``tensors``."""
    values = {"x": input} if inputs is None else inputs
    graph = helper.make_graph(
        list(nodes),
        "test",
        [helper.make_tensor_value_info(name, element, shape) for name, shape in values.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    for output in graph.output:
        output.type.tensor_type.elem_type = element
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version, producer_name="a test")
    helper.set_model_props(model, {"alphabet": "abc"})
    return model


def node(operator: str, inputs: str, output: str = "y", **attributes: Any) -> Any:
    """A node named after its output; ``inputs`` are names with blanks between them."""
    return helper.make_node(operator, inputs.split(" "), [output], name=f"the.{output}", **attributes)


def written(model: Any, folder: Path, name: str = "model.onnx") -> Path:
    """The model in a file."""
    onnx.save_model(model, folder / name)
    return folder / name


def inputs_for(network: ts.graphs.OnnxNetwork, batch: int = 3, size: int = 6) -> torch.Tensor:
    """Random inputs; sizes that may vary are ``size``."""
    shape = (batch, *(size if length is None else length for length in network.input_shape[1:]))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x.to(ts.graphs.TYPES[network.input_facts[network.input]["type"]][0])


def answers_of(file: Path, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """What ONNX Runtime computes."""
    with torch.inference_mode():
        return list(ts.running.leaves(ts.graphs.OnnxModel(file, **options)(x)).values())


def assert_same(network: torch.nn.Module, x: torch.Tensor, expected: list[torch.Tensor], share: float = 1e-5) -> None:
    """The outputs of ``network`` are those expected, up to ``share`` of the largest value."""
    with torch.inference_mode():
        outputs = list(ts.running.leaves(network(x)).values())
    assert len(outputs) == len(expected)
    for output, target in zip(outputs, expected, strict=True):
        assert output.shape == target.shape
        torch.testing.assert_close(output, target, rtol=0, atol=share * float(target.abs().max()))

"""Files of torchvision's networks by both of PyTorch's exporters; OpenVINO opens what comes of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tensigma as ts
from support_graphs import answers_of, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SIZE = 64


def export(model: torch.nn.Module, file: Path, exporter: str) -> None:
    x = torch.randn(2, 3, SIZE, SIZE)
    if exporter == "dynamo":
        ts.export(model, file, x)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names: dict[str, Any] = {"input_names": ["input"], "output_names": ["output"]}
        torch.onnx.export(
            model, (x,), file, dynamo=False, dynamic_axes={"input": {0: "n"}, "output": {0: "n"}}, **names
        )


@pytest.mark.parametrize(
    ("name", "exporter"),
    [("resnet18", "dynamo"), ("resnet18", "torchscript"), ("mobilenet_v3_small", "torchscript")],
)
def test_both_exporters(name: str, exporter: str, tmp_path: Path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ts.zoo.load_model(f"torchvision:{name}")
    file = tmp_path / "model.onnx"
    export(model, file, exporter)
    network = ts.load_onnx(file)
    # Every layer is found, under the name it has in PyTorch.
    assert {*network.layers} == {layer.name for layer in ts.layers.find_layers(model)}
    assert not network.left_alone
    x = torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    expected = answers_of(file, x)
    assert_same(network, x, expected)
    plan = ts.plan(network, ranks=ts.Ranks({"*": 8}), norm="frobenius", method="svd")
    small, report = ts.compress(network, plan)
    assert len(report.compressed) > 15
    out = tmp_path / "small.onnx"
    ts.export(small, out, x)
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed (extra openvino)")
    compiled = openvino.compile_model(str(out), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    (found,) = compiled(x.numpy()).values()
    assert_same(small, x, [torch.from_numpy(found.copy())], share=1e-4)

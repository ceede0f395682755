"""Files of torchvision's networks by both of PyTorch's exporters; OpenVINO opens what comes of them."""

from __future__ import annotations

from pathlib import Path

import onnx_exports
import pytest
import torch

import tensigma as ts
from support_graphs import answers_of, assert_same

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
SIZE = onnx_exports.SIZE


@pytest.mark.parametrize(
    ("name", "exporter"),
    [("squeezenet1_1", "torchscript"), ("vision_transformer", "dynamo"), ("vision_transformer", "torchscript")],
)
def test_at_full_rank_the_answers_are_the_same(name: str, exporter: str, tmp_path: Path):
    facts = onnx_exports.at_full_rank(onnx_exports.network(name), exporter, tmp_path)
    assert facts["difference_as_read"] < 1e-4
    assert facts["difference_at_full_rank"] < 1e-4
    # Projections of attention are no modules in PyTorch, and layers in the file.
    assert facts["decomposed"] >= 0.7 * facts["layers_in_pytorch"]


@pytest.mark.parametrize(
    ("name", "exporter"),
    [("resnet18", "own"), ("resnet18", "torchscript"), ("mobilenet_v3_small", "torchscript")],
)
def test_both_exporters(name: str, exporter: str, tmp_path: Path):
    model = onnx_exports.network(name)
    file = tmp_path / "model.onnx"
    if exporter == "own":
        ts.export(model, file, torch.randn(2, 3, SIZE, SIZE))
    else:
        onnx_exports.export(model, file, exporter)
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

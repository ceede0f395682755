"""Weights of few bits in ONNX files: small on disk, the same to compute with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_grids import round_, rounded
from support_nets import batches, small_net
from tensigma.deployment import OnnxModel, exporting
from tensigma.graphs import FewBits
from tensigma.layers import HALF, grid_of

pytestmark = pytest.mark.slow
KINDS = {3: "INT4", 8: "INT8", HALF: "FP16"}


class Tokens(nn.Module):
    """Linear layers on sequences, which become MatMul with a transposed weight; one of them square."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.square = nn.Linear(16, 16, bias=False)
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.square(torch.relu(self.first(x)))))


class Folded(nn.Module):
    """BatchNorm after a convolution, one channel of it silent, and after a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.up, self.up_norm = nn.ConvTranspose2d(8, 6, 2, bias=False), nn.BatchNorm2d(6)
        for norm in (self.norm, self.up_norm):
            assert norm.running_var is not None
            norm.running_var.uniform_(0.3, 3)
            norm.weight.data.uniform_(-2, 2)
        self.norm.weight.data[3] = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.up_norm(self.up(torch.relu(self.norm(self.conv(x)))))


def assert_same(model: nn.Module, file: Path, x: Tensor) -> None:
    expected = model(x).detach()
    scale = float(expected.abs().max())
    torch.testing.assert_close(OnnxModel(file)(x), expected, rtol=0, atol=1e-5 * scale)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ts.Exported:
    """A network whose weights are on grids, stored in single precision all the same."""
    net = rounded(small_net(), 4)
    return ts.export(net, tmp_path_factory.mktemp("plain") / "plain.onnx", batches()[0], pack=False)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("tokens") / "tokens.onnx"
    ts.export(Tokens().eval(), path, torch.randn(4, 7, 12))
    return path


@pytest.mark.parametrize("bits", KINDS)
def test_weights_take_few_bits_and_compute_the_same(bits: int, plain: ts.Exported, tmp_path: Path) -> None:
    net, x = rounded(small_net(), bits), batches(seed=4)[0]
    packed = ts.export(net, tmp_path / "packed.onnx", x)
    assert packed.packed == {KINDS[bits]: 8}
    assert packed.opset == (21 if bits <= 4 else 20)
    assert plain.packed == {}
    assert plain.opset == 20
    assert_same(net, packed.path, x)
    onnx.checker.check_model(onnx.load(packed.path), full_check=True)
    n_weights = sum(layer.get_parameter("weight").numel() for layer in net.modules() if grid_of(layer) is not None)
    saved = n_weights * (4 - {"INT4": 0.5, "INT8": 1, "FP16": 2}[KINDS[bits]])
    # Names and shapes of nodes, and scales, take some of it.
    assert plain.bytes - packed.bytes > saved - 3000
    assert packed.bytes == packed.path.stat().st_size
    assert {node.domain for node in onnx.load(packed.path).graph.node} == {""}


@pytest.mark.parametrize("groups", [1, 4])
def test_matrices_that_are_stored_transposed(groups: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tokens().eval()
    for layer in (model.first, model.square, model.last):
        round_(layer, 4, groups)
    x = torch.randn(3, 7, 12)
    exported = ts.export(model, tmp_path / "tokens.onnx", x)
    assert exported.packed == {"INT4": 3}
    assert_same(model, exported.path, x)


def test_folded_batchnorm_changes_scales_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Folded().eval(), torch.randn(3, 3, 8, 8)
    grids = {layer: round_(layer, 4) for layer in (model.conv, model.up)}
    exported = ts.export(model, tmp_path / "folded.onnx", x)
    tensors = {tensor.name: tensor for tensor in onnx.load(exported.path).graph.initializer}
    integers = onnx.numpy_helper.to_array(tensors["conv.weight.integers"]).astype(np.int8)
    expected = grids[model.conv].integers(model.conv.weight)
    assert expected is not None
    assert np.array_equal(integers.reshape(8, -1), expected.numpy())
    # A transposed convolution has its outputs on another axis than its scales, and is left as it is.
    assert exported.packed == {"INT4": 1}
    assert_same(model, exported.path, x)


@pytest.mark.parametrize("reason", ["operators", "runtime"])
def test_eight_bits_where_four_cannot_be_read(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = rounded(Tokens().eval(), 4), torch.randn(3, 7, 12)
    # What has left its grid is stored as it is.
    model.get_parameter("last.weight").data += 0.01
    if reason == "runtime":
        monkeypatch.setattr(exporting, "runs_int4", lambda: False)
        monkeypatch.setattr("tensigma.graphs.few_bits.runs_int4", lambda: False)
    exported = ts.export(model, tmp_path / "a.onnx", x, opset=20 if reason == "operators" else None)
    assert exported.opset == 20
    assert exported.packed == {"INT8": 2}
    assert_same(model, exported.path, x)


@pytest.mark.parametrize("opset", [12, 21])
def test_networks_that_came_as_files(opset: int, tokens: Path, tmp_path: Path) -> None:
    proto = onnx.load(tokens)
    proto.opset_import[0].version = opset
    onnx.save_model(proto, tmp_path / "a.onnx")
    network, x = ts.load_onnx(tmp_path / "a.onnx"), torch.randn(4, 7, 12)
    names = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    for name, bits in zip(names, (4, 8, HALF), strict=True):
        round_(network.get_submodule(name), bits, 1 if bits == HALF else 2)
    exported = ts.export(network, tmp_path / "small.onnx", x)
    assert exported.packed == ({"INT4": 1, "INT8": 1, "FP16": 1} if opset == 21 else {"INT8": 2, "FP16": 1})
    assert_same(network, exported.path, x)
    assert ts.export(network, tmp_path / "plain.onnx", x, pack=False).packed == {}
    # The layers of the new file are layers again, and it is written as it is.
    again = ts.load_onnx(exported.path)
    assert [name for name, layer in again.named_modules() if isinstance(layer, nn.Linear)] == names
    assert_same(again, exported.path, x)
    assert ts.export(again, tmp_path / "again.onnx", x).packed == exported.packed
    ts.save(again, tmp_path / "archive")
    assert ts.deployment.stored_bytes(tmp_path / "archive") == (tmp_path / "again.onnx").stat().st_size
    assert ts.deployment.plain_bytes(again) == exported.bytes


@pytest.mark.parametrize("bits", [3, 8, HALF])
def test_rows_may_be_rescaled_and_nothing_else(bits: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    layer = nn.Conv2d(6, 10, 3)
    layer.weight.data = torch.randn(layer.weight.shape, generator=rng)
    few = FewBits.of(layer.weight, round_(layer, bits))
    weight = layer.weight.detach().numpy()
    assert few.rescaled_to(weight) is few
    factors = torch.randn(10, 1, 1, 1, generator=rng).numpy()
    scaled = few.rescaled_to(weight * factors)
    assert scaled is not None
    np.testing.assert_allclose(scaled.dense(), weight * factors, rtol=1e-6)
    changes: list[Callable[[Any], Any]] = [
        lambda w: w + 1e-3,
        lambda w: w * torch.randn(1, 6, 1, 1, generator=rng).numpy(),
        lambda w: w[:, :, :2],
        lambda w: np.where(np.arange(6)[:, None, None] == 2, np.nan, w),
    ]
    assert all(few.rescaled_to(change(weight)) is None for change in changes)


def test_a_model_with_folded_batchnorms_goes_all_the_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Conv2d(16, 32, 3, padding=1, bias=False)]
    body = [part for conv in convs for part in (conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU())]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    data = [torch.randn(32, 3, 16, 16) for _ in range(3)]
    for batch in data:
        model.train()(batch)
    model.eval()
    small, _ = ts.compress(model, data, budget=ts.Bytes(0.25), answers=ts.Scores(axis=1))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in small.modules())
    exported = ts.export(small, tmp_path / "small.onnx", data[0][:1])
    assert exported.packed
    torch.testing.assert_close(OnnxModel(tmp_path / "small.onnx")(data[0]), small(data[0]), rtol=1e-4, atol=1e-5)
    ts.save(small, tmp_path / "small")
    assert torch.equal(ts.load(tmp_path / "small", model)(data[0]), small(data[0]))
    evaluation = ts.evaluate(small, data, original=model, answers=ts.Scores(axis=1))
    alike = (small(torch.cat(data)).argmax(1) == model(torch.cat(data)).argmax(1)).float().mean()
    assert evaluation.agreement == pytest.approx(alike.item())
    assert evaluation.certificate is not None
    assert evaluation.agreement is not None
    assert 0 < evaluation.certificate.bound <= evaluation.agreement

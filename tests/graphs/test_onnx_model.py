"""ONNX files as modules, and several models over the same data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.deployment import OnnxModel
from tensigma.errors import InputError, MissingExtra, StoreError
from tensigma.evaluation import Size, compare, measure_latency
from tensigma.graphs import onnx_module

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 7)).eval()


@pytest.fixture(scope="module")
def file(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "net.onnx"
    ts.export(net, path, torch.randn(2, 3, 2, 2))
    return path


def test_a_file_is_evaluated_like_a_model(net: nn.Module, file: Path):
    x = torch.randn(40, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    data = [(part, net(part).argmax(1)) for part in x.split(16)]
    found = ts.evaluate(OnnxModel(file), data, original=net, latency=True, rounds=2)
    assert found.top1 == found.agreement == 1
    assert found.latency is not None
    assert found.latency.rounds == 2


def test_the_file_may_go_once_it_is_open(net: nn.Module, file: Path, tmp_path: Path):
    copied = tmp_path / "copy.onnx"
    copied.write_bytes(file.read_bytes())
    model = OnnxModel(copied)
    copied.unlink()
    x = torch.randn(3, 3, 2, 2)
    torch.testing.assert_close(model(x), net(x).detach(), rtol=1e-5, atol=1e-6)
    # Other precisions and layouts are made to fit.
    torch.testing.assert_close(model(x.double().to(memory_format=torch.channels_last)), model(x))


def test_what_is_no_onnx_file_is_refused(tmp_path: Path, file: Path):
    (tmp_path / "bad.onnx").write_bytes(b"not at all")
    for name in ("bad.onnx", "absent.onnx"):
        with pytest.raises(StoreError, match=name):
            OnnxModel(tmp_path / name)
    with pytest.raises(InputError, match=r"\(2, 5, 2, 2\)"):
        OnnxModel(file)(torch.zeros(2, 5, 2, 2))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(MissingExtra, match=r"tensigma\[onnx\]"):
        onnx_module("onnxruntime.quantization")


def test_models_are_compared_on_the_same_samples(net: nn.Module, file: Path):
    x = torch.randn(30, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    answers = net(x).argmax(1)
    wrong = nn.Sequential(net, _Negative())
    models = {"net": net, "file": OnnxModel(file), "wrong": wrong}
    stream = ((part, labels) for part, labels in zip(x.split(8), answers.split(8), strict=True))
    size = Size(params=1, macs=2, bytes=3)
    found = compare(models, stream, reference="net", sizes={"file": size}, max_samples=20, rounds=3)
    assert {name: each.samples for name, each in found.items()} == dict.fromkeys(models, 20)
    assert found["file"].top1 == found["file"].agreement == 1
    assert found["wrong"].top1 == found["wrong"].agreement == 0
    assert found["file"].size == size
    assert all(each.latency is not None for each in found.values())
    with pytest.raises(InputError, match="empty"):
        compare(models, [])


def test_models_take_turns(file: Path):
    order: list[str] = []

    class Witness(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.inner = name, OnnxModel(file)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append(self.name)
            return self.inner(x)

    measure_latency([Witness("a"), Witness("b")], torch.zeros(1, 3, 2, 2), rounds=2)
    assert order == ["a", "b"] * 5


class _Negative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x

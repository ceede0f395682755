"""Layers whose weights a model reads besides calling them are found, and stay dense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.layers import weight_reads

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers; ``peek`` is called with the first between the calls of both."""

    def __init__(self, peek: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.stem, self.first, self.fc = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.peek = peek

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x).relu())
        self.peek(self.first)
        return self.fc(x.relu())


def fail(layer: nn.Linear) -> None:
    raise RuntimeError(layer.weight.shape)


READS = [
    pytest.param(lambda layer: layer.weight.device, True, id="weight"),
    pytest.param(lambda layer: layer.bias, True, id="bias"),
    pytest.param(lambda layer: getattr(layer, "weight", None), True, id="getattr"),
    pytest.param(lambda layer: next(layer.parameters()).device, False, id="parameters"),
    pytest.param(lambda layer: layer(torch.zeros(1, 16)), False, id="another-call"),
]


def reads(net: Net) -> set[str]:
    layers = {name: module for name, module in net.named_modules() if isinstance(module, nn.Linear)}
    held = {name: module._parameters for name, module in layers.items()}
    try:
        with weight_reads(net, layers) as read, torch.no_grad():
            # Between calls of the model anybody may read.
            assert net.fc.weight.shape == (5, 16)
            net(X)
    finally:
        for name, module in layers.items():
            assert module._parameters is held[name]
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
    return read


@pytest.mark.parametrize(("peek", "counts"), READS)
def test_reads_are_told_from_calls(peek: Callable[[nn.Linear], object], counts: bool) -> None:
    assert reads(Net(peek)) == ({"first"} if counts else set())


def test_everything_is_as_before_after_an_error_and_an_assignment() -> None:
    with pytest.raises(RuntimeError):
        reads(Net(fail))
    net, new = Net(lambda layer: setattr(layer, "bias", new)), nn.Parameter(torch.ones(16))
    assert reads(net) == {"first"}
    assert net.first.bias is new


def test_such_a_layer_stays_dense_with_the_reason(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net(lambda layer: layer.weight.device).eval()
    stats = ts.calibrate(model, [X])
    assert stats.read_elsewhere == ("first",)
    assert stats.merge(ts.calibrate(model, [X])).read_elsewhere == ("first",)
    stats.save(tmp_path / "stats")
    loaded = ts.Calibration.load(tmp_path / "stats")
    plan = ts.plan(model, loaded, ranks=ts.Ranks({"*": 2}), skip=())
    assert [entry.name for entry in plan.compressed] == ["stem", "fc"]
    assert (plan["first"].reason or "").startswith("the model reads the weight or bias of this layer besides calling")
    small, _ = ts.compress(model, plan, loaded)
    with torch.no_grad():
        assert small(X).shape == (16, 5)


@pytest.mark.slow
def test_compiled_models_are_calibrated_too() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    expected = ts.calibrate(model, [X])
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    stats = ts.calibrate(compiled, [X])
    assert stats.read_elsewhere == ()
    for name, layer in stats.items():
        torch.testing.assert_close(layer.gram, expected[name.removeprefix("_orig_mod.")].gram)

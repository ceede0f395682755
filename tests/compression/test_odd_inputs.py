"""Inputs and weights at the limits of what numbers hold: compressed without harm, or refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.errors import CalibrationWarning, InputError


def net(*, dead: bool = False, bias: bool = True) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1, bias=bias),
            nn.ReLU(),
            nn.Conv2d(12, 16, 3, padding=1, bias=bias),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=bias),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 16, 24, bias=bias),
        ).eval()
    if dead:
        for key, value in {"2.weight": 0.0, "2.bias": -1.0}.items():
            model.get_parameter(key).data.fill_(value)
    return model


def noise(n: int = 16) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))


CASES = [
    pytest.param(net(), noise(1), id="one sample"),
    pytest.param(net(), torch.zeros(4, 3, 8, 8), id="black images"),
    pytest.param(net(), torch.full((4, 3, 8, 8), 0.7), id="constant images"),
    pytest.param(net(dead=True), noise(), id="a dead layer"),
    pytest.param(net(), noise() + 1e6, id="an offset of a million"),
    pytest.param(net(), noise() * 1e-16, id="inputs of 1e-16"),
    pytest.param(net(), noise() * 1e-30, id="inputs of 1e-30"),
    pytest.param(net().double(), noise().double() * 1e-160, id="doubles of 1e-160"),
    pytest.param(net(bias=False).double(), noise().double() * 1e-160, id="doubles of 1e-160, no bias"),
]


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["centred", "sigma"])
@pytest.mark.parametrize(("model", "images"), CASES)
def test_inputs_that_tell_nothing_do_no_harm(model: nn.Module, images: Tensor, norm: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        small, _ = ts.compress(model, [images], recipe=ts.Recipe(ranks=ts.Ranks({"*": 4}), norm=norm))
    with torch.no_grad():
        before, after = model(images).double(), small(images).double()
    assert after.isfinite().all()
    if before.abs().max() > 1e-100:
        assert ((before - after).norm() / before.norm()).item() < 0.2


def test_squares_that_vanish_are_told() -> None:
    with pytest.warns(CalibrationWarning, match="layer '0': its inputs are so small.*count as constant"):
        ts.calibrate(net(), [noise() * 1e-30])


def test_squares_that_overflow_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="layer '0': its inputs are so large that their squares overflow float32"):
        ts.calibrate(net(), [noise() * 1e20])


@pytest.mark.parametrize("scale", [1e20, 1e-25])
def test_extreme_weights_stay_dense_with_the_reason(scale: float) -> None:
    model = net()
    model.get_parameter("2.weight").data.mul_(scale)
    plan = ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius")
    assert "leave the range of numbers" in str(plan["2"].reason)
    assert plan["4"].ranks == (4, 4)

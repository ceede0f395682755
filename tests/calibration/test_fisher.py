"""Squared gradients against one backward pass per sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import tensigma as ts
from tensigma.errors import InputError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        self.twice = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(self.twice(self.twice(self.conv(x)).relu()))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batches(seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 2, 4, 4, generator=generator)
    y = torch.randint(3, (5,), generator=generator)
    return list(zip(x.split(2), y.split(2), strict=True))


def test_labels_given(model):
    found = ts.calibrate(model, batches(), fisher="labels")
    model.eval()
    for name in ("conv", "twice", "head"):
        weight = model.get_submodule(name).weight
        squares = torch.zeros_like(weight)
        for x, y in batches():
            for index in range(len(x)):
                loss = functional.cross_entropy(model(x[index : index + 1]), y[index : index + 1])
                squares += torch.autograd.grad(loss, weight)[0] ** 2
        torch.testing.assert_close(found[name].fisher, squares / 5)
        assert found[name].fisher_samples == 5


@pytest.mark.slow
def test_labels_drawn_from_the_model_approach_their_expectation(model):
    x = batches()[0][0]
    n = 400
    found = ts.calibrate(model, [x] * n, fisher="model", layers="head")["head"].fisher
    assert found is not None
    model.eval()
    expected = torch.zeros_like(model.head.weight)
    for index in range(len(x)):
        logits = model(x[index : index + 1])
        for label, chance in enumerate(logits.softmax(1)[0]):
            loss = functional.cross_entropy(logits, torch.tensor([label]))
            gradient = torch.autograd.grad(loss, model.head.weight, retain_graph=True)[0]
            expected += chance.detach() * gradient**2 / len(x)
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_drawing_follows_the_seed_alone(model):
    def fisher(seed: int) -> torch.Tensor:
        torch.rand(1)
        found = ts.calibrate(model, batches(), fisher="model", seed=seed)["conv"].fisher
        assert found is not None
        return found

    assert torch.equal(fisher(1), fisher(1))
    assert not torch.equal(fisher(1), fisher(2))


def test_moments_are_the_same_with_and_without(model):
    plain, with_fisher = ts.calibrate(model, batches()), ts.calibrate(model, batches(), fisher="model")
    assert plain["conv"].fisher is None
    for name in plain:
        assert plain[name].count == with_fisher[name].count
        assert torch.equal(plain[name].covariance, with_fisher[name].covariance)


@pytest.mark.parametrize("wrap", [lambda y: (y, None), lambda y: {"logits": y}, lambda y: {"out": y}])
def test_outputs_of_other_kinds(model, wrap):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x):
            return wrap(self.net(x))

    found = ts.calibrate(Wrapped(), batches(), fisher="labels")["net.conv"].fisher
    torch.testing.assert_close(found, ts.calibrate(model, batches(), fisher="labels")["conv"].fisher)


def test_a_model_that_does_not_classify():
    model = nn.Sequential(nn.Conv2d(2, 1, 4), nn.Flatten(0))
    with pytest.raises(InputError, match="class scores"):
        ts.calibrate(model, batches(), fisher="model")

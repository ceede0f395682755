"""Weights of layers by what the answers feel of their errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensigma as ts
from support_nets import batches, small_net
from tensigma.errors import InputError
from tensigma.planning import sensitivities


def naive_weights(model: nn.Module, data: list[Tensor], seed: int = 0) -> dict[str, float]:
    """Sample by sample: the squared gradient of each layer's output times the variance of that output."""
    generator = torch.Generator().manual_seed(seed)
    labels = [torch.multinomial(model(x).double().softmax(1), 1, generator=generator)[:, 0] for x in data]
    inputs, targets = torch.cat(data), torch.cat(labels)
    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            continue
        squares, outputs = 0.0, []
        for x, label in zip(inputs, targets, strict=True):
            kept: list[Tensor] = []

            def keep(module: nn.Module, args: Any, output: Tensor, kept: list[Tensor] = kept) -> None:
                kept.append(output)

            handle = module.register_forward_hook(keep)
            loss = functional.cross_entropy(model(x[None]), label[None])
            handle.remove()
            (gradient,) = torch.autograd.grad(loss, kept[0])
            squares += gradient.square().sum().item()
            outputs.append(kept[0].detach())
        rows = torch.cat(outputs).movedim(1, -1).flatten(0, -2).double()
        found[name] = squares / len(inputs) * rows.var(0, unbiased=False).mean().item()
    mean = math.exp(sum(map(math.log, found.values())) / len(found))
    return {name: weight / mean for name, weight in found.items()}


def test_weights_are_those_of_single_samples(seed: int) -> None:
    model, data = small_net(seed), batches(2, 4, seed=seed)
    expected = naive_weights(model, data)
    found = sensitivities(model, data, power=1.0)
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-3)
    assert set(found) == set(expected)
    damped = sensitivities(model, data, power=0.5)
    assert damped == pytest.approx({name: weight**0.5 for name, weight in found.items()}, rel=1e-6)


def test_the_model_and_its_generators_come_back_as_they_were() -> None:
    model, data = small_net(), batches(1)
    model.train()
    model.head.weight.requires_grad_(False)
    rng = torch.get_rng_state()
    sensitivities(model, data)
    assert model.training
    assert not model.head.weight.requires_grad
    assert model.stem.weight.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.stem._forward_hooks
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.slow
def test_a_layer_that_weighs_more_keeps_more() -> None:
    model, data = small_net(), batches(2)
    stats = ts.calibrate(model, data)
    plain = ts.plan(model, stats, budget=ts.Params(0.6))
    worst = max(plain.compressed, key=lambda entry: entry.error or 0.0)
    weighed = ts.plan(model, stats, budget=ts.Params(0.6), weights={worst.name: 1e4})
    assert (weighed[worst.name].error or 0.0) < (worst.error or 0.0)
    even = ts.plan(model, stats, budget=ts.Params(0.6), weights=dict.fromkeys(stats, 3.0))
    assert {name: entry.ranks for name, entry in even.items()} == {name: entry.ranks for name, entry in plain.items()}


@pytest.mark.parametrize(
    ("weights", "message"), [({"stem": 0.0}, "above 0"), ({"stem": True}, "above 0"), ({"nowhere": 1.0}, "no layer")]
)
def test_strange_weights_are_refused(weights: dict[str, Any], message: str) -> None:
    model = small_net()
    with pytest.raises(InputError, match=message):
        ts.plan(model, norm="frobenius", budget=ts.Params(0.6), weights=weights)


def test_strange_settings_are_refused() -> None:
    with pytest.raises(InputError, match="between 0"):
        sensitivities(small_net(), batches(1), power=2.0)
    with pytest.raises(InputError, match="empty"):
        sensitivities(small_net(), [])

"""Weights on grids of few bits are trained on grids of as many bits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_grids import round_, rounded
from support_nets import batches
from tensigma.compression import Refine, refine_
from tensigma.compression.grid_training import trained_on_grids
from tensigma.deployment import stored_bytes
from tensigma.layers import HALF, TARGETS, grid_of, has_half_bias


def network() -> nn.Module:
    """A network whose answers differ from input to input."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 24, 3, groups=2), nn.ReLU(), nn.Conv2d(24, 16, 3)]
        model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 5))
        nn.init.normal_(model[-1].weight, std=0.2)  # type: ignore[arg-type]
    return model.eval()


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, TARGETS)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8, HALF])
def test_nothing_changes_where_nothing_is_trained(bits: int) -> None:
    model = rounded(network(), bits)
    x = batches(1)[0]
    before, answers, grids = copy.deepcopy(model.state_dict()), model(x), [grid_of(each) for each in layers_of(model)]
    parameters = dict(model.named_parameters())
    with trained_on_grids(model):
        assert torch.equal(model(x), answers)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [(name, id(each)) for name, each in model.named_parameters()] == [
        (name, id(each)) for name, each in parameters.items()
    ]
    for layer, grid in zip(layers_of(model), grids, strict=True):
        now = grid_of(layer)
        assert now is not None
        assert grid is not None
        assert now.bits == grid.bits
        assert type(layer) in (nn.Conv2d, nn.Linear)


def test_gradients_are_those_without_rounding_and_of_learned_steps() -> None:
    layer = nn.Linear(6, 3, bias=False)
    grid = round_(layer, 3)
    assert grid.scales is not None
    sizes, x = grid.scales, torch.randn(5, 6)
    with trained_on_grids(layer):
        latent, stretch = (parameter for _, parameter in sorted(layer.named_parameters(), reverse=True))
        with torch.no_grad():
            latent.add_(0.3 * sizes * (2 * torch.rand_like(latent) - 1))
        steps = (latent / sizes).detach()
        weight = layer.weight
        integers = steps.round().clamp(-4, 3)
        torch.testing.assert_close(weight, integers * sizes)
        (weight @ x.T).square().sum().backward()
        wanted = 2 * (weight @ x.T) @ x
        inside = (steps >= -4) & (steps <= 3)
        assert latent.grad is not None
        assert stretch.grad is not None
        torch.testing.assert_close(latent.grad, wanted * inside)
        by_step = torch.where(inside, integers - steps, integers)
        torch.testing.assert_close(stretch.grad, (wanted * by_step * sizes).sum(1, keepdim=True))


def few_bits(bits: int = 3) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    model = network()
    data = batches(8)
    small = rounded(copy.deepcopy(model), bits)
    for layer in layers_of(small):
        layer.bias.data = layer.bias.data.half().float()
    return model, small, data


@pytest.mark.parametrize("bits", [2, 4])
def test_refinement_brings_answers_nearer_on_grids_of_as_many_bits(bits: int) -> None:
    model, small, data = few_bits(bits)
    assert all(map(has_half_bias, layers_of(small)))
    before = copy.deepcopy(small.state_dict())
    facts = refine_(small, model, data, Refine(passes=2_000, learning_rate=1e-3), blocks=[])
    assert facts["kept"]
    assert facts["loss_after"] < 0.9 * facts["loss_before"]
    moved = [key for key, value in small.state_dict().items() if not torch.equal(value, before[key])]
    assert any(key.endswith("weight") for key in moved)
    for layer in layers_of(small):
        grid = grid_of(layer)
        assert grid is not None
        assert grid.bits == bits
        assert has_half_bias(layer)


def test_a_model_that_does_not_come_nearer_keeps_its_grids() -> None:
    model, small, data = few_bits()
    before, grids = copy.deepcopy(small.state_dict()), [grid_of(layer) for layer in layers_of(small)]
    # Far too large a step.
    facts = refine_(small, model, data, Refine(passes=64, learning_rate=1e3), blocks=[])
    assert not facts["kept"]
    assert all(torch.equal(value, before[key]) for key, value in small.state_dict().items())
    for layer, grid in zip(layers_of(small), grids, strict=True):
        now = grid_of(layer)
        assert now is not None
        assert grid is not None
        assert now.scales is not None
        assert torch.equal(now.scales, grid.scales)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_plan_of_bytes_is_refined_and_takes_as_many_bytes(tmp_path: Path) -> None:
    model, data = network(), batches(12)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, budget=ts.Bytes(0.12), weights=None)
    assert plan.has_bits
    sizes, losses = [], []
    for refine in (None, Refine(passes=2_000, learning_rate=3e-4)):
        small, report = ts.compress(model, plan, stats, data=data, refine=refine)
        ts.save(small, tmp_path / str(refine is None))
        sizes.append(stored_bytes(tmp_path / str(refine is None)))
        again = ts.load(tmp_path / str(refine is None), network())
        assert all(torch.equal(small(x), again(x)) for x in data)
        with torch.no_grad():
            losses.append(sum((small(x) - model(x)).square().sum().item() for x in data))
        assert report.after.bytes == plan.after.bytes
    assert sizes[0] == sizes[1]
    assert losses[1] < losses[0]

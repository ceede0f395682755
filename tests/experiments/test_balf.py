"""BALF's rule against its definition: whitened singular values, and a search over all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.calibration import Calibration
from tensigma.errors import InputError
from tensigma.experiments.balf import BALF, share_out


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, Calibration]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, groups=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(16, 24, 1),
        nn.Flatten(),
        nn.Linear(24 * 9, 10),
    ).eval()
    return model, ts.calibrate(model, [torch.randn(40, 3, 7, 7).cumsum(-1)])


def whitened_energies(weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Squared singular values of M Σ^½, descending."""
    values, vectors = torch.linalg.eigh(gram.double())
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    return torch.linalg.svdvals(weight.double().flatten(1) @ root).square()


def test_energies_are_shares_of_whitened_singular_values(net: tuple[nn.Module, Calibration]) -> None:
    model, stats = net
    energies = BALF(model, stats)._energies
    # The first convolution is factorised too.
    assert list(energies) == ["0", "2", "4", "6"]
    for name in ("0", "4"):
        squares = whitened_energies(model.get_parameter(f"{name}.weight"), stats[name].gram)
        torch.testing.assert_close(energies[name], squares.cumsum(0) / squares.sum(), rtol=0, atol=1e-5)
    halves = [
        whitened_energies(weight, gram)
        for weight, gram in zip(model.get_parameter("2.weight").chunk(2), stats["2"].gram, strict=True)
    ]
    squares = halves[0] + halves[1]
    torch.testing.assert_close(energies["2"], squares.cumsum(0) / squares.sum(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", [ts.Params(0.6), ts.Params(0.3), ts.Macs(0.5)], ids=str)
def test_plans_keep_the_budget_and_grow_no_layer(
    net: tuple[nn.Module, Calibration], budget: ts.Params | ts.Macs
) -> None:
    model, stats = net
    made = BALF(model, stats).plan(budget)
    before, after = (getattr(cost, budget.field) for cost in (made.before, made.after))
    assert after <= budget.share * before
    assert {(entry.method.name, entry.norm.name) for entry in made.compressed} == {("svd", "sigma")}
    for entry in made.compressed:
        assert getattr(entry.after, budget.field) < getattr(entry.before, budget.field)
    small, report = ts.compress(model, made, stats)
    assert report.after.params == sum(parameter.numel() for parameter in small.parameters())


def test_no_other_ranks_keep_more_energy_at_that_cost(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    energies, costs = {}, {}
    for name, n_ranks in (("a", 5), ("b", 4), ("c", 6)):
        squares = torch.rand(n_ranks, generator=generator, dtype=torch.float64).sort(descending=True).values
        energies[name] = squares.cumsum(0) / squares.sum()
        dense = float(2 * n_ranks)
        costs[name] = (3 * torch.arange(1.0, n_ranks + 1, dtype=torch.float64)).clamp_max(dense)
    for limit in (12.0, 18.0, 24.0):
        chosen = share_out(energies, costs, limit)
        spent = sum(float(costs[name][rank - 1]) for name, rank in chosen.items())
        kept = sum(float(energies[name][rank - 1]) for name, rank in chosen.items())
        assert spent <= limit
        for ranks in itertools.product(*(range(1, len(energy) + 1) for energy in energies.values())):
            pairs = list(zip(energies, ranks, strict=True))
            if sum(float(costs[name][rank - 1]) for name, rank in pairs) <= spent:
                assert sum(float(energies[name][rank - 1]) for name, rank in pairs) <= kept + 1e-12


def test_budgets_out_of_reach_are_refused(net: tuple[nn.Module, Calibration]) -> None:
    model, stats = net
    with pytest.raises(InputError, match="rank 1 everywhere still costs"):
        BALF(model, stats).plan(ts.Params(0.01))

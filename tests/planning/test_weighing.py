"""Weights of layers by what their errors do to the answers, measured, and plans tried with them."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tensigma as ts
from support_nets import batches, small_net
from tensigma.calibration import LayerStats
from tensigma.errors import InputError
from tensigma.planning import EffectProgress, TrialProgress
from tensigma.planning.effects import normalised
from tensigma.running import Probe
from tensigma.solving import Solutions, compressed_copy


class TwoPaths(nn.Module):
    """Two wide layers of the same shape, of which one hardly matters for the answers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.loud, self.quiet = nn.Linear(32, 64), nn.Linear(32, 64)
            self.head = nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_hidden(self, x))


def _hidden(model: TwoPaths, x: Tensor) -> Tensor:
    return functional.relu(model.loud(x)) + 0.1 * functional.relu(model.quiet(x))


def rows(count: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(50, 32, generator=generator) * torch.logspace(0.5, -0.7, 32) for _ in range(count)]


def effects_of(model: nn.Module, data: list[Tensor], **keywords: Any) -> dict[str, float]:
    plan = ts.plan(model, ts.calibrate(model, data), budget=ts.Params(0.6), data=data, **keywords)
    return plan.notes["weighing"]["effects"]


def naive_effects(model: TwoPaths, data: list[Tensor], step: float) -> dict[str, float]:
    """Layer by layer: leave out the weakest directions of its centred outputs, and look at the answers.

    With a ``step`` below 1 they are left out in part, and the divergence is what that part would become as a square.
    """
    x = torch.cat(data).double()
    model = copy.deepcopy(model).double()
    answers = model(x).softmax(1)
    found = {}
    for name, layer in (("loud", model.loud), ("quiet", model.quiet), ("head", model.head)):
        inputs = x if name != "head" else _hidden(model, x)
        outputs = layer(inputs)
        mean = outputs.mean(0)
        _, energies, directions = torch.linalg.svd(outputs - mean, full_matrices=False)
        lost = (energies**2).flip(0).cumsum(0).flip(0) / (energies**2).sum()  # lost[r]: all beyond the first r
        ranks = [rank for rank in range(1, min(layer.weight.shape)) if lost[rank] > 1e-6]
        rank = min(ranks, key=lambda rank: abs(math.log(lost[rank].item() / 0.05)))
        keep = directions[:rank].T @ directions[:rank]

        def project(module: nn.Module, args: Any, output: Tensor, keep: Tensor = keep, mean: Tensor = mean) -> Tensor:
            return output + step * ((output - mean) @ keep + mean - output)

        handle = layer.register_forward_hook(project)
        divergence = (answers * (answers.log() - model(x).log_softmax(1))).sum(1).mean().item()
        handle.remove()
        found[name] = divergence / step**2 / lost[rank].item()
    mean_effect = math.prod(found.values()) ** (1 / len(found))
    return {name: effect / mean_effect for name, effect in found.items()}


def test_effects_are_those_of_small_disturbances(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = TwoPaths(seed).eval(), rows(seed=seed)
    # With the usual number of draws, near the effects of the disturbances themselves.
    assert effects_of(model, data) == pytest.approx(naive_effects(model, data, 1.0), rel=0.2)
    # With so many that chance plays no part, those of the smallest part of them.
    monkeypatch.setattr("tensigma.planning.effects._DRAWS", 100)
    assert effects_of(model, data) == pytest.approx(naive_effects(model, data, 1e-4), rel=0.03)


def test_a_layer_that_hardly_matters_gives_most(seed: int) -> None:
    model, data = TwoPaths(seed).eval(), rows(seed=seed)
    stats = ts.calibrate(model, data)
    effects = effects_of(model, data)
    assert effects["loud"] > 20 * effects["quiet"]
    plain = ts.plan(model, stats, budget=ts.Params(0.5), weights=None, data=data)
    weighed = ts.plan(model, stats, budget=ts.Params(0.5), data=data)
    assert weighed["quiet"].after.params < plain["quiet"].after.params
    assert weighed["loud"].after.params > plain["loud"].after.params
    fresh = torch.cat(rows(seed=seed + 10))
    answers = [ts.compress(model, each, stats)[0](fresh) for each in (weighed, plain)]
    wrong = [(model(fresh) - given).square().mean() for given in answers]
    assert wrong[0] < 0.8 * wrong[1]


def test_another_budget_needs_no_new_curves_or_effects(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = TwoPaths(seed).eval(), rows(seed=seed)
    stats = ts.calibrate(model, data)
    first, wanted = (ts.plan(model, stats, budget=ts.Params(share), data=data) for share in (0.7, 0.4))
    monkeypatch.setattr("tensigma.planning.planning_store.curve", None)
    monkeypatch.setattr("tensigma.planning.weighing.measured_effects", None)
    again = first.front().best_plan(ts.Params(0.4))
    assert again == wanted
    assert again.notes["weighing"] == wanted.notes["weighing"]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.35, 0.6])
def test_never_further_from_the_original_than_with_all_layers_alike(seed: int, share: float) -> None:
    model, data = small_net(seed), batches(seed=seed)
    stats = ts.calibrate(model, data)
    plans = [ts.plan(model, stats, budget=ts.Params(share), weights=w, data=data) for w in ("auto", None)]
    probe, solutions = Probe(model, data, samples=256), Solutions()
    # As the trials are made: with few steps of the solvers.
    rough = [{name: treatment.roughly() for name, treatment in plan.treatments.items()} for plan in plans]
    small = [compressed_copy(model, treatments, stats, solutions) for treatments in rough]
    found, plain = map(probe.divergence, small)
    note = plans[0].notes["weighing"]
    if not note["tried"]:
        assert plans[0] == plans[1]
        pytest.skip("all weights lead to the same plan")
    assert len(note["tried"]) > 1
    assert found <= plain
    assert dict(note["tried"])[note["power"]] == pytest.approx(found, rel=1e-3)
    assert dict(note["tried"])[0.0] == pytest.approx(plain, rel=1e-3)
    assert plans[0].after.params <= share * plans[0].before.params
    # The order does not change when the plans are carried out.
    carried = [ts.compress(model, plan, stats)[0] for plan in plans]
    assert probe.divergence(carried[0]) <= 1.02 * probe.divergence(carried[1])


def test_the_scale_of_the_moments_changes_nothing() -> None:
    model, data = TwoPaths(0).eval(), rows()
    met = {"loud": data, "quiet": data, "head": [_hidden(model, x).detach() for x in data]}
    stats = ts.calibrate(model, data)
    scaled = ts.Calibration(
        {
            name: LayerStats.from_rows(3 * torch.cat(met[name]), input_shape=own.input_shape)
            for name, own in stats.items()
        },
    )
    plans = [ts.plan(model, each, budget=ts.Params(0.5), norm="sigma", data=data) for each in (stats, scaled)]
    effects = [plan.notes["weighing"]["effects"] for plan in plans]
    assert effects[0] == pytest.approx(effects[1], rel=1e-3)
    assert plans[0]["loud"].ranks == plans[1]["loud"].ranks


def test_the_front_goes_on_with_the_weights_that_were_found(tmp_path: Path) -> None:
    model, data = TwoPaths(0).eval(), rows()
    seen: list[Any] = []
    plan = ts.plan(model, ts.calibrate(model, data), budget=ts.Params(0.5), data=data, progress=seen.append)
    assert plan.notes["weighing"]["power"] > 0
    assert plan.front().plan(ts.Params(0.5)) == plan
    measured = [state for state in seen if isinstance(state, EffectProgress)]
    assert measured[-1].done == measured[-1].total
    trials = [[state.power, float(f"{state.divergence:.4g}")] for state in seen if isinstance(state, TrialProgress)]
    assert trials == plan.notes["weighing"]["tried"]
    assert min(trials, key=lambda trial: trial[1])[0] == plan.notes["weighing"]["power"]
    plan.save(tmp_path / "plan.json")
    assert ts.Plan.load(tmp_path / "plan.json").notes == plan.notes


@pytest.mark.parametrize("budget", [ts.Macs(0.6), ts.Drop(0.2, trials=6)])
def test_other_budgets_are_weighed_too(budget: Any) -> None:
    model, data = TwoPaths(0).eval(), rows()
    plan = ts.plan(model, ts.calibrate(model, data), budget=budget, data=rows(seed=1))
    assert plan.notes["weighing"]["effects"]["loud"] > plan.notes["weighing"]["effects"]["quiet"]
    assert plan["quiet"].after.params < plan["loud"].after.params
    if isinstance(budget, ts.Drop):
        assert plan.notes["drop"]["kept"] >= 0.8


class Sums(nn.Sequential):
    """A model that answers with whole numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(1)


def test_where_nothing_can_be_measured_all_layers_count_alike() -> None:
    model, data = TwoPaths(0).eval(), rows()
    stats = ts.calibrate(model, data)
    for given in (None, iter(data)):
        assert "weighing" not in ts.plan(model, stats, budget=ts.Params(0.6), data=given).notes
    assert "weighing" not in ts.plan(model, stats, budget=ts.Params(0.7), layers=["loud"], data=data).notes
    counting = Sums(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    assert "weighing" not in ts.plan(counting, ts.calibrate(counting, data), budget=ts.Params(0.6), data=data).notes


def test_in_one_call_the_batches_serve() -> None:
    model, data = TwoPaths(0).eval(), rows()
    _, report = ts.compress(model, data, budget=ts.Params(0.5))
    assert report.notes["weighing"]["samples"] == 200
    _, report = ts.compress(model, data, recipe=ts.Recipe(budget=ts.Params(0.5), weights=None))
    assert "weighing" not in report.notes


class Lazy(nn.Module):
    """Makes a tensor when it is first called, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 8)
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1, 32)
        return self.other(functional.relu(self.one(x)) * self.scale)


def test_a_model_can_be_trained_afterwards() -> None:
    model, data = Lazy(), rows()
    stats = ts.calibrate(model, data)
    model.scale = None
    ts.plan(model, stats, budget=ts.Params(0.6), data=data)
    model(data[0]).sum().backward()


@pytest.mark.slow
def test_the_model_comes_back_as_it_was() -> None:
    model, data = small_net(), DataLoader(TensorDataset(torch.cat(batches(2))), batch_size=4, shuffle=True)
    stats = ts.calibrate(model, data)
    model.train()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    ts.plan(model, stats, budget=ts.Params(0.6), data=data)
    assert model.training
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert torch.equal(rng, torch.get_rng_state())


@pytest.mark.parametrize("weights", ["auto!", 3.0, ["stem"]])
def test_other_weights_are_refused(weights: Any) -> None:
    with pytest.raises(InputError, match="'auto', None, or a dict"):
        ts.plan(small_net(), norm="frobenius", budget=ts.Params(0.6), weights=weights)


def test_effects_far_apart_are_brought_nearer() -> None:
    found = normalised({"dead": 0.0, "one": 1.0, "other": 2.0, "fatal": math.inf})
    assert found["other"] / found["one"] == 2
    assert found["fatal"] / found["dead"] == pytest.approx(100 * 100)
    assert math.prod(found.values()) == pytest.approx(1)
    assert normalised({"a": 0.0}) == {}


class Finder(TwoPaths):
    """Answers with as many numbers as it finds, like a detector."""

    def forward(self, x: Tensor) -> Any:
        return [row[row > row.mean()] for row in super().forward(x)]


def test_answers_that_change_their_shape_are_not_compared() -> None:
    model, data = Finder(0).eval(), rows(2)
    small, report = ts.compress(model, data, budget=ts.Params(0.5))
    assert report.rate >= 2
    assert "weighing" not in report.notes
    assert len(small(data[0])) == 50
    # Nothing could be tried, so that layers count alike.
    plain = ts.plan(model, ts.calibrate(model, data), budget=ts.Params(0.5), weights=None)
    assert {row.name: row.ranks for row in report.layers} == {name: entry.ranks for name, entry in plain.items()}


def test_a_stream_that_has_ended_is_not_read_again() -> None:
    class Stream(IterableDataset):
        def __init__(self) -> None:
            self.left = rows(3)

        def __iter__(self) -> Any:
            while self.left:
                yield self.left.pop()

    model = TwoPaths(0).eval()
    plan = ts.plan(model, budget=ts.Params(0.5), data=DataLoader(Stream(), batch_size=None))
    assert "weighing" not in plan.notes


def test_effects_belong_to_the_norm_of_the_plan(seed: int) -> None:
    """Under the Frobenius norm, statistics that happen to be at hand change nothing."""
    # No more samples than are taken where nobody knows what they cost.
    model, data = TwoPaths(seed).eval(), [torch.cat(rows(2, seed=seed))[:64]]
    stats = ts.calibrate(model, data)
    plans = [ts.plan(model, each, norm="frobenius", budget=ts.Params(0.5), data=data) for each in (None, stats)]
    found, expected = (plan.notes["weighing"]["effects"] for plan in plans)
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_budget_that_cannot_be_kept_is_refused_first() -> None:
    model, data = TwoPaths(0).eval(), rows()
    seen: list[Any] = []
    stats = ts.calibrate(model, data)
    with pytest.raises(InputError, match="no plan leaves"):
        ts.plan(model, stats, budget=ts.Params(0.01), data=data, progress=seen.append)
    assert not any(isinstance(state, EffectProgress) for state in seen)

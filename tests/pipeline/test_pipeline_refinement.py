"""Refinement without labels, and BatchNorm statistics taken anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_nets import batches, small_net
from tensigma.errors import InputError
from tensigma.pipeline import RefinementProgress
from tensigma.pipeline.batchnorm import reestimate_bn_
from tensigma.pipeline.refinement import Refine, blocks_around, refine_


def classifier(seed: int) -> nn.Module:
    """A network whose answers differ from input to input, with a block of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        block = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), block, nn.Flatten(), nn.Linear(16 * 16, 5))
        nn.init.normal_(model[4].weight, std=0.2)  # type: ignore[arg-type]
    return model.eval()


def coarse(seed: int = 0) -> tuple[nn.Module, ts.Plan, ts.Calibration, list[Tensor]]:
    model, data = classifier(seed), batches(8, pixels=6, seed=seed)
    stats = ts.calibrate(model, data)
    return model, ts.plan(model, stats, ranks=ts.Ranks({"*": 3}), method="svd", saving="none"), stats, data


def distance(model: nn.Module, small: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return sum((model(x).softmax(1) - small(x).softmax(1)).square().sum().item() for x in data)


@pytest.mark.parametrize("seed", range(3))
def test_the_refined_model_answers_more_like_the_original(seed: int) -> None:
    model, plan, stats, data = coarse(seed)
    plain, _ = ts.compress(model, plan, stats)
    refined, report = ts.compress(
        model, plan, stats, data=data, sequential=False, refine=Refine(passes=1_000, learning_rate=5e-3)
    )
    assert distance(model, refined, data) < 0.7 * distance(model, plain, data)
    facts = report.notes["refinement"]
    assert facts["kept"]
    assert facts["loss_after"] < facts["loss_before"]
    assert ts.Report.from_json(report.to_json()) == report


def test_nothing_but_the_weights_of_the_small_model_changes() -> None:
    model, plan, stats, data = coarse()
    for parameter in model[4].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    model.train()
    before = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    small, _ = ts.compress(model, plan, stats, data=data, refine=40)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in (*model.parameters(), *small.parameters()))
    assert small.training
    assert [p.requires_grad for p in small[4].parameters()] == [False] * 3  # type: ignore[index]
    name = "2.1.running_mean"
    assert torch.equal(small.state_dict()[name], before[name])
    again, _ = ts.compress(model, plan, stats, data=data, refine=40)
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), again.parameters(), strict=True))


def test_steps_are_those_of_a_plain_loop() -> None:
    """One batch per step, Adam with the rising and falling rate, no blocks: nothing else happens."""
    torch.manual_seed(0)
    original, data = nn.Linear(4, 3), [torch.randn(5, 4), torch.randn(5, 4)]
    small = nn.Linear(4, 3)
    twin = copy.deepcopy(small)
    settings = Refine(passes=20, learning_rate=0.01, features=0.0, clip=1e9, temperature=2.0)
    refine_(small, original, data, settings, blocks=[])
    optimizer = torch.optim.Adam(twin.parameters())
    for step, x in enumerate(data * 2):
        share = (5 * step + 2.5) / 20
        rate = 0.01 * min(1.0, share / 0.1) * (0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * share))).item()
        optimizer.param_groups[0]["lr"] = rate
        p = (original(x) / 2).softmax(1).detach()
        loss = 4 * (p * (p.log() - (twin(x) / 2).log_softmax(1))).sum() / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(small.weight, twin.weight, rtol=1e-4, atol=1e-6)


class Maps(nn.Module):
    """Answers with a map and a dict, as detectors and segmenters do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.body(x)
        return {"map": y, "sizes": (y.mean((2, 3)), torch.tensor(1))}


def test_answers_of_any_structure_are_compared() -> None:
    torch.manual_seed(0)
    model, data = Maps(), batches(6)
    plan = ts.plan(model, ranks=ts.Ranks({"body.2": 2}), norm="frobenius")
    _, report = ts.compress(model, plan, data=data, refine=Refine(passes=500, learning_rate=5e-3))
    assert report.notes["refinement"]["loss_after"] < 0.9 * report.notes["refinement"]["loss_before"]
    assert blocks_around(model, ["body.2"]) == ["body"]


def test_progress_and_augmentation_see_every_batch() -> None:
    model, plan, stats, data = coarse()
    states: list[Any] = []
    seen: list[int] = []

    def augment(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.flip(-1)

    ts.compress(model, plan, stats, data=data, refine=Refine(passes=70, augment=augment), progress=states.append)
    own = [state for state in states if isinstance(state, RefinementProgress)]
    assert [state.samples for state in own] == [8, 16, 24, 32, 40, 48, 56, 64, 70]
    assert own[-1].remaining == 0
    assert seen == [8] * 8 + [6]


@pytest.mark.parametrize("rate", [0.5, 1e30])
def test_a_model_that_would_get_worse_stays_as_it_was(rate: float, caplog: pytest.LogCaptureFixture) -> None:
    model, data = small_net(), batches(2)
    small = copy.deepcopy(model)
    before = copy.deepcopy(small.state_dict())
    facts = refine_(small, model, data, Refine(passes=50, learning_rate=rate), blocks=["block"])
    assert not facts["kept"]
    assert "kept as it was" in caplog.text
    assert all(torch.equal(before[key], value) for key, value in small.state_dict().items())


@pytest.mark.parametrize("bad", [0, -5, 2.5, True])
def test_strange_numbers_of_passes_are_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="whole number of samples"):
        Refine.of(bad)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="above 0"):
        Refine(learning_rate=0)
    with pytest.raises(InputError, match="needs data="):
        ts.compress(small_net(), ts.plan(small_net(), ranks=ts.Ranks({"stem": 2}), norm="frobenius", skip=()), refine=9)


def test_batchnorm_takes_the_statistics_of_the_data() -> None:
    model, data = small_net(), batches(4)
    model.block[1].momentum = 0.3  # type: ignore[assignment]
    model.train()
    assert reestimate_bn_(model, data) == 1
    with torch.no_grad():
        maps = [model.block[0](torch.relu(model.stem(x))) for x in data]
    norm = model.block[1]
    assert isinstance(norm, nn.BatchNorm2d)
    torch.testing.assert_close(norm.running_mean, torch.stack([y.mean((0, 2, 3)) for y in maps]).mean(0))
    variances = torch.stack([y.var((0, 2, 3), unbiased=True) for y in maps]).mean(0)
    torch.testing.assert_close(norm.running_var, variances)
    assert norm.momentum == 0.3
    assert norm.training


def test_statistics_survive_data_that_breaks_the_model() -> None:
    model = small_net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="rejected batch 1"):
        reestimate_bn_(model, [batches(1)[0], torch.zeros(2, 5, 4, 4)])
    with pytest.raises(InputError, match="at least two samples"):
        reestimate_bn_(model, [batches(1)[0][:1]])
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_compression_takes_statistics_anew_when_asked() -> None:
    model, plan, stats, data = coarse()
    plain, _ = ts.compress(model, plan, stats, data=data)
    fresh, report = ts.compress(model, plan, stats, data=data, reestimate_bn=True)
    assert report.notes["reestimated_bn"] == 1
    key = "2.1.running_mean"
    assert not torch.equal(plain.state_dict()[key], fresh.state_dict()[key])

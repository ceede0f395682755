"""Refinement without labels, and BatchNorm statistics taken anew."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_nets import batches, small_net
from tensigma.compression import Refine, RefinementProgress, blocks_around, reestimate_bn_, refine_
from tensigma.compression.likeness import Likeness
from tensigma.errors import InputError


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


@pytest.mark.slow
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


@pytest.mark.parametrize(("width", "full_rate"), [(4, 0.01), (64, 0.01), (256, 0.0025)])
def test_steps_are_those_of_a_plain_loop(width: int, full_rate: float) -> None:
    """One batch per step, Adam with the rising and falling rate, lower for long rows, no blocks: nothing else."""
    torch.manual_seed(0)
    original, data = nn.Linear(width, 3), [torch.randn(5, width), torch.randn(5, width)]
    small = nn.Linear(width, 3)
    twin = copy.deepcopy(small)
    settings = Refine(passes=20, learning_rate=0.01, features=0.0, clip=1e9, temperature=2.0)
    refine_(small, original, data, settings, blocks=[])
    rates = {"weight": full_rate, "bias": 0.01}
    optimizer = torch.optim.Adam([{"params": [getattr(twin, name)], "name": name} for name in rates])
    for step, x in enumerate(data * 2):
        share = (5 * step + 2.5) / 20
        rise_and_fall = min(1.0, share / 0.1) * (0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * share))).item()
        for group in optimizer.param_groups:
            group["lr"] = rates[group["name"]] * rise_and_fall
        p = (original(x) / 2).softmax(1).detach()
        loss = 4 * (p * (p.log() - (twin(x) / 2).log_softmax(1))).sum() / len(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(small.weight, twin.weight, rtol=1e-4, atol=1e-6)


def test_a_learning_rate_that_raises_the_loss_is_lowered_unless_it_was_set(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    original = nn.Linear(8, 3).double()
    small = copy.deepcopy(original)
    with torch.no_grad():
        # So near already that ordinary steps only lead away.
        small.weight.add_(1e-6 * torch.randn(3, 8))
    data = [torch.rand(4, 8).double() for _ in range(30)]
    settings = Refine(passes=960).settled(4)
    set_rate = settings.learning_rate
    assert set_rate == pytest.approx(2.4e-4)
    answers = ts.Numbers()
    kept = copy.deepcopy(small)
    facts = refine_(kept, original, data, settings, blocks=[], answers=answers)
    assert facts["learning_rate"] == set_rate
    assert facts["loss_after"] > facts["loss_before"]
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), small.parameters(), strict=True))
    passes: list[int] = []
    with caplog.at_level("INFO"):
        facts = refine_(
            small,
            original,
            data,
            Refine(passes=960),
            blocks=[],
            answers=answers,
            progress=lambda progress: passes.append(progress.done),
        )
    trials = caplog.text.count("once more at a learning rate of")
    assert trials >= 1
    assert facts["learning_rate"] == pytest.approx(2.4e-4 / 4**trials)
    assert facts["kept"]
    assert facts["loss_after"] < 0.5 * facts["loss_before"]
    assert passes == list(range(4, 961, 4))


@pytest.mark.parametrize(("batch", "sizes"), [(None, [17, 17, 16] * 2), (20, [17, 17, 16] * 2), (50, [50, 50])])
def test_batches_are_split_where_there_would_be_few_steps(batch: int | None, sizes: list[int]) -> None:
    torch.manual_seed(0)
    original, small, data = nn.Linear(4, 10), nn.Linear(4, 10), [torch.randn(50, 4)]
    done: list[int] = []
    settings = Refine(passes=100, batch=batch, learning_rate=0.01)
    facts = refine_(small, original, data, settings, blocks=[], progress=lambda progress: done.append(progress.done))
    assert [after - before for before, after in zip([0, *done], done, strict=False)] == sizes
    assert facts["batch"] == sizes[0]


def test_scores_are_softened_as_suits_the_original() -> None:
    torch.manual_seed(0)
    small, data = nn.Linear(4, 10), [torch.randn(50, 4)]
    for scale, wanted in ((0.1, 1.0), (100.0, 4.0)):
        original = nn.Linear(4, 10)
        with torch.no_grad():
            original.weight.mul_(scale)
        facts = refine_(small, original, data, Refine(passes=50), blocks=[], answers=ts.Scores())
        assert facts["temperature"] == wanted
    scores = 6 * torch.randn(400, 10)
    temperature = ts.Scores().softening(scores)
    assert 1 < temperature < 4
    assert float((scores / temperature).softmax(1).amax(1).mean()) == pytest.approx(0.8, abs=1e-3)
    # Probabilities, and positions that are ruled out, are read as they are elsewhere.
    assert ts.Scores().softening(scores.softmax(1)) == pytest.approx(temperature, rel=1e-3)
    left_out = torch.cat([scores, torch.full((3, 10), -torch.inf)])
    assert ts.Scores().softening(left_out) == pytest.approx(temperature)


def test_a_loss_function_takes_the_place_of_the_distance_of_answers() -> None:
    torch.manual_seed(0)
    original, small, data = nn.Linear(4, 3), nn.Linear(4, 3), [torch.randn(5, 4), torch.randn(5, 4)]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        assert not target.requires_grad
        return (output - target)[:, 0].abs().mean()

    with torch.no_grad():
        expected = sum(loss(small(x), original(x)).item() for x in data) / 2
    rows = small.weight[1:].clone()
    facts = refine_(small, original, data, Refine(passes=240, learning_rate=0.01, loss=loss), blocks=[])
    assert facts["loss_before"] == pytest.approx(expected, rel=1e-5)
    assert facts["loss_after"] < 0.8 * expected
    assert facts["answers"] == "compared by a loss function"
    # What the function does not look at stays.
    assert torch.equal(small.weight[1:], rows)
    with pytest.raises(InputError, match="returns one number as a tensor"):
        refine_(small, original, data, Refine(passes=5, loss=lambda one, other: one), blocks=[])


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
    assert [state.done for state in own] == [8, 16, 24, 32, 40, 48, 56, 64, 70]
    assert own[-1].remaining == 0
    # First the samples on which the loss is measured.
    assert seen == [8, 1, *[8] * 8, 6]


@pytest.mark.parametrize("rate", [0.5, 1e30])
def test_a_model_that_would_get_worse_stays_as_it_was(rate: float, caplog: pytest.LogCaptureFixture) -> None:
    model, data = small_net(), batches(2)
    small = copy.deepcopy(model)
    before = copy.deepcopy(small.state_dict())
    facts = refine_(small, model, data, Refine(passes=50, learning_rate=rate), blocks=["block"])
    assert not facts["kept"]
    assert "kept as it was" in caplog.text
    assert all(torch.equal(before[key], value) for key, value in small.state_dict().items())


def single_output(seed: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
    """A network with one number for an answer, and another that is near to it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
    small = copy.deepcopy(model)
    with torch.no_grad():
        small.get_parameter("2.weight").mul_(0.8)
    return model, small


@pytest.mark.parametrize("sizes", [[1] * 20, [19, 1]], ids=["one by one", "one left over"])
def test_one_sample_of_one_number_is_refined_on(sizes: list[int]) -> None:
    model, small = single_output()
    data = list(torch.randn(20, 6).split(sizes))
    facts = refine_(small, model, data, Refine(passes=100, learning_rate=0.02), blocks=["0"])
    assert facts["kept"]
    assert facts["loss_after"] < 0.9 * facts["loss_before"]
    assert facts["skipped"] == 0


def test_a_batch_that_hardly_varies_does_not_outweigh_the_others() -> None:
    model, small = single_output()
    x = torch.randn(32, 6)
    with torch.no_grad():
        error2 = (small(x[:1]) - model(x[:1])).square().item()
        variance = model(x).var(correction=0).item()
    assert Likeness(small, model, [], [x]).value(x[[0, 0]]) == pytest.approx(10 * error2 / variance)


def test_ordinary_batches_are_judged_by_their_own_variance(seed: int) -> None:
    model, small = single_output(seed)
    x = torch.randn(64, 6)
    wanted, given = model(x).detach(), small(x).detach()
    assert Likeness(small, model, [], list(x.split(16))).value(x) == float(
        (given - wanted).square().mean() / wanted.var()
    )


class Shuffled:
    """Samples in a new order in every pass."""

    def __init__(self, samples: Tensor) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples[torch.randperm(len(self.samples))].split(50))


def test_before_and_after_are_measured_on_the_same_samples() -> None:
    model, small = single_output()
    data = Shuffled(torch.randn(4_000, 6) * torch.rand(4_000, 1) * 3)
    # Steps of nothing: whatever changes is the measurement.
    facts = refine_(small, model, data, Refine(passes=1_000, learning_rate=1e-30), blocks=[])
    assert facts["loss_after"] == facts["loss_before"]
    assert not facts["kept"]


def test_samples_that_are_no_numbers_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model, small = single_output()
    good, bad = torch.randn(20, 6), torch.full((4, 6), float("nan"))
    facts = refine_(small, model, [good, bad], Refine(passes=240, learning_rate=0.01), blocks=["0"])
    assert facts["kept"]
    assert facts["skipped"] == 40
    assert "40 of 240 samples" in caplog.text
    assert all(parameter.isfinite().all() for parameter in small.parameters())


def test_where_nothing_can_be_measured_the_report_is_still_plain_data() -> None:
    model, small = single_output()
    former = copy.deepcopy(small.state_dict())
    facts = refine_(small, model, [torch.full((4, 6), float("nan"))], Refine(passes=8), blocks=["0"])
    assert (facts["loss_before"], facts["loss_after"], facts["kept"]) == (None, None, False)
    json.dumps(facts, allow_nan=False)
    assert all(torch.equal(former[key], value) for key, value in small.state_dict().items())


def test_frozen_parameters_are_not_refined() -> None:
    data = [torch.randn(20, 6)]
    for frozen, trained in ((["0"], ["2"]), (["0", "2"], ["0", "2"])):
        model, small = single_output()
        for name in frozen:
            small.get_submodule(name).requires_grad_(False)
        former = copy.deepcopy(small)
        refine_(small, model, data, Refine(passes=60, learning_rate=0.01), blocks=[])
        changed = [
            name
            for name in ("0", "2")
            if not torch.equal(small.get_submodule(name).weight, former.get_submodule(name).weight)  # type: ignore[arg-type]
        ]
        # A model frozen as a whole was meant to be run, not to be kept from refinement.
        assert changed == trained
        assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in former.parameters()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refined(dtype: torch.dtype) -> None:
    model, small = (each.to(dtype) for each in single_output())
    x = torch.randn(40, 6)
    before = distance_of(small, model, x)
    facts = refine_(small, model, [x.to(dtype)], Refine(passes=2_000, learning_rate=0.01), blocks=["0"])
    assert facts["kept"]
    assert {parameter.dtype for parameter in (*small.parameters(), *model.parameters())} == {dtype}
    assert distance_of(small, model, x) < 0.5 * before


def distance_of(small: nn.Module, model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        one, other = (copy.deepcopy(each).float()(x) for each in (small, model))
    return float((one - other).norm())


@pytest.mark.parametrize("bad", [0, -5, 2.5, True])
def test_strange_numbers_of_passes_are_refused(bad: Any) -> None:
    with pytest.raises(InputError, match="passes is a whole number of samples"):
        Refine.of(bad)
    with pytest.raises(InputError, match="batch is a whole number of samples"):
        Refine(batch=bad)


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


class WithHead(nn.Module):
    """A head that only training calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return (y, self.head(y)) if self.training else y


def test_layers_that_only_training_calls_keep_their_statistics() -> None:
    model, data = WithHead(), batches(2)
    assert model.head.running_mean is not None
    model.head.running_mean.fill_(3.0)
    plan = ts.plan(model, ranks=ts.Ranks({"body.3": 3}), norm="frobenius")
    small, report = ts.compress(model, plan, data=data, reestimate_bn=True)
    assert report.notes["reestimated_bn"] == 1
    former, now = model.state_dict(), small.state_dict()
    assert all(torch.equal(former[key], now[key]) for key in former if key.startswith("head."))
    assert not torch.equal(former["body.1.running_mean"], now["body.1.running_mean"])


def test_statistics_that_are_no_numbers_are_refused() -> None:
    model, data = small_net(), batches(2)
    data[1][3, 0, 0, 0] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"running_mean of block\.1 would not be finite"):
        reestimate_bn_(model, data)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_compression_takes_statistics_anew_when_asked() -> None:
    model, plan, stats, data = coarse()
    plain, _ = ts.compress(model, plan, stats, data=data)
    fresh, report = ts.compress(model, plan, stats, data=data, reestimate_bn=True)
    assert report.notes["reestimated_bn"] == 1
    key = "2.1.running_mean"
    assert not torch.equal(plain.state_dict()[key], fresh.state_dict()[key])

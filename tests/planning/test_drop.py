"""Budgets of lost answers: what comes back was tried and kept enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_solving import Solved
from tensigma.errors import CalibrationWarning, InputError
from tensigma.planning import Front, SearchProgress
from tensigma.planning.drop import Judge, Kept, smallest_plan


def classifier() -> nn.Sequential:
    """Answers that depend on the input, unlike those of most networks with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 8)).eval()


def rows(count: int, seed: int, size: int = 50) -> list[Tensor]:
    """Inputs that vary much in a few directions and little in most."""
    inputs = torch.randn(count * size, 24, generator=torch.Generator().manual_seed(seed)) * torch.logspace(
        0.5, -1.5, 24
    )
    return list(inputs.split(size))


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(classifier(), rows(10, seed=0))


@pytest.mark.parametrize("share", [0.08, 0.15, 0.3])
def test_what_was_promised_is_kept(stats: ts.Calibration, share: float, tmp_path: Path) -> None:
    net, held_out = classifier(), rows(8, seed=1)
    seen: list[Any] = []
    plan = ts.plan(net, stats, budget=ts.Drop(share), data=held_out, progress=seen.append)
    small, _ = ts.compress(net, plan, stats)
    agreement = ts.evaluate(small, held_out, original=net).agreement
    assert agreement is not None
    assert agreement >= 1 - share
    note = plan.notes["drop"]
    assert (note["asked"], note["measure"], note["samples"]) == (share, "agreement", 400)
    assert note["kept"] == pytest.approx(agreement)
    plan.save(tmp_path / "plan.json")
    assert ts.Plan.load(tmp_path / "plan.json").notes == plan.notes
    trials = [state for state in seen if isinstance(state, SearchProgress)]
    assert [[state.size, state.kept] for state in trials] == note["tried"]
    assert all(state.enough == (1 - state.kept <= share + 1e-9) for state in trials)
    # Nothing that was tried and kept enough is smaller.
    assert plan.after.params / plan.before.params == min(state.size for state in trials if state.enough)
    assert plan.rate > 1


def test_more_may_be_lost_in_a_smaller_model(stats: ts.Calibration) -> None:
    plans = [ts.plan(classifier(), stats, budget=ts.Drop(s), data=rows(8, seed=1)) for s in (0.08, 0.3)]
    assert plans[0].after.params > plans[1].after.params


def _search(
    stats: ts.Calibration, enough: Callable[[float], bool], trials: int = 10
) -> tuple[ts.Plan, list[float], Front]:
    """A search in which a formula of the size decides."""
    front = ts.plan(classifier(), stats, budget=ts.Params(0.5)).front()
    tried: list[float] = []

    def judge(plan: Any) -> Kept:
        tried.append(plan.after.params / plan.before.params)
        return Kept(measure="agreement", samples=100, share=1.0 if enough(tried[-1]) else 0.0)

    found = smallest_plan(front, ts.Drop(0.1, trials=trials), build=lambda plan: plan, judge=judge)  # type: ignore[arg-type,return-value]
    return found, tried, front


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.97])
def test_the_search_closes_in_on_the_smallest(stats: ts.Calibration, threshold: float) -> None:
    found, _, front = _search(stats, lambda share: share >= threshold)
    size = found.after.params / found.before.params
    assert size >= threshold
    # The twin looks at every size in steps of a thousandth.
    plans = (front.plan(ts.Params(step / 1000)) for step in range(200, 1001))
    best = min(s for s in (p.after.params / p.before.params for p in plans) if s >= threshold)
    assert size <= 1.02 * best


def test_where_more_does_not_always_keep_more_the_result_still_kept_enough(stats: ts.Calibration) -> None:
    found, tried, _ = _search(stats, lambda share: int(share * 40) % 3 != 0)
    size = found.after.params / found.before.params
    assert size in tried
    assert int(size * 40) % 3 != 0


def test_where_nothing_keeps_enough_nothing_changes(stats: ts.Calibration) -> None:
    found, tried, _ = _search(stats, lambda share: share == 1.0, trials=3)
    assert not found.compressed
    assert found.notes["drop"]["kept"] == 1.0
    assert len(tried) == 4


def test_labels_count_where_they_are_given(stats: ts.Calibration) -> None:
    net = classifier()
    with torch.no_grad():
        # Every fifth label is wrong, so that the original is right on four fifths.
        labelled = [(x, (net(x).argmax(1) + (torch.arange(len(x)) % 5 == 0)) % 8) for x in rows(8, seed=1)]
    plan = ts.plan(net, stats, budget=ts.Drop(0.05), data=labelled)
    small, _ = ts.compress(net, plan, stats)
    result = ts.evaluate(small, labelled, original=net)
    note = plan.notes["drop"]
    assert (note["measure"], note["original"]) == ("accuracy", 0.8)
    assert note["kept"] == result.top1
    assert result.top1 is not None
    assert result.top1 >= 0.75
    plain = ts.plan(net, stats, budget=ts.Drop(0.05, measure="agreement"), data=labelled)
    assert plain.notes["drop"]["measure"] == "agreement"
    with pytest.raises(InputError, match="needs labels"):
        ts.plan(net, stats, budget=ts.Drop(0.05, measure="accuracy"), data=rows(2, seed=1))


def test_what_the_original_does_not_answer_is_not_kept() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 8), torch.nan)

    assert Judge(Silent(), rows(2, seed=1), measure="agreement", answers=ts.Scores())(Silent()).share == 0
    assert Judge(Silent(), rows(2, seed=1), measure="agreement", answers=ts.Scores())(classifier()).share == 0


def test_no_layer_is_solved_twice(stats: ts.Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    solved = Solved.watch(monkeypatch)
    net = classifier()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    plan = ts.plan(net, stats, budget=ts.Drop(0.1), data=rows(4, seed=1))
    assert len(solved) == len({(module, treatment.label) for module, treatment in solved.calls}) > 0
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    # What the search has solved is handed on with the plan.
    solved.calls.clear()
    _, report = ts.compress(net, plan, stats, sequential=False)
    assert report.compressed
    assert all(row.cached for row in report.compressed)
    assert not solved.calls


def test_without_statistics_a_part_of_the_batches_is_held_out() -> None:
    net, batches = classifier(), rows(10, seed=0)
    plan = ts.plan(net, budget=ts.Drop(0.1), data=batches)
    assert plan.notes["drop"]["samples"] == 2 * 50
    rest = [batch for index, batch in enumerate(batches) if index not in (1, 6)]
    own = ts.plan(net, ts.calibrate(net, rest), budget=ts.Drop(0.1), data=[batches[1], batches[6]])
    assert own == plan
    once = ts.plan(net, budget=ts.Drop(0.1), data=iter(batches))
    assert once == plan
    with pytest.raises(InputError, match="no second one"):
        ts.plan(net, budget=ts.Drop(0.1), data=batches[:1])


def test_what_cannot_be_searched_is_refused(stats: ts.Calibration) -> None:
    with pytest.raises(InputError, match="held-out batches"):
        ts.plan(classifier(), stats, budget=ts.Drop(0.1))
    with pytest.raises(InputError, match="can be read only once"):
        ts.plan(classifier(), stats, budget=ts.Drop(0.1), data=iter(rows(2, seed=1)))
    with pytest.raises(InputError, match="no batches"):
        ts.plan(classifier(), stats, budget=ts.Drop(0.1), data=[])
    with pytest.raises(InputError, match="the front takes Params, Macs, Bytes or Latency, got Drop"):
        ts.plan(classifier(), stats, budget=ts.Params(0.9)).front().plan(ts.Drop(0.1))


@pytest.mark.parametrize(
    "wrong", [{"share": 1}, {"share": -0.1}, {"share": True}, {"share": 0, "measure": "x"}, {"share": 0, "trials": 0}]
)
def test_budgets_of_answers_check_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ts.Drop(**wrong)


def test_judging_leaves_the_models_as_they_were() -> None:
    net = classifier().train()
    kept = Judge(net, rows(2, seed=1))(net)
    assert (kept.share, kept.lost, kept.samples) == (1.0, 0.0, 100)
    assert net.training


@pytest.mark.slow
def test_one_call_holds_out_by_itself() -> None:
    net, batches = classifier(), rows(10, seed=0)
    _, report = ts.compress(net, batches, budget=ts.Drop(0.15), sequential=False)
    plan = ts.plan(net, budget=ts.Drop(0.15), data=batches)
    assert report.after.params == plan.after.params
    dicts = [{"x": x, "extra": x} for x in batches]
    _, same = ts.compress(net, dicts, budget=ts.Drop(0.15), input="x", sequential=False)
    assert same.after.params == report.after.params
    held_out = rows(4, seed=3)
    small, own = ts.compress(net, iter(batches), budget=ts.Drop(0.15), data=held_out, sequential=False)
    agreement = ts.evaluate(small, held_out, original=net).agreement
    assert agreement is not None
    assert agreement >= 0.85
    assert own.rate > 1


def test_in_one_call_the_model_that_comes_back_keeps_what_was_promised() -> None:
    """Layers fitted in sequence would be other layers than those that the search has judged."""
    net, held_out = classifier(), rows(8, seed=1)
    small, report = ts.compress(net, rows(10, seed=0), budget=ts.Drop(0.2), data=held_out)
    assert report.notes["sequential"] is False
    agreement = ts.evaluate(small, held_out, original=net).agreement
    assert agreement is not None
    assert agreement >= 0.8


@pytest.mark.parametrize("labels", ["beyond", "numbers", "missed"])
def test_integers_that_are_no_labels_of_the_model_are_not_taken_for_them(stats: ts.Calibration, labels: str) -> None:
    net, inputs = classifier(), rows(8, seed=1)
    made = {
        "beyond": [net(x).argmax(1) + 8 for x in inputs],
        "numbers": [torch.arange(len(x)) + 50 * index for index, x in enumerate(inputs)],
        "missed": [(net(x).argmax(1) + 1) % 8 for x in inputs],
    }[labels]
    held_out = list(zip(inputs, made, strict=True))
    with pytest.warns(CalibrationWarning, match="agreement is measured instead of accuracy"):
        plan = ts.plan(net, stats, budget=ts.Drop(0.1), data=held_out)
    assert plan.notes["drop"]["measure"] == "agreement"
    assert plan.notes["drop"]["kept"] >= 0.9
    with pytest.raises(InputError, match="measure='agreement'"):
        ts.plan(net, stats, budget=ts.Drop(0.1, measure="accuracy"), data=held_out)


def test_scores_that_are_no_numbers_are_no_answers() -> None:
    net, broken = classifier(), classifier()
    for parameter in broken.parameters():
        nn.init.constant_(parameter, torch.nan)
    assert Judge(net, rows(2, seed=1))(broken).share == 0

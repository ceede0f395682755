"""Planning that was interrupted goes on where it stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.errors import CalibrationWarning
from tensigma.planning import PlanningProgress, SearchProgress, TrialProgress, planning_store
from tensigma.planning import drop as drops
from tensigma.planning import effects as gradient_effects
from tensigma.planning.curves import Option
from tensigma.running import Probe, Progress
from tensigma.solving import Candidate

pytestmark = pytest.mark.slow


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10)
        ).eval()


def images(seed: int = 0) -> list[Tensor]:
    return [torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(seed))]


def compress(
    cache: Path | None, progress: object = False, data: list[Tensor] | None = None
) -> tuple[nn.Module, ts.Report]:
    return ts.compress(
        net(),
        data or images(),
        recipe=ts.Recipe(budget=ts.Params(0.6), method="svd"),
        cache=cache,
        progress=progress,  # type: ignore[arg-type]
        workers=1,
    )


def interrupt_at(kind: type[Progress], done: int) -> Callable[[Any], None]:
    def interrupt(state: Any) -> None:
        if isinstance(state, kind) and state.done == done:
            raise KeyboardInterrupt

    return interrupt


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    """A list that grows by one with every call of a function."""
    calls: list[str] = []
    real = getattr(owner, name)

    def counting(*args: Any, **keywords: Any) -> Any:
        calls.append(name)
        return real(*args, **keywords)

    monkeypatch.setattr(owner, name, counting)
    return calls


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


def test_a_plan_interrupted_after_two_curves_resumes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = compress(None)
    with pytest.raises(KeyboardInterrupt):
        compress(tmp_path, interrupt_at(PlanningProgress, 2))
    assert len(list(tmp_path.glob("curve-*.json"))) == 2
    computed: list[str] = []
    real = planning_store.curve

    def noting(layer: Candidate) -> list[Option]:
        computed.append(layer.name)
        return real(layer)

    monkeypatch.setattr(planning_store, "curve", noting)
    resumed, _ = compress(tmp_path)
    assert len(computed) == 1
    assert_same(expected, resumed)


def test_effects_and_trials_are_kept_from_the_first_one_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, report = compress(None)
    tried = len(report.notes["weighing"]["tried"])
    assert tried > 1
    with pytest.raises(KeyboardInterrupt):
        compress(tmp_path, interrupt_at(TrialProgress, 1))
    assert len(list(tmp_path.glob("effects-*.json"))) == 1
    assert len(list(tmp_path.glob("trial-*.json"))) == 1
    backward = counted(monkeypatch, gradient_effects, "_squares")
    passes = counted(monkeypatch, Probe, "divergence")
    resumed, again = compress(tmp_path)
    assert not backward
    assert len(passes) == tried - 1
    assert_same(expected, resumed)
    assert again.notes["weighing"] == report.notes["weighing"]


def test_other_samples_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stats = net(), ts.calibrate(net(), images())
    first = ts.plan(model, stats, budget=ts.Params(0.6), method="svd", data=images(), cache=tmp_path)
    backward = counted(monkeypatch, gradient_effects, "_squares")
    ts.plan(model, stats, budget=ts.Params(0.6), method="svd", data=images(), cache=tmp_path)
    assert not backward
    other = ts.plan(model, stats, budget=ts.Params(0.6), method="svd", data=images(1), cache=tmp_path)
    assert backward
    assert other.notes["weighing"]["effects"] != first.notes["weighing"]["effects"]


def test_a_search_interrupted_after_two_trials_resumes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = ts.calibrate(net(), images())
    # Labels that are not the model's: the doubt is told again when outcomes are read.
    held_out = [(images(1)[0], torch.zeros(16, dtype=torch.long))]

    def search(cache: Path | None, progress: Any = False) -> ts.Plan:
        budget = ts.Drop(0.2, trials=4)
        return ts.plan(net(), stats, budget=budget, method="svd", data=held_out, cache=cache, progress=progress)

    measured = counted(monkeypatch, drops.Judge, "_measured")
    with pytest.warns(CalibrationWarning, match="agreement is measured instead"):
        expected = search(None)
    in_all = len(measured)
    with pytest.raises(KeyboardInterrupt), pytest.warns(CalibrationWarning):
        search(tmp_path, interrupt_at(SearchProgress, 2))
    del measured[:]
    with pytest.warns(CalibrationWarning, match="agreement is measured instead"):
        assert search(tmp_path) == expected
    assert len(measured) == in_all - 2 > 0
    del measured[:]
    with pytest.warns(CalibrationWarning, match="agreement is measured instead"):
        search(tmp_path)
    assert not measured
    held_out[0] = (images(2)[0], held_out[0][1])
    with pytest.warns(CalibrationWarning):
        search(tmp_path)
    assert measured


@pytest.mark.parametrize("kind", ["curve", "effects", "trial"])
def test_what_is_damaged_is_computed_again(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = compress(tmp_path)
    files = list(tmp_path.glob(f"{kind}-*.json"))
    assert files
    for file in files:
        # One digit of one number.
        text = file.read_text()
        place = next(i for i, letter in enumerate(text) if letter.isdigit() and i > len(kind) + 4)
        file.write_text(f"{text[:place]}{(int(text[place]) + 1) % 10}{text[place + 1 :]}")
    with caplog.at_level(logging.WARNING):
        again, _ = compress(tmp_path)
    assert "computed again" in caplog.text
    assert_same(first, again)

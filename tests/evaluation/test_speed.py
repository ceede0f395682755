"""Whether a smaller model is a faster one, by a clock that the models themselves move on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.compression import Report, execution
from tensigma.errors import InputError, PlanWarning, StoreError
from tensigma.evaluation import Size, is_slower, speed_in_words, speed_note, speedup_of
from tensigma.report.cards import headline


class Clock:
    """Stands still until a model runs."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(nn.Module):
    """Takes so many seconds for each sample, and ten times as long for the first batch of a size."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.batches = clock, seconds, list[int]()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds * len(x) * (1 if len(x) in self.batches else 10)
        self.batches.append(len(x))
        return x


@pytest.mark.parametrize(("before", "after"), [(0.001, 0.0016), (0.001, 0.0005)])
def test_times_are_those_of_runs_that_are_warm(before: float, after: float) -> None:
    clock = Clock()
    note = speed_note(Slow(clock, before), Slow(clock, after), torch.zeros(40, 2), clock=clock)
    assert note is not None
    assert note["batch"] == 16
    assert note["before"] == pytest.approx(16 * before)
    assert speedup_of(note) == pytest.approx(before / after)
    assert is_slower(note) == (after > before)


@pytest.mark.parametrize(("seconds", "batch"), [(0.01, 8), (0.03, 2), (0.1, 1)])
def test_it_takes_about_a_second(seconds: float, batch: int) -> None:
    clock = Clock()
    models = Slow(clock, seconds), Slow(clock, 1.5 * seconds)
    note = speed_note(*models, torch.zeros(40, 2), clock=clock)
    assert note is not None
    assert note["batch"] == batch
    # A round more than what is wanted, and the first runs of each batch, which are ten times as long here.
    assert clock.now < 1 + 2.5 * seconds * batch + 10 * (1 + 2.5 * batch) * seconds


def test_models_that_take_too_long_are_not_timed() -> None:
    clock = Clock()
    models = Slow(clock, 0.3), Slow(clock, 0.3)
    assert speed_note(*models, torch.zeros(4, 2), clock=clock) is None
    assert models[1].batches == []


def test_models_come_back_as_they_were() -> None:
    clock = Clock()
    models = Slow(clock, 0.001).train(), Slow(clock, 0.001).eval()
    speed_note(*models, torch.zeros(4, 2), clock=clock)
    assert (models[0].training, models[1].training) == (True, False)


def test_the_note_is_in_the_report_and_in_its_headline() -> None:
    size = Size(params=10, macs=5, bytes=40)
    note = {"batch": 16, "before": 0.010, "after": 0.016}
    report = Report(layers=(), before=size, after=size, seconds=1.0).with_notes(speed=note)
    assert str(report).endswith(f", {speed_in_words(note)}")
    assert Report.from_json(report.to_json()) == report
    (card,) = (card for card in headline(report, None) if card.name == "Time")
    assert (card.before, card.after) == ("10 ms", "16 ms")
    assert card.change == "1.60× slower, PyTorch, one thread, batch 16"
    with pytest.raises(StoreError, match="after is 0"):
        Report.from_json(report.with_notes(speed={**note, "after": 0}).to_json())


class TestCompress:
    """``ts.compress(…, speed=True)``."""

    @pytest.fixture
    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    @pytest.fixture
    def plan(self, model: nn.Module) -> ts.Plan:
        return ts.plan(model, ranks=ts.Ranks({"*": 2}), norm="frobenius")

    def _time(self, monkeypatch: pytest.MonkeyPatch, note: dict[str, float] | None) -> list[int]:
        samples: list[int] = []

        def timed(original: nn.Module, small: nn.Module, inputs: Tensor) -> dict[str, float] | None:
            assert isinstance(small.get_submodule("2"), nn.Sequential)
            samples.append(len(inputs))
            return note

        monkeypatch.setattr(execution, "speed_note", timed)
        return samples

    def test_nothing_is_timed_unless_asked(
        self, model: nn.Module, plan: ts.Plan, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        samples = self._time(monkeypatch, None)
        _, report = ts.compress(model, plan, data=[torch.zeros(20, 8)])
        assert samples == []
        assert "speed" not in report.notes

    def test_what_is_slower_is_told(self, model: nn.Module, plan: ts.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        note = {"batch": 16, "before": 0.010, "after": 0.016}
        samples = self._time(monkeypatch, note)
        with pytest.warns(PlanWarning, match=r"slower than the original: 1\.60 times slower") as caught:
            _, report = ts.compress(model, plan, data=[torch.zeros(20, 8)], speed=True)
        assert caught[0].filename == __file__
        assert samples == [16]
        assert report.notes["speed"] == note
        assert str(report).endswith(speed_in_words(note))

    @pytest.mark.parametrize("note", [None, {"batch": 16, "before": 0.010, "after": 0.005}])
    def test_what_is_faster_or_not_timed_is_not(
        self, model: nn.Module, plan: ts.Plan, note: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._time(monkeypatch, note)
        _, report = ts.compress(model, plan, data=[torch.zeros(20, 8)], speed=True)
        assert report.notes.get("speed") == note

    def test_data_is_needed_and_asked_for_at_once(self, model: nn.Module, plan: ts.Plan) -> None:
        with pytest.raises(InputError, match="speed=True needs data="):
            ts.compress(model, plan, speed=True)
        with pytest.raises(InputError, match="speed=True reads data more than once"):
            ts.compress(model, iter([torch.zeros(2, 8)]), budget=ts.Params(0.9), speed=True)
        # Under Drop what is given as data= is searched on, and the batches are what is read again.
        with pytest.raises(InputError, match="speed=True reads data more than once"):
            ts.compress(model, iter([torch.zeros(2, 8)]), budget=ts.Drop(0.1), data=[torch.zeros(2, 8)], speed=True)

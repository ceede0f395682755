"""How far long work has come, as a bar or as lines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import singledispatch
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from tensigma.calibration import Progress as CalibrationProgress
from tensigma.experiments.reproduction import ReproductionProgress
from tensigma.pipeline import CompressionProgress, EvaluationProgress
from tensigma.planning import PlanningProgress, SearchProgress, TimingProgress

# Seconds between lines at first and at most: often enough to see that it lives, rarely enough for a log.
_FIRST, _MOST = 2.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where work stands. ``done`` and ``total`` are in any unit; None where the end is not known."""

    done: float
    total: float | None
    text: str
    remaining: float | None = None


@singledispatch
def step_of(state: Any, seconds: float) -> Step:
    """What the library reports, in the form that is shown, ``seconds`` after the work began."""
    raise TypeError(f"{type(state).__name__} is no progress that can be shown")


@step_of.register
def _(state: Step, seconds: float) -> Step:
    return state


@step_of.register
def _(state: CalibrationProgress, seconds: float) -> Step:
    batches = f"batch {state.done}" + ("" if state.total is None else f" of {state.total}")
    return Step(done=state.done, total=state.total, text=f"{batches}, {_rate(state.rate)}", remaining=state.remaining)


@step_of.register
def _(state: CompressionProgress, seconds: float) -> Step:
    error = "" if state.error is None else f", error {state.error:.3f}"
    source = " (cached)" if state.cached else ""
    text = f"layer {state.done} of {state.total}, {state.layer}{error}{source}"
    return Step(done=state.work, total=1.0, text=text, remaining=state.remaining)


@step_of.register
def _(state: PlanningProgress, seconds: float) -> Step:
    return Step(done=state.work, total=1.0, text=str(state), remaining=state.remaining)


@step_of.register
def _(state: TimingProgress, seconds: float) -> Step:
    return Step(done=state.done, total=state.total, text=str(state), remaining=state.remaining)


@step_of.register
def _(state: SearchProgress, seconds: float) -> Step:
    return Step(done=state.done, total=state.total, text=str(state), remaining=state.remaining)


@step_of.register
def _(state: EvaluationProgress, seconds: float) -> Step:
    batches = f"batch {state.done}" + ("" if state.total is None else f" of {state.total}")
    remaining = None if state.total is None else seconds / max(state.done, 1) * (state.total - state.done)
    rate = _rate(state.samples / seconds if seconds > 0 else 0.0)
    return Step(done=state.done, total=state.total, text=f"{batches}, {rate}", remaining=remaining)


@step_of.register
def _(state: ReproductionProgress, seconds: float) -> Step:
    rate = f", {60 * state.computed / state.seconds:.1f} a minute" if state.computed else ""
    text = f"cell {state.done} of {state.total}{rate}, {state.experiment}: {state.cell}"
    return Step(done=state.done, total=state.total, text=text, remaining=state.remaining)


def _rate(samples: float) -> str:
    return f"{samples:,.0f} samples/s" if samples >= 10 else f"{samples:.2g} samples/s"


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(0.34), duration(75), duration(7260)
    ('0.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Bar:
    """A bar that moves, for a terminal."""

    def __init__(self, title: str, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
        )
        self._task = self._progress.add_task(title, total=None, text="")
        self._start = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def update(self, state: Any) -> None:
        seconds = time.perf_counter() - self._start
        step = step_of(state, seconds)
        ends = step.total is not None and step.done >= step.total
        rest = f", {duration(step.remaining)} to go" if step.remaining is not None and not ends else ""
        if ends:
            rest = f", {duration(seconds)}"
        self._progress.update(self._task, completed=step.done, total=step.total, text=step.text + rest)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Lines:
    """Now and then a line, for files and pipes."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._start = self._last = time.perf_counter()
        self._pause = _FIRST

    def __enter__(self) -> Self:
        return self

    def update(self, state: Any) -> None:
        now = time.perf_counter()
        step = step_of(state, now - self._start)
        ends = step.total is not None and step.done >= step.total
        if not ends and now - self._last < self._pause:
            return
        if not ends:
            self._last, self._pause = now, min(2 * self._pause, _MOST)
        rest = "" if step.remaining is None else f", {duration(step.remaining)} to go"
        if ends:
            rest = f", {duration(now - self._start)}"
        self._console.print(Text(f"{self._title}: {step.text}{rest}"), soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

"""Progress of long work, as a bar or as lines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

import tensigma as ts

# Seconds between two lines, at first and at most: often enough to show that work goes on, without filling a log.
_FIRST, _MOST = 2.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A state of work as it is shown. ``done`` and ``total`` are in any unit; None if the end is not known."""

    done: float
    total: float | None
    text: str
    remaining: float | None = None


def step_of(state: Step | ts.running.Progress) -> Step:
    """A state that the library reports, in the form that is shown."""
    if isinstance(state, Step):
        return state
    if state.share is None:
        return Step(done=state.done, total=None, text=str(state))
    return Step(done=state.share, total=1.0, text=str(state), remaining=state.remaining)


def duration(seconds: float) -> str:
    """Seconds in words.

    >>> duration(0.34), duration(75), duration(7260)
    ('0.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _Watch:
    """Measures the time of each kind of work separately: it starts again when the kind of state changes."""

    def __init__(self, start: float) -> None:
        self._start = self._last = start
        self._kind: type | None = None

    def step(self, state: Step | ts.running.Progress, now: float) -> tuple[Step, str]:
        """The step, and in words the time to go, or after the last step the time taken."""
        if self._kind not in (None, type(state)):
            self._start = self._last
        self._kind, self._last = type(state), now
        step = step_of(state)
        if step.total is not None and step.done >= step.total:
            return step, duration(now - self._start)
        return step, "" if step.remaining is None else f"{duration(step.remaining)} to go"


class _Time(ProgressColumn):
    """The time to go, counted down between steps, or the time taken."""

    max_refresh = 0.25

    def render(self, task: Task) -> Text:
        step, since = task.fields["step"], task.fields["since"]
        now = time.perf_counter()
        if step is None or step.total is None or (step.remaining is None and step.done < step.total):
            return Text(duration(now - since), style="dim")
        if step.done >= step.total:
            return Text(task.fields["taken"], style="dim")
        left = step.remaining - (now - since)
        # The estimate has run out, but the work has not ended.
        return Text(f"{duration(left)} to go" if left > 0 else "a moment to go", style="cyan")


class Bar:
    """A moving bar for a terminal. It never takes more than one line."""

    def __init__(self, title: str, console: Console) -> None:
        self._progress = rich.progress.Progress(
            SpinnerColumn("line", finished_text="[green]✓[/green]", style="cyan"),
            TextColumn("{task.description:<11}", style="bold"),
            BarColumn(bar_width=18),
            TaskProgressColumn("{task.percentage:>3.0f} %", show_speed=False),
            TextColumn(
                "{task.fields[text]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
            ),
            _Time(table_column=Column(no_wrap=True, justify="right")),
            console=console,
            expand=True,
        )
        self._begin = time.perf_counter()
        self._task = self._progress.add_task(title, total=None, text="", step=None, taken="", since=self._begin)
        self._watch = _Watch(self._begin)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def update(self, state: Step | ts.running.Progress) -> None:
        now = time.perf_counter()
        step, taken = self._watch.step(state, now)
        # If the end is not known, the time since the beginning is shown.
        since = self._begin if step.total is None else now
        self._progress.update(
            self._task, completed=step.done, total=step.total, text=step.text, step=step, taken=taken, since=since
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Lines:
    """A line now and then, for files and pipes."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._last, self._pause = time.perf_counter(), _FIRST
        self._watch = _Watch(self._last)

    def __enter__(self) -> Self:
        return self

    def update(self, state: Step | ts.running.Progress) -> None:
        now = time.perf_counter()
        step, time_in_words = self._watch.step(state, now)
        ends = step.total is not None and step.done >= step.total
        if not ends and now - self._last < self._pause:
            return
        if not ends:
            self._last, self._pause = now, min(2 * self._pause, _MOST)
        words = [f"{self._title}: {step.text}", time_in_words]
        self._console.print(Text(", ".join(filter(None, words))), soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

"""How far long work has come, as a bar or as lines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from tensigma.running import Progress, samples_per_second

# Seconds between lines at first and at most: often enough to see that it lives, rarely enough for a log.
_FIRST, _MOST = 2.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where work stands. ``done`` and ``total`` are in any unit; None where the end is not known."""

    done: float
    total: float | None
    text: str
    remaining: float | None = None


def step_of(state: Any, seconds: float) -> Step:
    """What the library reports, in the form that is shown, ``seconds`` after the work began.

    Anything else that counts what is done, or samples, towards a total can be shown too.
    """
    if isinstance(state, Step):
        return state
    if isinstance(state, Progress):
        if state.share is None:
            return Step(done=state.done, total=None, text=str(state))
        return Step(done=state.share, total=1.0, text=str(state), remaining=state.remaining)
    samples = getattr(state, "samples", None)
    done, total = getattr(state, "done", samples), getattr(state, "total", None)
    if done is None:
        raise TypeError(f"{type(state).__name__} is no progress that can be shown")
    words = [f"{done:,}" + ("" if total is None else f" of {total:,}") + (" samples" if done is samples else "")]
    if getattr(state, "loss", None) is not None:
        words.append(f"loss {state.loss:.3g}")
    if samples is not None and seconds > 0:
        words.append(samples_per_second(samples, seconds))
    remaining = getattr(state, "remaining", None)
    if remaining is None and total is not None and done > 0:
        remaining = seconds / done * (total - done)
    return Step(done=done, total=total, text=", ".join(words), remaining=remaining)


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(0.34), duration(75), duration(7260)
    ('0.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _Watch:
    """Steps with the time that belongs to them: it begins anew when another kind of work begins."""

    def __init__(self, start: float) -> None:
        self._start = self._last = start
        self._kind: type | None = None

    def step(self, state: Any, now: float) -> tuple[Step, str]:
        """Where work stands, and the time to go, or after the last step the time taken, in words."""
        if self._kind not in (None, type(state)):
            self._start = self._last
        self._kind, self._last = type(state), now
        seconds = now - self._start
        step = step_of(state, seconds)
        if step.total is not None and step.done >= step.total:
            return step, duration(seconds)
        return step, "" if step.remaining is None else f"{duration(step.remaining)} to go"


class _Time(ProgressColumn):
    """The time to go, which runs on between the steps, or the time taken."""

    max_refresh = 0.25

    def render(self, task: Task) -> Text:
        step, since = task.fields["step"], task.fields["since"]
        now = time.perf_counter()
        if step is None or step.total is None or (step.remaining is None and step.done < step.total):
            return Text(duration(now - since), style="dim")
        if step.done >= step.total:
            return Text(task.fields["taken"], style="dim")
        left = step.remaining - (now - since)
        # Past the estimate nothing is known but that it goes on.
        return Text(f"{duration(left)} to go" if left > 0 else "a moment to go", style="cyan")


class Bar:
    """A bar that moves, for a terminal. It never takes more than one line."""

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

    def update(self, state: Any) -> None:
        now = time.perf_counter()
        step, taken = self._watch.step(state, now)
        # Without an end in sight, the time since the beginning is shown.
        since = self._begin if step.total is None else now
        self._progress.update(
            self._task, completed=step.done, total=step.total, text=step.text, step=step, taken=taken, since=since
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


class Lines:
    """Now and then a line, for files and pipes."""

    def __init__(self, title: str, console: Console) -> None:
        self._title, self._console = title, console
        self._last, self._pause = time.perf_counter(), _FIRST
        self._watch = _Watch(self._last)

    def __enter__(self) -> Self:
        return self

    def update(self, state: Any) -> None:
        now = time.perf_counter()
        step, rest = self._watch.step(state, now)
        ends = step.total is not None and step.done >= step.total
        if not ends and now - self._last < self._pause:
            return
        if not ends:
            self._last, self._pause = now, min(2 * self._pause, _MOST)
        self._console.print(Text(", ".join(filter(None, [f"{self._title}: {step.text}", rest]))), soft_wrap=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

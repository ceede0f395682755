"""What a command shows: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

import tensigma as ts
from tensigma.cli.progress import Bar, Lines
from tensigma.errors import AnswersWarning, CalibrationWarning, NumericalWarning, PlanWarning

# Wide enough for any table: text written to a file is not cut to the width of a window.
_UNLIMITED = 1000


class Screen:
    """Standard output and standard error of one command.

    If several processes work together, only the first one shows anything; the others show only errors.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.json, self.quiet, self.verbose = json, quiet, verbose
        self.rank, self.size = ts.running.rank_and_size()
        self._out = _console(stderr=False)
        self._err = _console(stderr=True)
        #: What is held until the command ends, such as the place of its output.
        self.until_end = ExitStack()

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that shows results and writes files."""
        return self.rank == 0

    def result(self, command: str, data: Mapping[str, Any], *shown: RenderableType) -> None:
        """The result of the command: ``data`` as JSON, or ``shown`` for a reader."""
        if not self.speaks:
            return
        if self.json:
            complete = {"command": command, "tensigma": ts.__version__, **data}
            typer.echo(json.dumps(_strict(complete), indent=1, ensure_ascii=False, allow_nan=False))
            return
        for item in shown:
            self._out.print(item, markup=False, highlight=False, emoji=False)

    def show(self, *shown: RenderableType) -> None:
        """Something for a reader that is not the result."""
        if self.speaks and not self.quiet:
            for item in shown:
                self._err.print(item, markup=False, highlight=False, emoji=False)

    def note(self, text: str) -> None:
        """A note on what is being done."""
        if self.speaks and not self.quiet:
            self._say(Text(text, style="dim"))

    def warn(self, text: str) -> None:
        """A warning; the work goes on."""
        if self.speaks:
            self._say(Text.assemble(("warning: ", "bold yellow"), text))

    def error(self, text: str) -> None:
        """Why the work failed."""
        process = "" if self.size == 1 else f"process {self.rank} of {self.size}: "
        self._say(Text.assemble(("error: ", "bold red"), process, text))

    def _say(self, text: Text) -> None:
        # A message is one line in a file, and broken between words on a terminal.
        self._err.print(text, soft_wrap=not self._err.is_terminal)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[Any], None]]:
        """A function to pass as ``progress``: it moves a bar on a terminal and prints lines elsewhere."""
        if not self.speaks or self.quiet:
            yield lambda state: None
            return
        display = Bar if self._err.is_terminal else Lines
        with display(title, self._err) as shown:
            yield shown.update

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Show the library's warnings, and with ``verbose`` its log, while the block runs."""
        handler = _Handler(self)
        shown: set[str] = set()

        def warn_once(text: str) -> None:
            # Several steps of one command may say the same.
            if text not in shown:
                shown.add(text)
                self.warn(text)

        logger = logging.getLogger("tensigma")
        level = logger.level
        with warnings.catch_warnings():
            # Warnings of other libraries are meant for developers.
            warnings.simplefilter("default" if self.verbose else "ignore")
            for category in (AnswersWarning, CalibrationWarning, NumericalWarning, PlanWarning):
                warnings.simplefilter("always", category)
            warnings.showwarning = lambda message, *args, **kwargs: warn_once(str(message))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO if self.verbose else logging.WARNING)
            try:
                yield
            finally:
                logger.removeHandler(handler)
                logger.setLevel(level)


class _Handler(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self.screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.screen.warn(record.getMessage())
        else:
            self.screen.note(record.getMessage())


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    console = Console(file=stream)
    return console if console.is_terminal else Console(file=stream, width=_UNLIMITED)


def _strict(value: Any) -> Any:
    """The same, with null for numbers that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value

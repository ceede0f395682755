"""What a command shows: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

import tensigma
from tensigma.cli.progress import Bar, Lines
from tensigma.errors import CalibrationWarning, NumericalWarning
from tensigma.running import rank_and_size

# Wide enough for any table: text that goes to a file is not cut to the width of a window.
_UNLIMITED = 1000


class Screen:
    """Standard output and standard error of one command.

    Where several processes work together, the first one speaks for all; only errors are heard from the others.
    """

    def __init__(self, *, json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.json, self.quiet, self.verbose = json, quiet, verbose
        self.rank, self.size = rank_and_size()
        self._out = _console(stderr=False)
        self._err = _console(stderr=True)

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that shows and writes."""
        return self.rank == 0

    def result(self, command: str, data: Mapping[str, Any], *shown: RenderableType) -> None:
        """What the command was asked for: ``data`` as JSON, or ``shown`` for a reader."""
        if not self.speaks:
            return
        if self.json:
            complete = {"command": command, "tensigma": tensigma.__version__, **data}
            typer.echo(json.dumps(_strict(complete), indent=1, ensure_ascii=False, allow_nan=False))
            return
        for item in shown:
            self._out.print(item, markup=False, highlight=False, emoji=False)

    def show(self, *shown: RenderableType) -> None:
        """Something for a reader along the way, beside the result."""
        if self.speaks and not self.quiet:
            for item in shown:
                self._err.print(item, markup=False, highlight=False, emoji=False)

    def note(self, text: str) -> None:
        """A remark along the way."""
        if self.speaks and not self.quiet:
            self._err.print(Text(text, style="dim"), soft_wrap=True)

    def detail(self, text: str) -> None:
        """A remark for those who want to know more."""
        if self.verbose:
            self.note(text)

    def warn(self, text: str) -> None:
        """Something that deserves a look, though the work goes on."""
        if self.speaks:
            self._err.print(Text.assemble(("warning: ", "bold yellow"), text), soft_wrap=True)

    def error(self, text: str) -> None:
        """Why the work could not be done."""
        whose = "" if self.size == 1 else f"process {self.rank} of {self.size}: "
        self._err.print(Text.assemble(("error: ", "bold red"), whose, text), soft_wrap=True)

    @contextmanager
    def progress(self, title: str) -> Iterator[Callable[[Any], None]]:
        """A callback for the library: a moving bar on a terminal, now and then a line elsewhere."""
        if not self.speaks or self.quiet:
            yield lambda state: None
            return
        kind = Bar if self._err.is_terminal else Lines
        with kind(title, self._err) as shown:
            yield shown.update

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Show the library's warnings, and with ``verbose`` its log, for as long as the block lasts."""
        handler = _Handler(self)
        logger = logging.getLogger("tensigma")
        level = logger.level
        with warnings.catch_warnings():
            # Warnings of other libraries are for their developers, not for whoever runs this command.
            warnings.simplefilter("default" if self.verbose else "ignore")
            for category in (CalibrationWarning, NumericalWarning):
                warnings.simplefilter("always", category)
            warnings.showwarning = lambda message, *args, **kwargs: self.warn(str(message))
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
    """The same with what JSON has no word for made null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value

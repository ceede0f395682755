"""What all commands share: a few options, and one way to fail."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from tensigma.cli.screen import Screen
from tensigma.errors import TensigmaError

EXIT_CODES = "Exit codes: 0 done; 1 it could not be done; 2 the command line is wrong; 130 interrupted."
_PANEL = "Output and resources"
_Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and nothing else, on stdout.", rich_help_panel=_PANEL)
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks.", rich_help_panel=_PANEL)]
_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="More remarks; a traceback with an error.", rich_help_panel=_PANEL)
]
_THREADS = "CPU threads"
_Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help=f"{_THREADS}; all by default.", rich_help_panel=_PANEL),
]
_FewThreads = Annotated[int, typer.Option("--threads", min=1, metavar="N", help=f"{_THREADS}.", rich_help_panel=_PANEL)]
#: Arguments of the library whose options are called otherwise.
_OPTIONS = {"check": "--force", "recipe": "--budget or --ranks"}
_SHARED: dict[str, Any] = {"json": _Json, "quiet": _Quiet, "verbose": _Verbose, "threads": _Threads}


def command(function: Callable[..., None], *, threads: int | None = None) -> Callable[..., None]:
    """Turn ``function(screen, …)`` into a command with the shared options and errors shown as one message.

    ``threads`` is how many the command takes where nothing else is asked for; None means all.
    """
    default_threads = threads

    @functools.wraps(function)
    def run(*, json: bool, quiet: bool, verbose: bool, threads: int | None, **own: Any) -> None:
        if quiet and verbose:
            raise typer.BadParameter("--quiet and --verbose contradict each other")
        screen = Screen(json=json, quiet=quiet, verbose=verbose)
        with _outcome(screen), screen.listening(), _threads(threads):
            function(screen, **own)

    # typer reads options from the signature: the screen goes, the shared options come.
    own = inspect.signature(function, eval_str=True)
    _, *parameters = own.parameters.values()
    parameters += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default_threads if name == "threads" else False,
            annotation=_FewThreads if name == "threads" and default_threads is not None else kind,
        )
        for name, kind in _SHARED.items()
    ]
    for parameter in parameters:
        _hide_type(parameter.annotation)
    keyword_only = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    del run.__wrapped__
    run.__signature__ = own.replace(parameters=keyword_only)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in keyword_only}
    return run


def _hide_type(annotation: Any) -> None:
    """A flag takes no value, so none is named in its help."""
    kind, *others = get_args(annotation) or (None,)
    for option in others:
        if isinstance(option, OptionInfo) and option.metavar is None and kind in (bool, bool | None):
            option.metavar = ""


def _as_flag(option: Any) -> Any:
    """An option that is shown without the kind of its value."""
    if option is not None:
        option.metavar = ""
    return option


class Command(TyperCommand):
    """A command whose ``--help`` is a flag like others."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


class Group(TyperGroup):
    """The same for several commands under one name."""

    def get_help_option(self, ctx: Any) -> Any:
        return _as_flag(super().get_help_option(ctx))


def command_line() -> list[str] | None:
    """What was typed, from the name of the program on; None where the command runs inside another program."""
    program = Path(sys.argv[0])
    if program.stem != "tensigma" and program.parts[-2:] != ("tensigma", "__main__.py"):
        return None
    return ["tensigma", *sys.argv[1:]]


@contextmanager
def _outcome(screen: Screen) -> Iterator[None]:
    """Failures as a message and an exit code."""
    try:
        yield
    except (typer.Exit, typer.BadParameter, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        screen.error("interrupted")
        raise typer.Exit(130) from None
    except Exception as error:
        if screen.verbose:
            screen.note(traceback.format_exc().rstrip())
        screen.error(_message(error, screen.verbose))
        raise typer.Exit(1) from None


def _message(error: Exception, verbose: bool) -> str:
    if isinstance(error, TensigmaError):
        # The library names its arguments; on the command line they are options, mostly of the same names.
        return error.worded(lambda parameter: _OPTIONS.get(parameter, f"--{parameter.replace('_', '-')}"))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory; take a smaller --batch-size or --memory ({error})"
    hint = "" if verbose else "; --verbose shows where"
    return f"this is a fault of tensigma or of the model itself: {type(error).__name__}: {error}{hint}"


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """So many threads for torch, and as many as before afterwards."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)

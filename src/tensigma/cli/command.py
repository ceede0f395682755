"""What all commands share: a few options, and how errors are shown."""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import tensigma as ts
from tensigma.cli.parsing import in_options
from tensigma.cli.screen import Screen
from tensigma.errors import TensigmaError

#: The exit code if the model was compressed and written, but could not be evaluated or exported.
INCOMPLETE = 3
_INCOMPLETE = f"{INCOMPLETE} compressed, but not evaluated or exported"
EXIT_CODES = f"Exit codes: 0 done; 1 failed; 2 wrong usage; {_INCOMPLETE}; 130 interrupted."
_PANEL = "Output and resources"
_Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else.", rich_help_panel=_PANEL)
]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes.", rich_help_panel=_PANEL)]
_Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="More notes, and tracebacks of errors.", rich_help_panel=_PANEL)
]
_Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, metavar="N", help="CPU threads; all by default.", rich_help_panel=_PANEL),
]
_FewThreads = Annotated[int, typer.Option("--threads", min=1, metavar="N", help="CPU threads.", rich_help_panel=_PANEL)]
_SHARED: dict[str, Any] = {"json": _Json, "quiet": _Quiet, "verbose": _Verbose, "threads": _Threads}


def command(function: Callable[..., None], *, threads: int | None = None) -> Callable[..., None]:
    """Turn ``function(screen, …)`` into a command with the shared options, whose errors are shown as one message.

    ``threads`` is the default of ``--threads``; None means all.
    """
    default_threads = threads

    @functools.wraps(function)
    def run(*, json: bool, quiet: bool, verbose: bool, threads: int | None, **arguments: Any) -> None:
        if quiet and verbose:
            raise typer.BadParameter("--quiet and --verbose contradict each other; give one of them")
        screen = Screen(json=json, quiet=quiet, verbose=verbose)
        with _errors_shown(screen), screen.until_end, screen.listening(), ts.running.threads(threads):
            function(screen, **arguments)

    # typer reads options from the signature: leave out the screen, add the shared options.
    signature = inspect.signature(function, eval_str=True)
    _, *parameters = signature.parameters.values()
    for name, annotation in _SHARED.items():
        default: Any = False
        if name == "threads":
            default = default_threads
            annotation = _Threads if default_threads is None else _FewThreads
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    del run.__wrapped__
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


class _FlagsWithoutTypes:
    """Shows no type of value in the help of flags, which take none."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(_FlagsWithoutTypes, TyperCommand):
    """A command as all of them are shown."""


class Group(_FlagsWithoutTypes, TyperGroup):
    """Commands under one name."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)
        for parameter in parameters:
            # typer's own flags, which install completion, are None by default; to turn that into a bool, typer would
            # import pydantic, which takes longer than all the rest of a command's --help.
            if getattr(parameter, "is_flag", False) and parameter.default is None:
                parameter.default = False
        return parameters


def command_line() -> list[str] | None:
    """The words that were typed, beginning with the program; None if the command runs inside another program."""
    program = Path(sys.argv[0])
    if program.stem != "tensigma" and program.parts[-2:] != ("tensigma", "__main__.py"):
        return None
    return ["tensigma", *sys.argv[1:]]


@contextmanager
def _errors_shown(screen: Screen) -> Iterator[None]:
    """Turn errors into a message and an exit code."""
    try:
        yield
    except (typer.Exit, typer.BadParameter, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        screen.error("interrupted")
        raise typer.Exit(130) from None
    except Exception as error:
        screen.error(message_of(screen, error))
        raise typer.Exit(1) from None


def message_of(screen: Screen, error: Exception) -> str:
    """An error in words; with ``--verbose`` its traceback is shown too."""
    if screen.verbose:
        screen.note(traceback.format_exc().rstrip())
    return _message(error, screen.verbose)


def _message(error: Exception, verbose: bool) -> str:
    if isinstance(error, TensigmaError):
        return in_options(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    # The second one is torch's.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory; try a smaller --batch-size or --memory ({error})"
    hint = "" if verbose else "; --verbose shows where"
    return f"this is a bug in tensigma or in the model: {type(error).__name__}: {error}{hint}"

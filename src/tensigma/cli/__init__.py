"""The command line: where a string from a person becomes a type, and where results are shown."""

from __future__ import annotations

import importlib
import sys

#: What the extra ``cli`` brings.
_NEEDED = ("typer", "rich")


def main() -> None:
    """Run the command line; the entry point of ``tensigma``."""
    for package in _NEEDED:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            sys.stderr.write(
                f"tensigma: the command line needs {package}, which is not installed; run: "
                "pip install 'tensigma[cli]'\n"
            )
            raise SystemExit(1) from None
    # Not before the check above: every sub-command is made of what the extra brings.
    from tensigma.cli.app import app

    app()

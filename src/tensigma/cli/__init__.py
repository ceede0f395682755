"""The command line: words become types, the library is called, results are shown.

Everything here is imported without torch, so that help and completion answer at once: the library is used through
``tensigma``'s own names, which are imported when a command starts.
"""

from __future__ import annotations

import importlib
import sys

#: Packages of the extra ``cli``.
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
    # Not before the check above: all commands import these packages.
    from tensigma.cli.app import app

    app()

"""Names that tests of the command line share."""

from __future__ import annotations

from pathlib import Path

MODEL = "zoo:digits-cnn?width=6"
DATA = "digits:?samples=96"


def files(folder: Path) -> set[str]:
    """Every file and folder below, hidden ones too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}

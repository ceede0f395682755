"""Output that is written completely or not at all, and that replaces nothing without ``--force``."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tensigma.cli.screen import Screen
from tensigma.errors import StoreError
from tensigma.files import claimed, read_json, recover, whole_file

MODEL = "tensigma-model"
CALIBRATION = "tensigma-calibration"
#: What stands for a manifest in the folder of a model that came as an ONNX file.
GRAPH = "model.onnx"


def claim_folder(screen: Screen, target: Path, *, force: bool, format: str) -> None:
    """Refuse a folder that cannot be written, and hold the place until the command ends, before long work starts."""
    recover(target)
    check_folder(target, force=force, format=format)
    if screen.speaks:
        screen.until_end.enter_context(claimed(target))


def claim_file(screen: Screen, target: Path, *, force: bool) -> None:
    """The same for a file."""
    _check_parents(target)
    if target.is_dir():
        raise StoreError(f"{target} is a folder; give --out the name of a file")
    if target.exists() and not force:
        raise StoreError(f"{target} exists; add --force to replace it, or choose another --out")
    if screen.speaks:
        screen.until_end.enter_context(claimed(target, replace=force))


def check_folder(target: Path, *, force: bool, format: str) -> None:
    """Refuse a folder that cannot be written."""
    _check_parents(target)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise StoreError(f"{target} exists and is not a folder; choose another --out")
    if not target.exists() or not any(target.iterdir()):
        return
    if not is_output(target, format):
        raise StoreError(f"{target} exists and holds something else; choose another --out")
    if not force:
        raise StoreError(f"{target} exists; add --force to replace it, or choose another --out")


def write_text(target: Path, text: str) -> None:
    """Write a file in one step."""
    with whole_file(target) as partial:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")


def to_json(data: object) -> str:
    """The text of a JSON file."""
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _check_parents(target: Path) -> None:
    for parent in target.absolute().parents:
        if parent.exists():
            if not parent.is_dir():
                raise StoreError(f"{target} cannot be written: {parent} is not a folder")
            if not os.access(parent, os.W_OK):
                raise StoreError(f"{target} cannot be written: {parent} is not writable")
            return


def is_output(folder: Path, format: str) -> bool:
    """Whether a folder holds earlier output of this format."""
    if format == MODEL and (folder / GRAPH).is_file() and (folder / "plan.json").is_file():
        return True
    try:
        return read_json(folder / "manifest.json").get("format") == format
    except (StoreError, AttributeError):
        return False

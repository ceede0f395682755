"""Statistics on disk: a folder with one safetensors file per layer and a manifest, complete or absent."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tensigma.errors import StoreError
from tensigma.files import recover, whole_folder

FORMAT = "tensigma-calibration"
VERSION = 1
MANIFEST = "manifest.json"


def write_store(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    layers: Iterable[tuple[str, Mapping[str, Tensor], Mapping[str, Any]]],
    *,
    force: bool = False,
) -> None:
    """Write ``layers`` (name, tensors, fields of the manifest) and ``manifest`` to the folder ``path``.

    Everything is written to a sibling folder first, which is renamed as the last step: a reader of ``path`` finds a
    complete store or none. An existing store is replaced only with ``force``, and a folder that is not a store never.
    """
    with whole_folder(Path(path), force=force, is_ours=is_store) as folder:
        entries: dict[str, Any] = {}
        for index, (name, tensors, fields) in enumerate(layers):
            # Layer names may differ only in case or hold any character; the number keeps their files apart.
            file = f"{index:04d}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:80]}.safetensors"
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, folder / file)
            entries[name] = {"file": file, **fields}
        complete = {"format": FORMAT, "version": VERSION, **manifest, "layers": entries}
        (folder / MANIFEST).write_text(json.dumps(complete, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of the store at ``path``, checked for format, version and missing files."""
    folder = Path(path)
    file = folder / MANIFEST
    recover(folder)
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; a calibration store is a folder written by Calibration.save")
    if not file.is_file():
        raise StoreError(f"{folder} is not a calibration store: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{file} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{file} is not the manifest of a calibration store")
    if manifest.get("version") != VERSION:
        raise StoreError(f"{file} has format version {manifest.get('version')}; this library reads version {VERSION}")
    for name, entry in manifest["layers"].items():
        if not (folder / entry["file"]).is_file():
            raise StoreError(f"{folder} is incomplete: {entry['file']} of layer {name!r} is missing")
    return manifest


def read_tensor(file: Path, key: str) -> Tensor:
    """One tensor of one file."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{file} cannot be read: {error}") from error


def is_store(path: Path) -> bool:
    """Whether a folder looks like a store, of any version."""
    try:
        return json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False

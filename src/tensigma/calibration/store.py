"""Statistics on disk: a folder with one safetensors file per layer and a manifest, complete or absent."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tensigma.errors import StoreError
from tensigma.files import (
    SEAL,
    anything,
    check_seal,
    integer,
    mapping,
    optional,
    read_json,
    record,
    recover,
    seal,
    sequence,
    text,
    unique,
    whole_folder,
)
from tensigma.running import content_digest, content_digests

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
            plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            save_file(plain, folder / file)
            entries[name] = {"file": file, **fields, "digests": content_digests(plain)}
        complete = seal({"format": FORMAT, "version": VERSION, **manifest, "layers": entries})
        (folder / MANIFEST).write_text(json.dumps(complete, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of the store at ``path``, checked as a whole: nobody who gets it needs to check it again."""
    folder = Path(path)
    file = folder / MANIFEST
    recover(folder)
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder; a calibration store is a folder written by Calibration.save")
    if not file.is_file():
        raise StoreError(f"{folder} is not a calibration store: it has no {MANIFEST}")
    manifest = read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{file} is not the manifest of a calibration store")
    if manifest.get("version") != VERSION:
        raise StoreError(f"{file} has format version {manifest.get('version')}; this library reads version {VERSION}")
    _MANIFEST(manifest, str(file))
    check_seal(manifest, str(file))
    for name, entry in manifest["layers"].items():
        _check_tensors(entry["tensors"], f"{file}: layer {name!r}")
        if not (folder / entry["file"]).is_file():
            raise StoreError(f"{folder} is incomplete: {entry['file']} of layer {name!r} is missing")
    return manifest


def read_tensor(file: Path, key: str, entry: Mapping[str, Any]) -> Tensor:
    """One tensor of one file, which must be what its entry in the manifest says."""
    try:
        with safe_open(file, framework="pt") as tensors:
            tensor = tensors.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{file} cannot be read: {error}") from error
    _check_tensor(tensor, key, entry, f"{file}: {key}")
    return tensor


_SIZES = sequence(integer())
_DIGEST = text(pattern="[0-9a-f]{64}", what="a digest")
_LAYER = record(
    {
        # A name, not a path: a store must not point at files outside its folder.
        "file": text(pattern=r"[0-9]{4,}-[A-Za-z0-9._-]*\.safetensors", what="the name of a file in this folder"),
        "d": integer(1),
        "groups": integer(1),
        "count": integer(1),
        "samples": integer(1),
        "input_shape": _SIZES,
        "output_shape": _SIZES,
        "output_count": integer(),
        "fisher_samples": integer(),
        "dtype": text("float32", "float64"),
        "tensors": sequence(text("mean", "rows", "covariance", "output_abs_mean", "fisher")),
    },
    {"digests": mapping(_DIGEST)},
)
_MANIFEST = record(
    {
        "format": text(FORMAT),
        "version": integer(VERSION, VERSION),
        "kind": text("statistics", "checkpoint"),
        "library": text(),
        "data": optional(text()),
        "samples": integer(),
        "unreached": sequence(text()),
        "fingerprint": mapping(text()),
        "layers": mapping(_LAYER),
    },
    {
        "weights": optional(text()),
        "read_elsewhere": sequence(text()),
        "normalised_by": mapping(text()),
        "inputs": text(),
        # Of a checkpoint.
        "options": mapping(anything),
        "finished_passes": integer(),
        "batches": integer(),
        "rng": sequence(integer(0, 255)),
        SEAL: _DIGEST,
    },
)


def _check_tensors(tensors: Sequence[str], where: str) -> None:
    unique(tensors, f"{where}: tensors")
    if "mean" not in tensors or ("rows" in tensors) == ("covariance" in tensors):
        raise StoreError(f"{where}: tensors are {', '.join(tensors)}; expected mean and one of rows and covariance")


def _check_tensor(tensor: Tensor, key: str, entry: Mapping[str, Any], where: str) -> None:
    d, grouped = entry["d"], (entry["groups"],) if entry["groups"] > 1 else ()
    shape, count = tuple(tensor.shape), entry["count"]
    accepted = {"mean": [(*grouped, d)], "covariance": [(*grouped, d, d)], "rows": [(count, d)]}.get(key, [shape])
    if entry["groups"] == 1:
        accepted += [(1, *sizes) for sizes in accepted]
    if shape not in accepted:
        raise StoreError(f"{where} has shape {shape}; its entry in {MANIFEST} says {accepted[0]}")
    if key in ("covariance", "rows") and tensor.dtype != getattr(torch, entry["dtype"]):
        raise StoreError(f"{where} has type {tensor.dtype}; its entry in {MANIFEST} says {entry['dtype']}")
    if not tensor.is_floating_point():
        raise StoreError(f"{where} has type {tensor.dtype}; moments are floating-point numbers")
    digests = entry.get("digests")
    if digests is not None and digests.get(key) != content_digest(tensor):
        raise StoreError(f"{where} is damaged: it does not match its digest in {MANIFEST}; calibrate again")
    # Stores of version 0.1 have no digests; what can be told from the values is checked for all.
    if not tensor.isfinite().all():
        raise StoreError(f"{where} holds NaN or infinity; calibrate again")
    if key == "covariance" and (tensor.diagonal(dim1=-2, dim2=-1) < 0).any():
        raise StoreError(f"{where} holds a negative variance; calibrate again")


def is_store(path: Path) -> bool:
    """Whether a folder looks like a store, of any version."""
    try:
        return read_json(path / MANIFEST).get("format") == FORMAT
    except (StoreError, AttributeError):
        return False

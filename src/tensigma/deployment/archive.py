"""Compressed models on disk: ``model.safetensors`` and ``manifest.json`` in a folder, nothing that can execute code.

Which layers are compressed, and how, is read from the structure of the model (:func:`tensigma.layers.recognition`), so
a model that was loaded, fine-tuned or moved is saved like one that has just been compressed. The architecture itself is
not stored: :func:`load` takes the original architecture and compares it with what was saved, layer by layer.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tensigma.errors import InputError, StoreError
from tensigma.files import recover, whole_folder
from tensigma.layers import (
    Format,
    Geometry,
    empty_modules,
    find_compressed,
    first_difference,
    format_from_json,
    format_to_json,
    from_modules,
    original_fingerprint,
    recognise,
    to_layer,
)

FORMAT = "tensigma-model"
VERSION = 1
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"


def save(model: nn.Module, folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a compressed model to ``folder``, all of it or nothing; replacing an archive needs ``force``.

    Any model can be saved, also one without compressed layers. Parameters and buffers are stored bit for bit.

    >>> import tempfile
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> small, _ = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"0": 8}), norm="frobenius"))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     ts.save(small, f"{place}/small")
    ...     again = ts.load(f"{place}/small", nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    >>> torch.equal(again[0].reduce.weight, small[0].reduce.weight)
    True
    """
    state, aliases = _unique(_tensors(model))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "library": version("tensigma"),
        "layers": {
            name: {**format_to_json(layer.format), "bias": layer.geometry.bias}
            for name, layer in find_compressed(model).items()
        },
        "architecture": original_fingerprint(model),
        "aliases": aliases,
    }
    with whole_folder(Path(folder), force=force, is_ours=_is_archive) as place:
        try:
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}, place / WEIGHTS)
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise StoreError(f"the weights cannot be written: {error}") from error
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        (place / MANIFEST).write_text(text + "\n", encoding="utf-8")


def load(folder: str | os.PathLike[str], model: nn.Module, *, dense: bool = False) -> nn.Module:
    """The compressed model in ``folder``, built on a copy of ``model``: the original architecture, with any weights.

    With ``dense=True`` every compressed layer becomes one plain layer again, with the kernel that its factors
    represent: the same function at the size of the original, for comparison. Mode and device are those of ``model``.

    >>> import tempfile
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    >>> small, _ = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"0": 8}), norm="frobenius"))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     ts.save(small, f"{place}/small")
    ...     again, whole = (ts.load(f"{place}/small", model, dense=dense) for dense in (False, True))
    >>> again[0], whole[0]
    (Sequential(
      (reduce): Linear(in_features=64, out_features=8, bias=False)
      (expand): Linear(in_features=8, out_features=64, bias=True)
    ), Linear(in_features=64, out_features=64, bias=True))
    """
    place = Path(folder)
    manifest = _manifest(place)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("the model is on the meta device; build it on a real one")
    fingerprint = original_fingerprint(model, manifest["layers"])
    difference = first_difference(manifest["architecture"], fingerprint, mine="the archive", yours="the model")
    if difference:
        raise StoreError(f"{place} was saved from another architecture: {difference}")
    try:
        state = load_file(place / WEIGHTS)
        state |= {alias: state[key] for alias, key in manifest["aliases"].items()}
    except (OSError, SafetensorError, KeyError) as error:
        raise StoreError(f"{place / WEIGHTS} cannot be read: {error}") from error
    loaded = copy.deepcopy(model)
    compressed = {name: _format(name, entry) for name, entry in manifest["layers"].items()}
    for name, (format, bias) in compressed.items():
        _make_room_(loaded, name, format, bias)
    _fill_(loaded, state, place)
    if dense:
        for name in compressed:
            _densify_(loaded, name)
    return loaded


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict(keep_vars=True)
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(f"{key} of the model is a {type(value).__name__}; only tensors can be saved")
        if value.is_meta:
            raise InputError(f"{key} of the model is on the meta device and has no values to save")
    return dict(state)


def _unique(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, and the other names of those that have several."""
    first: dict[int, str] = {}
    addresses: set[int] = set()
    tensors, aliases = {}, {}
    for key, tensor in state.items():
        if id(tensor) in first:
            aliases[key] = first[id(tensor)]
            continue
        first[id(tensor)] = key
        address = tensor.untyped_storage().data_ptr()
        # A copy if two different tensors share memory, which the file format does not support.
        tensors[key] = tensor.detach().clone() if address in addresses else tensor
        addresses.add(address)
    return tensors, aliases


def _is_archive(place: Path) -> bool:
    try:
        return json.loads((place / MANIFEST).read_text(encoding="utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def _manifest(place: Path) -> dict[str, Any]:
    file = place / MANIFEST
    recover(place)
    if not place.is_dir():
        raise StoreError(f"{place} is not a folder; a compressed model is a folder written by tensigma.save")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"{place} holds no compressed model: {MANIFEST} cannot be read ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{file} is not the manifest of a compressed model")
    if manifest.get("version") != VERSION:
        raise StoreError(f"{file} has format version {manifest.get('version')}; this library reads version {VERSION}")
    for key in ("layers", "architecture", "aliases"):
        if not isinstance(manifest.get(key), dict):
            raise StoreError(f"{file} is damaged: {key!r} is missing")
    return manifest


def _format(name: str, entry: Any) -> tuple[Format, bool]:
    try:
        return format_from_json(entry), bool(entry["bias"])
    except StoreError as error:
        raise error.prefixed(f"{MANIFEST}: layer {name!r}: ") from None
    except (KeyError, TypeError) as error:
        raise StoreError(f"{MANIFEST}: the entry of layer {name!r} cannot be read: {error!r}") from error


def _make_room_(model: nn.Module, name: str, format: Format, bias: bool) -> None:
    """Replace a layer, dense or already compressed, by empty layers of ``format``."""
    old = model.get_submodule(name)
    present = recognise(old)
    geometry = Geometry.of(old) if present is None else present.geometry
    geometry = replace(geometry, bias=bias)
    new = empty_modules(format, geometry)
    like = next(old.parameters())
    new.to_empty(device=like.device).to(like.dtype).train(old.training).requires_grad_(like.requires_grad)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


def _fill_(model: nn.Module, state: Mapping[str, Tensor], place: Path) -> None:
    targets = model.state_dict(keep_vars=True)
    for key, target in targets.items():
        if key not in state:
            raise StoreError(f"{place} was saved from another architecture: it has no {key!r}")
        if target.shape != state[key].shape:
            shapes = f"{tuple(state[key].shape)} in the archive and {tuple(target.shape)} in the model"
            raise StoreError(f"{place} was saved from another architecture: {key!r} has shape {shapes}")
    for key in sorted(state):
        if key not in targets:
            raise StoreError(f"{place} was saved from another architecture: the model has no {key!r}")
    filled: dict[int, str] = {}
    for key, tensor in state.items():
        target = targets[key]
        if id(target) in filled:
            if not torch.equal(tensor, state[filled[id(target)]]):
                raise StoreError(
                    f"{place} was saved from another architecture: the model ties {key!r} to {filled[id(target)]!r}"
                )
            continue
        filled[id(target)] = key
        # Through .data, so that tied parameters stay tied, in the precision of the archive.
        target.data = torch.empty_like(target.data, dtype=tensor.dtype).copy_(tensor)


def _densify_(model: nn.Module, name: str) -> None:
    modules = model.get_submodule(name)
    compressed = recognise(modules)
    assert compressed is not None
    assert isinstance(modules, nn.Sequential)
    kernels = torch.stack(
        [factors.to_dense() for factors in from_modules(modules, compressed.format, compressed.geometry)]
    )
    last = modules[-1].bias
    assert last is None or isinstance(last, Tensor)
    layer = to_layer(kernels, compressed.geometry, last).train(modules.training)
    layer.requires_grad_(next(modules.parameters()).requires_grad)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)

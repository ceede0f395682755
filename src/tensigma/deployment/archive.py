"""Compressed models on disk: ``model.safetensors`` and ``manifest.json`` in a folder, nothing that can execute code.

Which layers are compressed, and how, is read from the structure of the model (:func:`tensigma.layers.recognition`), so
a model that was loaded, fine-tuned or moved is saved like one that has just been compressed. The architecture itself is
not stored: :func:`load` takes the original architecture and compares it with what was saved, layer by layer.
"""

from __future__ import annotations

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
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tensigma.deployment.exporting import export
from tensigma.deployment.packing import PACKED, grids_in, note_grids_, packed_state, unpacked_state
from tensigma.errors import InputError, StoreError, TensigmaError
from tensigma.files import (
    SEAL,
    anything,
    check_seal,
    flag,
    integer,
    mapping,
    read_json,
    record,
    recover,
    seal,
    sequence,
    text,
    whole_folder,
)
from tensigma.graphs import OnnxNetwork, load_onnx
from tensigma.layers import (
    Format,
    Geometry,
    Grid,
    compressible,
    empty_modules,
    find_compressed,
    first_difference,
    format_from_json,
    format_to_json,
    from_modules,
    hooks_of,
    memory_format_of,
    original_fingerprint,
    recognise,
    to_layer,
)
from tensigma.running import content_digests, copied
from tensigma.solving import folded_norms, remove_norms_

FORMAT = "tensigma-model"
#: Archives with packed weights or folded BatchNorms have the second version, all others the first.
VERSION, PACKED_VERSION = 1, 2
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
#: A model that came as an ONNX file.
GRAPH = "model.onnx"
# What may lie in its folder. Others have folders with a file of this name too, and more beside it.
_BESIDE_GRAPH = {GRAPH, f"{GRAPH}.data", "plan.json", "report.json", "report.html"}


def save(model: nn.Module, folder: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a compressed model to ``folder``, all of it or nothing; replacing an archive needs ``force``.

    Any model can be saved, also one without compressed layers. Parameters and buffers are stored bit for bit; a weight
    of few bits takes few bits. A model that came as an ONNX file is one ONNX file in the folder, ``model.onnx``.

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
    if isinstance(model, OnnxNetwork):
        with whole_folder(Path(folder), force=force, is_ours=_is_graph) as place:
            # A network that has never been run, and takes any size, cannot be compared with its file.
            export(model, place / GRAPH, check=model.example() is not None)
        return
    state, aliases = _unique(_tensors(model))
    grids = grids_in(model, state, aliases)
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    tensors, packed = packed_state(plain, grids)
    folded = folded_norms(model)
    manifest = seal(
        {
            "format": FORMAT,
            "version": PACKED_VERSION if packed or folded else VERSION,
            "library": version("tensigma"),
            "layers": {
                name: {**format_to_json(layer.format), "bias": layer.geometry.bias}
                for name, layer in find_compressed(model).items()
            },
            "architecture": original_fingerprint(model),
            "aliases": aliases,
            **({"packed": packed} if packed or folded else {}),
            **({"folded": folded} if folded else {}),
            "digests": content_digests(tensors),
        }
    )
    with whole_folder(Path(folder), force=force, is_ours=_is_archive) as place:
        try:
            save_file(tensors, place / WEIGHTS)
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise StoreError(f"the weights cannot be written: {error}") from error
        (place / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(folder: str | os.PathLike[str], model: nn.Module | None = None, *, dense: bool = False) -> nn.Module:
    """The compressed model in ``folder``, built on a copy of ``model``: the original architecture, with any weights.

    With ``dense=True`` every compressed layer becomes one plain layer again, with the kernel that its factors
    represent: the same function at the size of the original, for comparison. Mode and device are those of ``model``.
    A folder with an ONNX file needs no ``model``.

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
    recover(place)
    if (place / GRAPH).is_file() and not (place / MANIFEST).is_file():
        return _load_graph(place / GRAPH, model, dense=dense)
    manifest = _manifest(place)
    if model is None:
        raise InputError(
            f"{place} holds weights without an architecture; pass {{model}}, built as the original was",
            parameters=("model",),
        )
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise InputError("the model is on the meta device; build it on a real one")
    fingerprint = original_fingerprint(model, manifest["layers"])
    difference = first_difference(manifest["architecture"], fingerprint, mine="the archive", yours="the model")
    if difference:
        raise StoreError(f"{place} was saved from another architecture: {difference}")
    for name in (*manifest["layers"], *manifest.get("folded", ())):
        hooks = hooks_of(dict(model.named_modules()).get(name, nn.Identity()))
        if hooks:
            raise InputError(
                f"layer {name!r} of the model has {hooks}, which it would lose; register them after loading"
            )
    state, grids = _state(place, manifest)
    loaded = copied(model, shared=manifest["layers"])
    _make_room_for_folded_(loaded, manifest, state, place)
    compressed = {name: _format(name, entry) for name, entry in manifest["layers"].items()}
    for name, (format, bias) in compressed.items():
        try:
            _make_room_(loaded, name, format, bias, state)
        except TensigmaError as error:
            raise StoreError(f"{place} is damaged: layer {name!r}: {error}") from error
    _fill_(loaded, state, place)
    try:
        note_grids_(loaded, grids, manifest["aliases"])
    except StoreError as error:
        raise error.prefixed(f"{place} is damaged: ") from None
    if dense:
        for name in compressed:
            _densify_(loaded, name)
    return loaded


def plain_bytes(model: nn.Module) -> int:
    """The size of a safetensors file of all parameters and buffers of ``model``, none packed.

    Of a model that came as an ONNX file, that of the file and of its weights beside it.

    >>> plain_bytes(nn.Linear(100, 100)) - 4 * 10_100 < 200
    True
    """
    if isinstance(model, OnnxNetwork):
        return model.source.n_bytes
    state, _ = _unique(_tensors(model))
    return len(safetensors_bytes({key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}))


def stored_bytes(folder: str | os.PathLike[str]) -> int:
    """The size of the weights that :func:`save` wrote to ``folder``, or of its ONNX file with its weights.

    >>> import tempfile
    >>> model = nn.Linear(100, 100)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     save(model, f"{place}/small")
    ...     stored_bytes(f"{place}/small") == plain_bytes(model)
    True
    """
    place = Path(folder)
    # Beside a manifest, an ONNX file is a copy for other runtimes.
    names = (WEIGHTS,) if (place / MANIFEST).is_file() else (GRAPH, f"{GRAPH}.data")
    files = [place / name for name in names]
    return sum(file.stat().st_size for file in files if file.is_file())


def _load_graph(file: Path, model: nn.Module | None, *, dense: bool) -> nn.Module:
    if dense:
        raise InputError(
            f"{file} does not say which layers were one; {{dense}} is for other archives", parameters=("dense",)
        )
    known = model if isinstance(model, OnnxNetwork) else None
    if known is None:
        return load_onnx(file)
    return load_onnx(file, input=known.input, fixed=known.fixed_inputs)


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
        return read_json(place / MANIFEST).get("format") == FORMAT
    except (StoreError, AttributeError):
        return False


def _is_graph(place: Path) -> bool:
    return (place / GRAPH).is_file() and {path.name for path in place.iterdir()} <= _BESIDE_GRAPH


_FIELDS = {
    "format": text(FORMAT),
    "version": integer(),
    "library": text(),
    # Formats check their own entries, also formats of other packages.
    "layers": mapping(record({"format": text(), "ranks": sequence(integer(1)), "bias": flag}, others=anything)),
    "architecture": mapping(text()),
    "aliases": mapping(text()),
}
# Archives of version 0.1 of the library have no digests; none of them has packed weights.
_DIGESTS = {"digests": mapping(text()), SEAL: text()}
_MANIFESTS = {
    VERSION: record(_FIELDS, _DIGESTS),
    PACKED_VERSION: record({**_FIELDS, "packed": PACKED, **_DIGESTS}, {"folded": sequence(text())}),
}


def _manifest(place: Path) -> dict[str, Any]:
    file = place / MANIFEST
    if not place.is_dir():
        raise StoreError(f"{place} is not a folder; a compressed model is a folder written by tensigma.save")
    try:
        manifest = read_json(file)
    except StoreError as error:
        raise error.prefixed(f"{place} holds no compressed model: ") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{file} is not the manifest of a compressed model")
    number = manifest.get("version")
    if type(number) is not int or number not in _MANIFESTS:
        known = " and ".join(map(str, _MANIFESTS))
        raise StoreError(f"{file} has format version {number}; this library reads versions {known}")
    _MANIFESTS[number](manifest, str(file))
    check_seal(manifest, str(file))
    return manifest


def _state(place: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Grid]]:
    """The tensors of an archive under all their names, each as it was before it was written, and grids of weights."""
    try:
        tensors = load_file(place / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise StoreError(f"{place / WEIGHTS} cannot be read: {error}") from error
    stored = manifest.get("digests")
    if stored is not None:
        for key, digest in content_digests(tensors).items():
            if stored.get(key) != digest:
                raise StoreError(f"{place / WEIGHTS} is damaged: {key!r} does not match its digest in {MANIFEST}")
    try:
        state, grids = unpacked_state(tensors, manifest.get("packed", {}))
    except StoreError as error:
        raise error.prefixed(f"{place} is damaged: ") from None
    for alias, key in manifest["aliases"].items():
        if alias in state or key not in state:
            raise StoreError(f"{place / MANIFEST} is damaged: {alias!r} cannot be another name of {key!r}")
        state[alias] = state[key]
    return state, grids


def _format(name: str, entry: Any) -> tuple[Format, bool]:
    try:
        return format_from_json(entry), entry["bias"]
    except StoreError as error:
        raise error.prefixed(f"{MANIFEST}: layer {name!r}: ") from None


def _make_room_for_folded_(
    model: nn.Module, manifest: Mapping[str, Any], state: Mapping[str, Tensor], place: Path
) -> None:
    """Take out the BatchNorms that were folded, and give layers the biases that they gained by it."""
    folded = manifest.get("folded", ())
    modules = dict(model.named_modules())
    for name in folded:
        if not isinstance(modules.get(name), _BatchNorm) and name not in folded_norms(model):
            raise StoreError(f"{place} was saved from another architecture: the model has no BatchNorm {name!r}")
    remove_norms_(model, tuple(folded))
    for name, layer in compressible(model) if folded else ():
        bias, weight = state.get(f"{name}.bias"), layer.weight
        if layer.bias is None and bias is not None and name not in manifest["layers"]:
            assert isinstance(weight, Tensor)
            layer.bias = nn.Parameter(weight.new_empty(bias.shape), requires_grad=weight.requires_grad)


def _make_room_(model: nn.Module, name: str, format: Format, bias: bool, state: Mapping[str, Tensor]) -> None:
    """Replace a layer, dense or already compressed, by empty layers of ``format``."""
    try:
        old = model.get_submodule(name)
    except AttributeError as error:
        raise StoreError("the model has no such layer") from error
    present = recognise(old)
    geometry = Geometry.of(old) if present is None else present.geometry
    geometry = replace(geometry, bias=bias)
    try:
        new = empty_modules(format, geometry)
    except RuntimeError as error:  # sizes beyond what torch can count
        raise StoreError(f"{format} has no such layers: {error}") from error
    # Before any memory is taken: ranks of a damaged manifest may ask for all there is.
    for key, parameter in new.named_parameters():
        tensor = state.get(f"{name}.{key}")
        if tensor is None or tensor.shape != parameter.shape:
            shape = "nothing" if tensor is None else tuple(tensor.shape)
            raise StoreError(f"{key} would have shape {tuple(parameter.shape)}; {WEIGHTS} holds {shape}")
    like = next(old.parameters())
    memory_format = memory_format_of(old)
    new.to_empty(device=like.device).to(like.dtype).train(old.training).requires_grad_(like.requires_grad)
    if memory_format is not None:
        new.to(memory_format=memory_format)  # type: ignore[call-overload]
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
        if not _fits(state[key].dtype, target.dtype):
            types = f"{state[key].dtype} in the archive and {target.dtype} in the model"
            raise StoreError(f"{place} is damaged or was saved from another architecture: {key!r} has type {types}")
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


def _fits(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a tensor may be loaded: floating-point numbers in any precision, all else as it is."""
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)


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
    memory_format = memory_format_of(modules)
    if memory_format is not None:
        layer.to(memory_format=memory_format)  # type: ignore[call-overload]
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, layer)

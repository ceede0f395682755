"""The archive: bit for bit, without code, and never into the wrong architecture."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensigma as ts
from support_nets import SmallNet, batches, small_net
from tensigma.errors import InputError, StoreError


def compressed(method: str = "tucker2", **options: Any) -> tuple[SmallNet, nn.Module]:
    net = small_net()
    plan = ts.plan(net, ranks=ts.Ranks({"*": 3}), method=method, norm="centred", data=batches(), **options)
    small, _ = ts.compress(net, plan, data=batches())
    return net, small


def assert_same(first: nn.Module, second: nn.Module) -> None:
    one, two = first.state_dict(), second.state_dict()
    assert list(one) == list(two)
    for key, value in one.items():
        assert value.dtype == two[key].dtype
        assert torch.equal(value, two[key])


@pytest.mark.parametrize("method", ["tucker2", "cp", "cp-joint", "svd", "deflation", "spatial-svd", "tensor-train"])
def test_the_round_trip_keeps_every_bit(tmp_path: Path, method: str) -> None:
    net, small = compressed(method)
    ts.save(small, tmp_path / "small")
    assert sorted(file.name for file in (tmp_path / "small").iterdir()) == ["manifest.json", "model.safetensors"]
    fresh = small_net(seed=5)
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    loaded = ts.load(tmp_path / "small", fresh)
    assert_same(small, loaded)
    x = batches(seed=2)[0]
    assert torch.equal(loaded(x), small(x))
    assert all(torch.equal(value, before[key]) for key, value in fresh.state_dict().items())
    # Loaded and saved again, it is the same once more, also into a model that is compressed already.
    ts.save(loaded, tmp_path / "again")
    assert_same(small, ts.load(tmp_path / "again", net))
    assert_same(small, ts.load(tmp_path / "again", loaded))


def test_a_dense_copy_computes_the_same(tmp_path: Path) -> None:
    net, small = compressed()
    ts.save(small, tmp_path / "small")
    dense = ts.load(tmp_path / "small", net, dense=True)
    x = batches(seed=2)[0]
    # This network hardly varies its output, so that means and biases cancel to a few digits.
    torch.testing.assert_close(dense(x), small(x), rtol=1e-3, atol=1e-4)
    assert isinstance(dense.get_submodule("grouped"), nn.Conv2d)
    assert isinstance(dense.get_submodule("up"), nn.ConvTranspose2d)
    # The block gained a bias, which stays.
    shapes = {key: value.shape for key, value in dense.state_dict().items() if key != "block.0.bias"}
    assert shapes == {key: value.shape for key, value in net.state_dict().items()}


def test_precision_mode_and_gradients(tmp_path: Path) -> None:
    _, small = compressed()
    ts.save(small.half(), tmp_path / "half")
    loaded = ts.load(tmp_path / "half", small_net().train().requires_grad_(False))
    assert_same(small, loaded)
    assert loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
        net[1].weight = net[0].weight
        return net

    net = tied()
    small, _ = ts.compress(net, ts.plan(net, ranks=ts.Ranks({"2": 2}), norm="frobenius"))
    ts.save(small, tmp_path / "small")
    loaded = ts.load(tmp_path / "small", tied())
    assert loaded.get_submodule("0").weight is loaded.get_submodule("1").weight
    assert_same(small, loaded)
    apart = ts.load(tmp_path / "small", nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
    with torch.no_grad():
        apart.get_submodule("0").weight.zero_()  # type: ignore[operator]
    assert apart.get_submodule("1").weight.any()  # type: ignore[operator]


def test_existing_folders_are_kept(tmp_path: Path) -> None:
    _, small = compressed()
    ts.save(small, tmp_path / "small")
    with pytest.raises(StoreError, match="exists; pass force=True"):
        ts.save(small, tmp_path / "small")
    with torch.no_grad():
        small.get_submodule("stem").bias.add_(1)  # type: ignore[operator]
    ts.save(small, tmp_path / "small", force=True)
    assert_same(small, ts.load(tmp_path / "small", small_net()))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match="holds something else"):
        ts.save(small, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    with pytest.raises(StoreError, match="not a folder"):
        ts.save(small, tmp_path / "mine" / "thesis.tex", force=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine", "small"]


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_files_are_as_open_as_others_of_the_user(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("")
    ts.save(compressed()[1], tmp_path / "small")
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "small").iterdir()}
    assert modes == {own.stat().st_mode & 0o777}


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, small = compressed()
    ts.save(small, tmp_path / "small")
    good = (tmp_path / "small" / "model.safetensors").read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensigma.deployment.archive.save_file", fail)
    with pytest.raises(StoreError, match="No space left on device; nothing was changed there"):
        ts.save(small, tmp_path / "small", force=True)
    assert [file.name for file in tmp_path.iterdir()] == ["small"]
    assert (tmp_path / "small" / "model.safetensors").read_bytes() == good


def other_head() -> nn.Module:
    net = small_net()
    net.head = nn.Linear(24, 11)
    return net


def other_norm() -> nn.Module:
    net = small_net()
    net.block[1] = nn.Identity()
    return net


def more_layers() -> nn.Module:
    net = small_net()
    net.extra = nn.Linear(3, 3)
    return net


def other_stride() -> nn.Module:
    net = small_net()
    net.grouped = nn.Conv2d(16, 16, 3, padding=1, stride=2, groups=2)
    return net


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (other_head, "layer 'head' is linear 24→10 in the archive and linear 24→11 in the model"),
        (other_norm, "the model has no 'block.1.bias'"),
        (more_layers, "layer 'extra' .* of the model is missing in the archive"),
        (other_stride, "layer 'grouped' is .* stride 1×1 .* in the archive and .* stride 2×2"),
    ],
)
def test_another_architecture_is_refused(tmp_path: Path, build: Any, message: str) -> None:
    _, small = compressed()
    ts.save(small, tmp_path / "small")
    with pytest.raises(StoreError, match=f"another architecture: .*{message}"):
        ts.load(tmp_path / "small", build())


def test_other_buffers_are_refused(tmp_path: Path) -> None:
    _, small = compressed()
    ts.save(small, tmp_path / "small")
    net = small_net()
    net.register_buffer("scale", torch.ones(1))
    with pytest.raises(StoreError, match="it has no 'scale'"):
        ts.load(tmp_path / "small", net)
    net = small_net()
    net.block[1] = nn.BatchNorm2d(17)
    with pytest.raises(StoreError, match=r"'block.1.weight' has shape \(16,\) in the archive and \(17,\) in the model"):
        ts.load(tmp_path / "small", net)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=3), "format version 3; this library reads versions 1 and 2"),
        (lambda data: data.update(format="x"), "not the manifest"),
        (lambda data: data.pop("layers"), "'layers' is missing"),
        (lambda data: data["layers"]["head"].update(format="magic"), "layer 'head': format 'magic' is unknown"),
        (lambda data: data["layers"]["head"].update(ranks=[-1]), r"'head': ranks\[0\] is -1"),
        (lambda data: data["layers"]["head"].update(ranks=[10**9]), "layer 'head': .*would have shape"),
        (lambda data: data["layers"]["head"].update(ranks=[2**39]), "layer 'head': "),
        (lambda data: data["layers"]["head"].update(bias="yes"), "bias is 'yes'; expected true or false"),
        (lambda data: data["layers"].update(nowhere=data["layers"]["head"]), "layer 'nowhere': .*no such layer"),
        (lambda data: data["architecture"].update(head=3), "expected text"),
        (lambda data: data["aliases"].update({"head.expand.bias": "head.reduce.weight"}), "cannot be another name"),
        (lambda data: data["aliases"].update({"x": "nowhere"}), "cannot be another name"),
        (lambda data: data.update(extra=1), "key 'extra', which is not known"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    _, small = compressed()
    ts.save(small, tmp_path / "small")
    file = tmp_path / "small" / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    # With its digest it would be refused before anything else is looked at; archives of version 0.1 have none.
    file.write_text(json.dumps({key: value for key, value in data.items() if key not in ("digest", "digests")}))
    with pytest.raises(StoreError, match=message):
        ts.load(tmp_path / "small", small_net())


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    _, small = compressed()
    with pytest.raises(StoreError, match="is not a folder"):
        ts.load(tmp_path / "none", small_net())
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="holds no compressed model"):
        ts.load(tmp_path / "empty", small_net())
    ts.save(small, tmp_path / "empty")
    weights = tmp_path / "empty" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(StoreError, match="cannot be read"):
        ts.load(tmp_path / "empty", small_net())
    with pytest.raises(InputError, match="meta device"):
        ts.save(small_net().to("meta"), tmp_path / "meta")
    with pytest.raises(InputError, match="meta device"):
        ts.load(tmp_path / "empty", small_net().to("meta"))


@pytest.mark.slow
def test_a_model_that_was_compressed_twice(tmp_path: Path) -> None:
    net, small = compressed()
    smaller, _ = ts.compress(small, batches(), budget=ts.Params(0.8))
    ts.save(smaller, tmp_path / "smaller")
    assert_same(smaller, ts.load(tmp_path / "smaller", small))
    with pytest.raises(StoreError, match="another architecture"):
        ts.load(tmp_path / "smaller", net)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_no_flipped_byte_is_loaded_in_silence(tmp_path: Path, name: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10))
    small, _ = ts.compress(model, ts.plan(model, ranks=ts.Ranks({"0": 8}), norm="frobenius"))
    ts.save(small, tmp_path / "small")
    file = tmp_path / "small" / name
    good = file.read_bytes()
    for position in torch.randint(len(good), (150,), generator=torch.Generator().manual_seed(0)).tolist():
        damaged = bytearray(good)
        damaged[position] ^= 1 << (position % 8)
        file.write_bytes(damaged)
        with suppress(StoreError):
            # Space between tokens of JSON and in the header of the weights means nothing.
            assert_same(ts.load(tmp_path / "small", model), small)


@pytest.mark.parametrize(("key", "dtype"), [("0.weight", torch.int32), ("0.bias", torch.bool)])
def test_weights_that_are_no_weights_are_refused(tmp_path: Path, key: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    ts.save(model, tmp_path / "small")
    state = load_file(tmp_path / "small" / "model.safetensors")
    save_file({**state, key: state[key].to(dtype)}, tmp_path / "small" / "model.safetensors")
    with pytest.raises(StoreError, match="does not match its digest"):
        ts.load(tmp_path / "small", model)
    manifest = json.loads((tmp_path / "small" / "manifest.json").read_text())
    without = {name: value for name, value in manifest.items() if name not in ("digest", "digests")}
    (tmp_path / "small" / "manifest.json").write_text(json.dumps(without))
    with pytest.raises(StoreError, match=f"'{key}' has type"):
        ts.load(tmp_path / "small", model)


def test_memory_format_survives(tmp_path: Path) -> None:
    _, small = compressed()
    ts.save(small, tmp_path / "small")
    last = small_net(seed=5).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    kinds = {}
    for dense in (False, True):
        loaded = ts.load(tmp_path / "small", last, dense=dense)
        kinds[dense] = [p.is_contiguous(memory_format=torch.channels_last) for p in loaded.parameters() if p.ndim == 4]
        assert all(kinds[dense])
    assert len(kinds[False]) > len(kinds[True]) > 3
    x = batches(seed=2)[0]
    torch.testing.assert_close(ts.load(tmp_path / "small", last)(x), small(x), rtol=1e-3, atol=1e-4)

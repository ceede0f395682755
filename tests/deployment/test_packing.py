"""Weights of few bits in archives: tight, bit for bit, and the same file again."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensigma as ts
from support_grids import integers_in_python, round_, rounded
from support_nets import batches, small_net
from tensigma.deployment import OnnxModel
from tensigma.deployment.packing import PLACE, pack, unpack
from tensigma.errors import StoreError
from tensigma.evaluation import count_bytes
from tensigma.files import seal
from tensigma.layers import HALF, Grid, grid_of, set_grid_
from tensigma.running import content_digests

BITS = [2, 3, 4, 5, 6, 7, 8]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 1000])
def test_integers_are_packed_without_gaps(bits: int, count: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (count,), generator=rng).to(torch.int8)
    packed = pack(integers, bits)
    assert packed.dtype == torch.uint8
    assert len(packed) == -(-count * bits // 8)
    assert integers_in_python(packed.tolist(), bits, count) == integers.tolist()
    assert torch.equal(unpack(packed, bits, count), integers)


@pytest.mark.parametrize("bits", [*BITS, HALF])
def test_the_round_trip_keeps_every_bit_and_the_same_file(bits: int, tmp_path: Path) -> None:
    net = rounded(small_net(), bits)
    ts.save(net, tmp_path / "first")
    loaded = ts.load(tmp_path / "first", small_net(seed=3))
    assert list(loaded.state_dict()) == list(net.state_dict())
    for key, value in net.state_dict().items():
        assert loaded.state_dict()[key].dtype == value.dtype
        assert torch.equal(loaded.state_dict()[key], value)
    for layer in (loaded.get_submodule("up"), loaded.get_submodule("head")):
        noted = grid_of(layer)
        assert noted is not None
        assert noted.bits == bits
    assert torch.equal(loaded(batches()[0]), net(batches()[0]))
    ts.save(loaded, tmp_path / "again")
    for name in ("model.safetensors", "manifest.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


@pytest.mark.parametrize("groups", [1, 4])
def test_three_bits_take_three_bits(groups: int, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(96, 40, bias=False))
    round_(net[0], 3, groups)
    ts.save(net, tmp_path / "small")
    stored = weights_in(tmp_path / "small")
    assert set(stored) == {PLACE}
    assert stored[PLACE].dtype == torch.uint8
    assert len(stored[PLACE]) == 96 * 40 * 3 // 8 + 40 * groups * 4
    entry = {"bits": 3, "shape": [40, 96], "scales": [40, groups, 4]}
    assert manifest_of(tmp_path / "small")["packed"] == {"0.weight": entry}
    loaded = ts.load(tmp_path / "small", nn.Sequential(nn.Linear(96, 40, bias=False)))
    assert torch.equal(loaded.get_parameter("0.weight"), net.get_parameter("0.weight"))


def test_scales_that_half_precision_holds_take_half(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 5))
    grid = Grid(4, torch.rand(5, 1).half().float())
    net[0].weight.data = grid.values(torch.randint(-8, 8, (5, 8)), (5, 8))
    set_grid_(net[0], grid)
    ts.save(net, tmp_path / "small")
    assert manifest_of(tmp_path / "small")["packed"]["0.weight"]["scales"] == [5, 1, 2]
    assert len(weights_in(tmp_path / "small")[PLACE]) == 5 * 8 // 2 + 5 * 2
    loaded = ts.load(tmp_path / "small", nn.Sequential(nn.Linear(8, 5)))
    assert torch.equal(loaded.get_parameter("0.weight"), net.get_parameter("0.weight"))


def test_biases_beside_packed_weights_take_half_where_that_is_exact(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.Linear(3, 3))
    for layer in (net[0], net[1]):
        round_(layer, 4)
    for place, value in enumerate((0.25, 0.1, 0.5)):
        net.get_parameter(f"{place}.bias").data.fill_(value)
    ts.save(net, tmp_path / "small")
    stored = weights_in(tmp_path / "small")
    assert {key for key in stored if key != PLACE} == {"1.bias", "2.weight", "2.bias"}
    assert manifest_of(tmp_path / "small")["packed"]["0.bias"] == {"bits": HALF, "shape": [5]}
    assert sum(tensor.nbytes for tensor in stored.values()) == count_bytes(net)
    loaded = ts.load(tmp_path / "small", nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.Linear(3, 3)))
    for key, value in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
        assert loaded.state_dict()[key].dtype == value.dtype


def test_without_packed_weights_the_form_is_the_first(tmp_path: Path) -> None:
    net = rounded(small_net(), 4)
    for layer in net.modules():
        if grid_of(layer) is not None:
            layer.get_parameter("weight").data += 0.01  # trained on: no longer on the grid
    ts.save(net, tmp_path / "small")
    manifest = manifest_of(tmp_path / "small")
    assert manifest["version"] == 1
    assert "packed" not in manifest
    assert {tensor.dtype for tensor in weights_in(tmp_path / "small").values()} == {torch.float32, torch.int64}


@pytest.mark.slow
def test_some_layers_of_a_compressed_model(tmp_path: Path) -> None:
    net = small_net()
    small, _ = ts.compress(net, ts.plan(net, ranks=ts.Ranks({"head": 3, "block.0": 4}), norm="frobenius"))
    for stage, bits in zip(small.get_submodule("block.0").children(), (4, HALF), strict=False):
        round_(stage, bits)
    ts.save(small, tmp_path / "small")
    assert manifest_of(tmp_path / "small")["version"] == 2
    loaded = ts.load(tmp_path / "small", small_net(seed=1))
    for key, value in small.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    first, second, *_ = loaded.get_submodule("block.0").children()
    assert [getattr(grid_of(stage), "bits", None) for stage in (first, second)] == [4, HALF]
    dense = ts.load(tmp_path / "small", small_net(seed=1), dense=True)
    torch.testing.assert_close(dense(batches()[0]), small(batches()[0]), rtol=1e-3, atol=1e-4)


def test_tied_weights_are_packed_once(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        net[1].weight = net[0].weight
        return net

    net = tied()
    # Only the second layer knows of the grid.
    round_(net[1], 4)
    net[0].weight = net[1].weight
    ts.save(net, tmp_path / "small")
    assert manifest_of(tmp_path / "small")["packed"].keys() == {"0.weight"}
    loaded = ts.load(tmp_path / "small", tied())
    assert loaded.get_parameter("0.weight") is loaded.get_submodule("1").weight
    assert all(grid_of(layer) is not None for layer in loaded.children())
    ts.save(loaded, tmp_path / "again")
    assert weights_in(tmp_path / "again").keys() == weights_in(tmp_path / "small").keys()


def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = manifest_of(folder)
        change(data)
        (folder / "manifest.json").write_text(json.dumps(seal(data)))

    return edit


def edit_packed(**changes: object) -> Callable[[Path], None]:
    return edit_manifest(lambda data: data["packed"]["0.weight"].update(changes))


def edit_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Change tensors, with digests that match, as only somebody who means to does."""

    def edit(folder: Path) -> None:
        tensors = weights_in(folder)
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        edit_manifest(lambda data: data.update(digests=content_digests(tensors)))(folder)

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_manifest(lambda data: data.update(version=1)), "key 'packed', which is not known"),
        (edit_manifest(lambda data: data.pop("packed")), "'packed' is missing"),
        (edit_manifest(lambda data: data.pop("digests")), "'digests' is missing"),
        (edit_manifest(lambda data: data["packed"]["0.weight"].update(bits=9)), "bits is 9"),
        (edit_manifest(lambda data: data["packed"]["0.weight"].update(bits=True)), "bits is True"),
        (edit_packed(bits=5), "would take 384 bytes"),
        (edit_packed(bits=16), "in half precision, and has scales"),
        (edit_packed(shape=[2**39, 2**39], scales=[2**39, 1, 4]), "would take"),
        (edit_packed(shape=[]), "a list of at least 1"),
        (edit_packed(shape=[32, 16]), "cannot have scales"),
        (edit_packed(shape=[16, 2, 16]), "another architecture"),
        (edit_packed(scales=[16, 3, 4]), "cannot have scales"),
        (edit_packed(scales=[16, 1, 8]), "2 or 4 are needed"),
        (edit_packed(scales=[16, 1, 4, 1]), "2 or 4 are needed"),
        (edit_packed(scales=[16, 0, 4]), "scales"),
        (edit_manifest(lambda data: data["packed"]["0.weight"].pop("scales")), "2 or 4 are needed"),
        (edit_manifest(lambda data: data["packed"].update({"0.bias": data["packed"]["0.weight"]})), "would take"),
        (edit_manifest(lambda data: data["packed"].clear()), "would take 0 bytes"),
        (edit_weights(lambda tensors: tensors.pop(PLACE)), "would take"),
        (edit_weights(lambda tensors: tensors.update({PLACE: tensors[PLACE][:-1]})), "would take"),
        (edit_weights(lambda tensors: tensors.update({PLACE: tensors[PLACE].view(2, -1)})), "has shape"),
        (edit_weights(lambda tensors: tensors.update({PLACE: tensors[PLACE].view(torch.int8)})), "type torch.int8"),
        (edit_weights(lambda tensors: tensors[PLACE][-4:].fill_(255)), "does not lie on the grid"),
        (edit_weights(lambda tensors: tensors.update({"0.weight": torch.zeros(16, 32)})), "stored twice"),
    ],
)
def test_damaged_packed_archives_are_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16))
    round_(net[0], 4)
    ts.save(net, tmp_path / "small")
    damage(tmp_path / "small")
    with pytest.raises(StoreError, match=message):
        ts.load(tmp_path / "small", nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_no_flipped_byte_is_loaded_in_silence(tmp_path: Path, name: str) -> None:
    net = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    round_(net[0], 3)
    round_(net[2], HALF)
    ts.save(net, tmp_path / "small")
    file = tmp_path / "small" / name
    good = file.read_bytes()
    for position in torch.randint(len(good), (100,), generator=torch.Generator().manual_seed(0)).tolist():
        damaged = bytearray(good)
        damaged[position] ^= 1 << (position % 8)
        file.write_bytes(damaged)
        with suppress(StoreError):
            # Space between tokens of JSON and in the header of the weights means nothing.
            state = ts.load(tmp_path / "small", net).state_dict()
            assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())


@pytest.mark.slow
def test_a_plan_of_bytes_with_folded_norms_goes_into_archives_and_onnx_files(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="files are run in ONNX Runtime")
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(24, 3, 8, 8, generator=generator).cumsum(2)

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [nn.Conv2d(3, 24, 3, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3, bias=False)]
            return nn.Sequential(*layers, nn.BatchNorm2d(24), nn.Flatten(), nn.Linear(24 * 16, 5))

    model = build()
    model.train()(images)
    model.eval()
    stats = ts.calibrate(model, [images])
    plan = ts.plan(model, stats, budget=ts.Bytes(0.24, bits=(5, 8)), weights=None)
    assert plan.folding.layers
    assert {entry.bits for entry in plan.compressed} == {5, 8}
    small, _ = ts.compress(model, plan, stats, data=[images])
    answers = small(images).detach()
    ts.save(small, tmp_path / "small")
    assert torch.equal(ts.load(tmp_path / "small", build()).eval()(images), answers)
    file = ts.export(small, tmp_path / "small.onnx", images[:2]).path
    torch.testing.assert_close(OnnxModel(file)(images), answers, rtol=1e-4, atol=1e-4)
    # ONNX has no integers of 5 bits: those of 8 hold them.
    assert file.stat().st_size < 0.5 * count_bytes(model)

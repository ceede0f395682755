"""``ts.quantize``: FP16 to store, INT8 to compute with, and figures before and after."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_grids import round_
from support_nets import batches, small_net
from tensigma.deployment import OnnxModel, quantization
from tensigma.deployment.equalisation import _scale_
from tensigma.deployment.qdq import needs_reduced_range
from tensigma.errors import InputError
from tensigma.layers import Geometry, find_compressed
from tensigma.zoo import load_data, load_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original() -> nn.Module:
    return small_net()


@pytest.fixture(scope="module")
def small(original: nn.Module) -> nn.Module:
    """Compressed by CP and SVD, with channels between the factors that differ a hundredfold, as fits may leave them."""
    stats = ts.calibrate(original, batches())
    plan = ts.plan(original, stats, ranks=ts.Energy(0.97), method="cp")
    small, _ = ts.compress(original, plan, stats)
    for name in find_compressed(small):
        first, second, *_ = small.get_submodule(name).children()
        scales = 10 ** torch.linspace(-1, 1, Geometry.of(first).out_channels)
        _scale_(first, outputs=scales)
        _scale_(second, inputs=1 / scales)
    return small


def labelled(model: nn.Module, count: int = 3, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return [(x, model(x).argmax(1)) for x in batches(count, seed=seed)]


def int8_weights(path: Path) -> list[Any]:
    """The matrices and kernels of an ONNX file that are stored in eight bits."""
    tensors = onnx.load(path).graph.initializer
    return [
        onnx.numpy_helper.to_array(tensor)
        for tensor in tensors
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


@pytest.fixture(scope="module")
def int8(small: nn.Module, original: nn.Module, place: Path) -> ts.Quantized:
    stream = (x for x in batches())
    return ts.quantize(
        small,
        place / "int8.onnx",
        stream,
        data=labelled(original),
        original=original,
        reduce_range=True,
        rounds=2,
        max_samples=20,
    )


def test_int8_is_beside_what_it_was(int8: ts.Quantized):
    assert int8.samples == 20
    for found in (int8.before, int8.after, int8.original):
        assert found is not None
        assert found.samples == 24
        assert found.latency is not None
        assert found.latency.rounds == 2
    assert int8.original is not None
    assert int8.original.top1 == int8.original.agreement == 1
    assert int8.before.size.params == int8.after.size.params < int8.original.size.params
    assert int8.after.size.macs == int8.before.size.macs
    assert int8.bytes == int8.path.stat().st_size == int8.after.size.bytes
    assert json.loads(json.dumps(int8.to_json()))["after"]["top1"] == int8.after.top1


def test_int8_is_quantised_all_through(int8: ts.Quantized):
    proto = onnx.load(int8.path)
    onnx.checker.check_model(proto)
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    dequantised = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    weights = [node.input[1] for node in proto.graph.node if node.op_type in ("Conv", "Gemm")]
    assert weights
    assert {kinds[dequantised[name]] for name in weights} == {onnx.TensorProto.INT8}
    # One scale for each output channel.
    shapes = {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer}
    scales = {node.input[0]: node.input[1] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    stored = dequantised[weights[0]]
    assert shapes[scales[stored]] == shapes[stored][:1]
    assert {each.domain for each in proto.opset_import} == {""}
    assert b"tensigma" not in int8.path.read_bytes()
    # Batches of any size.
    assert [len(OnnxModel(int8.path)(torch.randn(n, 3, 10, 10))) for n in (1, 5)] == [1, 5]


def test_equal_channels_keep_int8_close(small: nn.Module, int8: ts.Quantized, place: Path):
    plain = ts.quantize(
        small, place / "plain.onnx", batches(), equalise=False, reduce_range=True, latency=False, max_samples=20
    )
    assert int8.equalised
    assert not plain.equalised
    assert plain.after.latency is None
    assert int8.error < 0.6 * plain.error
    assert int8.error < 0.1


def test_the_model_comes_back_and_nothing_else_is_left(small: nn.Module, tmp_path: Path, capfd: Any, caplog: Any):
    model = copy.deepcopy(small).train()
    state = copy.deepcopy(model.state_dict())
    handlers, filters = list(logging.getLogger().handlers), list(logging.getLogger().filters)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(scratch))
        ts.quantize(model, tmp_path / "out" / "a.onnx", batches(), reduce_range=True, latency=False, max_samples=4)
    assert not list(scratch.iterdir())
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["a.onnx"]
    assert model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert logging.getLogger().handlers == handlers
    assert logging.getLogger().filters == filters
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]
    # Seven bits, as asked for.
    weights = int8_weights(tmp_path / "out" / "a.onnx")
    assert max(int(abs(each.astype(int)).max()) for each in weights) <= 64


def test_fp16_onnx_stores_half_and_computes_as_before(small: nn.Module, place: Path):
    found = ts.quantize(small, place / "half.onnx", batches(), precision="fp16", rounds=2)
    assert found.form == "onnx"
    assert 0 < found.error < 2e-3
    proto = onnx.load(found.path)
    kinds = Counter(tensor.data_type for tensor in proto.graph.initializer if len(tensor.dims) > 1)
    assert set(kinds) == {onnx.TensorProto.FLOAT16}
    x = batches(1, 5, seed=4)[0]
    expected = copy.deepcopy(small)
    for parameter in expected.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.half().float()
    scale = float(expected(x).detach().abs().max())
    # BatchNorm is folded before rounding, so that the weights are not quite the same.
    torch.testing.assert_close(OnnxModel(found.path)(x), expected(x).detach(), rtol=0, atol=2e-3 * scale)


class Several(nn.Module):
    """Scores and large features, in a dict of either order or in a tuple."""

    def __init__(self, keys: tuple[str, ...] | None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(288, 10)
        self.keys = keys

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        found = {"logits": self.head(features), "features": 100 * features}
        return tuple(found.values()) if self.keys is None else {key: found[key] for key in self.keys}


@pytest.mark.parametrize("keys", [None, ("logits", "features"), ("features", "logits")], ids=str)
@pytest.mark.parametrize(("name", "precision"), [("int8.onnx", "int8"), ("half.onnx", "fp16"), ("half", "fp16")])
def test_models_with_several_outputs(keys: tuple[str, ...] | None, name: str, precision: Any, tmp_path: Path):
    torch.manual_seed(0)
    model, x = Several(keys).eval(), torch.randn(24, 3, 8, 8)
    answer = model(x)
    logits = (answer[0] if keys is None else answer["logits"]).detach()
    found = ts.quantize(
        model, tmp_path / name, [(x, logits.argmax(1))], precision=precision, reduce_range=True, latency=False
    )
    assert 0 < found.error < 0.1
    # Scores are those of the model, wherever they are among its outputs.
    assert found.before.top1 == 1
    assert found.after.top1 is not None
    assert found.after.top1 > 0.8


class Inputs(nn.Module):
    """An image, facts about it, and the number of a place."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3), nn.ReLU())
        self.read, self.place, self.head = nn.Linear(4, 12), nn.Embedding(5, 12), nn.Linear(12, 6)

    def forward(self, image: Tensor, facts: Tensor, place: Tensor) -> Tensor:
        return self.head(self.see(image).mean((2, 3)) + self.read(facts) + self.place(place))


@pytest.mark.parametrize("key", ["**", "*", ("place", "image", "facts")], ids=str)
@pytest.mark.parametrize(("name", "precision"), [("int8.onnx", "int8"), ("half.onnx", "fp16"), ("half", "fp16")])
def test_models_with_several_inputs(key: Any, name: str, precision: Any, tmp_path: Path):
    torch.manual_seed(0)
    model = Inputs().eval()
    shapes = {"image": (8, 3, 8, 8), "facts": (8, 4)}
    named = [
        {**{what: torch.randn(shape) for what, shape in shapes.items()}, "place": torch.randint(0, 5, (8,))}
        for _ in range(3)
    ]
    data = [tuple(batch.values()) for batch in named] if key == "*" else named
    small, _ = ts.compress(model, data, budget=ts.Params(0.7), input=key, answers=ts.Scores())
    found = ts.quantize(small, tmp_path / name, data, original=model, precision=precision, input=key, rounds=1)
    assert 0 < found.error < 0.2
    assert found.before.agreement is not None
    assert found.after.agreement is not None
    assert abs(found.after.agreement - found.before.agreement) < 0.2
    if found.form == "onnx":
        assert OnnxModel(found.path).inputs == ("image", "facts", "place")


class Finder(nn.Module):
    """Boxes where an image is bright; how many depends on the last digits of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 1, bias=False)
        nn.init.constant_(self.conv.weight, 1.0004)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        bright = [self.conv(image[None]).flatten() for image in images]
        chosen = [scores[scores > 1.0002] for scores in bright]
        return [{"boxes": torch.tensor([[0.0, 0.0, 2.0, 2.0]]).expand(len(s), 4), "scores": s} for s in chosen]


def test_detectors_are_stored_in_half_precision(tmp_path: Path):
    data = [([torch.tensor([[[1.0, 2.0, 3.0]]])],), ([torch.tensor([[[0.0, 3.0, 4.0]]])],)]
    found = ts.quantize(Finder(), tmp_path / "half", data, precision="fp16")
    # One box less is found; the error is that of the outputs of the last layer.
    assert found.error == pytest.approx(4e-4, rel=0.1)
    assert found.after.precision is not None
    with pytest.raises(InputError, match=r"inputs are tensors become ONNX files.*precision='fp16' and a folder"):
        ts.quantize(Finder(), tmp_path / "a.onnx", data)


def test_fp16_archive_comes_back(small: nn.Module, original: nn.Module, tmp_path: Path):
    found = ts.quantize(small, tmp_path / "half", batches(), precision="fp16", original=original)
    assert found.form == "archive"
    assert found.samples == 0
    assert found.bytes == (tmp_path / "half" / "model.safetensors").stat().st_size
    n_halves = sum(tensor.numel() for tensor in small.state_dict().values() if tensor.is_floating_point())
    # Headers name tensors and where they are.
    assert found.before.size.bytes - found.bytes == pytest.approx(2 * n_halves, abs=200)
    again = ts.load(tmp_path / "half", small_net())
    floats = [tensor for tensor in again.state_dict().values() if tensor.is_floating_point()]
    assert {tensor.dtype for tensor in floats} == {torch.float16}
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, small.state_dict()[key].to(tensor.dtype))
    x = batches(1)[0]
    scale = float(small(x).detach().abs().max())
    torch.testing.assert_close(again.float()(x), small(x), rtol=0, atol=5e-3 * scale)
    # Loaded, it is a compressed model like any other.
    ts.save(again.half(), tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "half" / "model.safetensors"
    ).read_bytes()
    assert next(ts.load(tmp_path / "half", small_net(), dense=True).parameters()).dtype == torch.float16


def test_what_half_precision_cannot_hold(original: nn.Module, tmp_path: Path):
    model = copy.deepcopy(original)
    with torch.no_grad():
        model.get_parameter("head.weight")[0, 0] = 1e6
    for name in ("half", "half.onnx"):
        with pytest.raises(InputError, match=r"head\.weight reaches 1e\+06"):
            ts.quantize(model, tmp_path / name, batches(), precision="fp16")
    assert not list(tmp_path.iterdir())


class Gridded(nn.Module):
    """A convolution with BatchNorm, one channel of it turned around and one silent, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.norm.weight.data[:2] = torch.tensor([-1.5, 0.0])
        self.hidden, self.head = nn.Linear(288, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(torch.relu(self.norm(self.conv(x))).flatten(1))))


def test_weights_of_few_bits_keep_their_integers(tmp_path: Path):
    torch.manual_seed(0)
    model, data = Gridded().eval(), [torch.randn(24, 3, 8, 8)]
    bits = {"conv": 4, "hidden": 7, "head": 8}
    grids = {name: round_(model.get_submodule(name), bits[name]) for name in bits}
    for reduce_range, kept in ((True, ["conv", "hidden"]), (False, ["conv", "hidden", "head"])):
        found = ts.quantize(model, tmp_path / "a.onnx", data, reduce_range=reduce_range, ranges="minmax", latency=False)
        assert found.kept == len(kept)
        assert found.error < 0.1
        stored = {tensor.name: tensor for tensor in onnx.load(found.path).graph.initializer}
        for name in kept:
            weight = model.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            integers = grids[name].integers(weight)
            assert integers is not None
            written = torch.tensor(onnx.numpy_helper.to_array(stored[f"{name}.weight_quantized"])).flatten(1)
            signs = model.norm.weight.sign()[:, None] if name == "conv" else torch.ones(1)
            assert torch.equal(written, (signs * integers).to(torch.int8))


def test_ranges_are_those_with_the_least_error(tmp_path: Path):
    torch.manual_seed(0)
    x = torch.randn(64, 3, 8, 8)
    x[0, 0, 0, 0] = 60.0  # a pixel that is far from all others
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval()
    options: dict[str, Any] = {"reduce_range": True, "latency": False}
    found = {
        rule: ts.quantize(model, tmp_path / "a.onnx", [x[:40], x[40:]], ranges=rule, **options)
        for rule in ("auto", "minmax", "mse")
    }
    assert found["minmax"].ranges == "minmax"
    assert found["auto"].ranges in ("minmax", "mse", "p99.999", "p99.99", "p99.9")
    assert found["auto"].error <= min(found[rule].error for rule in ("minmax", "mse"))
    assert found["auto"].error < found["minmax"].error
    assert found["auto"].kept == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"precision": "int4"}, "int8, fp16", id="precision"),
        pytest.param({"ranges": "entropy"}, "auto, minmax, mse", id="ranges"),
        pytest.param({"max_samples": 0}, "one sample", id="samples"),
        pytest.param({"batches": []}, "empty", id="empty"),
    ],
)
def test_refusals(original: nn.Module, tmp_path: Path, options: dict[str, Any], words: str):
    given = options.pop("batches", batches())
    with pytest.raises(InputError, match=words):
        ts.quantize(original, tmp_path / "a.onnx", given, **options)
    assert not list(tmp_path.iterdir())


def test_range_is_reduced_where_the_cpu_asks_for_it(tmp_path: Path):
    info = tmp_path / "cpuinfo"
    for flags, expected in (("avx2 avx512f", True), ("avx2 avx512_vnni", False), ("avx_vnni", False)):
        info.write_text(f"processor: 0\nflags\t\t: fpu {flags} sse\nbugs: avx_vnni\n")
        assert needs_reduced_range(info, "x86_64") is expected
        assert not needs_reduced_range(info, "arm64")


@pytest.mark.parametrize("needed", [True, False])
def test_by_default_this_cpu_decides(needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quantization, "needs_reduced_range", lambda: needed)
    model, data = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 10)), [torch.randn(8, 3, 8, 8)]
    found = ts.quantize(model, tmp_path / "a.onnx", data, latency=False)
    assert found.reduce_range is needed
    largest = max(int(abs(weight.astype(int)).max()) for weight in int8_weights(found.path))
    assert (largest <= 64) is needed


@pytest.mark.real
@pytest.mark.slow
def test_resnet20_survives(tmp_path: Path):
    folder = os.environ.get("TENSIGMA_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("TENSIGMA_DATA does not name a folder with the real models and images")
    root = Path(folder) / "cifar10"
    model = load_model("zoo:resnet20-cifar", root / "resnet20.safetensors")
    data = load_data(f"cifar10:{root}", samples=300)
    test = load_data(f"cifar10:{root}?split=test", samples=500)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, method="cp", ranks=ts.VBMF(0.8), layers="spatial")
    small, _ = ts.compress(model, plan, stats)
    # Weights of seven bits compute the same on every CPU; eight overflow on those without VNNI.
    options: dict[str, Any] = {"data": test, "reduce_range": True, "latency": False}
    found = ts.quantize(small, tmp_path / "small.onnx", data, **options)
    plain = ts.quantize(small, tmp_path / "plain.onnx", data, equalise=False, **options)
    # Equalising gains or costs a few per cent here, with the solution that CP ends at; it must do no harm.
    assert found.error < 1.1 * plain.error
    assert found.before.top1 is not None
    assert found.after.top1 is not None
    # Seven bits cost CP about 4 points here; two standard errors of a difference of paired answers are about 2 more.
    assert found.after.top1 >= found.before.top1 - 0.06
    assert found.bytes < 0.6 * found.before.size.bytes


@pytest.mark.parametrize(("precision", "name"), [("int8", "small.onnx"), ("fp16", "small.onnx"), ("fp16", "small")])
def test_what_cannot_be_measured_is_written_all_the_same(
    precision: Any, name: str, original: nn.Module, tmp_path: Path
) -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise OSError("the disk with the images is gone")

    target = tmp_path / name
    with pytest.raises(OSError, match="is gone"):
        ts.quantize(original, target, batches(), precision=precision, data=Broken(), latency=False)
    loaded = OnnxModel(target) if target.suffix else ts.load(target, small_net()).float()
    (x, *_) = batches()
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), original(x), rtol=0.2, atol=0.1)

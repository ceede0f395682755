"""``ts.export``: one file, checked, free of Tensigma, or no file at all."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_nets import batches, small_net
from tensigma.deployment import OnnxModel
from tensigma.deployment.exporting import read_exported
from tensigma.deployment.parity import parity
from tensigma.errors import ExportError, InputError

pytestmark = pytest.mark.slow


class Tiny(nn.Module):
    """A convolution with BatchNorm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def compressed() -> nn.Module:
    model, data = small_net(), batches()
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, budget=ts.Params(0.6), method="tucker2")
    return ts.compress(model, plan, stats)[0]


@pytest.fixture(scope="module")
def exported(compressed: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> ts.Exported:
    return ts.export(compressed, tmp_path_factory.mktemp("onnx") / "small.onnx", batches()[0])


def test_any_batch_gives_what_the_model_gives(compressed: nn.Module, exported: ts.Exported):
    file = OnnxModel(exported.path)
    for count in (1, 2, 6, 17):
        x = batches(1, count, seed=count)[0]
        torch.testing.assert_close(file(x), compressed(x).detach(), rtol=1e-4, atol=1e-5)
    # Sizes other than that of the example, two at least.
    assert len(set(exported.batches) - {8}) >= 2
    assert exported.max_difference is not None
    assert exported.largest_output is not None
    assert 0 <= exported.max_difference <= 1e-4 * exported.largest_output
    assert json.loads(json.dumps(exported.to_json()))["bytes"] == exported.path.stat().st_size


def test_one_file_that_tells_nothing_of_where_it_was_made(exported: ts.Exported):
    assert [file.name for file in exported.path.parent.iterdir()] == ["small.onnx"]
    proto = onnx.load(exported.path)
    onnx.checker.check_model(proto, full_check=True)
    operators = Counter(node.op_type for node in proto.graph.node)
    assert "BatchNormalization" not in operators
    assert set(operators) <= {"Conv", "ConvTranspose", "Relu", "Add", "Gemm", "ReduceMean"}
    assert {node.domain for node in proto.graph.node} == {""}
    raw = exported.path.read_bytes()
    for word in (b"tensigma", b".py", b"forward", b"support_nets"):
        assert word not in raw


def test_it_runs_where_tensigma_and_torch_are_not(exported: ts.Exported, compressed: nn.Module):
    code = f"""
import sys
sys.modules["tensigma"] = sys.modules["torch"] = None
import numpy, onnxruntime
session = onnxruntime.InferenceSession({str(exported.path)!r}, providers=["CPUExecutionProvider"])
print(session.run(None, {{"input": numpy.ones((2, 3, 10, 10), numpy.float32)}})[0].sum())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) == pytest.approx(compressed(torch.ones(2, 3, 10, 10)).sum().item(), rel=1e-3, abs=1e-4)


def test_torch_export(compressed: nn.Module, tmp_path: Path):
    found = ts.export(compressed, tmp_path / "small.pt2", batches()[0][:1], format="torch-export")
    program = torch.export.load(tmp_path / "small.pt2").module()
    x = batches(1, 4, seed=5)[0]
    torch.testing.assert_close(program(x), compressed(x))
    assert found.opset is None
    assert set(found.batches) == {3, 5}


def test_a_fixed_batch_stays_fixed(tmp_path: Path):
    found = ts.export(Tiny().eval(), tmp_path / "tiny.onnx", torch.randn(2, 3, 5, 5), dynamic_batch=False)
    assert found.batches == (2,)
    with pytest.raises(InputError, match=r"\(3, 3, 5, 5\)"):
        OnnxModel(found.path)(torch.zeros(3, 3, 5, 5))


def test_the_model_comes_back_as_it_was(tmp_path: Path):
    model = Tiny().train()
    model.conv.weight.data = model.conv.weight.data.to(memory_format=torch.channels_last)
    model.conv.weight.requires_grad_(False)
    state = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    ts.export(model, tmp_path / "deep" / "tiny.onnx", (torch.randn(2, 3, 5, 5, generator=torch.Generator()), None))
    assert model.training
    assert model.norm.training
    assert not model.conv.weight.requires_grad
    assert torch.equal(rng, torch.get_rng_state())
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


def test_nothing_is_printed_logged_or_warned_of(tmp_path: Path, capfd: pytest.CaptureFixture, caplog: Any):
    ts.export(Tiny().eval(), tmp_path / "tiny.onnx", torch.randn(2, 3, 5, 5))
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]


class Restless(nn.Module):
    """Never the same answer twice, so that no file can give what it gives."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2, 3)) + torch.rand(())


class OneSize(nn.Module):
    """Batches of four only."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 48)


class Printed(nn.Module):
    """Python decides by the values of the input, which no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path):
    path = tmp_path / "file.onnx"
    path.write_bytes(b"what was there")
    for model, words in (
        (Restless(), r"differs from the model by up to \d\.\d\de"),
        (OneSize(), "dynamic_batch=False"),
        (Printed(), "cannot be written as onnx"),
    ):
        with pytest.raises(ExportError, match=words):
            ts.export(model.eval(), path, torch.randn(4, 3, 4, 4) + 2)
    assert [file.name for file in tmp_path.iterdir()] == ["file.onnx"]
    assert path.read_bytes() == b"what was there"


def test_parity_catches_what_is_wrong():
    model, x = nn.Identity(), torch.randn(4, 3)
    wrong = {
        "scaled": lambda x: x * 1.01,
        "mixed up": lambda x: x.flip(0),
        "no number": lambda x: x * float("nan"),
        "another shape": lambda x: x[:, :2],
    }
    for other in wrong.values():
        with pytest.raises(ExportError):
            parity(model, other, x, (1, 3), 1e-4)
    # Not what is zero on both sides, nor what is well within the tolerance.
    assert parity(_Zero(), _Zero(), x, (1, 3), 1e-4) == (0.0, 0.0)
    assert parity(model, lambda x: x * (1 + 1e-5), x, (1, 3), 1e-4)[0] > 0


class Detector(nn.Module):
    """Large values beside small ones."""

    def __init__(self, off: float = 0.0, keys: tuple[str, str] = ("boxes", "scores")) -> None:
        super().__init__()
        self.off, self.keys = off, keys

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.keys, (1000 * x.flatten(1), x.flatten(1).sigmoid() + self.off), strict=True))


def test_small_outputs_beside_large_ones_are_compared_with_their_own_size():
    x = torch.randn(4, 8)
    with pytest.raises(ExportError, match=r"in output 'scores'"):
        parity(Detector(), Detector(0.05), x, (1, 3), 1e-4)
    difference, largest = parity(Detector(), Detector(1e-5), x, (1, 3), 1e-4)
    # Those of the output that differs most for its size.
    assert 0 < difference < 2e-5
    assert largest <= 1


@pytest.mark.parametrize("keys", [("boxes", "scores"), ("scores", "boxes"), ("input", "b"), ("flatten", "mul")])
def test_outputs_keep_the_names_of_a_dict(keys: tuple[str, str], tmp_path: Path):
    model = Detector(keys=keys).eval()
    ts.export(model, tmp_path / "file.onnx", torch.randn(2, 3, 2))
    x = torch.randn(5, 3, 2)
    found = OnnxModel(tmp_path / "file.onnx")(x)
    # A name that something else in the file has is not given again; outputs are numbered then.
    named = found if isinstance(found, dict) else dict(zip(keys, found, strict=True))
    assert isinstance(found, dict) or "input" in keys or "flatten" in keys
    for key, value in model(x).items():
        torch.testing.assert_close(named[key], value, rtol=1e-4, atol=1e-4)


class _Zero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0


def test_a_model_that_rounds_badly_is_forgiven_its_own_rounding():
    class Cancelling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1000) - 1000

    x = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ExportError, match="differs"):
        parity(Cancelling(), lambda x: x, x, (1, 3), 1e-6)
    assert parity(Cancelling(), lambda x: x, x, (1, 3), 1e-6, 1e-3)[0] > 1e-6
    # Not more than that, and not what has another reason.
    for wrong, most in ((lambda x: x, 1e-5), (lambda x: 1.01 * x, 1e-1)):
        with pytest.raises(ExportError, match="differs"):
            parity(Cancelling(), wrong, x, (1, 3), 1e-6, most)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"format": "tflite"}, "torch-export", id="format"),
        pytest.param({"tolerance": 2.0}, "share", id="tolerance"),
        pytest.param({"format": "torch-export", "opset": 18}, "opset", id="opset"),
        pytest.param({"example": torch.zeros(0, 3, 5, 5)}, "no sample", id="empty"),
    ],
)
def test_refusals(tmp_path: Path, options: dict[str, Any], words: str):
    example = options.pop("example", torch.zeros(1, 3, 5, 5))
    with pytest.raises(InputError, match=words):
        ts.export(Tiny(), tmp_path / "tiny.onnx", example, **options)
    assert not list(tmp_path.iterdir())


def test_precisions(tmp_path: Path):
    model, x = Tiny().eval(), torch.randn(2, 3, 5, 5)
    for precision in (torch.float64, torch.bfloat16):
        with pytest.raises(InputError, match=r"\.float\(\)"):
            ts.export(copy.deepcopy(model).to(precision), tmp_path / "tiny.onnx", x.to(precision))
    found = ts.export(copy.deepcopy(model).half(), tmp_path / "half.onnx", x.half())
    assert found.tolerance > 1e-3


class TwoInputs(nn.Module):
    """An image, and facts about it; a table belongs to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.read, self.head = nn.Conv2d(3, 4, 3), nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, image: Tensor, facts: Tensor, table: Tensor | None = None) -> dict[str, Tensor]:
        features = self.conv(image).relu().mean((2, 3)) - self.read(facts)
        scores = self.head(features if table is None else features @ table)
        return {"logits": scores, "features": features}


def pairs(n: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = {"image": (n, 3, 6, 6), "facts": (n, 5), "table": (4, 4)}
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_several_inputs(format: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TwoInputs().eval()
    # In another order than that of the arguments.
    found = ts.export(model, tmp_path / "file", pairs(2), format=format, input=("facts", "image"))
    assert found.batches == (1, 3, 5)
    file = read_exported(found.path, format)
    with torch.no_grad():
        batch = pairs(7)
        del batch["table"]
        found_answers = [file(**batch)]
        if format == "onnx":
            found_answers.append(file(batch["image"], batch["facts"]))
        for name, expected in model(**batch).items():
            for answers in found_answers:
                torch.testing.assert_close(answers[name], expected, rtol=1e-4, atol=1e-5)
    if format == "onnx":
        result = ts.evaluate(file, [batch], original=model, input="**")
        assert (result.agreement, result.measure) == (1.0, "agreement")
        with pytest.raises(InputError, match=r"takes 2 inputs \(image, facts\); it was called with 0"):
            file(batch["image"])


def test_an_input_that_belongs_to_every_sample_keeps_its_size(tmp_path: Path) -> None:
    model = TwoInputs().eval()
    # Three samples: as many as the table has rows would be taken for samples.
    found = ts.export(model, tmp_path / "file.pt2", tuple(pairs(3).values()), format="torch-export", input="*")
    assert found.batches == (1, 5)
    with pytest.raises(InputError, match="inputs are tensors can be exported; the example is image: "):
        ts.export(model, tmp_path / "other", {**pairs(3), "facts": "none"}, input="**")

"""``tensigma export`` and ``tensigma quantize``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tensigma as ts
from support_cli import DATA, MODEL, files
from support_grids import rounded
from tensigma.deployment import OnnxModel
from tensigma.zoo import load_model


@pytest.fixture
def small(weights: Path, place: Path) -> Path:
    """A compressed model in a folder, with a report that names its original."""
    model = load_model(MODEL, weights)
    plan = ts.plan(model, ranks=ts.VBMF(0.8), norm="frobenius", method="tucker2")
    network, report = ts.compress(model, plan)
    ts.save(network, place / "small")
    data = report.to_json() | {"notes": {"model": MODEL, "weights": str(weights)}}
    (place / "small" / "report.json").write_text(json.dumps(data))
    return Path("small")


@pytest.mark.slow
def test_export_a_folder(run, run_json, small: Path, place: Path):
    shown = run("export", small, "--out", "out/small.onnx", "--rounds", 2)
    for words in ("largest difference", "latency, PyTorch", "latency, ONNX Runtime", "original", "MACs"):
        assert words in shown.stdout
    x = torch.randn(4, 1, 8, 8)
    network = ts.load(small, load_model(MODEL))
    torch.testing.assert_close(OnnxModel("out/small.onnx")(x), network(x).detach(), rtol=1e-4, atol=1e-5)
    assert files(place / "out") == {"small.onnx"}
    assert "--force" in run("export", small, "--out", "out/small.onnx", code=1).stderr
    ts.save(rounded(network, 4), small, force=True)
    found = run_json("export", small, "--out", "out/small.onnx", "--force", "--no-latency", "--original", MODEL)
    assert found["packed"].keys() == {"INT4"}
    assert found["batches"] == [3, 5]
    assert found["max_difference"] <= 1e-4 * found["largest_output"]
    assert found["latency"] == {}
    assert found["sizes"]["model"]["params"] < found["sizes"]["original"]["params"]


@pytest.mark.slow
def test_export_a_model_for_torch(run, run_json, weights: Path):
    common = ("export", MODEL, "--weights", weights, "--format", "torch-export", "--rounds", 2)
    found = run_json(*common, "--out", "model.pt2", "--batch", 2)
    assert set(found["latency"]) == {"model, eager", "model, file"}
    assert found["latency"]["model, file"]["batch"] == 2
    program = torch.export.load("model.pt2").module()
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(program(x), load_model(MODEL, weights)(x))
    shown = run(*common, "--out", "fixed.pt2", "--fixed-batch")
    assert "original" not in shown.stdout
    assert "torch.export" in shown.stdout


@pytest.mark.slow
def test_quantize_a_folder(run, run_json, small: Path, place: Path):
    common = ("quantize", small, "--data", DATA, "--max-samples", 32, "--rounds", 2)
    shown = run(*common, "--eval-data", "digits:?split=val&samples=64", "--out", "int8.onnx")
    for words in ("original", "FP32", "INT8", "top-1", "agreement", "bytes", "latency"):
        assert words in shown.stdout
    assert "64 samples of digits:?split=val" in shown.stderr
    found = run_json(*common, "--precision", "fp16", "--out", "half")
    assert found["form"] == "archive"
    assert found["original"]["agreement"] == 1
    assert found["after"]["agreement"] > 0.9
    assert found["bytes"] == Path("half/model.safetensors").stat().st_size < found["before"]["size"]["bytes"]
    half = ts.load("half", load_model(MODEL))
    assert next(half.parameters()).dtype == torch.float16
    assert "--force" in run(*common, "--precision", "fp16", "--out", "half", code=1).stderr
    run(*common, "--precision", "fp16", "--out", "half", "--force", "--quiet")
    assert "stored in half precision" in run("evaluate", MODEL, "--compressed", "half", "--data", DATA).stderr
    assert "stored in half precision" in run("export", "half", "--original", MODEL, "--out", "half.onnx").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("export", "absent", "--out", "a.onnx"), "no such folder", id="neither-model-nor-folder"),
        pytest.param(("export", "folder", "--out", "a.onnx"), "no compressed model", id="another-folder"),
        pytest.param(("export", MODEL, "--original", MODEL, "--out", "a.onnx"), "--original", id="original"),
        pytest.param(("export", MODEL, "--input", "3x8x8", "--out", "a.onnx"), "cannot be written", id="shape"),
        pytest.param(("quantize", MODEL, "--out", "a.onnx"), "--data", id="no-data"),
    ],
)
def test_refusals(run, place: Path, arguments: tuple[Any, ...], words: str):
    (place / "folder").mkdir()
    result = run(*arguments, code=1)
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert words in message
    assert files(place) == {"folder"}


def test_a_folder_cannot_name_code_to_execute(run, small: Path, place: Path):
    report = json.loads((small / "report.json").read_text())
    report["notes"]["model"] = "evil.py:build"
    (small / "report.json").write_text(json.dumps(report))
    (place / "evil.py").write_text("raise SystemExit('executed')\n")
    assert "--original evil.py:build" in run("export", small, "--out", "a.onnx", code=1).stderr
    (small / "report.json").unlink()
    assert "--original" in run("export", small, "--out", "a.onnx", code=1).stderr

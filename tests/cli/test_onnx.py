"""Commands on an ONNX file."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from PIL import Image

import tensigma as ts
from support_cli import DATA, files
from support_graphs import answers_of, graph_of, node, weights, written

pytestmark = pytest.mark.slow


@pytest.fixture
def model(place: Path) -> Path:
    """A classifier of 8×8 digits whose batch size is fixed."""
    nodes = [
        node("Conv", "x w1 b1", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2", pads=[1, 1, 1, 1]),
        node("Relu", "c2", "r2"),
        node("Conv", "r2 w3", "c3", pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Flatten", "c3", "flat"),
        node("Gemm", "flat w4 b4", "y", transB=1),
    ]
    tensors = {
        "w1": weights(8, 1, 3, 3),
        "b1": weights(8),
        "w2": weights(16, 8, 3, 3),
        "w3": weights(16, 16, 3, 3),
        "w4": weights(10, 256),
        "b4": weights(10),
    }
    return written(graph_of(nodes, tensors, input=(1, 1, 8, 8)), place)


def test_from_file_to_smaller_file(run, run_json, model: Path, place: Path):
    layers = run_json("inspect", model)
    assert [layer["name"] for layer in layers["layers"]] == ["the.c1", "the.c2", "the.c3", "the.y"]
    assert layers["input"] == [1, 8, 8]
    assert layers["inputs"] == {"x": {"type": "tensor(float)", "shape": [1, 1, 8, 8]}}
    assert layers["macs"] > 0
    run("calibrate", model, "--data", DATA, "--out", "stats")
    plan = run_json("plan", model, "--stats", "stats", "--budget", "macs=0.5", "--method", "svd")
    assert plan["macs"][1] <= 0.5 * plan["macs"][0]
    result = run(
        *("compress", model, "--data", DATA, "--eval-data", "digits:?split=val", "--budget", "macs=0.5"),
        # Which asks for what is done anyway.
        *("--method", "svd", "--export", "--out", "small"),
    )
    assert "agreement" in result.stdout
    assert "ONNX Runtime takes" in result.stderr
    assert files(place / "small") == {"model.onnx", "plan.json", "report.json", "report.html"}
    small = onnx.load("small/model.onnx")
    assert small.graph.input == onnx.load(model).graph.input
    assert small.metadata_props == onnx.load(model).metadata_props
    for notes in (json.loads(Path("small/report.json").read_text())["notes"], ts.Plan.load("small/plan.json").notes):
        assert notes["runtime"]["saving"] >= 2
        assert notes["runtime"]["words"].startswith("ONNX Runtime takes")
        assert notes["weighing"]["by"] == "forward runs"
    assert "ONNX Runtime takes" in Path("small/report.html").read_text(encoding="utf-8")
    x = torch.randn(3, 1, 8, 8)
    with torch.inference_mode():
        torch.testing.assert_close(ts.load("small")(x), answers_of(place / "small" / "model.onnx", x)[0])
    evaluation = run_json("evaluate", model, "--compressed", "small", "--data", "digits:?split=val", "--latency")
    assert evaluation["agreement"] > 0.3
    assert evaluation["rate"] > 1
    # Earlier output is replaced only if asked to.
    again = ("compress", model, "--stats", "stats", "--budget", "macs=0.4", "--no-evaluate", "--out", "small")
    assert "--force" in run(*again, code=1).stderr
    run(*again, "--force", "--method", "svd")
    quantized = run_json("quantize", "small/model.onnx", "--data", DATA, "--out", "int8.onnx", "--rounds", "2")
    assert quantized["error"] < 0.3
    assert "QuantizeLinear" in {item.op_type for item in onnx.load("int8.onnx").graph.node}
    run("export", "small/model.onnx", "--out", "same.onnx")


def test_what_needs_gradients_is_refused(run, model: Path):
    common = ("compress", model, "--data", DATA, "--budget", "macs=0.5", "--method", "svd", "--out", "small")
    refused = " ".join(run(*common, "--refine", "20", code=1).stderr.split())
    assert "--refine needs gradients, and a model that came as an ONNX file has none" in refused
    run(*common, "--no-evaluate")
    refused = " ".join(run("finetune", "small", "--data", DATA, "--out", "tuned", code=1).stderr.split())
    assert "fine-tuning needs gradients" in refused
    assert "Fine-tune the PyTorch model" in refused


def test_bad_input_is_refused_in_words(run, model: Path, place: Path):
    def message(*arguments: object) -> str:
        return " ".join(run(*arguments, code=1).stderr.split())

    common = ("--budget", "macs=0.5", "--out", "small")
    assert "takes 'x' of shape 1 × 1 × 8 × 8, and got 64 × 1 × 32 × 32" in message(
        *("compress", model, "--data", "digits:?size=32", *common)
    )
    assert "leave out --weights" in message("compress", model, "--weights", "w.pth", "--data", DATA, *common)
    (place / "cut.onnx").write_bytes(model.read_bytes()[:200])
    assert "cut.onnx cannot be read as ONNX" in message("inspect", "cut.onnx")
    assert "absent.onnx: no such file" in message("inspect", "absent.onnx")
    one = {"w": weights(6, 3, 3, 3)}
    bad = {
        "plain": (graph_of([node("Relu", "x")], {}), "there is nothing to compress"),
        "newer": (
            graph_of(
                [node("Conv", "x w", "c"), onnx.helper.make_node("Nowhere", ["c"], ["y"], domain="nowhere")],
                {"w": weights(6, 4, 3, 3)},
                domains=["nowhere"],
            ),
            "operator that the installed version",
        ),
        "last": (
            graph_of([node("Transpose", "x", "t", perm=[0, 3, 1, 2]), node("Conv", "t w")], one, input=("n", 8, 8, 3)),
            "add layout=nhwc",
        ),
        "two": (
            graph_of(
                [node("Conv", "x w", "c"), node("Mul", "c s")], one, inputs={"x": ("n", 3, 8, 8), "s": ("n", 1, 1, 1)}
            ),
            "two.onnx?input=x&s=[[1,1]]",
        ),
    }
    for number in range(2):
        Image.new("RGB", (8, 8), (90 * number,) * 3).save(place / f"{number}.png")
    for name, (graph, words) in bad.items():
        written(graph, place, f"{name}.onnx")
        images = f"imagefolder:{place}?size=8x8"
        assert words in message("compress", f"{name}.onnx", "--data", images, *common), name
    assert not Path("small").exists()


def test_answers_that_cannot_be_judged_lose_nothing(run, place: Path):
    nodes = [node("Conv", "x w", "c"), node("Relu", "c", "r"), node("Conv", "r v")]
    model = written(graph_of(nodes, {"w": weights(8, 1, 3, 3), "v": weights(8, 8, 3, 3)}, input=("n", 1, 8, 8)), place)
    run("compress", model, "--data", DATA, "--budget", "macs=0.6", "--method", "svd", "--out", "small")
    assert Path("small/model.onnx").is_file()

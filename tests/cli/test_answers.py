"""Models that are no classifiers, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

FILE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    body = nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU()
    return nn.Sequential(*body, nn.Conv2d(12, 4, 1))

def embedding():
    return nn.Sequential(*net(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(4))

class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.classifier, self.age = net(), nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x):
        features = self.body(x).mean((2, 3))
        return {"age": self.age(features), "species": self.classifier(features)}

def others():
    return [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(9, 12)]

def regressor():
    return nn.Sequential(*net(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1))

def photos():
    return [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
"""


@pytest.fixture
def file(place: Path) -> str:
    (place / "mine.py").write_text(FILE, encoding="utf-8")
    return "mine.py"


@pytest.mark.slow
def test_a_segmenter(run, run_json, file: str):
    common = (f"{file}:net", "--data", f"{file}:photos")
    shown = run("compress", *common, "--budget", "params=0.6", "--out", "small")
    for words in (
        "agreement by position",
        "mean IoU with the original",
        "compared: scores of 4 classes along axis 1 (assumed",
    ):
        assert words in shown.output
    assert shown.output.count("compared: ") == 1
    # Said once, though planning and evaluation both assume it.
    assert " ".join(shown.output.split()).count("warning: the answers are compared as scores of 4 classes") == 1
    page = Path("small/report.html").read_text(encoding="utf-8")
    for words in ("Agreement by position", "Mean IoU", "scores of 4 classes along axis 1"):
        assert words in page
    found = run_json("evaluate", *common, "--compressed", "small", "--answers", "numbers")
    assert (found["measure"], found["agreement"], found["certificate"]) == ("closeness", None, None)
    assert 0 < found["error"] < 1


@pytest.mark.slow
def test_several_parts(run, file: str):
    model, data = f"{file}:Parts", ("--data", f"{file}:photos", "--eval-data", f"{file}:others")
    shown = run("compress", model, *data, "--budget", "params=0.6", "--out", "small")
    output = " ".join(shown.output.split())
    for words in ("compared: species: scores of 3 classes along axis 1; age: numbers", "age: closeness"):
        assert words in output
    assert "agrees with the original (in the part 'species' alone) on at least" in output
    page = " ".join(Path("small/report.html").read_text(encoding="utf-8").split())
    for words in (
        "<h3>Closeness</h3>",
        "of the part &#39;age&#39;, by the original",
        "in the part &#39;species&#39; alone: at",
    ):
        assert words in page
    eight = run("quantize", "small", "--data", f"{file}:photos", "--out", "8.onnx", "--original", model, "--rounds", 1)
    assert "age: closeness" in eight.output


@pytest.mark.slow
def test_a_regressor(run, file: str):
    common = (f"{file}:regressor", "--data", f"{file}:photos")
    shown = run("compress", *common, "--budget", "params=0.6", "--out", "small")
    assert "relative error" in shown.output
    page = Path("small/report.html").read_text(encoding="utf-8")
    for words in ("Relative error", "numbers of shape (1,)", "closeness of"):
        assert words in page
    assert "exact binomial" not in page
    made = ("small", "--data", f"{file}:photos", "--original", f"{file}:regressor")
    tuned = run("finetune", *made, "--teacher", "--epochs", 1, "--learning-rates", 1e-4, "--out", "tuned")
    assert "closeness" in tuned.output
    eight = run("quantize", *made, "--out", "8.onnx", "--rounds", 1)
    assert "relative error" in eight.output


@pytest.mark.slow
def test_a_detector(run, run_json, place: Path):
    page = (Path(__file__).parents[2] / "docs" / "a-detector.md").read_text(encoding="utf-8")
    (place / "detector.py").write_text(
        page.split('```python title="detector.py"\n')[1].split("```")[0], encoding="utf-8"
    )
    common = ("detector.py:net", "--data", "detector.py:photos")
    shown = run("compress", *common, "--budget", "params=0.7", "--answers", "boxes", "--out", "small")
    for words in ("precision by the original", "average precision", "compared: boxes with scores and classes"):
        assert words in shown.output
    written = Path("small/report.html").read_text(encoding="utf-8")
    for words in ("Average precision", "against the detections of the original", "boxes with scores and classes"):
        assert words in written
    found = run_json("evaluate", *common, "--compressed", "small")
    assert (found["measure"], 0 < found["precision"] <= 1) == ("average precision", True)
    tuned = run(
        *("finetune", "small", "--data", "detector.py:photos", "--original", "detector.py:net", "--teacher"),
        *("--epochs", 1, "--learning-rates", 1e-5, "--out", "tuned"),
    )
    assert "average precision" in tuned.output


def test_what_cannot_be_guessed_is_asked_for(run, file: str):
    data = ("--data", f"{file}:photos")
    model = f"{file}:embedding"
    search = ("--budget", "drop=0.5,trials=1", "--holdout", f"{file}:photos", *data)
    refused = run("plan", model, *search, code=1)
    assert "may be class scores or an embedding; say which with --answers" in " ".join(refused.output.split())
    run("plan", model, *search, "--answers", "numbers")
    for wrong, message in (
        ("scores=x", "'x' is not a number"),
        ("words", "got 'words'; write scores"),
        ("boxes=2", "overlap"),
    ):
        assert message in " ".join(run("plan", model, *search, "--answers", wrong, code=2).output.split())

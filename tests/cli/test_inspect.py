"""``tensigma inspect``."""

from __future__ import annotations

from pathlib import Path

import pytest

from support_cli import MODEL


def test_lists_layers_with_costs(run):
    result = run("inspect", MODEL)
    assert "conv2" in result.stdout
    assert "6 → 12, 3×3" in result.stdout
    assert "tucker2, cp, cp-joint, deflation, svd" in result.stdout
    assert "whole model" in result.stdout
    assert not any(line != line.rstrip() for line in result.stdout.splitlines())


def test_json_holds_the_same(run_json):
    found = run_json("inspect", MODEL)
    assert found["command"] == "inspect"
    assert found["input"] == [1, 8, 8]
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert list(layers) == ["conv1", "conv2", "conv3", "conv4", "fc"]
    assert layers["conv2"]["macs"] == 6 * 12 * 9 * 64
    assert layers["fc"]["formats"] == ["svd"]
    assert found["macs"] == sum(layer["macs"] for layer in found["layers"])


def test_the_layer_that_plans_leave_dense_is_marked(run, run_json):
    marked = [layer["name"] for layer in run_json("inspect", MODEL)["layers"] if layer["skipped_by_default"]]
    assert marked == ["conv1"]
    lines = [line for line in run("inspect", MODEL).stdout.splitlines() if "left dense" in line]
    assert [line.split()[0] for line in lines] == ["conv1"]


def test_says_why_a_layer_stays_dense(run_json, place: Path):
    (place / "net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    shared = nn.Conv2d(4, 4, 3, padding=1)\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, groups=1), shared, shared, nn.Conv2d(4, 4, 3, groups=4))\n"
    )
    found = run_json("inspect", "net.py:build", "--input", "3x12x12")
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers["0"]["compressible"]
    assert "also reachable" in layers["1"]["reason"]
    assert "depthwise" in layers["3"]["reason"]
    # A module that is called twice costs twice.
    assert layers["1"]["macs"] == 2 * 4 * 4 * 9 * 100


def test_without_an_input_macs_are_left_out(run, run_json, place: Path):
    (place / "net.py").write_text("from torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(4, 4))\n")
    assert run_json("inspect", "net.py:build")["macs"] is None
    assert "--input" in run("inspect", "net.py:build").stderr


@pytest.mark.parametrize("shape", ["3x7x7", "1x8x8x8"])
def test_refuses_an_input_the_model_rejects(run, shape: str):
    assert "rejects an input" in run("inspect", MODEL, "--input", shape, code=1).stderr

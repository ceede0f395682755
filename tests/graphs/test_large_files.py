"""A real file above 2 GB, which no single ONNX file can hold: read, compressed in part and as a whole, written, run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import tensigma as ts
from support_graphs import FLOAT, answers_of, assert_same, graph_of, node

#: What one message of the format can hold.
LIMIT = 2**31

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TENSIGMA_LARGE") != "1",
        reason="writes 5 GB and takes about as much memory; TENSIGMA_LARGE=1 runs it",
    ),
]


def outside(folder: Path, shapes: Sequence[tuple[int, int]]) -> Path:
    """Matrix products with weights of these shapes and ReLUs between them; all weights are in one other file."""
    generator = np.random.default_rng(0)
    tensors, nodes = [], []
    with (folder / "weights.bin").open("wb") as weights:
        for index, (n_in, n_out) in enumerate(shapes):
            array = generator.standard_normal((n_in, n_out), dtype=np.float32) * np.float32((2 / n_in) ** 0.5)
            tensor = onnx.TensorProto(name=f"w{index}", data_type=FLOAT, dims=(n_in, n_out))
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in {"location": "weights.bin", "offset": weights.tell(), "length": array.nbytes}.items():
                tensor.external_data.add(key=key, value=str(value))
            array.tofile(weights)
            tensors.append(tensor)
            last = index == len(shapes) - 1
            nodes.append(node("MatMul", f"{f'r{index - 1}' if index else 'x'} w{index}", "y" if last else f"p{index}"))
            nodes += [] if last else [node("Relu", f"p{index}", f"r{index}")]
    model = graph_of(nodes, {}, input=("n", shapes[0][0]))
    model.graph.initializer.extend(tensors)
    onnx.save_model(model, folder / "model.onnx")
    return folder / "model.onnx"


def test_many_layers(tmp_path: Path):
    """Two of 34 layers are factorised, and the rest is still above the limit."""
    file = outside(tmp_path, [(4096, 4096)] * 34)
    assert (tmp_path / "weights.bin").stat().st_size > LIMIT
    network = ts.load_onnx(file)
    x = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    expected = answers_of(file, x)
    assert_same(network, x, expected)
    plan = ts.plan(network, ranks=ts.Ranks({"the.p3": 64, "the.p20": 64}), norm="frobenius", method="svd")
    small, report = ts.compress(network, plan)
    assert len(report.compressed) == 2
    ts.export(small, tmp_path / "small.onnx", x)
    assert (tmp_path / "small.onnx").stat().st_size < 100_000
    assert LIMIT < (tmp_path / "small.onnx.data").stat().st_size < (tmp_path / "weights.bin").stat().st_size
    assert_same(small, x, answers_of(tmp_path / "small.onnx", x))
    assert_same(ts.load_onnx(tmp_path / "small.onnx"), x, answers_of(tmp_path / "small.onnx", x))


def test_one_tensor(tmp_path: Path):
    """A weight that is above the limit by itself stays as it is, and the layer after it is factorised."""
    file = outside(tmp_path, [(8, 70_000), (70_000, 8_000), (8_000, 100)])
    assert (tmp_path / "weights.bin").stat().st_size > LIMIT
    network = ts.load_onnx(file)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    assert_same(network, x, answers_of(file, x))
    plan = ts.plan(network, ranks=ts.Ranks({"the.y": 10}), norm="frobenius", method="svd")
    small, _ = ts.compress(network, plan)
    ts.export(small, tmp_path / "small.onnx", x)
    assert (tmp_path / "small.onnx.data").stat().st_size > LIMIT
    assert_same(small, x, answers_of(tmp_path / "small.onnx", x))


def test_one_file_that_grows(tmp_path: Path):
    """A file below the limit, whose graph is above it after a layer was replaced."""
    inside = tmp_path / "inside.onnx"
    onnx.save_model(onnx.load(outside(tmp_path, [(8, 70_000), (70_000, 1_000), (1_000, 10)])), inside)
    network = ts.load_onnx(inside)
    narrow, wide = (torch.nn.Linear(*sizes, bias=False) for sizes in ((70_000, 7_700), (7_700, 1_000)))
    ts.layers.replace_(network, {"the.p1": torch.nn.Sequential(narrow, wide)})
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    ts.export(network, tmp_path / "large.onnx", x)
    assert (tmp_path / "large.onnx.data").stat().st_size > LIMIT
    assert_same(network, x, answers_of(tmp_path / "large.onnx", x))

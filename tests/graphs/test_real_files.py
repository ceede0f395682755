"""Real ONNX files, fed with text lines and pages that Pillow draws."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import onnx_files
import pytest
import torch
from onnx_files import TASKS

import tensigma as ts

FOLDER = Path(os.environ.get("TENSIGMA_DATA") or "absent") / "onnx"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="TENSIGMA_DATA names no folder with real ONNX files"),
]


def compressed(name: str, file: Path, **recipe: Any) -> tuple[ts.graphs.OnnxNetwork, ts.Report]:
    """The network of a task compressed, and written to ``file``."""
    network = ts.load_onnx(FOLDER / TASKS[name].file)
    batches = list(TASKS[name].inputs(8, 0).split(4))
    small, report = ts.compress(network, batches, recipe=ts.Recipe(method="svd", **recipe), sequential=False)
    assert isinstance(small, ts.graphs.OnnxNetwork)
    ts.export(small, file)
    return small, report


@pytest.mark.parametrize("name", TASKS)
def test_at_full_rank_the_answers_are_the_same(name: str, tmp_path: Path):
    task, file = TASKS[name], tmp_path / "small.onnx"
    network = ts.load_onnx(FOLDER / task.file)
    assert not network.left_alone
    plan = ts.plan(network, ranks=ts.Ranks({"*": 10**6}), norm="frobenius", method="svd", skip=(), saving="none")
    full, report = ts.compress(network, plan)
    assert len(report.compressed) >= 30
    x = task.inputs(2, 1)
    ts.export(full, file, x)
    answers = [onnx_files.answers(ts.graphs.OnnxModel(path), x, 2) for path in (file, FOLDER / task.file)]
    assert onnx_files.difference(*answers) < 1e-4
    assert task.agree(*map(task.read, answers)) == 1
    before, after = onnx.load(FOLDER / task.file), onnx.load(file)
    for field in ("ir_version", "producer_name", "opset_import", "metadata_props"):
        assert getattr(before, field) == getattr(after, field)
    assert (before.graph.input, before.graph.output) == (after.graph.input, after.graph.output)


def test_a_file_in_which_the_batch_is_fixed_and_a_strange_domain_imported(tmp_path: Path):
    _, report = compressed("layout", tmp_path / "small.onnx", budget=ts.Macs(0.9), weights=None)
    assert report.before.macs is not None
    assert 0.7 < (report.after.macs or 0) / report.before.macs <= 0.9
    x = TASKS["layout"].inputs(2, 1)
    model = ts.graphs.OnnxModel(tmp_path / "small.onnx")
    with torch.inference_mode():
        assert all(len(output) == 2 for output in model(x).values())

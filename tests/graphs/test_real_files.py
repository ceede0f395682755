"""Real ONNX files, fed with text lines and pages that Pillow draws."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_files
import pytest
from onnx_files import TASKS

import tensigma as ts

FOLDER = Path(os.environ.get("TENSIGMA_DATA") or "absent") / "onnx"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="TENSIGMA_DATA names no folder with real ONNX files"),
]


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
    one = onnx_files.answers(ts.graphs.OnnxModel(file), x[:1], 1)
    # None where OpenVINO is not installed.
    assert (onnx_files.opens_in_openvino(file, x[:1], one) or 0) < 1e-4
    before, after = onnx.load(FOLDER / task.file), onnx.load(file)
    for field in ("ir_version", "producer_name", "opset_import", "metadata_props"):
        assert getattr(before, field) == getattr(after, field)
    assert (before.graph.input, before.graph.output) == (after.graph.input, after.graph.output)


@pytest.mark.parametrize(("name", "calibration", "judged"), [("recognition", 120, 40), ("detection", 10, 10)])
def test_texts_and_boxes_agree_at_two_thirds_of_the_work(name: str, calibration: int, judged: int, tmp_path: Path):
    task, file = TASKS[name], tmp_path / "small.onnx"
    network = ts.load_onnx(FOLDER / task.file)
    # All layers counted alike, in one format: a third of the time, and still enough.
    recipe = ts.Recipe(budget=ts.Macs(0.66), method="svd", weights=None)
    small, report = ts.compress(network, list(task.inputs(calibration, 0).split(task.batch)), recipe=recipe)
    assert report.before.macs is not None
    assert (report.after.macs or 0) <= 0.66 * report.before.macs
    ts.export(small, file)
    x = task.inputs(judged, 1)
    answers = [onnx_files.answers(ts.graphs.OnnxModel(path), x, 4) for path in (FOLDER / task.file, file)]
    assert task.agree(*map(task.read, answers)) >= 0.95


def test_int8_goes_on_from_a_compressed_file(tmp_path: Path):
    """Also from operators of version 11, which have no scales for single channels."""
    task = TASKS["direction"]
    network = ts.load_onnx(FOLDER / task.file)
    batches = list(task.inputs(32, onnx_files.CALIBRATION).split(16))
    small, _ = ts.compress(network, batches, recipe=ts.Recipe(budget=ts.Macs(0.8), method="svd", weights=None))
    ts.export(small, tmp_path / "small.onnx")
    quantised = ts.quantize(ts.load_onnx(tmp_path / "small.onnx"), tmp_path / "int8.onnx", batches, latency=False)
    assert quantised.error < 0.1
    assert (tmp_path / "int8.onnx").stat().st_size < 0.7 * (tmp_path / "small.onnx").stat().st_size

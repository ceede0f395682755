"""Times of layers: measured, kept, and never trusted to a damaged file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from cases import GEOMETRIES, LayerCase
from support_timing import FakeClock
from tensigma.files import seal
from tensigma.layers import Geometry
from tensigma.running import Chain, TimeTable, runtime_of
from tensigma.running.chains import onnx_graph
from tensigma.running.timetable import cache_folder
from tensigma.running.timing import Eager, OnnxRuntime, measure


def _chain(n: int = 4) -> Chain:
    return Chain.of(Geometry.of(nn.Linear(n, n)), None, ())


def test_the_table_is_read_back_only_where_it_belongs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = FakeClock(monkeypatch)

    def times(about: str = "x") -> list[float]:
        runtime = Eager()
        monkeypatch.setattr(Eager, "about", lambda self: {"cpu": about})
        return TimeTable(runtime, tmp_path).seconds([_chain()])

    times()
    times()
    assert len(clock.asked) == 1
    (file,) = tmp_path.iterdir()
    data = json.loads(file.read_text())
    assert (data["format"], data["version"], data["about"]) == ("tensigma-timings", 1, {"cpu": "x"})
    times("another machine")
    assert len(clock.asked) == 2
    for damage in ("{", "[]", json.dumps({**data, "version": 2}), json.dumps({**data, "about": {"cpu": "y"}})):
        clock.asked.clear()
        file.write_text(damage)
        times()
        assert len(clock.asked) == 1
        assert json.loads(file.read_text()) == data
    # A time that cannot be is measured again; what others have added meanwhile stays.
    file.write_text(json.dumps(seal({**data, "seconds": {_chain().key: -1, "other": 2.0}})))
    times()
    assert json.loads(file.read_text())["seconds"] == {**data["seconds"], "other": 2.0}


def test_a_folder_that_cannot_be_written_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FakeClock(monkeypatch)
    (tmp_path / "file").write_text("in the way")
    assert TimeTable(Eager(), tmp_path / "file").seconds([_chain()]) == [pytest.approx(16e-9)]
    assert "not kept" in caplog.text


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TENSIGMA_CACHE", raising=False)
    assert cache_folder().name == "tensigma"
    monkeypatch.setenv("TENSIGMA_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(tmp_path / "own") == tmp_path / "own"


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", GEOMETRIES)
def test_graphs_compute_shapes_as_the_layers_do(case: LayerCase) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    layer = case.layer(dtype=torch.float32)
    chain = Chain.of(Geometry.of(layer), None, case.size, batch=3)
    session = runtime.InferenceSession(onnx_graph(chain), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": torch.ones(chain.input_shape).numpy()})
    assert found.shape == layer(case.inputs(3, dtype=torch.float32)).shape


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", GEOMETRIES)
def test_openvino_computes_the_same_chains(case: LayerCase) -> None:
    openvino = pytest.importorskip("openvino", reason="OpenVINO is not installed (extra openvino)")
    pytest.importorskip("onnx")
    layer = case.layer(dtype=torch.float32)
    chain = Chain.of(Geometry.of(layer), None, case.size, batch=3)
    (found,) = runtime_of("openvino").runner(chain)().values()  # type: ignore[attr-defined]
    assert found.shape == layer(case.inputs(3, dtype=torch.float32)).shape
    assert runtime_of("openvino").about()["openvino"] == openvino.get_version()


@pytest.mark.parametrize("name", ["eager", "onnxruntime", "openvino"])
def test_more_work_takes_longer(name: str) -> None:
    """The one test that starts a clock: a ratio of a thousand in work, seen as a ratio of two in time."""
    if name != "eager":
        pytest.importorskip(name, reason=f"{name} is not installed")
        pytest.importorskip("onnx")
    few, many = (Chain.of(Geometry.of(nn.Linear(n, n)), None, ()) for n in (32, 1024))
    state = torch.get_rng_state()
    quick, slow = measure([few, many], runtime_of(name))
    assert 0 < 2 * quick < slow
    assert torch.equal(torch.get_rng_state(), state)


def test_auto_is_onnx_runtime_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    assert isinstance(runtime_of("auto"), OnnxRuntime)
    assert isinstance(runtime_of("auto", torch.device("meta")), Eager)
    monkeypatch.setattr("tensigma.running.timing.find_spec", lambda name: None)
    assert isinstance(runtime_of("auto"), Eager)
    with pytest.raises(ImportError, match=r"tensigma\[onnx\]"):
        runtime_of("onnxruntime")
    with pytest.raises(ImportError, match=r"tensigma\[onnx,openvino\]"):
        runtime_of("openvino")

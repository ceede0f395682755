"""The study of norms, end to end on a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tensigma.experiments import fidelity
from tensigma.zoo import load_model

STUDY = fidelity.Study(
    model="zoo:digits-cnn",
    weights="weights.safetensors",
    calibration="digits:?split=train&samples=60",
    evaluation="digits:?split=val&samples=50&shuffle=false",
    tucker2=(1.0,),
    cp=(1.1,),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    save_file(load_model(STUDY.model).state_dict(), folder / STUDY.weights)
    return folder


@pytest.mark.slow
def test_a_study_runs_cell_by_cell_goes_on_where_it_stopped_and_makes_a_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "STUDIES", {"stand-in": STUDY})
    found: dict[str, Any] = {}
    steps = fidelity.run(STUDY, folder, found)
    next(steps), next(steps)
    steps.close()
    assert list(found) == ["original", "tucker2/1/frobenius"]
    first = dict(found)
    for _ in fidelity.run(STUDY, folder, found):
        pass
    assert set(found) == {"original", *(cell.key for cell in STUDY.cells())}
    assert all(found[key] is first[key] for key in first)
    assert all(cell["rate"] > 1 for key, cell in found.items() if key != "original")
    text = fidelity.table({"studies": {"stand-in": found}})
    assert f"## stand-in: {100 * found['original']['top1']:.1f} %" in text
    assert text.count(f"**{100 * found['tucker2/1/sigma']['top1']:.1f}**") >= 1
    assert not list(fidelity.run(STUDY, folder, found))

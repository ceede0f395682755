"""Planning that was interrupted goes on where it stopped."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.planning import PlanningProgress, curve_store
from tensigma.planning.curves import Option
from tensigma.solving import Candidate

pytestmark = pytest.mark.slow


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10)
        ).eval()


def images() -> list[torch.Tensor]:
    return [torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))]


def compress(cache: Path | None, progress: object = False) -> tuple[nn.Module, ts.Report]:
    return ts.compress(net(), images(), budget=ts.Params(0.6), cache=cache, progress=progress, workers=1)  # type: ignore[arg-type]


def test_a_plan_interrupted_after_two_curves_resumes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = compress(None)

    def interrupt(state: object) -> None:
        if isinstance(state, PlanningProgress) and state.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(tmp_path, interrupt)
    assert len(list(tmp_path.glob("curve-*.json"))) == 2
    computed: list[str] = []
    real = curve_store.curve

    def noting(layer: Candidate) -> list[Option]:
        computed.append(layer.name)
        return real(layer)

    monkeypatch.setattr(curve_store, "curve", noting)
    resumed, _ = compress(tmp_path)
    assert len(computed) == 1
    for key, value in expected.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key])


def test_a_damaged_curve_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = compress(tmp_path)
    for file in tmp_path.glob("curve-*.json"):
        file.write_text(file.read_text().replace('"error2": 0.0', '"error2": 0.5', 1))
    with caplog.at_level(logging.WARNING):
        again, _ = compress(tmp_path)
    assert "computed again" in caplog.text
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])

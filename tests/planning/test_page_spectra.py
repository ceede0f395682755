"""What a report carries for pictures: spectra are lower bounds, and old reports still load."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import tensigma as ts
from tensigma.compression import Report
from tensigma.planning import spectra_data
from tensigma.planning.page_data import N_POINTS


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3), nn.Conv2d(12, 12, 3, groups=12), nn.Conv2d(12, 80, 1), nn.Flatten(),
        nn.Linear(80 * 4, 6),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["tucker2", "cp", "auto"])
def report(request: pytest.FixtureRequest) -> Report:
    images = [torch.randn(40, 3, 8, 8)]
    # In sequence a layer is fitted to other inputs than those of the spectrum, and may go below it.
    return ts.compress(network(0), images, budget=ts.Params(0.5), method=request.param, sequential=False)[1]


def test_no_format_beats_the_spectrum(report: Report):
    assert report.compressed
    for layer in report.compressed:
        curve = report.spectra[layer.name]
        assert layer.ranks is not None
        assert layer.error is not None
        points = dict(zip(curve["rank"], curve["error"], strict=True))
        # The next rank that is among the points is at least as good as the own one.
        reached = min((rank for rank in points if rank >= layer.ranks[0]), default=max(points))
        assert layer.error >= points[reached] - 1e-3


def test_spectra_fall_from_everything_to_nothing(report: Report):
    assert set(report.spectra) == {"0", "1", "3", "5"}  # the depthwise layer has no channels to reduce
    for curve in report.spectra.values():
        assert (curve["rank"][0], curve["error"][0], curve["error"][-1]) == (0, 1.0, 0.0)
        assert curve["error"] == sorted(curve["error"], reverse=True)
        assert len(curve["rank"]) == len(curve["error"]) <= N_POINTS


def test_svd_lies_on_its_spectrum():
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 10))
    plan = ts.plan(model, ranks=ts.Ranks({"*": 4}), norm="frobenius", skip=[])
    _, report = ts.compress(model, plan)
    for layer in report.compressed:
        curve = report.spectra[layer.name]
        assert layer.frobenius_error == pytest.approx(curve["error"][curve["rank"].index(4)], abs=1e-4)


def test_layers_without_statistics_are_left_out():
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 10))
    stats = ts.calibrate(model, [torch.randn(64, 20)])
    plan = ts.plan(model, stats, budget=ts.Params(0.6), skip=[])
    assert spectra_data(plan, dict(model.named_modules()), None) == {}


def test_reports_carry_the_front(report: Report):
    assert report.front is not None
    again = Report.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False)))
    assert again == report


def test_older_reports_load(report: Report):
    old = report.to_json()
    del old["front"], old["spectra"]
    loaded = Report.from_json(old)
    assert loaded.front is None
    assert loaded.spectra == {}
    assert loaded.layers == report.layers

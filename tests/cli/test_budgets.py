"""Budgets of time and of lost answers on the command line, and certificates."""

from __future__ import annotations

from pathlib import Path

import pytest

import tensigma as ts
from support_cli import DATA, MODEL
from tensigma.running import timetable

pytestmark = pytest.mark.slow

HOLDOUT = "digits:?split=val&samples=60"
SVD = ("--method", "svd")


@pytest.fixture(autouse=True)
def straight_clock(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Time is a matter of multiply-adds here, and kept in a folder of its own."""
    monkeypatch.setenv("TENSIGMA_CACHE", str(place / "cache"))
    monkeypatch.setattr(timetable, "measure", lambda chains, runtime: [chain.macs * 1e-9 for chain in chains])


def test_time(run, run_json, stats: Path, weights: Path) -> None:
    common = ("plan", MODEL, "--weights", weights, "--stats", stats, *SVD)
    result = run(*common, "--budget", "latency=0.95,runtime=eager,batch=2", "--out", "plan.json")
    assert "in eager at batch 2" in result.stderr
    before, after = ts.Plan.load("plan.json").notes["latency"]["seconds"]
    assert after <= 0.95 * before
    found = run_json(*common, "--budget", "latency=1.0,runtime=eager")
    assert found["notes"]["latency"]["batch"] == 1
    assert any(Path("cache").iterdir())


def test_bytes_and_multiply_adds(run, run_json, stats: Path, weights: Path) -> None:
    common = (MODEL, "--weights", weights, "--stats", stats, *SVD)
    result = run("plan", *common, "--budget", "bytes=0.3,macs=0.9", "--bits", "4,8", "--out", "plan.json")
    assert "times fewer bytes" in result.stdout
    plan = ts.Plan.load("plan.json")
    assert plan.after.bytes <= 0.3 * plan.before.bytes
    assert plan.after.macs <= 0.9 * plan.before.macs
    assert {entry.bits for entry in plan.values()} <= {4, 8, None}
    found = run_json("plan", *common, "--budget", "bytes=0.5")
    assert found["bytes"][1] <= 0.5 * found["bytes"][0]
    assert "--budget bytes=X" in run("plan", *common, "--budget", "macs=0.9", "--bits", "4", code=2).stderr
    assert "two budgets of macs" in run("plan", *common, "--budget", "macs=0.9,macs=0.8", code=2).stderr
    assert "cannot be combined" in run("plan", *common, "--budget", "drop=0.1,macs=0.8", code=2).stderr


def test_layers_weighed_by_what_they_do(run, run_json, stats: Path, weights: Path) -> None:
    common = ("plan", MODEL, "--weights", weights, "--budget", "params=0.6", *SVD)
    result = run(*common, "--data", DATA, "--out", "plan.json")
    assert "on 96 samples" in result.stderr
    note = ts.Plan.load("plan.json").notes["weighing"]
    assert note["samples"] == 96
    assert note["power"] in (0.0, 0.25, 0.5)
    assert "weighing" not in run_json(*common, "--data", DATA, "--no-weigh")["notes"]
    assert "weighing" not in run_json(*common, "--stats", stats)["notes"]
    refused = run(*common, "--stats", stats, "--weigh", code=2)
    assert "--data" in refused.stderr
    refused = run("plan", MODEL, "--ranks", "vbmf=0.5", "--data", DATA, "--weigh", code=2)
    assert "--budget" in refused.stderr


@pytest.mark.parametrize("weigh", ["--weigh", "--no-weigh"])
def test_images_that_chose_a_plan_prove_nothing(run, run_json, weights: Path, weigh: str) -> None:
    one, other = (f"digits:?split={part}&holdout=0.5&samples=40" for part in ("train", "val"))
    run("calibrate", MODEL, "--weights", weights, "--data", one, "--out", "own")
    common = (MODEL, "--weights", weights, "--stats", "own")
    run("plan", *common, "--data", other, "--budget", "params=0.6", *SVD, weigh, "--out", "plan.json")
    found = run_json("compress", *common, "--plan", "plan.json", "--eval-data", other, "--out", "small")
    assert (found["evaluation"]["certificate"] is None) == (weigh == "--weigh")
    again = run_json("evaluate", MODEL, "--weights", weights, "--compressed", "small", "--data", other)
    assert (again["certificate"] is None) == (weigh == "--weigh")


def test_lost_answers_on_data_of_their_own(run, run_json, stats: Path, weights: Path) -> None:
    common = ("plan", MODEL, "--weights", weights, "--stats", stats, *SVD)
    result = run(*common, "--budget", "drop=30%,trials=3", "--holdout", HOLDOUT, "--out", "plan.json")
    assert "on 60 held-out samples" in result.stderr
    note = ts.Plan.load("plan.json").notes["drop"]
    # Weights are random here, so that labels say nothing.
    assert note["measure"] == "agreement"
    assert "agreement is measured instead of accuracy" in result.stderr
    assert note["kept"] >= 0.7
    assert note["data"] == HOLDOUT
    found = run_json(*common, "--budget", "drop=0.3,measure=agreement,trials=2", "--holdout", HOLDOUT)
    assert found["notes"]["drop"]["measure"] == "agreement"
    assert len(found["notes"]["drop"]["tried"]) <= 2


def test_lost_answers_on_a_part_of_the_data(run_json, weights: Path) -> None:
    """96 images in batches of 16: the second of six is held out, and the sixth would be the seventh."""
    found = run_json(
        *("compress", MODEL, "--weights", weights, "--data", DATA, "--batch-size", 16, *SVD),
        *("--budget", "drop=0.3,trials=3", "--out", "small"),
    )
    assert found["plan"]["notes"]["drop"]["samples"] == 16
    assert found["report"]["notes"]["samples"] == 80
    # The only images at hand had a part in it, so they prove nothing.
    assert found["evaluation"]["certificate"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "drop=0.1"), "--holdout"),
        (("--budget", "params=0.5", "--holdout", HOLDOUT), "--holdout goes with"),
        (("--budget", "drop=0.1,batch=3", "--holdout", HOLDOUT), "measure=… and trials=…"),
        (("--budget", "params=0.5,batch=3"), "takes at-most="),
        (("--budget", "latency=0.5,batch=x"), "whole number"),
        (("--budget", "latency=0.5,runtime=tvm"), "onnxruntime"),
        (("--budget", "speed=2"), "latency=0.5"),
        (("--ranks", "sigma=1"), "sigma-vbmf=ALPHA"),
    ],
)
def test_wrong_budgets_are_explained(run, stats: Path, weights: Path, arguments: tuple, message: str) -> None:
    result = run("plan", MODEL, "--weights", weights, "--stats", stats, *SVD, *arguments, code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_ranks_from_what_weights_do(run_json, stats: Path, weights: Path) -> None:
    found = run_json("plan", MODEL, "--weights", weights, "--stats", stats, "--ranks", "sigma-vbmf=0.9")
    assert any(layer["ranks"] for layer in found["layers"].values())


def test_certificates_are_for_fresh_images(run, run_json, weights: Path) -> None:
    own, fresh = "digits:?split=train&samples=96", "digits:?split=val"
    found = run_json(
        *("compress", MODEL, "--weights", weights, "--data", own, "--eval-data", fresh, *SVD),
        *("--budget", "params=0.7", "--out", "small"),
    )
    certificate = found["evaluation"]["certificate"]
    assert set(certificate) == {"samples", "agreed", "confidence", "bound", "meaning"}
    assert certificate["bound"] < certificate["agreed"] / certificate["samples"]
    judge = ("evaluate", MODEL, "--weights", weights, "--compressed", "small", "--data")
    assert "agrees with the original on at least" in run(*judge, fresh).stdout
    stale = run(*judge, own)
    assert "at least" not in stale.stdout
    assert "no certificate: some of these images may have had a part" in stale.stderr


def test_no_certificate_on_images_that_had_a_part_in_statistics_or_search(run, run_json, weights: Path) -> None:
    run("calibrate", MODEL, "--weights", weights, "--data", "digits:?split=train", "--out", "known", "--quiet")
    common = ("--weights", weights, "--stats", "known", "--quiet")
    kept = ("compress", MODEL, *common, *SVD, "--budget", "params=0.7")
    part = run_json(*kept, "--eval-data", "digits:?split=train&samples=50", "--out", "part")
    assert part["evaluation"]["certificate"] is None
    apart = run_json(*kept, "--eval-data", "digits:?split=val", "--out", "apart")
    assert apart["evaluation"]["certificate"] is not None
    search = ("--budget", "drop=0.2,trials=2,measure=agreement", "--holdout", "digits:?split=val")
    run("plan", MODEL, *common, *SVD, *search, "--out", "plan.json")
    again = ("--plan", "plan.json", "--eval-data", "digits:?split=val", "--out", "searched")
    searched = run_json("compress", MODEL, *common, *again)
    assert searched["evaluation"]["certificate"] is None
    judge = ("evaluate", MODEL, "--weights", weights, "--compressed", "searched", "--data", "digits:?split=val")
    assert "no certificate" in run(*judge).stderr

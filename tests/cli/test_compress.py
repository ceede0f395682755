"""``tensigma plan``, ``compress``, ``evaluate`` and ``report``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tensigma as ts
from support_cli import DATA, MODEL, files
from tensigma.zoo import load_model

OUTPUT = {"manifest.json", "model.safetensors", "plan.json", "report.json", "report.html"}


@pytest.mark.slow
def test_plan_is_shown_and_written(run, run_json, stats: Path, weights: Path):
    common = ("plan", MODEL, "--weights", weights, "--stats", stats, "--method", "tucker2")
    result = run(*common, "--budget", "params=0.5", "--out", "plans/plan.json")
    assert "whole model" in result.stdout
    assert "first convolution" in result.stdout
    assert ts.Plan.load("plans/plan.json").rate >= 2
    assert "--force" in run(*common, "--budget", "params=0.4", "--out", "plans/plan.json", code=1).stderr
    run(*common, "--budget", "params=40%", "--out", "plans/plan.json", "--force")
    assert ts.Plan.load("plans/plan.json").rate >= 2.5
    found = run_json(*common, "--budget", "macs=0.5", "--norm", "sigma")
    assert found["macs"][1] <= 0.5 * found["macs"][0]
    assert found["layers"]["conv3"]["norm"] == "sigma"


def test_plan_by_rules_and_names(run_json, weights: Path):
    common = ("plan", MODEL, "--weights", weights, "--norm", "frobenius")
    found = run_json(*common, "--ranks", "vbmf=0.9", "--layers", "spatial", "--skip", "conv1,conv2")
    dense = [name for name, layer in found["layers"].items() if layer["ranks"] is None]
    assert {"conv1", "conv2", "fc"} <= set(dense)
    found = run_json(*common, "--ranks", "energy=0.5", "--layers", "conv[34]", "--skip", "none")
    assert [name for name, layer in found["layers"].items() if layer["ranks"]] == ["conv3", "conv4"]


@pytest.mark.slow
def test_compress_in_one_go(run, weights: Path, place: Path):
    result = run(
        *("compress", MODEL, "--weights", weights, "--data", DATA, "--eval-data", "digits:?split=val"),
        *("--budget", "params=0.5", "--method", "tucker2", "--latency", "--out", "small"),
    )
    for words in ("parameters", "MACs", "bytes", "bytes on disk", "top-1", "agreement", "latency"):
        assert words in result.stdout
    assert "calibrating: batch 2 of 2" in result.stderr
    assert "compressing: layer" in result.stderr
    assert "evaluating: batch" in result.stderr
    assert files(place / "small") == OUTPUT
    small = ts.load("small", load_model(MODEL))
    original = load_model(MODEL, weights)
    assert sum(p.numel() for p in small.parameters()) <= 0.5 * sum(p.numel() for p in original.parameters())
    report = ts.Report.from_json(json.loads(Path("small/report.json").read_text()))
    assert report.notes["model"] == MODEL
    assert report.notes["evaluated_on"] == "digits:?split=val"
    sizes = {"before": weights.stat().st_size, "after": Path("small/model.safetensors").stat().st_size}
    # The file of weights may have other metadata in its header.
    assert report.notes["file_bytes"]["before"] == pytest.approx(sizes["before"], abs=1000)
    assert report.notes["file_bytes"]["after"] == sizes["after"]
    assert ts.Plan.load("small/plan.json").after.params == report.after.params
    assert str(report.notes["evaluation"]["samples"]) in Path("small/report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("after", "slower"), [(0.016, True), (0.005, False)])
def test_time_is_measured_beside_size(
    run, weights: Path, monkeypatch: pytest.MonkeyPatch, after: float, slower: bool
) -> None:
    timed = []

    def speed_note(original, small, inputs):
        timed.append((sum(p.numel() for p in original.parameters()), sum(p.numel() for p in small.parameters())))
        return {"batch": len(inputs), "before": 0.010, "after": after}

    monkeypatch.setattr(ts.evaluation, "speed_note", speed_note)
    common = ("compress", MODEL, "--weights", weights, "--norm", "frobenius", "--ranks", "vbmf=0.5", "--data", DATA)
    result = run(*common, "--no-evaluate", "--out", "small")
    ((before, left),) = timed
    assert left < before
    said = " ".join(result.stderr.split())
    assert ("warning: the compressed model is slower than the original: 1.60 times slower in PyTorch" in said) == slower
    assert f"time, batch 16 10 ms {1000 * after:.0f} ms" in " ".join(result.stdout.split())
    report = ts.Report.from_json(json.loads(Path("small/report.json").read_text()))
    assert report.notes["speed"] == {"batch": 16, "before": 0.010, "after": after}
    assert f"{1000 * after:.0f} ms" in Path("small/report.html").read_text()


@pytest.mark.slow
def test_ways_to_fit(run, run_json, stats: Path, weights: Path, place: Path):
    common = ("compress", MODEL, "--weights", weights, "--ranks", "energy=0.8", "--no-evaluate", "--stats", stats)
    assert run_json(*common, "--out", "alone")["report"]["notes"]["sequential"] is False
    given = (*common, "--data", DATA, "--max-samples", "40")
    assert run_json(*given, "--out", "joined")["report"]["notes"]["sequential"] is True
    assert run_json(*given, "--no-sequential", "--out", "apart")["report"]["notes"]["sequential"] is False
    result = run(*given, "--sequential", "--refine", "80", "--reestimate-bn", "--out", "refined")
    assert "refining, 80 of 80 samples" in result.stderr
    notes = json.loads(Path("refined/report.json").read_text())["notes"]
    assert notes["refinement"]["passes"] == 80
    assert notes["refinement"]["augmented"] is False
    assert notes["reestimated_bn"] >= 1
    viewed = run_json(*given, "--refine", "80", "--views", "--out", "viewed")
    assert viewed["report"]["notes"]["refinement"]["augmented"] is True
    assert "--refine" in run(*given, "--views", "--out", "nothing", code=2).stderr
    failed = run(*common, "--refine", "80", "--out", "nothing", code=2)
    assert "--data" in failed.stderr
    assert not (place / "nothing").exists()


@pytest.mark.slow
def test_compress_from_statistics_and_a_plan(run, run_json, stats: Path, weights: Path):
    run("plan", MODEL, "--weights", weights, "--stats", stats, "--ranks", "vbmf=0.7", "--out", "plan.json")
    common = ("compress", MODEL, "--weights", weights, "--stats", stats)
    first = run_json(*common, "--plan", "plan.json", "--cache", "cache", "--out", "small")
    again = run_json(*common, "--plan", "plan.json", "--cache", "cache", "--out", "again")
    assert first["evaluation"] is None
    assert first["report"]["rate"] == again["report"]["rate"] > 1
    assert all(layer["cached"] for layer in again["report"]["layers"] if layer["ranks"])
    one, other = (ts.load(folder, load_model(MODEL)).state_dict() for folder in ("small", "again"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_compress_without_data(run_json, weights: Path):
    common = ("compress", MODEL, "--weights", weights, "--norm", "frobenius", "--method", "tucker2")
    found = run_json(*common, "--ranks", "vbmf=0.8", "--out", "small")
    assert found["evaluation"] is None
    assert found["report"]["before"]["macs"] is None


@pytest.mark.slow
def test_fisher_is_gathered_where_the_norm_needs_it(run_json, weights: Path):
    found = run_json(
        *("compress", MODEL, "--weights", weights, "--data", DATA, "--norm", "fisher", "--method", "tucker2"),
        *("--ranks", "vbmf=0.8", "--layers", "spatial", "--no-evaluate", "--out", "small"),
    )
    assert {layer["norm"] for layer in found["report"]["layers"] if layer["ranks"]} == {"fisher"}


@pytest.mark.slow
def test_existing_output_is_kept_without_force(run, stats: Path, weights: Path, place: Path):
    common = ("compress", MODEL, "--weights", weights, "--stats", stats, "--method", "svd", "--out", "small")
    run(*common, "--budget", "params=0.6")
    before = (place / "small/report.json").read_text()
    assert "--force" in run(*common, "--budget", "params=0.5", code=1).stderr
    assert (place / "small/report.json").read_text() == before
    run(*common, "--budget", "params=0.5", "--force")
    assert files(place / "small") == OUTPUT
    assert (place / "small/report.json").read_text() != before
    # What is refused is refused before any work.
    refused = run("compress", MODEL, "--stats", "nowhere", "--budget", "params=0.5", "--out", stats, "--force", code=1)
    assert "something else" in refused.stderr


def test_a_failure_leaves_nothing_behind(run, stats: Path, weights: Path, place: Path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    before = files(place)
    monkeypatch.setattr("tensigma.Plan.save", full)
    common = ("compress", MODEL, "--weights", weights, "--stats", stats, "--budget", "params=0.6", "--method", "svd")
    assert "No space left" in run(*common, "--out", "small", code=1).stderr
    assert files(place) == before
    # Once the model is written, a page that cannot be written does not take it away.
    monkeypatch.undo()
    monkeypatch.chdir(place)
    monkeypatch.setattr("tensigma.write_report", full)
    assert "No space left" in run(*common, "--out", "small", code=1).stderr
    assert files(place / "small") == OUTPUT - {"report.html"}


def test_evaluate_beside_the_original(run, run_json, stats: Path, weights: Path):
    run("compress", MODEL, "--weights", weights, "--stats", stats, "--ranks", "energy=0.999", "--out", "small")
    common = ("evaluate", MODEL, "--weights", weights, "--data", DATA)
    found = run_json(*common, "--compressed", "small", "--latency", "--rounds", 3)
    assert found["samples"] == 96
    assert found["agreement"] > 0.5
    assert found["speedup"] > 0
    alone = run_json(*common, "--max-samples", 20)
    assert alone["samples"] == 20
    assert alone["original"] is None
    assert alone["top1"] == pytest.approx(round(alone["top1"] * 20) / 20)
    assert "agreement" in run(*common, "--compressed", "small").stdout
    # Without the original's weights there is nothing to agree with.
    unknown = run_json("evaluate", MODEL, "--data", DATA, "--compressed", "small")
    assert unknown["agreement"] is None
    assert unknown["top1"] == found["top1"]


def test_report_is_written_again(run, run_json, stats: Path, weights: Path, place: Path):
    run("compress", MODEL, "--weights", weights, "--stats", stats, "--ranks", "energy=0.99", "--out", "small")
    assert "conv3" in run("report", "small").stdout
    run("report", "small", "--out", "page.html")
    assert (place / "page.html").read_text() == (place / "small/report.html").read_text()
    assert "--force" in run("report", "small/report.json", "--out", "page.html", code=1).stderr
    assert run_json("report", "small/report.json", "--out", "page.html", "--force")["report"]["rate"] > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", MODEL, "--data", DATA, "--compressed", "small"),
        ("report", "small"),
        ("quantize", "small", "--precision", "fp16", "--data", DATA, "--out", "half"),
        ("finetune", "small", "--data", DATA, "--epochs", 1, "--learning-rates", "1e-4", "--out", "tuned"),
    ],
    ids=lambda command: command[0],
)
def test_a_folder_that_a_kill_left_between_two_renames_is_found(
    run, stats: Path, weights: Path, place: Path, command: tuple[str, ...]
):
    run("compress", MODEL, "--weights", weights, "--stats", stats, "--ranks", "energy=0.99", "--out", "small")
    (place / "small").rename(place / ".small.old-999999999")
    run(*command)
    assert files(place / "small") == OUTPUT


@pytest.mark.slow
def test_resume_is_the_same_command_again(run, weights: Path, place: Path, monkeypatch: pytest.MonkeyPatch):
    command = ("compress", MODEL, "--weights", weights, "--data", DATA, "--budget", "params=0.5", "--method", "svd")
    assert "--resume needs the --cache" in run(*command, "--out", "small", "--resume", code=2).output
    refused = run(*command, "--out", "small", "--cache", "cache", "--resume", code=2)
    assert "holds nothing to go on from" in refused.output
    real = ts.compress

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ts, "compress", interrupted)
    result = run(*command, "--out", "small", "--cache", "cache", code=130)
    assert "cache holds what was computed so far; the same command goes on from there" in " ".join(
        result.output.split()
    )
    assert not (place / "small").exists()
    monkeypatch.setattr(ts, "compress", real)
    kept = {file.name for file in (place / "cache").iterdir()}
    assert {name.partition("-")[0] for name in kept} >= {"calibration", "curve", "effects"}

    def computed_again(*_: object, **__: object) -> None:
        raise AssertionError("statistics, a curve or an effect is computed again")

    monkeypatch.setattr("tensigma.calibration.runner.Collector", computed_again)
    monkeypatch.setattr("tensigma.planning.planning_store.curve", computed_again)
    monkeypatch.setattr("tensigma.planning.effects._squares", computed_again)
    run(*command, "--out", "small", "--cache", "cache", "--resume")
    assert (place / "small" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_plan_keeps_what_it_computes(run, stats: Path, weights: Path, place: Path, monkeypatch: pytest.MonkeyPatch):
    command = ("plan", MODEL, "--weights", weights, "--stats", stats, "--budget", "params=0.5", "--method", "svd")
    first = run(*command, "--cache", "cache").stdout
    monkeypatch.setattr("tensigma.planning.planning_store.curve", pytest.fail)
    assert run(*command, "--cache", "cache").stdout == first


@pytest.mark.slow
def test_export_leaves_an_onnx_file_beside_the_archive(run, weights: Path, place: Path) -> None:
    result = run(
        *("compress", MODEL, "--weights", weights, "--data", DATA, "--budget", "bytes=0.2", "--method", "dense"),
        *("--export", "--out", "small"),
    )
    assert "exported to small/model.onnx" in result.stderr
    assert files(place / "small") == OUTPUT | {"model.onnx"}
    small = ts.load("small", load_model(MODEL)).eval()
    x = next(iter(ts.zoo.load_data(DATA)))[0]
    # The last size has been seen by no trace.
    for size in (1, 7):
        expected = small(x[:size]).detach()
        answers = ts.deployment.OnnxModel(place / "small" / "model.onnx")(x[:size])
        torch.testing.assert_close(answers, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    # Weights of few bits are integers there too.
    assert (place / "small" / "model.onnx").stat().st_size < 0.6 * weights.stat().st_size
    notes = json.loads(Path("small/report.json").read_text())["notes"]
    # The copy counts for nothing.
    assert notes["file_bytes"]["after"] == Path("small/model.safetensors").stat().st_size
    assert notes["evaluation"]["samples"] == 96
    run("evaluate", MODEL, "--weights", weights, "--compressed", "small", "--data", DATA)


def test_export_without_images_tries_the_file_on_inputs_of_the_usual_shape(run, weights: Path, place: Path) -> None:
    command = ("compress", MODEL, "--weights", weights, "--norm", "frobenius", "--ranks", "vbmf=0.5")
    run(*command, "--export", "--out", "small")
    assert files(place / "small") == OUTPUT | {"model.onnx"}
    Path("mine.py").write_text("from tensigma.zoo import load_model\ndef net(): return load_model('zoo:digits-cnn')\n")
    result = run("compress", "mine.py:net", *command[4:], "--export", "--out", "other", code=2)
    assert "--data or --eval-data" in " ".join(result.output.split())
    assert not Path("other").exists()


def test_a_model_that_cannot_be_exported_is_kept_and_evaluated(
    run, weights: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ts.errors.ExportError("no such operator")

    monkeypatch.setattr(ts, "export", fail)
    result = run(
        *("compress", MODEL, "--weights", weights, "--norm", "frobenius", "--ranks", "vbmf=0.5"),
        *("--eval-data", DATA, "--export", "--out", "small"),
        code=3,
    )
    assert "the compressed model is in small, but it could not be exported: no such operator" in result.output
    assert files(place / "small") == OUTPUT
    assert json.loads(Path("small/report.json").read_text())["notes"]["evaluation"]["samples"] == 96

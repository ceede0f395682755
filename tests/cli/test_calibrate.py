"""``tensigma calibrate`` and ``tensigma stats``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensigma as ts
from support_cli import DATA, MODEL, files
from tensigma.zoo import load_data, load_model

# Batches that stop as if someone had pressed Ctrl-C, for as long as the file "stop" is there.
INTERRUPTED = """
from pathlib import Path
import torch

class Batches:
    n_classes = None
    def __len__(self):
        return 6
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for index in range(6):
            if index == 4 and Path("stop").exists():
                raise KeyboardInterrupt
            yield torch.rand(8, 1, 8, 8, generator=generator)

def batches():
    return Batches()
"""


@pytest.mark.slow
def test_writes_what_the_library_gathers(run, weights: Path, place: Path):
    result = run("calibrate", MODEL, "--weights", weights, "--data", DATA, "--batch-size", 32, "--out", "stats")
    assert "samples" in result.stdout
    assert "96" in result.stdout
    assert "calibrating: batch 3 of 3" in result.stderr
    assert files(place) == {"weights.safetensors", "stats"} | {f"stats/{file}" for file in files(place / "stats")}
    expected = ts.calibrate(load_model(MODEL, weights), load_data(DATA))
    found = ts.Calibration.load("stats")
    assert found.data == DATA
    torch.testing.assert_close(found["conv3"].gram, expected["conv3"].gram)


def test_json_and_limits(run_json, weights: Path):
    found = run_json(
        "calibrate", MODEL, "--weights", weights, "--data", DATA, "--max-samples", 40, "--layers", "conv*", "--out", "s"
    )
    assert found["samples"] == 40
    assert list(found["layers"]) == ["conv1", "conv2", "conv3", "conv4"]


def test_fisher_and_memory(run, run_json, weights: Path):
    run("calibrate", MODEL, "--weights", weights, "--data", DATA, "--fisher", "model", "--memory", "1GB", "--out", "s")
    assert run_json("stats", "show", "s")["layers"]["conv2"]["fisher"] is True
    run("calibrate", MODEL, "--data", DATA, "--memory", "much", "--out", "t", code=2)


def test_existing_output_is_kept_without_force(run, stats: Path, weights: Path):
    arguments = ("calibrate", MODEL, "--weights", weights, "--data", DATA, "--max-samples", 32, "--out", stats)
    assert "--force" in run(*arguments, code=1).stderr
    assert ts.Calibration.load(stats).samples == 96
    run(*arguments, "--force")
    assert ts.Calibration.load(stats).samples == 32


def test_a_folder_of_something_else_is_never_replaced(run, place: Path):
    (place / "mine").mkdir()
    (place / "mine" / "thesis.txt").write_text("years of work")
    assert "something else" in run("calibrate", MODEL, "--data", DATA, "--out", "mine", "--force", code=1).stderr
    assert (place / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_will_do(run, weights: Path, place: Path):
    (place / "empty").mkdir()
    run("calibrate", MODEL, "--weights", weights, "--data", DATA, "--out", "empty", "--quiet")
    assert ts.Calibration.load("empty").samples == 96


def test_resume_gives_what_an_uninterrupted_run_gives(run, weights: Path, place: Path):
    (place / "data.py").write_text(INTERRUPTED)
    common = ("calibrate", MODEL, "--weights", weights, "--data", "data.py:batches", "--checkpoint-every", 2)
    run(*common, "--out", "whole")
    (place / "stop").touch()
    stopped = run(*common, "--out", "stats", code=130)
    assert "interrupted" in stopped.stderr
    assert "--resume" in stopped.stderr
    assert not (place / "stats").exists()
    (place / "stop").unlink()
    assert "--resume" in run(*common, "--out", "stats", code=1).stderr
    run(*common, "--out", "stats", "--resume")
    assert not (place / "stats.checkpoint").exists()
    one, other = ts.Calibration.load("whole"), ts.Calibration.load("stats")
    assert one.samples == other.samples == 48
    for name, layer in one.items():
        torch.testing.assert_close(other[name].gram, layer.gram)


def test_force_starts_over(run, weights: Path, place: Path):
    (place / "data.py").write_text(INTERRUPTED)
    (place / "stop").touch()
    common = ("calibrate", MODEL, "--weights", weights, "--data", "data.py:batches", "--checkpoint-every", 2)
    run(*common, "--out", "stats", code=130)
    (place / "stop").unlink()
    run(*common, "--out", "stats", "--force")
    assert ts.Calibration.load("stats").samples == 48
    assert not (place / "stats.checkpoint").exists()


@pytest.mark.parametrize("option", ["--force", "--resume"])
def test_a_folder_of_somebody_else_in_the_place_of_the_checkpoint_is_left_alone(
    run, weights: Path, place: Path, option: str
):
    (place / "stats.checkpoint" / "step-000001").mkdir(parents=True)
    (place / "stats.checkpoint" / "step-000001" / "precious.txt").write_text("theirs")
    command = ("calibrate", MODEL, "--weights", weights, "--data", DATA, "--out", "stats", option)
    run(*command, code=1)
    assert (place / "stats.checkpoint" / "step-000001" / "precious.txt").read_text() == "theirs"
    assert not (place / "stats").exists()


def test_what_is_not_ours_stays_beside_a_finished_checkpoint(run, weights: Path, place: Path):
    (place / "data.py").write_text(INTERRUPTED)
    (place / "stop").touch()
    common = ("calibrate", MODEL, "--weights", weights, "--data", "data.py:batches", "--checkpoint-every", 2)
    run(*common, "--out", "stats", code=130)
    (place / "stop").unlink()
    (place / "stats.checkpoint" / "precious.txt").write_text("theirs")
    run(*common, "--out", "stats", "--resume")
    assert [path.name for path in (place / "stats.checkpoint").iterdir()] == ["precious.txt"]


def test_stats_show(run, run_json, stats: Path):
    result = run("stats", "show", stats)
    assert "conv4" in result.stdout
    assert DATA in result.stderr
    assert run_json("stats", "show", stats)["layers"]["conv2"]["d"] == 54


def test_stats_merge_and_compare(run, run_json, stats: Path, weights: Path):
    run("calibrate", MODEL, "--weights", weights, "--data", "digits:?classes=3", "--out", "threes")
    merged = run_json("stats", "merge", stats, "threes", "--out", "both")
    assert merged["samples"] == ts.Calibration.load("both").samples == 96 + ts.Calibration.load("threes").samples
    near, far = run_json("stats", "compare", stats, "both"), run_json("stats", "compare", stats, "threes")
    assert 0 < near["total"] < far["total"] < 1
    assert "all layers" in run("stats", "compare", stats, stats).stdout
    assert "--force" in run("stats", "merge", stats, "threes", "--out", "both", code=1).stderr
    run("stats", "merge", stats, "--out", "alone", code=2)
    run("stats", "merge", stats, "threes", "--out", stats, "--force", code=1)
    assert ts.Calibration.load(stats).samples == 96


def test_stats_of_two_models_do_not_mix(run, stats: Path):
    run("calibrate", "zoo:digits-cnn?width=8", "--data", DATA, "--out", "wide")
    assert "architecture" in run("stats", "merge", stats, "wide", "--out", "both", code=1).stderr
    assert not Path("both").exists()

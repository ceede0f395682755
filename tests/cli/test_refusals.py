"""Bad input: one clear message, an exit code that is not 0, nothing written."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import tensigma as ts
from support_cli import DATA, MODEL, files
from tensigma.cli.parsing import in_options
from tensigma.errors import InputError, StoreError
from tensigma.files import claimed
from tensigma.zoo import load_model

pytestmark = pytest.mark.slow

COMPRESS = ("compress", MODEL, "--data", DATA, "--budget", "params=0.5", "--out", "small")
WITHOUT_DATA = ("compress", MODEL, "--norm", "frobenius", "--ranks", "vbmf=0.5")


def one_message(stderr: str) -> str:
    """The message of a failure, which must be one line."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert stderr.splitlines()[-1] == line
    return line


def test_a_checkpoint_that_is_no_state_dict(run, place: Path):
    torch.save([1, 2, 3], place / "list.pth")
    assert "not a state dict" in one_message(run(*COMPRESS, "--weights", "list.pth", code=1).stderr)
    (place / "broken.safetensors").write_bytes(b"not at all")
    assert "safetensors" in one_message(run(*COMPRESS, "--weights", "broken.safetensors", code=1).stderr)
    assert "no such file" in one_message(run(*COMPRESS, "--weights", "absent.pth", code=1).stderr)
    assert not Path("small").exists()


def test_keys_that_do_not_match(run, weights: Path):
    arguments = ("compress", "zoo:resnet20-cifar", "--weights", weights, *COMPRESS[2:])
    assert "missing" in one_message(run(*arguments, code=1).stderr)
    arguments = ("compress", "zoo:digits-cnn?width=8", "--weights", weights, *COMPRESS[2:])
    assert "another shape" in one_message(run(*arguments, code=1).stderr)


@pytest.fixture
def folder(place: Path) -> str:
    """Three images in a folder, of which one is none."""
    for index in range(3):
        (place / "photos" / "a").mkdir(parents=True, exist_ok=True)
        Image.new("L", (12, 12), index * 80).save(place / "photos" / "a" / f"{index}.png")
    (place / "photos" / "a" / "1.png").write_bytes(b"not a picture")
    (place / "net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),"
        " nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))\n"
    )
    return "imagefolder:photos?size=12"


def test_an_unreadable_image(run, folder: str, place: Path):
    before = files(place)
    common = ("compress", "net.py:build", "--budget", "params=0.8", "--method", "svd", "--out", "small")
    message = one_message(run(*common, "--data", folder, code=1).stderr)
    assert "1.png" in message
    assert "unreadable=skip" in message
    assert {file for file in files(place) if "__pycache__" not in file} == before
    skipped = run(*common, "--data", f"{folder}&unreadable=skip")
    assert "warning: " in skipped.stderr
    assert "1.png" in skipped.stderr
    assert Path("small/report.html").exists()


def test_no_compressible_layer(run, place: Path):
    (place / "net.py").write_text(
        "from torch import nn\n"
        "def pool():\n    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten())\n"
        "def depthwise():\n    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Flatten())\n"
    )
    for factory in ("pool", "depthwise"):
        arguments = ("compress", f"net.py:{factory}", *COMPRESS[2:])
        assert " no " in one_message(run(*arguments, code=1).stderr)
    assert "no convolution" in one_message(run("inspect", "net.py:pool", code=1).stderr)
    assert not Path("small").exists()


def test_an_impossible_budget(run, stats: Path, weights: Path):
    common = ("compress", MODEL, "--weights", weights, "--stats", stats, "--out", "small")
    message = one_message(run(*common, "--budget", "params=0.001", code=1).stderr)
    assert "0.001" in message
    assert not Path("small").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("--budget", "params=2"), "(0, 1]", id="share-above-1"),
        pytest.param(("--budget", "half"), "params=0.5", id="no-name"),
        pytest.param(("--budget", "params=much"), "not a number", id="no-number"),
        pytest.param(("--ranks", "vbmf=-1"), "alpha", id="negative-alpha"),
        pytest.param(("--ranks", "cp=3"), "vbmf=ALPHA", id="unknown-rule"),
        pytest.param(("--budget", "params=0.5", "--method", "tucker"), "tucker2", id="unknown-method"),
        pytest.param(("--budget", "params=0.5", "--norm", "l2"), "frobenius", id="unknown-norm"),
        pytest.param(("--budget", "params=0.5", "--ranks", "vbmf=1"), "exactly one", id="both"),
        pytest.param((), "exactly one", id="neither"),
        pytest.param(("--budget", "params=0.5", "--device", "abacus"), "device", id="device"),
        pytest.param(("--budget", "params=0.5", "--quiet", "--verbose"), "contradict", id="quiet-and-verbose"),
        pytest.param(("--budget", "params=0.5", "--threads", "0"), "threads", id="no-threads"),
        pytest.param(("--budget", "params=0.5", "--colour", "red"), "--colour", id="unknown-option"),
    ],
)
def test_a_wrong_command_line(run, arguments: tuple[str, ...], words: str, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    result = run("compress", MODEL, "--data", DATA, "--out", "small", *arguments, code=2)
    assert words in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(("--method", "auto"), id="the-default-too"),
        pytest.param(("--norm", "sigma"), id="norm"),
        pytest.param(("--layers", "conv2", "--skip", "none"), id="layers-and-skip"),
        pytest.param(("--holdout", DATA), id="holdout"),
        pytest.param(("--no-weigh",), id="weigh"),
    ],
)
def test_a_plan_decides_alone(run, given: tuple[str, ...], monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    result = run("compress", MODEL, "--data", DATA, "--plan", "plan.json", "--out", "small", *given, code=2)
    assert " and ".join(given[::2]).replace("no-", "") in result.stderr
    assert "--plan has decided" in result.stderr


MINE = "from torch import nn\nfrom torch.utils.data import DataLoader\ndef net():\n    return nn.Linear(2, 2)\n"


@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        pytest.param("mine.py", "it defines: net", "DataLoader", id="no-function"),
        pytest.param("mine.py:nett", "did you mean 'net'", "DataLoader", id="wrong-function"),
        pytest.param("mine.py:zzz", "known: net)", "DataLoader", id="nothing-like-it"),
        pytest.param("empty.py:build", "defines no function", "known", id="no-functions"),
        pytest.param("absent.py", "no such file", "defines", id="no-file"),
        pytest.param("resnet18", "torchvision:…, timm:…", "imagefolder", id="model-without-scheme"),
    ],
)
def test_what_a_model_could_be(run, place: Path, name: str, said: str, unsaid: str):
    (place / "mine.py").write_text(MINE)
    (place / "empty.py").write_text("from torch.nn import Linear\n")
    message = one_message(run("inspect", name, code=1).stderr)
    assert said in message
    assert unsaid not in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("c32", "did you mean 'imagefolder:c32'", id="folder"),
        pytest.param("c32?size=32", "did you mean 'imagefolder:c32?size=32'", id="folder-with-options"),
        pytest.param("some.npz", "did you mean 'npz:some.npz'", id="npz"),
        pytest.param("photos", "imagefolder:…, cifar10:…", id="nothing-there"),
    ],
)
def test_what_data_could_be(run, place: Path, name: str, said: str):
    (place / "c32").mkdir()
    (place / "some.npz").touch()
    message = one_message(run("calibrate", MODEL, "--data", name, "--out", "stats", code=1).stderr)
    assert said in message
    assert "zoo:" not in message


def test_a_folder_that_is_not_there(run):
    message = one_message(run("export", "nothere", "--out", "x.onnx", code=1).stderr)
    assert "nothere: no such folder" in message


def test_messages_name_options_not_arguments(run, stats: Path, weights: Path):
    common = ("compress", MODEL, "--weights", weights, "--stats", stats, "--out", "small")
    message = one_message(run(*common, "--budget", "params=0.001", code=1).stderr)
    assert "(--layers, --skip)" in message
    needs = ("plan", MODEL, "--norm", "frobenius", "--budget", "macs=0.5")
    assert "needs --stats" in one_message(run(*needs, code=1).stderr)
    message = one_message(run(*common, "--ranks", "vbmf=0.8", "--norm", "fisher", code=1).stderr)
    assert "--norm fisher, layer 'conv2'" in message
    assert "calibrate with --fisher model" in message


def test_python_and_the_command_line_word_one_error(run):
    with pytest.raises(InputError) as caught:
        ts.plan(load_model(MODEL), ranks=ts.VBMF(0.5))
    assert "norm='centred' needs stats= (from tensigma.calibrate) or data= " in str(caught.value)
    message = one_message(run("plan", MODEL, "--ranks", "vbmf=0.5", code=1).stderr)
    assert "--norm centred needs --stats (from tensigma.calibrate) or --data " in message


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        pytest.param("max_samples", "--max-samples", id="name"),
        pytest.param("method='cp'", "--method cp", id="value"),
        pytest.param("freeze_bn=True", "--freeze-bn", id="flag"),
        pytest.param("check=False", "--force", id="other-name"),
        pytest.param("sequential=False", "--no-sequential", id="flag-off"),
        pytest.param("dynamic_batch=False", "--fixed-batch", id="opposite-flag"),
    ],
)
def test_parameters_as_options(parameter: str, expected: str):
    name = parameter.partition("=")[0]
    error = StoreError(f"pass {{{name}}}", parameters=(parameter,)).prefixed("conv1: ")
    assert in_options(error) == f"conv1: pass {expected}"


def test_statistics_and_plans_of_other_weights(run, stats: Path, weights: Path, place: Path):
    common = ("--stats", stats, "--method", "svd")
    run("plan", MODEL, "--weights", weights, *common, "--ranks", "energy=0.9", "--out", "plan.json")
    save_file(load_model(MODEL).state_dict(), place / "others.safetensors")
    others = (MODEL, "--weights", "others.safetensors", *common)
    for arguments in (
        ("plan", *others, "--ranks", "energy=0.9"),
        ("compress", *others, "--ranks", "energy=0.9", "--out", "small"),
        ("compress", *others[:3], "--data", DATA, "--plan", "plan.json", "--out", "again"),
    ):
        message = one_message(run(*arguments, code=1).stderr)
        assert "other weights" in message
        assert "--force" in message
        run(*arguments, "--force")


def test_the_same_statistics_twice(run, stats: Path):
    message = one_message(run("stats", "merge", stats, "./stats/", "--out", "both", code=1).stderr)
    assert "given twice" in message
    assert not Path("both").exists()


@pytest.mark.parametrize("command", ["compress", "plan"])
@pytest.mark.parametrize("option", ["--layers", "--skip"])
def test_a_layer_that_is_not_there_costs_no_calibration(run, command: str, option: str):
    out = ("--out", "small") if command == "compress" else ()
    result = run(command, MODEL, "--data", DATA, "--budget", "params=0.5", *out, option, "conv9", code=1)
    assert f"no layer is called 'conv9' (from {option})" in one_message(result.stderr)
    assert "calibrating" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("inspect", "zoo:digit-cnn"), "digits-cnn", id="unknown-model"),
        pytest.param(("inspect", "resnet18"), "SCHEME:NAME", id="no-scheme"),
        pytest.param(("inspect", "absent.py:build"), "no such file", id="no-file"),
        pytest.param((*COMPRESS[:3], "digit:", *COMPRESS[4:]), "digits:", id="unknown-data"),
        pytest.param((*COMPRESS[:3], "digits:?size=x", *COMPRESS[4:]), "whole number", id="bad-option"),
        pytest.param((*COMPRESS[:3], "npz:absent.npz", *COMPRESS[4:]), "absent.npz", id="no-data-file"),
        pytest.param((*COMPRESS, "--layers", "conv9"), "conv9", id="unknown-layer"),
        pytest.param((*COMPRESS[:2], *COMPRESS[4:]), "--data", id="no-data-at-all"),
        pytest.param((*COMPRESS, "--stats", "absent"), "absent", id="no-stats"),
        pytest.param((*COMPRESS[:4], "--plan", "absent.json", "--out", "small"), "absent.json", id="no-plan"),
        pytest.param(("calibrate", MODEL, "--out", "stats"), "--data", id="calibrate-without-data"),
        pytest.param(("calibrate", "zoo:resnet20-cifar", "--data", DATA, "--out", "stats"), "batch 0", id="rejected"),
        pytest.param(("stats", "show", "absent"), "not a folder", id="no-store"),
        pytest.param(("report", "absent.json"), "absent.json", id="no-report"),
        pytest.param(("evaluate", MODEL, "--data", DATA, "--compressed", "absent"), "absent", id="no-archive"),
    ],
)
def test_what_is_not_there(run, arguments: tuple[str, ...], words: str, place: Path):
    assert words in one_message(run(*arguments, code=1).stderr)
    assert files(place) == set()


def test_files_of_another_kind(run, stats: Path, weights: Path, place: Path):
    (place / "plan.json").write_text('{"format": "recipe"}')
    (place / "list.json").write_text("[]")
    common = ("compress", MODEL, "--weights", weights, "--stats", stats, "--out", "small")
    assert "not a plan" in one_message(run(*common, "--plan", "plan.json", code=1).stderr)
    for file in ("plan.json", "list.json", "weights.safetensors"):
        assert "report" in one_message(run("report", file, code=1).stderr)
    wide = ("compress", "zoo:digits-cnn?width=8", "--stats", stats, "--budget", "params=0.5", "--out", "small")
    assert "architecture" in one_message(run(*wide, code=1).stderr)
    assert "folder" in one_message(run(*common[:-1], "weights.safetensors", "--budget", "params=0.5", code=1).stderr)
    below = run(*common[:-1], "weights.safetensors/small", "--budget", "params=0.5", code=1)
    assert "not a folder" in one_message(below.stderr)


def test_a_fault_shows_its_traceback_only_when_asked(run, monkeypatch):
    def broken(model):
        raise RuntimeError("a gear is missing")

    monkeypatch.setattr("tensigma.layers.find_layers", broken)
    result = run("inspect", MODEL, code=1)
    assert "RuntimeError: a gear is missing" in one_message(result.stderr)
    assert "Traceback" in run("inspect", MODEL, "--verbose", code=1).stderr


class TestTwoRunsInOnePlace:
    """A run claims the place of its output when it starts, so that a second one is refused before it has worked."""

    def test_a_place_that_another_run_holds_is_refused_at_once(self, run, weights: Path) -> None:
        command = [*WITHOUT_DATA, "--weights", weights, "--out", "small"]
        holder: list[BaseException] = []
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            try:
                with claimed(Path("small")):
                    held.set()
                    done.wait(60)
            except BaseException as error:
                holder.append(error)
                held.set()

        other = threading.Thread(target=hold)
        other.start()
        held.wait(60)
        try:
            refused = run(*command, code=1)
        finally:
            done.set()
            other.join()
        assert not holder
        assert "is being written by another run" in refused.output
        run(*command)
        assert files(Path("small")) >= {"manifest.json", "model.safetensors", "plan.json", "report.json"}
        assert not [name for name in files(Path()) if "claim" in name or "partial" in name]

    def test_a_folder_made_by_somebody_while_compressing_is_kept(
        self, run, weights: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = ts.save

        def slow_save(model: object, place: Path) -> None:
            real(model, place)  # type: ignore[arg-type]
            Path("small").mkdir()
            Path("small/precious.txt").write_text("theirs")

        monkeypatch.setattr(ts, "save", slow_save)
        result = run(*WITHOUT_DATA, "--weights", weights, "--out", "small", code=1)
        assert files(Path("small")) == {"precious.txt"}
        assert "small-2" in result.output
        assert "model.safetensors" in files(Path("small-2"))


def test_a_model_that_cannot_be_evaluated_is_kept(run, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a broken image")

    monkeypatch.setattr(ts, "evaluate", fail)
    command = [*WITHOUT_DATA, "--weights", weights, "--eval-data", DATA, "--out", "small"]
    result = run(*command, code=3)
    assert "the compressed model is in small, but it could not be evaluated" in result.output
    assert "a broken image" in result.output
    assert files(Path("small")) == {"manifest.json", "model.safetensors", "plan.json", "report.json", "report.html"}
    ts.load("small", load_model(MODEL))
    assert json.loads(Path("small/report.json").read_text())["notes"].get("evaluation") is None


def test_so_is_one_whose_evaluation_is_interrupted(run, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ts, "evaluate", interrupt)
    result = run(*WITHOUT_DATA, "--weights", weights, "--eval-data", DATA, "--out", "small", code=130)
    assert "the compressed model is in small, but it was not evaluated" in result.output
    ts.load("small", load_model(MODEL))

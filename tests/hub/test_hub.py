"""Folders and cards for the Hub, against a local folder and a stand-in for its API: nothing is sent anywhere."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn

import tensigma as ts
from support_nets import batches, small_net
from tensigma.errors import InputError, MissingExtra, StoreError
from tensigma.hub import folders
from tensigma.report import number
from tensigma.zoo import load_model

ARCHITECTURE = "zoo:digits-cnn?width=8&num_classes=4"


def compressed(model: nn.Module, layer: str) -> tuple[nn.Module, ts.Report]:
    return ts.compress(model, ts.plan(model, ranks=ts.Ranks({layer: 3}), method="svd", norm="frobenius"))


@pytest.fixture
def digits() -> tuple[nn.Module, ts.Report]:
    return compressed(load_model(ARCHITECTURE), "conv2")


def assert_same(first: nn.Module, second: nn.Module) -> None:
    one, two = first.state_dict(), second.state_dict()
    assert list(one) == list(two)
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_a_folder_without_a_name_needs_the_model(tmp_path: Path) -> None:
    small, report = compressed(small_net(), "grouped")
    ts.save_pretrained(small, tmp_path / "small", report)
    assert_same(ts.from_pretrained(tmp_path / "small", small_net(seed=3)), small)
    assert_same(ts.load(tmp_path / "small", small_net()), small)
    with pytest.raises(InputError, match="pass model="):
        ts.from_pretrained(tmp_path / "small")
    with pytest.raises(StoreError, match="another architecture"):
        ts.from_pretrained(tmp_path / "small", nn.Linear(2, 2))


def test_a_named_architecture_is_built(tmp_path: Path, digits: Any) -> None:
    small, report = digits
    ts.save_pretrained(small, tmp_path / "given", report, architecture=ARCHITECTURE)
    # As the command line notes it.
    ts.save_pretrained(small, tmp_path / "noted", report.with_notes(model=ARCHITECTURE))
    for folder in ("given", "noted"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert (config["library_name"], config["architecture"]) == ("tensigma", "digits-cnn")
        again = ts.from_pretrained(tmp_path / folder)
        assert not again.training
        assert_same(again, small)
    whole = ts.from_pretrained(tmp_path / "given", dense=True)
    assert isinstance(whole.get_submodule("conv2"), nn.Conv2d)
    assert ts.Report.from_json(json.loads((tmp_path / "given" / "report.json").read_text())) == report


@pytest.mark.slow
def test_timm_models_know_their_architecture(tmp_path: Path) -> None:
    original = load_model("timm:resnet18?num_classes=5&in_chans=1")
    small, report = compressed(original, "layer4.1.conv2")
    ts.save_pretrained(small, tmp_path / "small", report)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["model"] == "timm:resnet18?num_classes=5&in_chans=1"
    assert config["preparation"]["mean"] == [0.485, 0.456, 0.406]
    assert_same(ts.from_pretrained(tmp_path / "small"), small)
    import timm

    architecture = timm.create_model("resnet18", num_classes=5, in_chans=1)
    assert_same(ts.from_pretrained(tmp_path / "small", architecture), small)
    assert "timm" in ModelCard.load(tmp_path / "small" / "README.md").data.tags


@pytest.mark.slow
def test_the_card_has_the_figures_of_the_report(tmp_path: Path) -> None:
    net, data = small_net(), batches()
    plan = ts.plan(net, ranks=ts.Ranks({"grouped": 3, "hidden": 4}), method="svd", data=data)
    small, report = ts.compress(net, plan, data=data, sequential=False)
    figures = ts.evaluate(small, batches(seed=1), original=net, answers=ts.Scores(axis=1))
    ts.save_pretrained(small, tmp_path / "small", report, evaluation=figures, license="mit", base_model="you/net")
    card = ModelCard.load(tmp_path / "small" / "README.md")
    assert (card.data.library_name, card.data.license, card.data.base_model) == ("tensigma", "mit", "you/net")
    assert number(report.after.params) in card.text
    assert f"{report.rate:.2f} times fewer" in card.text
    assert figures.certificate is not None
    assert str(figures.certificate) in card.text
    for layer in report.compressed:
        assert f"| `{layer.name}` | {layer.method} |" in card.text
    # The same, found among the notes of the report.
    ts.save_pretrained(small, tmp_path / "noted", report.with_notes(evaluation=figures.to_json()))
    assert str(figures.certificate) in (tmp_path / "noted" / "README.md").read_text(encoding="utf-8")
    # A bound on samples that the model was made with would not hold, and is not printed.
    used = report.with_notes(evaluated_on="photos", data="photos")
    ts.save_pretrained(small, tmp_path / "used", used, evaluation=figures)
    assert "confidence" not in (tmp_path / "used" / "README.md").read_text(encoding="utf-8")


def test_a_card_without_a_report(tmp_path: Path, digits: Any) -> None:
    ts.save_pretrained(digits[0], tmp_path / "small", title="Mine")
    text = (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    assert "# Mine" in text
    assert "## Figures" not in text
    assert not (tmp_path / "small" / "report.json").exists()


def test_folders_are_replaced_with_force_only(tmp_path: Path, digits: Any) -> None:
    small, report = digits
    place = tmp_path / "small"
    ts.save_pretrained(small, place, report)
    with pytest.raises(StoreError, match="force=True"):
        ts.save_pretrained(small, place)
    ts.save_pretrained(small, place, force=True)
    assert not (place / "report.json").exists()
    # A kill between two renames left no folder under its name; that is no repository.
    place.rename(tmp_path / ".small.old-999999999")
    ts.from_pretrained(place, load_model(ARCHITECTURE))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"library_name": "timm"}')
    with pytest.raises(StoreError, match="holds something else"):
        ts.save_pretrained(small, tmp_path / "other", force=True)
    with pytest.raises(StoreError, match="another library"):
        ts.from_pretrained(tmp_path / "other")


def test_nothing_half_written_is_left(tmp_path: Path, digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.Config, "write", fail)
    with pytest.raises(StoreError, match="No space left"):
        ts.save_pretrained(digits[0], tmp_path / "small", digits[1])
    assert list(tmp_path.iterdir()) == []


WRONG_NAMES = [
    pytest.param("mine.py:build", id="executes-a-file"),
    pytest.param("timm:resnet18?pretrained=1", id="downloads"),
    pytest.param("timm:resnet18?checkpoint_path=evil.pth", id="reads-a-file"),
    pytest.param("timm:resnet18?num_classes=__import__", id="not-a-number"),
]


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_an_architecture_never_executes_or_fetches_anything(tmp_path: Path, digits: Any, name: str) -> None:
    small, report = digits
    with pytest.raises(InputError, match="pass model="):
        ts.save_pretrained(small, tmp_path / "small", report, architecture=name)
    ts.save_pretrained(small, tmp_path / "small", report.with_notes(model=name))
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["model"] is None
    (tmp_path / "small" / "config.json").write_text(json.dumps({**config, "model": name}))
    with pytest.raises(StoreError, match=r"config\.json"):
        ts.from_pretrained(tmp_path / "small")


def test_an_architecture_that_does_not_fit(tmp_path: Path, digits: Any) -> None:
    ts.save_pretrained(digits[0], tmp_path / "small", architecture="zoo:digits-cnn")
    with pytest.raises(StoreError, match=r"names zoo:digits-cnn, which does not fit .* pass model="):
        ts.from_pretrained(tmp_path / "small")


class StandIn:
    """Repositories as folders, with the methods of ``HfApi`` that an upload calls."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, list[str]()

    def api(self, **options: Any) -> StandIn:
        self.token = options["token"]
        return self

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> SimpleNamespace:
        self.calls.append("create_repo")
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id: str, folder_path: Path, delete_patterns: list[str], **_: Any) -> Any:
        self.calls.append("upload_folder")
        for name in delete_patterns:
            (self.root / repo_id / name).unlink(missing_ok=True)
        shutil.copytree(folder_path, self.root / repo_id, dirs_exist_ok=True)
        return SimpleNamespace(commit_url=f"https://hub.example/{repo_id}/commit/1")

    def snapshot_download(self, repo_id: str, *, allow_patterns: list[str], **_: Any) -> str:
        if not (self.root / repo_id).is_dir():
            raise huggingface_hub.errors.LocalEntryNotFoundError(f"no {repo_id}\nand more lines")
        place = self.root / "cache" / repo_id
        place.mkdir(parents=True)
        for name in allow_patterns:
            if (self.root / repo_id / name).exists():
                shutil.copy(self.root / repo_id / name, place)
        return str(place)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", stand_in.api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stand_in.snapshot_download)
    return stand_in


def test_up_and_down_again(stand_in: StandIn, digits: Any) -> None:
    small, report = digits
    there = stand_in.root / "you" / "small"
    there.mkdir(parents=True)
    (there / "picture.png").write_text("theirs")
    (there / "model.onnx").write_text("of an earlier upload")
    address = ts.push_to_hub(small, "you/small", report, architecture=ARCHITECTURE, token="secret")
    assert address == "https://hub.example/you/small/commit/1"
    assert stand_in.token == "secret"
    names = {"README.md", "config.json", "manifest.json", "model.safetensors", "report.json"}
    assert {file.name for file in there.iterdir()} == {*names, "picture.png"}
    assert "secret" not in (there / "README.md").read_text(encoding="utf-8")
    assert_same(ts.from_pretrained("you/small"), small)
    assert {file.name for file in (stand_in.root / "cache" / "you" / "small").iterdir()} == names


def test_a_model_that_cannot_be_saved_creates_no_repository(stand_in: StandIn) -> None:
    with pytest.raises(InputError, match="meta device"):
        ts.push_to_hub(nn.Linear(2, 2, device="meta"), "you/small")
    assert stand_in.calls == []


def test_repositories_that_are_not_there(stand_in: StandIn) -> None:
    with pytest.raises(StoreError, match=r"you/nothing is no folder, and cannot be loaded from the Hub .*: no you"):
        ts.from_pretrained("you/nothing")
    with pytest.raises(StoreError, match="no such folder, and no name of a repository"):
        ts.from_pretrained("a/b/c")


def test_without_the_package(tmp_path: Path, digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small, report = digits
    ts.save_pretrained(small, tmp_path / "small", report, architecture=ARCHITECTURE)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (
        lambda: ts.save_pretrained(small, tmp_path / "other", report),
        lambda: ts.push_to_hub(small, "you/small"),
        lambda: ts.from_pretrained("you/small"),
    ):
        with pytest.raises(MissingExtra, match=r"tensigma\[hub\]"):
            call()
    # A folder needs no package.
    assert_same(ts.from_pretrained(tmp_path / "small"), small)

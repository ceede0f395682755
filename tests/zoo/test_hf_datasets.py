"""Sets of Hugging Face ``datasets``, from files: what they give is what a folder of the same images gives."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import tensigma as ts
from tensigma.cli.app import app
from tensigma.errors import CalibrationWarning, InputError, MissingExtra, StoreError
from tensigma.zoo import Data, load_data, may_share

# The package warns about its own use of others.
pytestmark = pytest.mark.filterwarnings(r"ignore:Cannot (locate reference|pickle)")
NAMES = ["ant", "bee", "cat"]


def load(spec: str, **options: object) -> Data:
    data = load_data(spec, **options)  # type: ignore[arg-type]
    assert isinstance(data, Data)
    return data


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'tensigma[hf]'")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(package.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return package


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def rows(datasets: Any, first: int = 0, count: int = 12) -> Any:
    images = [{"bytes": png(first + i), "path": None} for i in range(count)]
    features = {
        "picture": datasets.Image(),
        "label": datasets.ClassLabel(names=NAMES),
        "note": datasets.Value("string"),
    }
    columns = {"picture": images, "label": [i * 3 // count for i in range(count)], "note": ["x"] * count}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for i in range(12):
        place = tmp_path / "set" / NAMES[i * 3 // 12]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:02}.png").write_bytes(png(i))
    return f"imagefolder:{tmp_path / 'set'}"


def assert_same(data: Data, other: Data) -> None:
    assert (data.n_samples, data.classes) == (other.n_samples, other.classes)
    for _ in range(2):
        for one, two in zip(data, other, strict=True):
            assert torch.equal(one[0], two[0])
            assert one[1] is not None
            assert two[1] is not None
            assert torch.equal(one[1], two[1])


@pytest.mark.slow
def test_tables_are_a_folder(datasets: Any, folder: str, tmp_path: Path) -> None:
    place = tmp_path / "parquet"
    place.mkdir()
    rows(datasets).to_parquet(place / "train-00000-of-00001.parquet")
    rows(datasets, first=100, count=3).to_parquet(place / "test-00000-of-00001.parquet")
    datasets.DatasetDict(train=rows(datasets), test=rows(datasets, 100, 3)).save_to_disk(tmp_path / "saved")
    rows(datasets).save_to_disk(tmp_path / "alone")
    names = [place, place / "train-00000-of-00001.parquet", tmp_path / "saved", tmp_path / "alone"]
    for name in names:
        for options in ("size=16", "size=16&classes=ant,cat&samples=5&mean=0.5&std=0.2"):
            assert_same(load(f"hf:{name}?{options}", batch_size=5), load(f"{folder}?{options}", batch_size=5))
    held = "size=16&split=val&holdout=0.25"
    assert_same(load(f"hf:{place}?{held}"), load(f"{folder}?{held}"))
    for name in (place, tmp_path / "saved"):
        assert load(f"hf:{name}?split=test").n_samples == 3
        with pytest.raises(InputError, match=r"the split 'dev' is not known.*test, train"):
            load(f"hf:{name}?split=dev")


@pytest.mark.slow
def test_columns(datasets: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = rows(datasets)
    table.add_column("raw", [png(i) for i in range(12)]).add_column("kind", [1] * 12).to_parquet(file)
    with pytest.raises(InputError, match=r"columns with images: picture, raw .*give column="):
        load(f"hf:{file}")
    first, second = (load(f"hf:{file}?column={name}&size=16") for name in ("picture", "raw"))
    assert_same(first, second)
    assert load(f"hf:{file}?column=raw&label=kind").n_classes == 2
    for options, message in (
        ("column=note", "holds no images"),
        ("column=pictur", "did you mean 'picture'"),
        ("column=raw&label=note", "not classes"),
        ("column=raw&label=what", "'what' is not known"),
    ):
        with pytest.raises(InputError, match=message):
            load(f"hf:{file}?{options}")


@pytest.mark.slow
def test_streams(datasets: Any, folder: str, tmp_path: Path) -> None:
    place = tmp_path / "parquet"
    place.mkdir()
    for part in range(2):
        rows(datasets).select(range(6 * part, 6 * part + 6)).to_parquet(place / f"train-{part}-of-2.parquet")
    rows(datasets, first=100, count=3).to_parquet(place / "test-0-of-1.parquet")
    rows(datasets).save_to_disk(tmp_path / "saved")
    stored = list(load(f"{folder}?size=16&shuffle=false", batch_size=5))
    cache = set(tmp_path.rglob("*.arrow"))
    for name in (place, tmp_path / "saved"):
        data = load_data(f"hf:{name}?size=16&streaming=true&shuffle=false", batch_size=5)
        assert (data.n_samples, data.n_classes) == (None, 3)
        for _ in range(2):
            assert_same_batches(data, stored)
    # Nothing was converted to files of the package's own.
    assert set(tmp_path.rglob("*.arrow")) == cache
    whole = torch.cat([images for images, _ in stored])
    mixed = load_data(f"hf:{place}?size=16&streaming=true&seed=3", batch_size=5)
    images = torch.cat([images for images, _ in mixed])
    assert_same_batches(mixed, list(mixed))
    assert not torch.equal(images, whole)
    assert sorted(images.flatten(1).sum(1).tolist()) == sorted(whole.flatten(1).sum(1).tolist())
    few = load_data(f"hf:{place}?size=16&streaming=true&seed=3&samples=7", batch_size=7)
    assert torch.equal(next(iter(few))[0], images[:7])
    assert [len(images) for images, _ in load_data(f"hf:{place}?size=16&streaming=true&split=test")] == [3]


def assert_same_batches(data: Any, other: Any) -> None:
    for (images, labels), (expected, classes) in zip(data, other, strict=True):
        assert torch.equal(images, expected)
        assert torch.equal(labels, classes)


@pytest.mark.slow
def test_a_stream_calibrates_as_a_table(datasets: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    rows(datasets).to_parquet(file)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    options = "size=16&shuffle=false"
    table, stream = (
        ts.calibrate(net, load_data(f"hf:{file}?{each}")) for each in (options, f"{options}&streaming=true")
    )
    assert torch.equal(table["2"].gram, stream["2"].gram)
    name = f"hf:{file}?size=32&streaming=true"
    most = CliRunner().invoke(app, ["calibrate", "zoo:resnet20-cifar", "--data", name, "--out", str(tmp_path / "s")])
    assert most.exit_code == 0, most.output
    assert ts.Calibration.load(tmp_path / "s").samples == 12


@pytest.mark.slow
def test_what_a_stream_cannot_do(datasets: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    rows(datasets).to_parquet(file)
    for options, message in (
        ("classes=ant", r"cannot be chosen from by classes; leave streaming=true out"),
        ("split=val&holdout=0.5", r"cannot be chosen from by holdout"),
        ("column=note", "holds no images"),
        ("label=note", "not classes"),
    ):
        with pytest.raises(InputError, match=message):
            load_data(f"hf:{file}?streaming=true&{options}")
    with pytest.raises(InputError, match="cannot be mixed"):
        load_data([f"hf:{file}?streaming=true", f"hf:{file}"])
    with pytest.raises(InputError, match="samples=13 is too many; there are 12"):
        list(load_data(f"hf:{file}?streaming=true&samples=13&size=16"))
    with pytest.raises(InputError, match="the option 'streaming' is not known"):
        load_data("imagefolder:photos?streaming=true")
    (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(StoreError, match="cannot be read"):
        list(load_data(f"hf:{tmp_path / 'bad.parquet'}?streaming=true"))
    broken = rows(datasets).to_dict()
    broken["picture"][4] = {"bytes": b"no image", "path": None}
    datasets.Dataset.from_dict(broken, features=rows(datasets).features).to_parquet(tmp_path / "broken.parquet")
    name = f"hf:{tmp_path / 'broken.parquet'}?streaming=true&size=16&shuffle=false"
    with pytest.raises(StoreError, match=r"row 4 of the stream: not a readable image .* add unreadable=skip"):
        list(load_data(name))
    with pytest.warns(CalibrationWarning, match="row 4 of the stream"):
        assert [len(images) for images, _ in load_data(f"{name}&unreadable=skip", batch_size=5)] == [4, 5, 2]


@pytest.mark.slow
def test_bad_tables(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"without \.parquet files"):
        load(f"hf:{tmp_path / 'empty'}")
    (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
    for name in (tmp_path / "bad.parquet", "nobody/nothing-here"):
        with pytest.raises(StoreError, match="cannot be read as a file or folder"):
            load(f"hf:{name}")


def test_parts_of_splits_are_chosen_by_our_options() -> None:
    with pytest.raises(InputError, match=r"split=train\[:10%\] is no name of a split"):
        load("hf:cats?split=train[:10%]")


def test_what_shares_images() -> None:
    assert not may_share("hf:cats", "hf:cats?split=validation")
    assert may_share("hf:cats", "hf:cats?split=train")
    assert may_share("hf:cats?split=train&holdout=0.1", "hf:cats")
    assert not may_share("hf:cats?split=train&holdout=0.1", "hf:cats?split=val&holdout=0.1")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"tensigma\[hf\]"):
        load("hf:cats")

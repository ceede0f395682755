"""Shards of the WebDataset form give what a folder of the same files gives."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tensigma as ts
from tensigma.errors import CalibrationWarning, InputError, StoreError
from tensigma.zoo import Data, load_data, may_share
from tensigma.zoo.shards import shard_files

N_CLASSES, PER_CLASS = 3, 7


def load(spec: str, **options: object) -> Data:
    data = load_data(spec, **options)  # type: ignore[arg-type]
    assert isinstance(data, Data)
    return data


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def png(seed: int, side: int = 20) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + 4, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def both(tmp_path: Path) -> tuple[str, str]:
    """The same images in the same order, as a folder and as three shards."""
    number = 0
    tars = [tarfile.open(tmp_path / f"set-{i:03}.tar", "w") for i in range(3)]
    for label in range(N_CLASSES):
        (tmp_path / "set" / str(label)).mkdir(parents=True)
        for i in range(PER_CLASS):
            (tmp_path / "set" / str(label) / f"{i}.png").write_bytes(png(number))
            tar = tars[label]
            add(tar, f"train/{number:05}.cls", str(label).encode())
            add(tar, f"train/{number:05}.png", png(number))
            add(tar, f"train/{number:05}.json", b"{}")
            number += 1
    for tar in tars:
        tar.close()
    return f"imagefolder:{tmp_path / 'set'}", f"webdataset:{tmp_path}/set-{{000..002}}.tar"


OPTIONS = ["size=16", "size=16&samples=9&seed=2", "size=12x20&classes=0,2", "size=16&per_class=2&shuffle=false",
           "size=16&split=val&holdout=0.3&mean=0.5&std=0.25", "size=16&order=bgr&layout=nhwc&via=8"]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_shards_are_a_folder(both: tuple[str, str], options: str) -> None:
    folder, shards = (load(f"{name}?{options}", batch_size=4) for name in both)
    assert (shards.n_samples, shards.classes, len(shards)) == (folder.n_samples, folder.classes, len(folder))
    # Twice: every pass reads the same.
    for _ in range(2):
        for one, other in zip(shards, folder, strict=True):
            assert torch.equal(one[0], other[0])
            assert one[1] is not None
            assert other[1] is not None
            assert torch.equal(one[1], other[1])


def test_names_of_shards(both: tuple[str, str], tmp_path: Path) -> None:
    expected = [tmp_path / f"set-{i:03}.tar" for i in range(3)]
    for name in (f"{tmp_path}/set-{{000..002}}.tar", str(tmp_path), f"{tmp_path}/set-*.tar"):
        assert shard_files(name) == expected
    assert [str(file) for file in shard_files("{1..2}/a-{9..10}.tar")] == [
        "1/a-9.tar",
        "1/a-10.tar",
        "2/a-9.tar",
        "2/a-10.tar",
    ]
    for name, message in (("a-{9..2}.tar", "no range"), ("https://host/a.tar", "download"), ("pipe:cat a", "download")):
        with pytest.raises(InputError, match=message):
            shard_files(name)


def test_what_shares_images(both: tuple[str, str]) -> None:
    name = both[1]
    assert may_share(name, name.replace("{000..002}", "{002..004}"))
    assert not may_share(name.replace("002", "001"), name.replace("{000..002}", "002"))
    assert not may_share(f"{name}?split=train&holdout=0.2", f"{name}?split=val&holdout=0.2")


def test_several_images_in_a_sample(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i in range(4):
            add(tar, f"{i}.jpg", png(i))
            add(tar, f"{i}.png", png(10 + i))
            add(tar, f"{i}.seg.png", png(20 + i))
            add(tar, f"{i}.kind", b"1")
    with pytest.raises(StoreError, match="several images, jpg, png; name one with column="):
        load(f"webdataset:{tmp_path}/a.tar")
    tail = "size=16&shuffle=false&mean=0&std=1"
    for column, first in (("png", 10), ("seg.png", 20)):
        data = load(f"webdataset:{tmp_path}/a.tar?column={column}&label=kind&{tail}")
        (tmp_path / column).mkdir()
        (tmp_path / column / "0.png").write_bytes(png(first))
        images, labels = next(iter(data))
        assert torch.equal(images[0], next(iter(load(f"imagefolder:{tmp_path / column}?{tail}")))[0][0])
        assert labels is not None
        assert labels.tolist() == [1] * 4
    assert load(f"webdataset:{tmp_path}/a.tar?column=png").n_classes is None


def test_damaged_shards(tmp_path: Path) -> None:
    file = tmp_path / "a.tar"
    name = f"webdataset:{file}"
    with pytest.raises(StoreError, match="no such file"):
        load(name)
    file.write_bytes(b"not a tar" * 200)
    with pytest.raises(StoreError, match="not a readable tar file"):
        load(name)
    with tarfile.open(file, "w:gz") as tar:
        add(tar, "0.png", png(0))
    with pytest.raises(StoreError, match="must be unpacked"):
        load(name)
    with tarfile.open(file, "w") as tar:
        add(tar, "0.txt", b"words")
    with pytest.raises(StoreError, match="no member of 1 shards ends in one of"):
        load(name)
    for content, message in ((b"cat", "whole number"), (b"-1", "whole number"), (b"9" * 30, "whole number")):
        with tarfile.open(file, "w") as tar:
            add(tar, "0.png", png(0))
            add(tar, "0.cls", content)
        with pytest.raises(StoreError, match=message):
            load(name)
    with tarfile.open(file, "w") as tar:
        add(tar, "0.png", png(0))
        add(tar, "0.cls", b"1")
        add(tar, "1.png", png(1))
    with pytest.raises(StoreError, match="1 of 2 images"):
        load(name)
    with tarfile.open(file, "w") as tar:
        add(tar, "0.png", png(0))
        add(tar, "1.png", b"no image at all")
    with pytest.raises(StoreError, match="image at byte"):
        list(load(f"{name}?size=16"))
    with pytest.warns(CalibrationWarning, match="skipped"):
        assert sum(len(images) for images, _ in load(f"{name}?size=16&unreadable=skip")) == 1
    whole = file.read_bytes()
    file.write_bytes(whole[:700])
    with pytest.raises(StoreError, match="not a readable tar file"):
        load(name)


def test_columns_are_for_shards_and_tables() -> None:
    with pytest.raises(InputError, match="option 'column' is not known"):
        load("digits:?column=image")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """The peak of Python's own memory over ten times as many images stays about the same; benchmarks/streaming.py has
    100,000 of them, and all memory."""
    import tracemalloc

    def peak(n: int) -> int:
        place = tmp_path / f"{n}.tar"
        with tarfile.open(place, "w") as tar:
            for i in range(n):
                # Of this size all images together would stand out.
                add(tar, f"{i}.bmp", bmp)
        data = load(f"webdataset:{place}?size=64&resize=64", batch_size=4, workers=0)
        model = torch.nn.Conv2d(3, 4, 3, stride=8)
        ts.calibrate(model, data)
        tracemalloc.start()
        stats = ts.calibrate(model, data)
        largest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert stats[""].samples == n
        return largest

    stream = io.BytesIO()
    Image.new("RGB", (64, 64), (10, 200, 30)).save(stream, "BMP")
    bmp = stream.getvalue()
    few, many = peak(16), peak(160)
    assert 160 * len(bmp) > 3 * few, "the images must be larger than what is held"
    assert many < few + 16 * len(bmp)

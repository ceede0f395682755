from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.testing import assert_close

from tensigma.errors import CalibrationWarning, InputError, StoreError
from tensigma.zoo import Data, FactoryData, load_data
from tensigma.zoo.images import IMAGENET_MEAN, IMAGENET_STD, View


def load(spec: str | list[str], **options: object) -> Data:
    data = load_data(spec, **options)  # type: ignore[arg-type]
    assert isinstance(data, Data)
    return data


def gather(data: Data) -> tuple[Tensor, Tensor]:
    batches = list(data)
    labels = [batch[1] for batch in batches]
    return torch.cat([batch[0] for batch in batches]), torch.cat([label for label in labels if label is not None])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of four images each; the colour says which: class in red, number in green."""
    for label, name in enumerate(("ant", "bee", "cat")):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(4):
            colour = (10 * label, 10 * i, 0)
            Image.new("RGB", (40, 30), colour).save(tmp_path / "set" / name / f"{i}.png")
    return tmp_path / "set"


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (50, 6, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(50, dtype=np.uint8) % 5)
    return tmp_path / "set.npz"


def test_folder(folder: Path) -> None:
    data = load(f"imagefolder:{folder}?size=16&mean=0&std=1", batch_size=5)
    assert (data.n_samples, data.n_classes, len(data)) == (12, 3, 3)
    assert data.classes == ("ant", "bee", "cat")
    images, labels = gather(data)
    assert images.shape == (12, 3, 16, 16)
    assert_close((images[:, 0, 0, 0] * 25.5).round().long(), labels)
    assert torch.equal(data.labels if data.labels is not None else torch.empty(0), labels)
    again, again_labels = gather(data)
    assert torch.equal(again, images)
    assert torch.equal(again_labels, labels)


def test_order_is_random_but_seeded_unless_asked(folder: Path) -> None:
    def labels(options: str) -> list[int]:
        return gather(load(f"imagefolder:{folder}?size=4{options}"))[1].tolist()

    assert labels("&shuffle=false") == [0] * 4 + [1] * 4 + [2] * 4
    assert labels("") == labels("&seed=0") != labels("&seed=1")
    assert sorted(labels("")) == labels("&shuffle=false")


def test_folder_of_images_without_classes(folder: Path) -> None:
    data = load(f"imagefolder:{folder / 'ant'}", size=8)
    assert (data.n_samples, data.n_classes, data.labels) == (4, None, None)
    assert [label for _, label in data] == [None]
    with pytest.raises(InputError, match="need labels"):
        load(f"imagefolder:{folder / 'ant'}?per_class=1")


def test_usual_preparation_is_resize_crop_normalise(folder: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (300, 256, 3), dtype=np.uint8)
    for file in folder.rglob("*.png"):
        Image.fromarray(image).save(file)
    ((images, _),) = load(f"imagefolder:{folder}?samples=1")
    crop = torch.from_numpy(image[38:262, 16:240]).permute(2, 0, 1) / 255
    mean, std = torch.tensor(IMAGENET_MEAN)[:, None, None], torch.tensor(IMAGENET_STD)[:, None, None]
    assert_close(images[0], (crop - mean) / std)


def test_small_images_are_not_enlarged_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Image.new("RGB", (32, 40)).save(tmp_path / "small.png")
    load_data(f"imagefolder:{tmp_path}?size=224")
    assert not caplog.records
    load_data(f"imagefolder:{tmp_path}")
    assert "images of 32×40 are enlarged to 224×224; add ?size=32 to" in caplog.text
    # The middle of a line of text is not the line.
    Image.new("RGB", (192, 48)).save(tmp_path / "small.png")
    load_data(f"imagefolder:{tmp_path}")
    assert "add ?size=48x192 to keep their size" in caplog.text


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resizing_agrees_with_pillow(interpolation: str) -> None:
    # Away from black and white, where Pillow cuts overshoot off after every pass and not once.
    array = np.random.default_rng(0).integers(64, 192, (40, 60, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    mode = getattr(Image.Resampling, interpolation.upper())
    for size in (24, 70):
        view = View(scale=255, resize=size, interpolation=interpolation)
        ours = view.apply(torch.from_numpy(array).permute(2, 0, 1)[None])[0] * 255
        theirs = np.array(image.resize((int(size * 1.5), size), mode))
        assert (ours - torch.from_numpy(theirs).permute(2, 0, 1)).abs().max() <= 1.01


def test_via_takes_detail_away(npz: Path) -> None:
    plain, _ = gather(load(f"npz:{npz}?size=24&shuffle=false"))
    via, _ = gather(load(f"npz:{npz}?size=24&via=2&shuffle=false"))
    cubic, _ = gather(load(f"npz:{npz}?size=24&via=2&interpolation=bicubic&shuffle=false"))
    assert plain.shape == via.shape == (50, 3, 24, 24)
    assert via.diff(dim=-1).abs().mean() < 0.5 * plain.diff(dim=-1).abs().mean()
    assert not torch.equal(via, cubic)


def test_choices_are_nested_and_seeded(npz: Path) -> None:
    def indices(options: str) -> list[float]:
        return gather(load(f"npz:{npz}?{options}"))[0][:, 0, 0, :].sum(1).tolist()

    few, many, other = indices("samples=10"), indices("samples=30"), indices("samples=10&seed=1")
    assert few == many[:10] != other
    train, val = indices("split=train&holdout=0.2"), indices("split=val&holdout=0.2")
    assert (len(train), len(val)) == (40, 10)
    assert not set(train) & set(val)
    _, labels = gather(load(f"npz:{npz}?per_class=3&classes=1,4"))
    assert labels.bincount().tolist() == [0, 3, 0, 0, 3]


def test_classes_by_name_keep_their_numbers(folder: Path) -> None:
    data = load(f"imagefolder:{folder}?size=4&classes=cat,bee")
    assert data.n_classes == 3
    assert sorted(gather(data)[1].tolist()) == [1] * 4 + [2] * 4
    with pytest.raises(InputError, match="the class 'dog' is not known"):
        load(f"imagefolder:{folder}?classes=dog")


def test_mixtures(folder: Path, npz: Path) -> None:
    mixed = load(f"npz:{npz}?size=8 + imagefolder:{folder}?size=8", batch_size=7)
    assert (mixed.n_samples, mixed.n_classes) == (62, None)
    assert sum(len(images) for images, labels in mixed) == 62
    weighted = load([f"npz:{npz}?weight=2", f"imagefolder:{folder}"], size=8)
    assert weighted.n_samples == 24 + 12
    same = load(f"npz:{npz}?classes=0 + npz:{npz}?classes=3&shuffle=false")
    images, labels = gather(same)
    assert labels.bincount().tolist() == [10, 0, 0, 10]
    # Every image comes with its own label.
    alone = gather(load(f"npz:{npz}?classes=3"))[0]
    assert {float(x.sum()) for x in images[labels == 3]} == {float(x.sum()) for x in alone}
    with pytest.raises(InputError, match=r"images of 3×6×6 and 3×8×8 cannot be mixed"):
        list(load(f"npz:{npz} + imagefolder:{folder}?size=8"))


def test_take_and_shard(npz: Path) -> None:
    data = load(f"npz:{npz}", batch_size=8)
    everything = gather(data)[1]
    assert torch.equal(gather(data.take(11))[1], everything[:11])
    assert torch.equal(gather(data.shard(1, 3))[1], everything[1::3])
    assert data.n_samples == 50
    with pytest.raises(InputError, match="shard 3 of 3"):
        data.shard(3, 3)


@pytest.mark.parametrize("workers", [0, 3])
def test_threads_change_nothing_and_end(npz: Path, workers: int) -> None:
    expected = gather(load(f"npz:{npz}", batch_size=4))
    data = load(f"npz:{npz}", batch_size=4, workers=workers)
    assert_close(gather(data), expected, rtol=0, atol=0)
    iterator = iter(data)
    next(iterator)
    del iterator
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tensigma-data")]


def test_reading_leaves_the_random_state_alone(npz: Path) -> None:
    before = torch.get_rng_state()
    gather(load(f"npz:{npz}?samples=5"))
    assert torch.equal(torch.get_rng_state(), before)


def test_unreadable_images(folder: Path) -> None:
    (folder / "bee" / "2.png").write_bytes(b"no image")
    (folder / "cat" / "1.png").write_bytes((folder / "cat" / "1.png").read_bytes()[:60])
    with pytest.raises(StoreError, match=r"bee/2.png: not a readable image.*unreadable=skip"):
        list(load(f"imagefolder:{folder}?classes=bee&size=4"))
    with pytest.warns(CalibrationWarning, match="not a readable image.*skipped") as caught:
        images, labels = gather(load(f"imagefolder:{folder}?size=4&unreadable=skip"))
    assert len(caught) == 2
    assert len(images) == 10
    assert labels.bincount().tolist() == [4, 3, 3]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_every_colour_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    suffix = "jpg" if mode == "CMYK" else "png"
    image = Image.new(mode, (9, 9))
    if mode == "P":
        image.info["transparency"] = b"\x00\x01"
    image.save(tmp_path / f"0.{suffix}")
    ((images, labels),) = load(f"imagefolder:{tmp_path}?size=4")
    assert images.shape == (1, 3, 4, 4)
    assert labels is None


def test_npz_forms(tmp_path: Path) -> None:
    def shape(**arrays: np.ndarray) -> tuple[int, ...]:
        np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
        ((images, _),) = load(f"npz:{tmp_path / 'a.npz'}")
        return tuple(images.shape)

    zeros = np.zeros((2, 5, 6, 3), dtype=np.uint8)
    assert shape(images=zeros) == (2, 3, 5, 6)
    assert shape(x=zeros.transpose(0, 3, 1, 2)) == (2, 3, 5, 6)
    assert shape(data=zeros[..., 0], y=np.array([0, 1])) == (2, 1, 5, 6)
    normalised = np.random.default_rng(0).normal(size=(2, 3, 5, 6)).astype(np.float32)
    np.savez(tmp_path / "f.npz", images=normalised)
    ((images, _),) = load(f"npz:{tmp_path / 'f.npz'}?shuffle=false")
    assert torch.equal(images, torch.from_numpy(normalised))


def test_bad_npz(tmp_path: Path) -> None:
    zeros = np.zeros((2, 5, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "objects.npz", images=np.array([{}, {}], dtype=object))
    np.savez(tmp_path / "other.npz", pictures=zeros)
    np.savez(tmp_path / "labels.npz", images=zeros, labels=np.zeros(3))
    np.savez(tmp_path / "ints.npz", images=zeros.astype(np.int64))
    (tmp_path / "junk.npz").write_bytes(b"junk")
    for name, message in {
        "absent": "no such file",
        "objects": "not a readable npz file of plain arrays",
        "junk": "not a readable npz file of plain arrays",
        "other": "holds pictures; the images are expected under 'images'",
        "labels": r"labels have shape \(3,\) for 2 images",
        "ints": "images have dtype int64",
    }.items():
        with pytest.raises(StoreError, match=message):
            load(f"npz:{tmp_path / name}.npz")


def test_cifar10_forms(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(20, dtype=np.uint8) % 10
    np.savez(tmp_path / "train_20.npz", images=images, labels=labels)
    np.savez(tmp_path / "test_10.npz", images=images[:10], labels=labels[:10])
    binary = tmp_path / "other" / "cifar-10-batches-bin"
    binary.mkdir(parents=True)
    for i, half in enumerate((slice(0, 10), slice(10, 20)), start=1):
        rows = np.concatenate([labels[half, None], images[half].transpose(0, 3, 1, 2).reshape(10, -1)], axis=1)
        (binary / f"data_batch_{i}.bin").write_bytes(rows.tobytes())
    assert_close(gather(load(f"cifar10:{tmp_path}")), gather(load(f"cifar10:{tmp_path / 'other'}")))
    assert load(f"cifar10:{tmp_path}?split=test").n_samples == 10
    assert load(f"cifar10:{tmp_path}?split=train").n_samples == 20
    assert load(f"cifar10:{tmp_path}?split=val&holdout=0.25").n_samples == 5
    assert load(f"cifar10:{tmp_path}?split=train&holdout=0.25").n_samples == 15
    assert set(gather(load(f"cifar10:{tmp_path}?classes=cat,3,dog"))[1].tolist()) == {3, 5}
    (binary / "data_batch_1.bin").write_bytes(b"123")
    with pytest.raises(StoreError, match=r"data_batch_1.bin: 3 bytes are not whole records"):
        load(f"cifar10:{binary}")


def test_cifar100_forms(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(12, dtype=np.uint8) * 9
    (tmp_path / "npz").mkdir()
    (tmp_path / "cifar-100-binary").mkdir()
    np.savez(tmp_path / "npz" / "train.npz", images=images, labels=labels)
    rows = [
        np.concatenate([[7, label], pixels])
        for label, pixels in zip(labels, images.transpose(0, 3, 1, 2).reshape(12, -1), strict=True)
    ]
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(np.array(rows, dtype=np.uint8).tobytes())
    by_name, binary = (load(f"cifar100:{place}") for place in (tmp_path / "npz", tmp_path))
    assert by_name.n_classes == binary.n_classes == 100
    assert_close(gather(by_name), gather(binary))
    assert sorted(gather(binary)[1].tolist()) == labels.tolist()
    with pytest.raises(StoreError, match="no test set found"):
        load(f"cifar100:{tmp_path}?split=test")
    with pytest.raises(StoreError, match="no such folder"):
        load(f"cifar100:{tmp_path / 'nowhere'}")


def test_classes_by_range(npz: Path) -> None:
    assert set(gather(load(f"npz:{npz}?classes=1-3"))[1].tolist()) == {1, 2, 3}
    assert set(gather(load(f"npz:{npz}?classes=0,2-2"))[1].tolist()) == {0, 2}
    for wrong in ("3-1", "1-99", "1-", "-1"):
        with pytest.raises(InputError, match="is not known"):
            load(f"npz:{npz}?classes={wrong}")


def test_pickled_cifar10_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x04.")
    with pytest.raises(StoreError, match="unpickling could execute code; get the binary version"):
        load(f"cifar10:{tmp_path}")
    with pytest.raises(StoreError, match="no test set found; expected test"):
        load(f"cifar10:{tmp_path}?split=test")


def test_digits() -> None:
    train, val = load("digits:?split=train"), load("digits:?split=val")
    assert (train.n_samples + val.n_samples, train.n_classes) == (1797, 10)
    images, _ = gather(train)
    assert images.shape[1:] == (1, 8, 8)
    assert (images.min().item(), images.max().item()) == (0, 1)


FACTORIES = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def loader(n=10):
    return DataLoader(TensorDataset(torch.arange(n), torch.arange(n)), batch_size=4)

def dataset():
    return TensorDataset(torch.arange(10), torch.arange(10))

def generator(n=2):
    for i in range(n):
        yield torch.full((2, 1), i)

def number():
    return 5
"""


def test_factories(tmp_path: Path) -> None:
    file = tmp_path / "sets.py"
    file.write_text(FACTORIES)
    for name in ("loader", "dataset"):
        data = load_data(f"{file}:{name}", batch_size=4)
        assert isinstance(data, FactoryData)
        assert (len(data), data.n_samples) == (3, 10)
        assert [len(x) for x, y in data] == [len(x) for x, y in data] == [4, 4, 2]
    generator = load_data(f"{file}:generator?n=3")
    assert len(list(generator)) == len(list(generator)) == 3
    assert next(iter(generator))[1] is None
    with pytest.raises(TypeError, match="not known"):
        len(generator)
    with pytest.raises(InputError, match="returned a int; return batches"):
        load_data(f"{file}:number")
    with pytest.raises(InputError, match="mix inside the function"):
        load_data(f"{file}:loader + digits:")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("imagefoldr:x", "names no data; did you mean imagefolder:…"),
        ("digits:?holdout=0.3", "holdout=0.3 needs split="),
        ("digits:?siz=3", "the option 'siz' is not known; did you mean 'size'"),
        ("digits:?size=large", "size=large is invalid; give a whole number"),
        ("digits:?size=0", "size=0 is invalid; give a whole number of at least 1"),
        ("digits:?interpolation=nearest", "interpolation=nearest is invalid; give bilinear or bicubic"),
        ("digits:?holdout=2&split=val", "holdout=2.0 is invalid; give a share between 0 and 1"),
        ("digits:?samples=5000", "samples=5000 is too many; there are 1797 to choose from"),
        ("digits:?split=test", "this set has no split=test"),
        ("digits:?shuffle=maybe", "give true or false"),
        ("digits:?std=0", "give positive numbers"),
        ("digits:?split=val&holdout=0.0006&classes=11", "the class '11' is not known"),
    ],
)
def test_bad_specifications(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(spec)


def test_options_as_keywords(npz: Path) -> None:
    written = load(f"npz:{npz}?classes=1,3&mean=0.5&std=2&samples=7&shuffle=false")
    keywords = load(f"npz:{npz}", classes=[1, "3"], mean=0.5, std=(2,), samples=7, shuffle=False)
    assert_close(gather(written), gather(keywords), rtol=0, atol=0)
    assert load(f"npz:{npz}?samples=3", samples=7, classes=None, seed=None).n_samples == 3


def test_bad_folders(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(StoreError, match="no such folder"):
        load(f"imagefolder:{tmp_path / 'nowhere'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=r"no images found; they end in .jpg"):
        load(f"imagefolder:{tmp_path / 'empty'}")
    Image.new("RGB", (4, 4)).save(folder / "stray.png")
    with pytest.raises(StoreError, match=r"images beside class folders, such as stray.png"):
        load(f"imagefolder:{folder}")
    with pytest.raises(InputError, match="needs holdout=SHARE"):
        load(f"imagefolder:{folder / 'ant'}?split=val")


def test_rectangles_colours_and_layouts(folder: Path) -> None:
    plain = next(iter(load_data(f"imagefolder:{folder}?size=40x60&shuffle=false&mean=0&std=1")))[0]
    assert plain.shape[1:] == (3, 40, 60)
    options = f"imagefolder:{folder}?shuffle=false&mean=0.5&std=0.5"
    swapped = next(iter(load_data(f"{options}&size=40x60&order=bgr&layout=nhwc")))[0]
    torch.testing.assert_close(swapped, (plain.flip(1).permute(0, 2, 3, 1) - 0.5) / 0.5)
    padded = next(iter(load_data(f"{options}&size=16x900&fit=pad")))[0]
    assert padded.shape[1:] == (3, 16, 900)
    # Beside the image, whose proportions are kept, there are zeros.
    assert not padded[..., -400:].any()
    assert padded[..., :8].abs().sum() > 0
    for option in ("size=40x", "size=1x2x3", "fit=crop", "order=gbr", "layout=hwc"):
        with pytest.raises(InputError, match=option.partition("=")[0]):
            load_data(f"imagefolder:{folder}?{option}")

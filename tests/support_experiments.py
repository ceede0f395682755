"""Tiny models and images in place of those that the paper's configs name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from tensigma.experiments import Overrides

N_CLASSES = 10
_FACTORY = """
from tensigma.zoo.networks import CifarResNet


def net(num_classes=10):
    return CifarResNet((4, 6, 6, 8), 2, projection=True, head="fc", in_chans=3, num_classes=num_classes)
"""


def stand_ins(folder: Path) -> Overrides:
    """A ResNet of few channels for every model, random images for every source."""
    (folder / "tiny.py").write_text(_FACTORY)
    write_npz(folder / "images.npz", 24, size=16, classes=N_CLASSES)
    pictures(folder / "pictures", size=20)
    return Overrides(
        models={"*": f"{folder / 'tiny.py'}:net"},
        sources={"*": f"npz:{folder / 'images.npz'}", "imagenet-5*": f"imagefolder:{folder / 'pictures'}?size=16"},
    )


def write_npz(file: Path, count: int, *, size: int, classes: int) -> None:
    """Random images with labels."""
    generator = np.random.default_rng(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    images = generator.integers(0, 255, (count, size, size, 3), dtype=np.uint8)
    np.savez(file, images=images, labels=np.arange(count) % classes)


def pictures(folder: Path, *, size: int) -> None:
    """A folder of a few random images in two classes."""
    generator = np.random.default_rng(1)
    for index in range(12):
        file = folder / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 255, (size, size, 3), dtype=np.uint8)).save(file)

"""Names that tests of the command line share."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tensigma.zoo import load_model

MODEL = "zoo:digits-cnn?width=6"
DATA = "digits:?samples=96"


def files(folder: Path) -> set[str]:
    """Every file and folder below, hidden ones too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def readme_command() -> list[str]:
    """The first command of the README as it is written, run by the program of this environment."""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(
        r"^tensigma compress torchvision:resnet18 .*?[^\\]$", readme, flags=re.DOTALL | re.MULTILINE
    )
    program, *words = shlex.split(command.replace("\\\n", " "))
    return [str(Path(sys.executable).with_name(program)), *words]


def readme_material(folder: Path) -> None:
    """The weights and photos that the command of the README names."""
    torch.save(load_model("torchvision:resnet18").state_dict(), folder / "resnet18.pth")
    (folder / "photos").mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 255, (224, 224, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "photos" / f"{number}.png")

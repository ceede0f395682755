"""The README's first example in Python, taken from its text, run against an installed package.

    python readme.py README.md

``model`` is a network of torchvision and ``loader`` reads image files: what the README's extras are for.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from PIL import Image

import tensigma as ts
from tensigma.zoo import load_data, load_model

NETWORK = "torchvision:squeezenet1_1?num_classes=10"


def photos(folder: Path) -> str:
    """A few images of noise as files; the name of the data."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(16):
        pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    return f"imagefolder:{folder}?size=64&resize=64"


assert "site-packages" in ts.__file__, f"this is the source, not an installed package: {ts.__file__}"
example = re.findall(r"^```python\n(.*?)^```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.S | re.M)[0]
torch.manual_seed(0)
original, images = load_model(NETWORK), load_data(photos(Path("photos")), batch_size=8)
names = {"model": original, "loader": images, "build_the_original": lambda: load_model(NETWORK)}
exec(compile(example, "README.md", "exec"), names)

small, report = names["small"], names["report"]
assert isinstance(small, torch.nn.Module)
assert isinstance(report, ts.Report)
assert report.after.params <= report.before.params / 2
assert sum(parameter.numel() for parameter in small.parameters()) == report.after.params
ts.write_report(report, "report.html")

"""The README's first Python example on a small network of torchvision, run against an installed package."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

import tensigma as ts
from tensigma.zoo import load_data, load_model

assert "site-packages" in ts.__file__, f"this is the source, not an installed package: {ts.__file__}"

generator = torch.Generator().manual_seed(0)
for number in range(16):
    Path("photos").mkdir(exist_ok=True)
    pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=generator)
    Image.fromarray(pixels.numpy()).save(f"photos/{number}.png")

model = load_model("torchvision:squeezenet1_1")
loader = load_data("imagefolder:photos?size=64&resize=64", batch_size=8)
stats = ts.calibrate(model, loader)
ranks = ts.Ranks({"features.11.expand3x3": (16, 16), "features.12.expand3x3": (16, 16)})
plan = ts.plan(model, stats, ranks=ranks, method="tucker2")
small, report = ts.compress(model, plan, stats, data=loader)
ts.save(small, "small/")
again = ts.load("small/", load_model("torchvision:squeezenet1_1"))
ts.write_report(report, "report.html")
with torch.no_grad():
    batch = next(iter(loader))[0]
    torch.testing.assert_close(again(batch), small.eval()(batch))
assert report.after.params < report.before.params

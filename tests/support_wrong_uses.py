"""What the examples on docs/wrong-uses.md are evaluated with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensigma as ts


def network(width: int = 8) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 8, 3),
            nn.Flatten(),
            nn.Linear(8 * 4 * 4, 5),
        ).eval()


def names(folder: Path) -> dict[str, Any]:
    """Everything that an example may name."""
    model = network()
    images = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    stats = ts.calibrate(model, [images])
    plan = ts.plan(model, stats, ranks=ts.Ranks({"3": 2}))
    small, _ = ts.compress(model, plan, stats)
    ts.save(small, folder / "small")
    (folder / "photos").mkdir()
    (folder / "photos" / "cat.txt").write_text("a photo of a cat")
    (folder / "file.txt").write_text("text")
    return {
        "ts": ts,
        "torch": torch,
        "nn": nn,
        "model": model,
        "other": network(6),
        "images": images,
        "stats": stats,
        "plan": plan,
        "small": small,
        "folder": folder,
    }

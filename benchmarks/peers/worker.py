"""What all tools have in common: the job is read, the model built, compressed, trained, and written with its facts.

A tool's file ends with ``main(compress)``; ``compress`` takes an :class:`Assignment` and returns the small model, or
the path of an ONNX file, which no track trains any further; then it notes the number of parameters itself.
"""

from __future__ import annotations

import copy
import json
import logging
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from peers.job import Job
from peers.statistics import with_better_statistics
from peers.training import trained
from tensigma.zoo import load_model


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The model to compress and what there is to do it with."""

    job: Job
    #: In evaluation mode; a tool may change it.
    model: nn.Module
    #: Unlabelled images (n, 3, height, width), normalised.
    images: Tensor
    #: What the tool wants noted, such as the setting that it found.
    notes: dict[str, Any]

    @property
    def example(self) -> Tensor:
        return self.images[:1]

    def batches(self, size: int = 64) -> Iterator[Tensor]:
        """The images in order."""
        yield from self.images.split(size)


Compress = Callable[[Assignment], "nn.Module | Path"]


def main(compress: Compress) -> None:
    """Do the job whose file is named on the command line."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    do(Job.read(Path(sys.argv[1])), compress)


def do(job: Job, compress: Compress) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    original = load_model(job.network, job.weights)
    images = torch.from_numpy(np.load(Path(job.material) / "calibration.npy"))
    notes: dict[str, Any] = {}
    start = time.perf_counter(), time.process_time()
    small = compress(Assignment(job=job, model=copy.deepcopy(original), images=images, notes=notes))
    # What an earlier process of the same tool has done for this one.
    before = notes.pop("seconds_before", 0.0)
    facts = {
        "seconds": round(time.perf_counter() - start[0] + before, 2),
        "cpu_seconds": round(time.process_time() - start[1] + before, 2),
        "peak_bytes": peak_bytes(),
        "notes": notes,
    }
    if isinstance(small, nn.Module):
        small, anew = with_better_statistics(small.eval(), original.eval(), images)
        notes |= {"statistics": "taken anew"} if anew else {}
    for track in job.tracks:
        if isinstance(small, Path):
            if track == "closed":
                keep(job, track, small, facts)
            continue
        result, training = small, {"training_steps": 0}
        if track != "closed":
            result, training = after_training(job, small, original, labels=track == "labels")
        keep(job, track, result.eval(), {**facts, **training})


def after_training(
    job: Job, small: nn.Module, original: nn.Module, *, labels: bool
) -> tuple[nn.Module, dict[str, Any]]:
    images = torch.from_numpy(np.load(Path(job.material) / "training.npy"))
    classes = torch.from_numpy(np.load(Path(job.material) / "training-labels.npy")) if labels else None
    return trained(small, original, images, classes, batch=job.batch, seed=job.seed)


def keep(job: Job, track: str, small: nn.Module | Path, facts: dict[str, Any]) -> None:
    """Write the model, then its facts: a track without facts is not finished."""
    out = Path(job.out)
    if isinstance(small, Path):
        shutil.copyfile(small, out / f"{track}.onnx")
        facts = {**facts, "params": facts["notes"]["params"]}
    else:
        example = torch.from_numpy(np.load(Path(job.material) / "calibration.npy", mmap_mode="r")[:1].copy())
        with torch.no_grad():
            program = torch.export.export(small, (example,))
        torch.export.save(program, out / f"{track}.pt2")
        facts = {**facts, "params": sum(parameter.numel() for parameter in small.parameters())}
    job.facts_file(track).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes everywhere but on macOS.
    return peak if sys.platform == "darwin" else 1024 * peak

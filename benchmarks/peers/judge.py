"""What a compressed model is worth, by one measure for all: it is read from a file and runs in ONNX Runtime."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch

from peers.counting import macs_of
from tensigma.experiments import pack_hits

_WARM_UP = 5
# The fewest rounds, the most, and the seconds of processor time after which no more are added.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 15, 400, 3.0


def to_onnx(artefact: Path) -> Path:
    """The file as ONNX, beside it: what ``torch.export`` wrote is converted here, by one exporter for all."""
    if artefact.suffix == ".onnx":
        return artefact
    target = artefact.with_suffix(".judged.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(artefact)
        torch.onnx.export(program, (), target, dynamo=True, external_data=False, verbose=False)
    return target


def session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def answers(file: Path, images: np.ndarray) -> np.ndarray:
    """The class of every image, one image at a time."""
    running = session(file)
    name = running.get_inputs()[0].name
    return np.array([int(running.run(None, {name: image[None]})[0].argmax()) for image in images])


def seconds_side_by_side(files: list[Path], image: np.ndarray) -> list[float]:
    """The least processor time of one image in each file, measured in turns."""
    running = [session(file) for file in files]
    names = [each.get_inputs()[0].name for each in running]
    best = [math.inf] * len(files)
    begin = time.thread_time()
    for turn in range(_WARM_UP + _MOST_ROUNDS):
        for index, (each, name) in enumerate(zip(running, names, strict=True)):
            start = time.thread_time()
            each.run(None, {name: image[None]})
            if turn >= _WARM_UP:
                best[index] = min(best[index], time.thread_time() - start)
        if turn >= _WARM_UP + _ROUNDS and time.thread_time() - begin > _SECONDS:
            break
    return best


@dataclass(frozen=True)
class Judge:
    """The original and the test images of one network."""

    original: Path
    images: np.ndarray
    labels: np.ndarray
    classes: np.ndarray

    @classmethod
    def of(cls, material: Path) -> Judge:
        """With the material that ``Subject.prepare`` and ``Bench`` have left."""
        images = np.load(material / "test.npy", mmap_mode="r")
        original = material / "original.onnx"
        kept = material / "original-classes.npy"
        if not kept.exists():
            np.save(kept, answers(original, images))
        return cls(original, images, np.load(material / "test-labels.npy"), np.load(kept))

    def figures(self, artefact: Path) -> dict[str, Any]:
        """Everything that is measured, as plain data."""
        file = to_onnx(artefact)
        same = file == self.original
        classes = self.classes if same else answers(file, self.images)
        before, after = seconds_side_by_side([self.original, file], self.images[0])
        hits = classes == self.labels
        return {
            "macs": macs_of(file),
            "bytes": file.stat().st_size,
            "top1": round(100 * float(hits.mean()), 3),
            "agreement": round(100 * float((classes == self.classes).mean()), 3),
            "time_ratio": 1.0 if same else round(after / before, 4),
            "milliseconds": round(1000 * after, 4),
            "hits": pack_hits(hits.tolist()),
        }

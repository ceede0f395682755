"""Models as ONNX Runtime runs them, for experiments on networks that PyTorch takes twice as long for."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.deployment import OnnxModel, export
from tensigma.experiments.hits import unpack_hits
from tensigma.experiments.workshop import Workshop, state_hash
from tensigma.running import processor_clock

_ROUNDS, _WARM_UP = 12, 2


class Deployed:
    """A model exported, checked against itself and opened; ``image`` is one input (1, …)."""

    def __init__(self, model: nn.Module, image: Tensor) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = export(model, Path(folder) / "model.onnx", image).path
            #: With all threads, for many images.
            self.fast = OnnxModel(file, threads=torch.get_num_threads())
            #: With one thread, to be timed.
            self.timed = OnnxModel(file, threads=1)


@dataclass(frozen=True, eq=False)
class Bench:
    """Judges compressed models beside one original on the same images."""

    original: nn.Module
    workshop: Workshop
    source: str
    spec: str

    def figures(self, model: nn.Module) -> dict[str, Any]:
        """Accuracy, agreement with the original, and the seconds that one image takes in the model and in the original.

        All but the agreement is kept by the weights of the model, so that no model is run twice.
        """
        found, wanted = self._found(model), self._found(self.original)
        same = [one == other >= 0 for one, other in zip(found["answers"], wanted["answers"], strict=True)]
        right = unpack_hits(found["hits"])
        return {
            "top1": float(right.mean()),
            "images": len(right),
            "agreement": sum(same) / len(same),
            "seconds": found["seconds"],
            "hits": found["hits"],
        }

    @cached_property
    def _image(self) -> Tensor:
        return next(iter(self.workshop.batches(self.source, self.spec)))[0][:1]

    @cached_property
    def _opened(self) -> Deployed:
        return Deployed(self.original, self._image)

    def _found(self, model: nn.Module) -> dict[str, Any]:
        def measure() -> dict[str, Any]:
            running = self._opened if model is self.original else Deployed(model, self._image)
            hits, answers = self.workshop.answers(running.fast, self.source, self.spec)
            seconds = seconds_in_turn(running.timed, self._opened.timed, self._image)
            return {"hits": hits, "answers": answers, "seconds": [round(each, 5) for each in seconds]}

        facts = ["onnxruntime", self.workshop.facts_of(self.source, self.spec), state_hash(model)]
        return self.workshop.kept("deployed", facts, measure)


@lru_cache(maxsize=1)
def bench_of(original: nn.Module, workshop: Workshop, source: str, spec: str) -> Bench:
    """The bench of a model; the last one stays open for the next call."""
    return Bench(original, workshop, source, spec)


@torch.inference_mode()
def seconds_in_turn(one: nn.Module, other: nn.Module, image: Tensor) -> tuple[float, float]:
    """Processor time of one ``image`` in each of two models that run on this thread: the least of several rounds.

    >>> all(seconds > 0 for seconds in seconds_in_turn(nn.Linear(9, 9), nn.Linear(9, 9), torch.ones(1, 9)))
    True
    """
    clock = processor_clock()
    best = [math.inf, math.inf]
    for turn in range(_WARM_UP + _ROUNDS):
        for index, model in enumerate((one, other)):
            start = clock()
            model(image)
            if turn >= _WARM_UP:
                best[index] = min(best[index], clock() - start)
    return best[0], best[1]

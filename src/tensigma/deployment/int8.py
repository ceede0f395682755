"""INT8 files: of several ways to quantise, the one whose answers are closest to those of the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tensigma.deployment.qdq import prepare, write_qdq
from tensigma.deployment.ranges import RangeRule, histograms_of, ranges_by
from tensigma.graphs import FewBits, OnnxModel
from tensigma.running import Answers, Batch, Inputs, borrowed, call, leaves, run, split, taken

# All tensors of a model are held for so many samples at a time.
_SAMPLES_AT_ONCE = 8
#: Ways to quantise are compared on so many samples at most.
_JUDGED = 128


@dataclass(frozen=True)
class Int8File:
    """How a file was quantised: from which source, by which rule, and the errors of all that were tried."""

    source: Path
    rule: RangeRule
    errors: Mapping[tuple[Path, RangeRule], float]
    #: How many weights kept their integers.
    kept: int


def write_int8(
    sources: Sequence[Path],
    target: Path,
    inputs: Sequence[Inputs],
    *,
    rules: Sequence[RangeRule],
    reduce_range: bool,
    weights: Mapping[str, FewBits],
    fixed: Mapping[str, np.ndarray] | None = None,
) -> Int8File:
    """Quantise ONNX files that compute the same by several rules for ranges, and keep the best in ``target``.

    The best has the least relative error of its outputs, on inputs without labels. ``fixed`` are the values of other
    inputs, if there are any; ``weights`` are those whose integers are kept.
    """
    judges = _first(inputs, _JUDGED)
    errors: dict[tuple[Path, RangeRule], float] = {}
    best: Int8File | None = None
    for source in sources:
        original = OnnxModel(source, fixed=fixed)
        proto = prepare(source, target.parent)
        size = original.batch_size or _SAMPLES_AT_ONCE
        feeds = (feed for x in inputs for part in split(x, size) for feed in call(original.feeds, part))
        histograms = histograms_of(proto, feeds)
        tried = []
        for rule in rules:
            ranges = ranges_by(rule, histograms)
            if ranges in tried:
                continue
            tried.append(ranges)
            attempt = target.with_name(f"attempt-{target.name}")
            kept = write_qdq(proto, attempt, ranges, reduce_range=reduce_range, weights=weights)
            error = relative_error(original, OnnxModel(attempt, fixed=fixed), judges)
            errors[source, rule] = error
            if best is None or error < errors[best.source, best.rule]:
                best = Int8File(source, rule, errors, kept)
                attempt.replace(target)
            else:
                attempt.unlink()
    assert best is not None
    return best


def _first(inputs: Sequence[Inputs], most: int) -> list[Inputs]:
    chosen: list[Inputs] = []
    left = most
    for x in inputs:
        chosen.append(taken(x, slice(left)))
        left -= len(chosen[-1])
        if not left:
            break
    return chosen


@torch.inference_mode()
def relative_error(before: nn.Module, after: nn.Module, inputs: Sequence[Any], reading: Answers | None = None) -> float:
    """Relative error of the output of ``after``, √(Σ|Δy|² ÷ Σ|y|²); of several outputs, the worst.

    ``reading``, if given, tells which outputs of layers stand in for boxes: two models find different numbers of them.
    """
    error_energy: dict[int, float] = defaultdict(float)
    energy: dict[int, float] = defaultdict(float)
    with borrowed(before), borrowed(after):
        for number, x in enumerate(inputs):
            batch = Batch(number, x, None)
            if reading is not None and reading.raw:
                outputs = [reading.run(model, batch)[1] for model in (before, after)]
            else:
                outputs = [list(leaves(run(model, batch)).values()) for model in (before, after)]
            for index, pair in enumerate(zip(*outputs, strict=True)):
                expected, actual = (tensor.double().cpu() for tensor in pair)
                error_energy[index] += float((expected - actual).square().sum())
                energy[index] += float(expected.square().sum())
    return max(((error_energy[index] / energy[index]) ** 0.5 for index in energy if energy[index]), default=0.0)

"""What ``tensigma compress`` finds out about its result, beside the original."""

from __future__ import annotations

from typing import Any

import tensigma as ts
from tensigma.cli.loading import Network, name_of
from tensigma.cli.screen import Screen
from tensigma.cli.sources import Planned
from tensigma.errors import InputError


def judged(
    screen: Screen,
    small: Network,
    original: Network,
    images: Any,
    planned: Planned,
    *,
    latency: bool,
    max_samples: int | None,
    answers: Any,
) -> ts.Evaluation | None:
    """The result beside the original; with a certificate if none of ``images`` had a part in making it."""
    if images is None:
        return None
    screen.note(f"evaluating on {name_of(images)}")
    fresh = not any(ts.zoo.may_share(name_of(images), name) for name in planned.data_names)
    try:
        with screen.progress("evaluating") as progress:
            return ts.evaluate(
                small,
                images,
                original=original,
                latency=latency,
                max_samples=max_samples,
                answers=answers,
                confidence=0.95 if fresh else None,
                progress=progress,
            )
    except InputError as error:
        # Most files hold classifiers, but what the others answer is not known beforehand.
        if not isinstance(original, ts.graphs.OnnxNetwork):
            raise
        screen.warn(f"not evaluated: {error}")
        return None


def speed_of(screen: Screen, original: Network, small: Network, images: Any) -> dict[str, Any] | None:
    """Times of both on the first images, in about a second; with a warning if fewer weights take longer."""
    if images is None or isinstance(original, ts.graphs.OnnxNetwork):
        return None
    first = next(iter(ts.running.Batches(images, max_samples=16)))
    note = ts.evaluation.speed_note(original, small, first.inputs)
    if note is not None and ts.evaluation.is_slower(note):
        screen.warn(
            f"the compressed model is slower than the original: {ts.evaluation.speed_in_words(note)}; --budget "
            "latency=0.8 counts the time of this machine, and ONNX Runtime makes more of small layers"
        )
    return note


def runtime_of(screen: Screen, original: Network, small: Network, report: ts.Report) -> dict[str, Any]:
    """What an ONNX file gains in time, as a note; nothing for other models."""
    macs = report.before.macs, report.after.macs
    if not isinstance(original, ts.graphs.OnnxNetwork) or macs[0] is None or macs[1] is None or small.example() is None:
        return {}
    note = ts.evaluation.runtime_note(original, small, (macs[0], macs[1]))
    screen.note(ts.evaluation.runtime_in_words(note))
    return {"runtime": note}

"""The headline of a report, and the facts below it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensigma.compression import Report
from tensigma.evaluation import Certificate, Evaluation, is_slower, runtime_in_words, speedup_of
from tensigma.finetuning import FineTuning
from tensigma.planning import weighing_in_words
from tensigma.report import numbers

_BY_LABELS = {
    "Top-1 accuracy": "top1",
    "Top-5 accuracy": "top5",
    "Mean IoU": "label_iou",
    "Average precision": "label_precision",
}
#: Title → figure of the comparison with the original, and what it is.
_BY_ORIGINAL = {
    "Agreement by position": ("position_agreement", "of positions have the class of the original"),
    "Mean IoU": ("iou", "with the classes of the original"),
    "Average precision": ("precision", "against the detections of the original"),
    "Relative error": ("error", "of the numbers, by the original"),
    "Likeness": ("likened", "to the answers of the original, by a function given"),
}


#: Bytes are named beside parameters where so many times as many are saved: biases alone make a small difference.
_MORE_BYTES = 1.05


@dataclass(frozen=True, kw_only=True)
class Card:
    """One headline number, before and after."""

    name: str
    before: str
    after: str
    change: str
    #: The share that remains, for a small bar; None if it has no meaning.
    share: float | None = None


def savings(report: Report) -> list[tuple[float, str]]:
    """How many times fewer, or more, the model has of what, the largest saving first, and whether it is slower.

    Bytes are among them where they say more than parameters, because weights have fewer bits.
    """
    before, after = report.before, report.after
    counts = [
        ("parameters", before.params, after.params),
        ("multiply-adds", before.macs, after.macs),
        ("bytes", before.bytes, after.bytes),
    ]
    ratios = {words: old / new for words, old, new in counts if old and new}
    if ratios.get("bytes", 0.0) <= _MORE_BYTES * ratios.get("parameters", 1.0):
        ratios.pop("bytes", None)
    less = sorted(((ratio, words) for words, ratio in ratios.items() if ratio >= 1), key=lambda each: -each[0])
    more = [(1 / ratio, words) for words, ratio in ratios.items() if ratio < 1]
    speed = report.notes.get("speed")
    slower = [(1 / speedup_of(speed), "slower in PyTorch")] if speed is not None and is_slower(speed) else []
    fewer, dearer = (
        [(ratio, f"{how} {words}") for ratio, words in part] for how, part in (("fewer", less), ("more", more))
    )
    return [*fewer, *dearer, *slower]


def headline(report: Report, evaluation: Evaluation | None) -> list[Card]:
    """The headline: size always, quality and time if they were measured."""
    before, after = report.before, report.after
    shown = [_size("Parameters", before.params, after.params)]
    if before.macs is not None and after.macs is not None:
        shown.append(_size("Multiply-adds", before.macs, after.macs))
    shown.append(_size("Bytes", before.bytes, after.bytes, "B"))
    speed = report.notes.get("speed")
    if speed is not None and (evaluation is None or evaluation.latency is None):
        shown.append(_time(speed))
    if evaluation is None:
        return shown
    first = evaluation.original
    for name, key in _BY_LABELS.items():
        old, new = getattr(first, key, None), getattr(evaluation, key)
        if new is not None:
            step = "" if old is None else f"{100 * (new - old):+.2f} points"
            shown.append(Card(name=name, before=numbers.percent(old), after=numbers.percent(new), change=step))
    if evaluation.agreement is not None:
        certified = certificate(report, evaluation)
        words = "of answers match the original" if certified is None else _promise(certified)
        shown.append(Card(name="Agreement", before="", after=numbers.percent(evaluation.agreement), change=words))
    for name, (key, words) in _BY_ORIGINAL.items():
        share = getattr(evaluation, key)
        if share is not None:
            shown.append(Card(name=name, before="", after=numbers.percent(share), change=words))
    for other in evaluation.others:
        if other.likeness is not None:
            words = f"of the part {other.path!r}, by the original"
            measure, share = other.measure.capitalize(), numbers.percent(other.likeness)
            shown.append(Card(name=measure, before="", after=share, change=words))
    if evaluation.latency is not None:
        old_time = None if first is None else first.latency
        ratio = ", ".join(filter(None, [numbers.speed(evaluation.speedup), "one thread"]))
        new_text = numbers.milliseconds(evaluation.latency)
        shown.append(Card(name="Latency", before=numbers.milliseconds(old_time), after=new_text, change=ratio))
    return shown


def certificate(report: Report, evaluation: Evaluation | None) -> Certificate | None:
    """The bound on agreement; None if the notes of the run show that it does not hold.

    It needs samples that were not used to make the model: not for calibration, not for a search, and not to choose one
    result among several.
    """
    notes = report.notes
    judged = notes.get("evaluated_on")
    used = notes.get("comparison") or (judged and judged in (notes.get("data"), notes.get("searched_on")))
    return None if evaluation is None or used else evaluation.certificate


def _promise(certified: Certificate) -> str:
    # Rounded down, so that the text never claims more than the bound.
    share = int(1000 * certified.bound) / 10
    promise = f"at least {share:.1f} % of inputs like these, with {100 * certified.confidence:g} % confidence"
    return f"{certified.meaning}: {promise}" if certified.meaning else promise


def _size(name: str, before: int, after: int, unit: str = "") -> Card:
    return Card(
        name=name,
        before=numbers.short(before, unit),
        after=numbers.short(after, unit),
        change=numbers.times(before, after, "fewer" if not unit else "smaller"),
        share=after / before if before else None,
    )


def _time(speed: Mapping[str, Any]) -> Card:
    before, after = (f"{1000 * speed[key]:.3g} ms" for key in ("before", "after"))
    change = f"{numbers.speed(speedup_of(speed))}, PyTorch, one thread, batch {speed['batch']}"
    return Card(name="Time", before=before, after=after, change=change)


def facts(report: Report, evaluation: Evaluation | None) -> list[tuple[str, str]]:
    """How the model was made: names and values."""
    notes = report.notes
    norms = sorted({layer.norm for layer in report.compressed if layer.norm})
    certified = certificate(report, evaluation)
    entries = [
        ("Model", notes.get("model")),
        ("Weights", "random" if notes.get("untrained") else notes.get("weights")),
        ("Calibrated with", notes.get("data")),
        ("Calibration samples", numbers.number(notes["samples"]) if notes.get("samples") else None),
        ("Searched with", notes.get("searched_on")),
        ("Evaluated on", notes.get("evaluated_on")),
        ("Evaluation samples", None if evaluation is None else numbers.number(evaluation.samples)),
        ("Compared", report.compared if evaluation is None else evaluation.answers),
        ("Certificate", None if certified is None else _certificate(certified)),
        ("Norm", ", ".join(norms)),
        ("Budget shared out", weighing_in_words(notes["weighing"]) if notes.get("weighing") else None),
        ("Time in ONNX Runtime", runtime_in_words(notes["runtime"]) if notes.get("runtime") else None),
        ("Fine-tuned", _fine_tuning(notes.get("finetuning"))),
        ("Layers compressed", f"{len(report.compressed)} of {len(report.layers)}"),
        ("Time to compress", f"{report.seconds:.1f} s"),
        ("Tensigma", report.library),
    ]
    return [(name, str(value)) for name, value in entries if value]


def _fine_tuning(noted: Any) -> str | None:
    """What training did after compression; layer errors are from before it."""
    if noted is None:
        return None
    tuning = FineTuning.from_json(noted)
    if tuning.learning_rate is None:
        return "no epoch was better than the model before training"
    measure = "top-1" if tuning.measure == "top1" else tuning.measure
    before, after = numbers.percent(tuning.start.score), numbers.percent(tuning.best.score)
    return (
        f"{tuning.optimizer}, learning rate {tuning.learning_rate:g}, epoch {tuning.epoch}: "
        f"{measure} {before} → {after} on {numbers.number(tuning.validation_samples)} validation samples. "
        "Layer errors are from before fine-tuning."
    )


def _certificate(certified: Certificate) -> str:
    return (
        f"{certified} It holds for independent draws of the inputs that the model will see, none of which was used "
        "to make it."
    ).replace(") It", "). It")

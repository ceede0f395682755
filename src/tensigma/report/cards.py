"""The headline of a report, and the facts below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensigma.compression import Report
from tensigma.evaluation import Certificate, Evaluation
from tensigma.finetuning import FineTuning
from tensigma.planning import weighing_in_words
from tensigma.report import numbers


@dataclass(frozen=True, kw_only=True)
class Card:
    """One headline number, before and after."""

    name: str
    before: str
    after: str
    change: str
    #: What is left of what was there, for a small bar; None where that means nothing.
    share: float | None = None


def cards(report: Report, evaluation: Evaluation | None) -> list[Card]:
    """The headline: size always, quality and time where they were measured."""
    before, after = report.before, report.after
    found = [_size("Parameters", before.params, after.params)]
    if before.macs is not None and after.macs is not None:
        found.append(_size("Multiply-adds", before.macs, after.macs))
    found.append(_size("Bytes", before.bytes, after.bytes, "B"))
    if evaluation is None:
        return found
    first = evaluation.original
    for name, old, new in (
        ("Top-1 accuracy", None if first is None else first.top1, evaluation.top1),
        ("Top-5 accuracy", None if first is None else first.top5, evaluation.top5),
    ):
        if new is not None:
            step = "" if old is None else f"{100 * (new - old):+.2f} points"
            found.append(Card(name=name, before=numbers.percent(old), after=numbers.percent(new), change=step))
    if evaluation.agreement is not None:
        certified = certificate(report, evaluation)
        words = "of answers are those of the original" if certified is None else _promise(certified)
        found.append(Card(name="Agreement", before="", after=numbers.percent(evaluation.agreement), change=words))
    if evaluation.latency is not None:
        old_time = None if first is None else first.latency
        ratio = ", ".join(filter(None, [numbers.speed(evaluation.speedup), "one thread"]))
        new_text = numbers.milliseconds(evaluation.latency)
        found.append(Card(name="Latency", before=numbers.milliseconds(old_time), after=new_text, change=ratio))
    return found


def certificate(report: Report, evaluation: Evaluation | None) -> Certificate | None:
    """The bound on agreement, where nothing that is known about the run takes it away.

    It needs samples that had no part in making the model: not those of the calibration or of a search, and not those by
    which one result was chosen among several.
    """
    notes = report.notes
    judged = notes.get("evaluated_on")
    used = notes.get("comparison") or (judged and judged in (notes.get("data"), notes.get("searched_on")))
    return None if evaluation is None or used else evaluation.certificate


def _promise(certified: Certificate) -> str:
    # Rounded down, or the words would claim more than the bound.
    share = int(1000 * certified.bound) / 10
    return f"at least {share:.1f} % of inputs like these, with {100 * certified.confidence:g} % confidence"


def _size(name: str, before: int, after: int, unit: str = "") -> Card:
    return Card(
        name=name,
        before=numbers.short(before, unit),
        after=numbers.short(after, unit),
        change=numbers.times(before, after, "fewer" if not unit else "smaller"),
        share=after / before if before else None,
    )


def facts(report: Report, evaluation: Evaluation | None) -> list[tuple[str, str]]:
    """How it was made."""
    notes = report.notes
    norms = sorted({layer.norm for layer in report.compressed if layer.norm})
    certified = certificate(report, evaluation)
    found = [
        ("Model", notes.get("model")),
        ("Weights", "random" if notes.get("untrained") else notes.get("weights")),
        ("Calibrated with", notes.get("data")),
        ("Calibration samples", numbers.number(notes["samples"]) if notes.get("samples") else None),
        ("Searched with", notes.get("searched_on")),
        ("Evaluated on", notes.get("evaluated_on")),
        ("Evaluation samples", None if evaluation is None else numbers.number(evaluation.samples)),
        ("Certificate", None if certified is None else _certificate(certified)),
        ("Norm", ", ".join(norms)),
        ("Budget shared out", weighing_in_words(notes["weighing"]) if notes.get("weighing") else None),
        ("Fine-tuned", _fine_tuning(notes.get("finetuning"))),
        ("Layers compressed", f"{len(report.compressed)} of {len(report.layers)}"),
        ("Time to compress", f"{report.seconds:.1f} s"),
        ("Tensigma", report.library),
    ]
    return [(name, str(value)) for name, value in found if value]


def _fine_tuning(noted: Any) -> str | None:
    """What training did afterwards; errors of layers are from before it."""
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
        "Errors of layers are from before."
    )


def _certificate(certified: Certificate) -> str:
    return (
        f"{certified} It holds for independent draws of the inputs that the model will meet, none of which had a part "
        "in making it."
    ).replace(") It", "). It")

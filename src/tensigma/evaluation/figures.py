"""Accuracy and cost of a model, compared with the original if there is one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn

from tensigma.errors import StoreError
from tensigma.evaluation.certificate import Certificate, check_confidence
from tensigma.evaluation.latency import Timing, measure_latency
from tensigma.evaluation.size import Size, size_of
from tensigma.files import anything, integer, mapping, number, optional, record, sequence, text
from tensigma.running import (
    Answers,
    Batch,
    Batches,
    Boxes,
    Key,
    Likened,
    Progress,
    Scores,
    Tally,
    Wanted,
    Wish,
    borrowed,
    first_answers,
    reporter,
    run,
    samples_per_second,
    taken,
)
from tensigma.text import count, table

FORMAT = "tensigma-evaluation"
VERSION = 1
_SHARE = optional(number(0, 1))
_FIGURES = record(
    {
        "samples": integer(),
        "top1": _SHARE,
        "top5": _SHARE,
        "agreement": _SHARE,
        "size": record({"params": integer(), "macs": optional(integer()), "bytes": integer()}),
        "latency": optional(
            record(
                {
                    "batch": integer(1),
                    "rounds": integer(1),
                    "minimum": number(0),
                    "median": number(0),
                    "spread": number(0),
                }
            )
        ),
        "original": optional(mapping(anything)),  # checks itself
    },
    {
        "certificate": optional(mapping(anything)),  # checks itself
        "answers": text(),
        "measure": text(),
        "likeness": optional(number()),
        **dict.fromkeys(("position_agreement", "iou", "label_iou", "precision", "label_precision"), _SHARE),
        "error": optional(number(0)),
        "part": text(),
        "others": sequence(record({"path": text(), "measure": text(), "likeness": _SHARE})),
    },
    others=anything,
)
#: Every share that may be measured, with its title.
SHARES = {
    "top1": "top-1",
    "top5": "top-5",
    "label_iou": "mean IoU with labels",
    "label_precision": "average precision",
    "agreement": "agreement",
    "position_agreement": "agreement by position",
    "iou": "mean IoU with the original",
    "precision": "precision by the original",
    "error": "relative error",
    "likened": "likeness",
}
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationProgress(Progress):
    """Progress after each batch.

    >>> print(EvaluationProgress(done=3, total=4, samples=60, seconds=2.0))
    batch 3 of 4, 30 samples/s
    """

    title: ClassVar[str] = "evaluation"

    samples: int

    def __str__(self) -> str:
        total = "" if self.total is None else f" of {self.total}"
        return f"batch {self.done}{total}, {samples_per_second(self.samples, self.seconds)}"


@dataclass(frozen=True, kw_only=True)
class PartFigure:
    """How much one part of the answers, other than the main one, is like the original's."""

    path: str
    #: What :attr:`likeness` is, as in :class:`Evaluation`.
    measure: str
    likeness: float | None

    @property
    def title(self) -> str:
        """The figure in words.

        >>> PartFigure(path="age", measure="closeness", likeness=0.9).title
        'age: closeness'
        """
        return f"{self.path}: {self.measure}"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of one model on some data. Shares lie between 0 and 1; None if a figure is not available.

    ``str(evaluation)`` is a table; :meth:`to_json` gives plain data from which :meth:`from_json` makes an equal object.

    >>> import torch
    >>> import tensigma as ts
    >>> model = torch.nn.Linear(4, 3)
    >>> inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    >>> figures = ts.evaluate(model, [(inputs, model(inputs).argmax(1))], original=model)
    >>> figures.samples, figures.top1, figures.agreement, figures.rate, figures.size.params
    (20, 1.0, 1.0, 1.0, 15)
    >>> ts.Evaluation.from_json(figures.to_json()) == figures
    True
    """

    samples: int
    #: Share of labels that are the first prediction (top5: among the first five). None without labels. Of a model that
    #: answers at many positions, as a segmenter does, the share of positions.
    top1: float | None
    #: Also None with at most five classes, or many positions.
    top5: float | None
    #: Share of samples on which the answer is that of the original: the class; with many positions, the class at a
    #: share ``Scores.least`` of them; of a detector, the same objects.
    agreement: float | None
    size: Size
    latency: Timing | None = None
    #: The same figures of the original, measured in the same run.
    original: Evaluation | None = None
    #: What the agreement proves about other inputs; None without an original, if not requested, or if answers are not
    #: alike or not but more or less near.
    certificate: Certificate | None = None
    #: What is compared, in words, and whether that was guessed; empty if nothing was.
    answers: str = ""
    #: What :attr:`likeness` is: "agreement", "average precision", "closeness" (1 − relative error), or "likeness".
    measure: str = ""
    #: How much the answers are like the original's, between 0 and 1: the figure that searches and training go by.
    likeness: float | None = None
    #: Of answers at many positions, the share of positions with the same class as the original.
    position_agreement: float | None = None
    #: Mean intersection over union of a segmenter with the original's own classes, and with labels.
    iou: float | None = None
    label_iou: float | None = None
    #: Average precision of a detector against the original's detections, and against labels.
    precision: float | None = None
    label_precision: float | None = None
    #: Relative error of numbers, √(Σ|Δy|² ÷ Σ|y|²); of several outputs the largest.
    error: float | None = None
    #: Of answers with several parts, the one that all figures above are about, and the figures of the others.
    part: str = ""
    others: tuple[PartFigure, ...] = ()

    @property
    def rate(self) -> float | None:
        """Compression rate: parameters of the original ÷ parameters."""
        return None if self.original is None else self.original.size.params / max(self.size.params, 1)

    @property
    def likened(self) -> float | None:
        """The likeness by a function of the user's; None for other answers, which have figures of their own."""
        return self.likeness if self.measure == Likened.measure else None

    @property
    def speedup(self) -> float | None:
        """Time of the original ÷ time, by the minimum of each."""
        if self.latency is None or self.original is None or self.original.latency is None:
            return None
        return self.original.latency.minimum / self.latency.minimum

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["size"] = asdict(self.size)
        plain["latency"] = None if self.latency is None else asdict(self.latency)
        plain["original"] = None if self.original is None else self.original.to_json()
        plain["certificate"] = None if self.certificate is None else self.certificate.to_json()
        plain["others"] = [asdict(other) for other in self.others]
        return {"format": FORMAT, "version": VERSION, "rate": self.rate, "speedup": self.speedup, **plain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """The inverse of :meth:`to_json`."""
        if not isinstance(data, Mapping):
            raise StoreError(f"the evaluation is damaged: it is {data!r}")
        if data.get("format", FORMAT) != FORMAT or data.get("version", VERSION) != VERSION:
            raise StoreError(f"this is not an evaluation of version {VERSION}, written by Evaluation.to_json")
        try:
            _FIGURES(data, "the evaluation is damaged")
            # Fields with a default came later; results written before have none of them.
            values = {
                field.name: data[field.name] if field.default is MISSING else data.get(field.name, field.default)
                for field in fields(cls)
                if field.name != "certificate"
            }
            values["size"] = Size(**values["size"])
            values["latency"] = values["latency"] and Timing(**values["latency"])
            values["original"] = values["original"] and cls.from_json(values["original"])
            values["others"] = tuple(PartFigure(**other) for other in values["others"])
            certified = data.get("certificate")
            return cls(**values, certificate=certified and Certificate.from_json(certified))
        except (KeyError, TypeError) as error:
            raise StoreError(f"the evaluation is damaged: {error}") from None

    def __str__(self) -> str:
        columns = [self] if self.original is None else [self.original, self]
        header = ["", *(["model"] if self.original is None else ["original", "model"])]
        rows = [
            *([title, *(_percent(getattr(column, name)) for column in columns)] for name, title in SHARES.items()),
            *(
                [figures[0].title, *(_percent(each.likeness) for each in figures)]
                for figures in zip(*(column.others for column in columns), strict=False)
            ),
            ["parameters", *(count(column.size.params) for column in columns)],
            ["MACs", *(count(column.size.macs) for column in columns)],
            ["bytes", *(count(column.size.bytes) for column in columns)],
            ["latency", *(_milliseconds(column.latency) for column in columns)],
        ]
        figures = table(header, [row for row in rows if set(row[1:]) != {"–"}])
        lines = [figures, f"compared: {self.answers}" if self.answers else "", str(self.certificate or "")]
        return "\n".join(line for line in lines if line)


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    original: nn.Module | None = None,
    latency: bool = False,
    latency_batch: int = 1,
    rounds: int = 20,
    max_samples: int | None = None,
    input: Key = None,
    answers: Wish = None,
    confidence: float | None = 0.95,
    progress: Wanted = False,
) -> Evaluation:
    """Run ``model`` over ``data`` and count hits, agreement with ``original``, parameters, MACs, bytes and time.

    Args:
        model: A classifier, a segmenter, a detector or any other model. It stays as it is.
        data: Batches as :func:`tensigma.calibrate` takes them. Labels, if every batch has them (the second item of a
            tuple, or ``label``, ``labels``, ``target``, ``targets`` or ``y`` of a dict), give top-1 and top-5; class
            numbers at every position give mean IoU, and dicts with ``boxes`` and ``labels`` average precision.
        original: The model before compression: its figures are measured too, and agreement with it needs no labels.
        latency: Also measure time, on one thread and in turn with the original, for ``rounds`` passes over the first
            ``latency_batch`` inputs.
        max_samples: Stop after this many.
        input: The entry or position of the model's input in a batch; several in a tuple are passed together.
        answers: What the model answers: :class:`~tensigma.Scores`, :class:`~tensigma.Numbers`,
            :class:`~tensigma.Boxes`, a dict of these by name of the part, or a function of two outputs that returns
            their likeness in [0, 1]. By default it is guessed, and what was guessed is among the results.
        confidence: Confidence of the certificate, a bound on agreement with ``original`` for unseen inputs. It holds
            only if ``data`` was not used for calibration or for any choice; otherwise pass None.
        progress: True for lines in the log, or a function called with an :class:`EvaluationProgress` after each batch.

    >>> batches = [(torch.eye(6), torch.arange(6))]
    >>> result = evaluate(nn.Identity(), batches, original=nn.Identity())
    >>> result.top1, result.agreement, result.samples
    (1.0, 1.0, 6)
    """
    if confidence is not None:
        check_confidence(confidence)
    models = {"the model": model} if original is None else {"the model": model, "the original": original}
    figures = compare(
        models,
        data,
        reference=None if original is None else "the original",
        latency=latency,
        latency_batch=latency_batch,
        rounds=rounds,
        max_samples=max_samples,
        input=input,
        answers=answers,
        progress=progress,
    )
    result = figures["the model"]
    if original is None:
        return result
    certificate = None
    # Positions of one image are not independent, and nearness is not a share of anything.
    if confidence is not None and result.agreement is not None:
        agreed = round(result.agreement * result.samples)
        certificate = Certificate(
            samples=result.samples, agreed=agreed, confidence=confidence, meaning=_meaning(result, answers)
        )
    return replace(result, original=figures["the original"], certificate=certificate)


def compare(
    models: Mapping[str, nn.Module],
    data: Any,
    *,
    reference: str | None = None,
    sizes: Mapping[str, Size] | None = None,
    latency: bool = True,
    latency_batch: int = 1,
    rounds: int = 20,
    max_samples: int | None = None,
    input: Key = None,
    answers: Wish | Answers = None,
    progress: Wanted = False,
) -> dict[str, Evaluation]:
    """Several models over the same data, read once: accuracy, agreement with ``reference``, size, and time in turn.

    ``sizes`` are for models whose size cannot be counted, such as ONNX files; ``answers`` is as :func:`evaluate` takes
    it, and refers to ``reference``, or to the first model without one.

    >>> models = {"one": nn.Identity(), "other": nn.Softmax(1)}
    >>> figures = compare(models, [(torch.eye(6), torch.arange(6))], reference="one", rounds=2)
    >>> figures["other"].top1, figures["other"].agreement, figures["other"].latency.rounds
    (1.0, 1.0, 2)
    """
    tallies: dict[str, Tally] = {}
    report, start = reporter(progress), time.perf_counter()
    batches = Batches(data, input=input, max_samples=max_samples, name="data")
    first: Batch | None = None
    samples = 0
    with torch.inference_mode(), borrowed(nn.ModuleList(models.values())):
        for batch in batches:
            outputs: dict[str, Any] = {}
            if first is None:
                first = batch
                name = next(iter(models)) if reference is None else reference
                outputs[name], reading = _read(models[name], batch, answers, ask=reference is not None)
                tallies = {name: Tally(reading) for name in models}
            for name, model in models.items():
                if name not in outputs:
                    outputs[name] = run(model, batch)
            labels = batch.targets
            for name, tally in tallies.items():
                tally.add(outputs[name], len(batch), labels, None if reference is None else outputs[reference])
            samples += len(batch)
            seconds = time.perf_counter() - start
            report(EvaluationProgress(done=batch.index + 1, total=batches.n_batches, samples=samples, seconds=seconds))
    assert first is not None
    for tally in list(tallies.values())[:1]:  # all are compared with the same answers
        tally.warn(stacklevel=4)
    times: list[Timing] | list[None] = [None] * len(models)
    if latency:
        times = measure_latency(list(models.values()), taken(first.inputs, slice(latency_batch)), rounds=rounds)
    figures = {}
    for (name, model), timing in zip(models.items(), times, strict=True):
        size = sizes[name] if sizes is not None and name in sizes else size_of(model, taken(first.inputs, slice(1)))
        figures[name] = _figures(name, tallies[name], size, timing)
    return figures


def _read(model: nn.Module, batch: Batch, answers: Wish | Answers, *, ask: bool) -> tuple[Any, Answers]:
    """The output for the first batch, and how it is read; what is unclear matters only if something is compared."""
    if isinstance(answers, Answers):
        return run(model, batch), answers
    return first_answers(model, batch, answers, ask=ask)


def _meaning(result: Evaluation, answers: Wish) -> str:
    """What an agreement is, if not the same class for the whole sample, and of which part of the answer."""
    alone = f"in the part {result.part!r} alone" if result.others else ""
    return ", ".join(filter(None, [_agreeing(result, answers), alone]))


def _agreeing(result: Evaluation, answers: Wish) -> str:
    if result.precision is not None or result.measure == Boxes.measure:
        return "the same objects"
    if result.measure == Likened.measure:
        return f"by {Likened(answers).name}" if callable(answers) else ""
    if result.position_agreement is None:
        return ""
    # Of parts by name, the first that is compared is the main one.
    kinds = [kind for kind in answers.values() if kind is not None] if isinstance(answers, Mapping) else [answers]
    least = kinds[0].least if isinstance(kinds[0], Scores) else Scores.least
    return f"the same class at {100 * least:g} % of positions or more"


def _figures(name: str, tally: Tally, size: Size, latency: Timing | None) -> Evaluation:
    unanswered = 0 if tally.main is None else tally.main.unanswered
    if unanswered:
        logger.warning(
            "%s gives scores that are not finite for %d of %d samples; they count as wrong",
            name,
            unanswered,
            tally.samples,
        )
    figures: dict[str, Any] = {"top1": None, "top5": None, "agreement": None, **tally.figures}
    compared = any(figure is not None for figure in figures.values())
    others = [PartFigure(path=part.path, measure=part.kind.measure, likeness=share) for part, share in tally.others]
    return Evaluation(
        samples=tally.samples,
        size=size,
        latency=latency,
        answers=str(tally.answers) if compared else "",
        measure=tally.answers.measure if compared else "",
        part=tally.answers.parts[0].path if others else "",
        others=tuple(others),
        **figures,
    )


def _percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{100 * value:.2f} %"


def _milliseconds(latency: Timing | None) -> str:
    return "–" if latency is None else f"{1000 * latency.minimum:.2f} ms (+{100 * latency.spread:.0f} %)"

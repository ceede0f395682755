"""How good a model is and what it costs, beside the original where that is at hand."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration.batches import count_batches, input_of, iterate
from tensigma.calibration.guard import borrowed
from tensigma.errors import InputError, StoreError
from tensigma.pipeline.certificate import Certificate, check_confidence
from tensigma.pipeline.counting import size_of
from tensigma.pipeline.latency import Timing, measure_latency
from tensigma.pipeline.report import Size
from tensigma.planning.answers import answered, class_labels, scores_of
from tensigma.planning.table import count, table

FORMAT = "tensigma-evaluation"
VERSION = 1
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationProgress:
    """Batches evaluated so far."""

    done: int
    total: int | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of one model on some data. Shares lie between 0 and 1; None where a figure could not be had.

    ``str(evaluation)`` is a table; :meth:`to_json` gives plain data from which :meth:`from_json` makes an equal object.

    >>> import torch
    >>> import tensigma as ts
    >>> model = torch.nn.Linear(4, 3)
    >>> inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    >>> found = ts.evaluate(model, [(inputs, model(inputs).argmax(1))], original=model)
    >>> found.samples, found.top1, found.agreement, found.rate, found.size.params
    (20, 1.0, 1.0, 1.0, 15)
    >>> ts.Evaluation.from_json(found.to_json()) == found
    True
    """

    samples: int
    #: Share of samples whose label is the first, or among the first five, predictions. None without labels.
    top1: float | None
    #: Also None where there are no more than five classes.
    top5: float | None
    #: Share of samples on which the prediction is that of the original.
    agreement: float | None
    size: Size
    latency: Timing | None = None
    #: The same figures of the original, measured in the same run.
    original: Evaluation | None = None
    #: What the agreement proves about other inputs; None without an original, or where it was not asked for.
    certificate: Certificate | None = None

    @property
    def rate(self) -> float | None:
        """Compression rate: parameters of the original ÷ parameters."""
        return None if self.original is None else self.original.size.params / max(self.size.params, 1)

    @property
    def speedup(self) -> float | None:
        """Time of the original ÷ time, by the minimum of each."""
        if self.latency is None or self.original is None or self.original.latency is None:
            return None
        return self.original.latency.minimum / self.latency.minimum

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own["size"] = asdict(self.size)
        own["latency"] = None if self.latency is None else asdict(self.latency)
        own["original"] = None if self.original is None else self.original.to_json()
        own["certificate"] = None if self.certificate is None else self.certificate.to_json()
        return {"format": FORMAT, "version": VERSION, "rate": self.rate, "speedup": self.speedup, **own}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """The evaluation that :meth:`to_json` was asked for."""
        if data.get("format", FORMAT) != FORMAT or data.get("version", VERSION) != VERSION:
            raise StoreError(f"this is not an evaluation of version {VERSION}, written by Evaluation.to_json")
        try:
            own = {field.name: data[field.name] for field in fields(cls) if field.name != "certificate"}
            own["size"] = Size(**own["size"])
            own["latency"] = own["latency"] and Timing(**own["latency"])
            own["original"] = own["original"] and cls.from_json(own["original"])
            certified = data.get("certificate")
            return cls(**own, certificate=certified and Certificate.from_json(certified))
        except (KeyError, TypeError) as error:
            raise StoreError(f"the evaluation is damaged: {error}") from None

    def __str__(self) -> str:
        columns = [self] if self.original is None else [self.original, self]
        header = ["", *(["model"] if self.original is None else ["original", "model"])]
        rows = [
            ["top-1", *(_percent(each.top1) for each in columns)],
            ["top-5", *(_percent(each.top5) for each in columns)],
            ["agreement", *(_percent(each.agreement) for each in columns)],
            ["parameters", *(count(each.size.params) for each in columns)],
            ["MACs", *(count(each.size.macs) for each in columns)],
            ["bytes", *(count(each.size.bytes) for each in columns)],
            ["latency", *(_milliseconds(each.latency) for each in columns)],
        ]
        figures = table(header, [row for row in rows if set(row[1:]) != {"–"}])
        return figures if self.certificate is None else f"{figures}\n{self.certificate}"


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    original: nn.Module | None = None,
    latency: bool = False,
    latency_batch: int = 1,
    rounds: int = 20,
    max_samples: int | None = None,
    input: str | int | None = None,
    confidence: float | None = 0.95,
    progress: bool | Callable[[EvaluationProgress], None] = False,
) -> Evaluation:
    """Run ``model`` over ``data`` and count hits, agreement with ``original``, parameters, MACs, bytes and time.

    Args:
        model: A classifier that returns scores (batch, classes). It comes back as it was.
        data: Batches as :func:`tensigma.calibrate` takes them. Labels, where every batch has them (the second item of a
            tuple, or ``label``, ``labels``, ``target``, ``targets`` or ``y`` of a dict), give top-1 and top-5.
        original: The model before compression: its figures are measured beside, and agreement needs no labels.
        latency: Also measure time, on one thread and in turn with the original, for ``rounds`` passes over the first
            ``latency_batch`` inputs.
        max_samples: Stop after this many.
        input: The entry or position of the model's input in a batch.
        confidence: Of the certificate that agreement with ``original`` gives: a bound for inputs nobody has seen. It
            holds only where ``data`` had no part in calibration or in any choice; None where that is not so.
        progress: True for lines in the log, or a function called with an :class:`EvaluationProgress` after each batch.

    >>> batches = [(torch.eye(6), torch.arange(6))]
    >>> result = evaluate(nn.Identity(), batches, original=nn.Identity())
    >>> result.top1, result.agreement, result.samples
    (1.0, 1.0, 6)
    """
    if confidence is not None:
        check_confidence(confidence)
    models = [model] if original is None else [model, original]
    tallies = [_Tally(name) for name, _ in zip(("the model", "the original"), models, strict=False)]
    report = _reporter(progress)
    first: Tensor | None = None
    samples = 0
    with torch.inference_mode(), borrowed(model), borrowed(original if original is not None else nn.Identity()):
        for index, batch in enumerate(iterate(data)):
            x, labels = input_of(batch, input, index), class_labels(batch)
            if max_samples is not None:
                x = x[: max_samples - samples]
                labels = None if labels is None else labels[: len(x)]
            if not len(x):
                continue
            if labels is not None and len(labels) != len(x):
                raise InputError(f"batch {index} has {len(x)} inputs and {len(labels)} labels")
            first = x if first is None else first
            scores = [scores_of(each, x, index) for each in models]
            for tally, own in zip(tallies, scores, strict=True):
                tally.add(own, labels, scores[-1] if original is not None else None)
            samples += len(x)
            report(EvaluationProgress(done=index + 1, total=count_batches(data), samples=samples))
            if samples == max_samples:
                break
    if first is None:
        raise InputError("no batches: the iterable given as data is empty")
    times: list[Timing] | list[None] = [None] * len(models)
    if latency:
        times = measure_latency(models, first[:latency_batch], rounds=rounds)
    found = [
        tally.result(size_of(each, first[:1]), time) for tally, each, time in zip(tallies, models, times, strict=True)
    ]
    if original is None:
        return found[0]
    certificate = None
    if confidence is not None:
        certificate = Certificate(samples=samples, agreed=tallies[0].agreed, confidence=confidence)
    return replace(found[0], original=found[1], certificate=certificate)


class _Tally:
    """Counts of one model. A row of scores without a largest number is no answer: neither right nor like another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples = self.hits = self.hits5 = self.agreed = self.unanswered = 0
        self.labelled = self.many = True
        self.compared = False

    def add(self, scores: Tensor, labels: Tensor | None, reference: Tensor | None) -> None:
        self.samples += len(scores)
        best, sound = scores.argmax(1), answered(scores)
        self.unanswered += int((~sound).sum())
        if labels is None:
            self.labelled = False
        else:
            target = labels.to(scores.device)
            self.hits += int(((best == target) & sound).sum())
            self.many = self.many and scores.shape[1] > 5
            if self.many:
                among = (scores.topk(5, 1).indices == target[:, None]).any(1)
                self.hits5 += int((among & sound).sum())
        if reference is not None:
            self.compared = True
            alike = best == reference.argmax(1).to(best.device)
            self.agreed += int((alike & sound & answered(reference).to(best.device)).sum())

    def result(self, size: Size, latency: Timing | None) -> Evaluation:
        if self.unanswered:
            logger.warning(
                "%s gives scores that are not finite to %d of %d samples; they count as wrong",
                self.name,
                self.unanswered,
                self.samples,
            )
        return Evaluation(
            samples=self.samples,
            top1=self.hits / self.samples if self.labelled else None,
            top5=self.hits5 / self.samples if self.labelled and self.many else None,
            agreement=self.agreed / self.samples if self.compared else None,
            size=size,
            latency=latency,
        )


def _reporter(progress: bool | Callable[[EvaluationProgress], None]) -> Callable[[EvaluationProgress], None]:
    if callable(progress):
        return progress
    if not progress:
        return lambda state: None
    return lambda state: logger.info("evaluation: %d samples", state.samples)


def _percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{100 * value:.2f} %"


def _milliseconds(latency: Timing | None) -> str:
    return "–" if latency is None else f"{1000 * latency.minimum:.2f} ms (+{100 * latency.spread:.0f} %)"

"""Accuracy and cost of a model, compared with the original if there is one."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import nn

from tensigma.errors import StoreError
from tensigma.evaluation.certificate import Certificate, check_confidence
from tensigma.evaluation.latency import Timing, measure_latency
from tensigma.evaluation.size import Size, size_of
from tensigma.files import anything, integer, mapping, number, optional, record
from tensigma.running import (
    Batch,
    Batches,
    Progress,
    Tally,
    Wanted,
    borrowed,
    reporter,
    run,
    samples_per_second,
    scores_of,
)
from tensigma.text import count, table

FORMAT = "tensigma-evaluation"
VERSION = 1
_SHARE = optional(number(0, 1))
#: The figures whose values are checked when they are read.
_CHECKED = record(
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
        "original": optional(mapping(anything)),
    },
    {"certificate": optional(mapping(anything))},
    others=anything,
)
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
    #: Share of samples whose label is the first prediction (top5: among the first five). None without labels.
    top1: float | None
    #: Also None with at most five classes.
    top5: float | None
    #: Share of samples on which the prediction is that of the original.
    agreement: float | None
    size: Size
    latency: Timing | None = None
    #: The same figures of the original, measured in the same run.
    original: Evaluation | None = None
    #: What the agreement proves about other inputs; None without an original, or if not requested.
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
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["size"] = asdict(self.size)
        plain["latency"] = None if self.latency is None else asdict(self.latency)
        plain["original"] = None if self.original is None else self.original.to_json()
        plain["certificate"] = None if self.certificate is None else self.certificate.to_json()
        return {"format": FORMAT, "version": VERSION, "rate": self.rate, "speedup": self.speedup, **plain}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """The inverse of :meth:`to_json`."""
        if not isinstance(data, Mapping):
            raise StoreError(f"the evaluation is damaged: it is {data!r}")
        if data.get("format", FORMAT) != FORMAT or data.get("version", VERSION) != VERSION:
            raise StoreError(f"this is not an evaluation of version {VERSION}, written by Evaluation.to_json")
        try:
            _CHECKED(data, "the evaluation is damaged")
            values = {field.name: data[field.name] for field in fields(cls) if field.name != "certificate"}
            values["size"] = Size(**values["size"])
            values["latency"] = values["latency"] and Timing(**values["latency"])
            values["original"] = values["original"] and cls.from_json(values["original"])
            certified = data.get("certificate")
            return cls(**values, certificate=certified and Certificate.from_json(certified))
        except (KeyError, TypeError) as error:
            raise StoreError(f"the evaluation is damaged: {error}") from None

    def __str__(self) -> str:
        columns = [self] if self.original is None else [self.original, self]
        header = ["", *(["model"] if self.original is None else ["original", "model"])]
        rows = [
            ["top-1", *(_percent(column.top1) for column in columns)],
            ["top-5", *(_percent(column.top5) for column in columns)],
            ["agreement", *(_percent(column.agreement) for column in columns)],
            ["parameters", *(count(column.size.params) for column in columns)],
            ["MACs", *(count(column.size.macs) for column in columns)],
            ["bytes", *(count(column.size.bytes) for column in columns)],
            ["latency", *(_milliseconds(column.latency) for column in columns)],
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
    progress: Wanted = False,
) -> Evaluation:
    """Run ``model`` over ``data`` and count hits, agreement with ``original``, parameters, MACs, bytes and time.

    Args:
        model: A classifier that returns scores (batch, classes). It stays as it is.
        data: Batches as :func:`tensigma.calibrate` takes them. Labels, if every batch has them (the second item of a
            tuple, or ``label``, ``labels``, ``target``, ``targets`` or ``y`` of a dict), give top-1 and top-5.
        original: The model before compression: its figures are measured too, and agreement with it needs no labels.
        latency: Also measure time, on one thread and in turn with the original, for ``rounds`` passes over the first
            ``latency_batch`` inputs.
        max_samples: Stop after this many.
        input: The entry or position of the model's input in a batch.
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
        progress=progress,
    )
    result = figures["the model"]
    if original is None:
        return result
    certificate = None
    if confidence is not None:
        assert result.agreement is not None
        agreed = round(result.agreement * result.samples)
        certificate = Certificate(samples=result.samples, agreed=agreed, confidence=confidence)
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
    input: str | int | None = None,
    progress: Wanted = False,
) -> dict[str, Evaluation]:
    """Several models over the same data, read once: accuracy, agreement with ``reference``, size, and time in turn.

    ``sizes`` are for models whose size cannot be counted, such as ONNX files.

    >>> models = {"one": nn.Identity(), "other": nn.Softmax(1)}
    >>> figures = compare(models, [(torch.eye(6), torch.arange(6))], reference="one", rounds=2)
    >>> figures["other"].top1, figures["other"].agreement, figures["other"].latency.rounds
    (1.0, 1.0, 2)
    """
    tallies = {name: Tally() for name in models}
    report, start = reporter(progress), time.perf_counter()
    batches = Batches(data, input=input, max_samples=max_samples, name="data")
    first: Batch | None = None
    samples = 0
    with torch.inference_mode(), borrowed(nn.ModuleList(models.values())):
        for batch in batches:
            first = batch if first is None else first
            scores = {name: scores_of(run(model, batch), batch.index) for name, model in models.items()}
            for name, tally in tallies.items():
                tally.add(scores[name], batch.labels, None if reference is None else scores[reference])
            samples += len(batch)
            seconds = time.perf_counter() - start
            report(EvaluationProgress(done=batch.index + 1, total=batches.n_batches, samples=samples, seconds=seconds))
    assert first is not None
    times: list[Timing] | list[None] = [None] * len(models)
    if latency:
        times = measure_latency(list(models.values()), first.inputs[:latency_batch], rounds=rounds)
    figures = {}
    for (name, model), timing in zip(models.items(), times, strict=True):
        size = sizes[name] if sizes is not None and name in sizes else size_of(model, first.inputs[:1])
        figures[name] = _figures(name, tallies[name], size, timing)
    return figures


def _figures(name: str, tally: Tally, size: Size, latency: Timing | None) -> Evaluation:
    if tally.unanswered:
        logger.warning(
            "%s gives scores that are not finite for %d of %d samples; they count as wrong",
            name,
            tally.unanswered,
            tally.samples,
        )
    return Evaluation(
        samples=tally.samples,
        top1=tally.top1,
        top5=tally.top5,
        agreement=tally.agreement,
        size=size,
        latency=latency,
    )


def _percent(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{100 * value:.2f} %"


def _milliseconds(latency: Timing | None) -> str:
    return "–" if latency is None else f"{1000 * latency.minimum:.2f} ms (+{100 * latency.spread:.0f} %)"

"""The history of a fine-tuning by learning rate and epoch: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from tensigma.errors import StoreError
from tensigma.files import anything, integer, number, optional, record, sequence, text
from tensigma.running import Progress, samples_per_second
from tensigma.text import share, table

FORMAT = "tensigma-finetuning"
VERSION = 1
#: What a stored epoch holds.
EPOCH = record(
    {
        "epoch": integer(),
        "loss": optional(number()),
        "validation_loss": optional(number()),
        "score": number(0, 1),
        "samples": integer(),
        "seconds": number(0),
    }
)
_TUNING = record(
    {
        "measure": text(),
        "optimizer": text(),
        "start": EPOCH,
        "rates": sequence(record({"learning_rate": number(0), "epochs": sequence(EPOCH, least=1), "ended": text()})),
        "learning_rate": optional(number(0)),
        "epoch": integer(),
        "validation_samples": integer(),
        "seconds": number(0),
    },
    {"library": text(), "answers": text()},
    others=anything,
)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch of one learning rate."""

    #: From 1 on; 0 is the model before training.
    epoch: int
    #: Mean loss while training; None if it was not finite, and for epoch 0.
    loss: float | None
    #: Mean loss and share of hits on the validation samples, after the epoch.
    validation_loss: float | None
    score: float
    #: Samples trained on.
    samples: int
    seconds: float

    @property
    def diverged(self) -> bool:
        """Whether the loss became infinite or NaN."""
        return self.validation_loss is None

    @property
    def key(self) -> tuple[float, float]:
        """What epochs are compared by, larger is better: the score, then the negative loss."""
        return (-1.0, 0.0) if self.validation_loss is None else (self.score, -self.validation_loss)


@dataclass(frozen=True, kw_only=True)
class RateHistory:
    """One learning rate: its epochs, and why it ended."""

    learning_rate: float
    epochs: tuple[Epoch, ...]
    #: "all epochs", "patience", "eliminated" or "diverged".
    ended: str


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """The history of all learning rates, and which epoch of which rate was kept.

    ``str(tuning)`` is a table; :meth:`to_json` gives plain data from which :meth:`from_json` makes an equal object.

    >>> import torch
    >>> import tensigma as ts
    >>> model, teacher = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    >>> batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    >>> tuned, history = ts.finetune(model, batches, teacher=teacher, epochs=2, learning_rates=(0.1, 0.01))
    >>> history.measure, [len(rate.epochs) for rate in history.rates], history.best.key >= history.start.key
    ('agreement', [2, 2], True)
    """

    #: What the score is: "top1", the share of correct answers, "agreement" with the teacher, or what takes its place:
    #: "average precision", "closeness" (1 − relative error), "likeness".
    measure: str
    optimizer: str
    #: The model before training.
    start: Epoch
    rates: tuple[RateHistory, ...]
    #: The rate and epoch that were kept; None and 0 if no epoch was better than the model before training.
    learning_rate: float | None
    epoch: int
    validation_samples: int
    seconds: float
    #: Version of the library.
    library: str = ""
    #: What is compared, in words; empty in results of version 0.1.
    answers: str = ""

    @property
    def best(self) -> Epoch:
        """The epoch that was kept."""
        for rate in self.rates:
            if rate.learning_rate == self.learning_rate:
                return rate.epochs[self.epoch - 1]
        return self.start

    def to_json(self) -> dict[str, Any]:
        """Plain data: dicts, lists, numbers, strings and None."""
        data = asdict(self)
        data["rates"] = [{**rate, "epochs": list(rate["epochs"])} for rate in data["rates"]]
        return {"format": FORMAT, "version": VERSION, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FineTuning:
        """The inverse of :meth:`to_json`.

        >>> start = Epoch(epoch=0, loss=None, validation_loss=0.7, score=0.5, samples=0, seconds=0.0)
        >>> tuning = FineTuning(
        ...     measure="top1",
        ...     optimizer="adam",
        ...     start=start,
        ...     rates=(),
        ...     learning_rate=None,
        ...     epoch=0,
        ...     validation_samples=10,
        ...     seconds=1.0,
        ... )
        >>> FineTuning.from_json(tuning.to_json()) == tuning, tuning.best == start
        (True, True)
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise StoreError(f"this is not a fine-tuning of version {VERSION}, written by FineTuning.to_json")
        _TUNING(data, "the fine-tuning is damaged")
        values = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        values["start"] = Epoch(**values["start"])
        values["rates"] = tuple(
            RateHistory(**{**rate, "epochs": tuple(Epoch(**epoch) for epoch in rate["epochs"])})
            for rate in values["rates"]
        )
        tuning = cls(**values)
        kept = next((rate for rate in tuning.rates if rate.learning_rate == tuning.learning_rate), None)
        if tuning.learning_rate is not None and (kept is None or not 1 <= tuning.epoch <= len(kept.epochs)):
            raise StoreError("the fine-tuning is damaged: the epoch that was kept is not among its epochs")
        return tuning

    def __str__(self) -> str:
        header = ["learning rate", "epochs", "best epoch", "loss", "validation loss", self.measure, "ended by"]
        rows = [["before training", "", "", "", share(self.start.validation_loss), _percent(self.start.score), ""]]
        for rate in self.rates:
            best = max(rate.epochs, key=lambda epoch: epoch.key)
            rows.append(
                [
                    f"{rate.learning_rate:g}" + (" (kept)" if rate.learning_rate == self.learning_rate else ""),
                    str(len(rate.epochs)),
                    str(best.epoch),
                    share(best.loss),
                    share(best.validation_loss),
                    _percent(best.score),
                    rate.ended,
                ]
            )
        figures = table(header, rows, left=(0, 6))
        return f"{figures}\ncompared: {self.answers}" if self.answers else figures


@dataclass(frozen=True, kw_only=True)
class FineTuningProgress(Progress):
    """Progress after each batch; a step is one epoch of one learning rate, and ``done`` includes fractions.

    >>> print(FineTuningProgress(learning_rate=1e-3, epoch=1, epochs=2, done=0.5, total=4, loss=0.3, score=None,
    ...                          samples=50, seconds=2.0))
    rate 0.001, epoch 1 of 2, loss 0.300, 25 samples/s
    """

    title: ClassVar[str] = "fine-tuning"

    learning_rate: float
    epoch: int
    epochs: int
    #: Mean loss of the current epoch so far.
    loss: float
    #: The best score of all rates so far; None before the first validation.
    score: float | None
    #: Samples since the run started or resumed.
    samples: int

    def __str__(self) -> str:
        best = "" if self.score is None else f", best {_percent(self.score)}"
        return (
            f"rate {self.learning_rate:g}, epoch {self.epoch} of {self.epochs}, loss {self.loss:.3f}{best}, "
            f"{samples_per_second(self.samples, self.seconds)}"
        )


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"

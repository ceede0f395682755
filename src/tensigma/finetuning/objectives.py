"""What a model is trained towards: labels, the answers of another model, or a loss function of the user's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tensigma.errors import InputError
from tensigma.running import Answers, Batch, Numbers, Scores, Tally, Wish, first_answers, run

_NORMS = (nn.modules.batchnorm._BatchNorm,)
#: The model and a pair of inputs and labels → the loss.
LossFunction = Callable[[nn.Module, tuple[Any, Any]], Tensor]


class Objective(ABC):
    """What is made small while training, and by which figure epochs are compared."""

    def __init__(self, answers: Wish) -> None:
        self._wish = answers
        #: How answers are read; None before the first.
        self.reading: Answers | None = None

    @property
    @abstractmethod
    def measure(self) -> str:
        """The name of the figure."""

    @property
    def in_evaluation_mode(self) -> bool:
        """Whether a model is trained in evaluation mode, because its answer in training mode is another one."""
        return False

    @abstractmethod
    def loss(self, model: nn.Module, x: Any, labels: Any, index: int) -> Tensor:
        """The loss of a batch."""

    @abstractmethod
    def judge(self, model: nn.Module, x: Any, labels: Any, index: int, tally: Tally) -> float:
        """Count a batch of validation samples; returns its loss."""

    def tally(self, model: nn.Module, x: Any, labels: Any) -> Tally:
        """Where answers are counted; ``x`` is the first batch."""
        if self.reading is None:
            self.reading = self._read(model, Batch(0, x, None if labels is None else (x, labels)))
        return Tally(self.reading)

    def _read(self, model: nn.Module, batch: Batch) -> Answers:
        return first_answers(model, batch, self._wish)[1]

    @abstractmethod
    def score(self, tally: Tally) -> float:
        """The figure between 0 and 1."""


class Labels(Objective):
    """The labels of the samples: cross-entropy and the share of correct answers, or squared error for numbers."""

    @property
    def measure(self) -> str:
        assert self.reading is not None
        return "top1" if isinstance(self.reading.parts[0].kind, Scores) else self.reading.measure

    def loss(self, model: nn.Module, x: Any, labels: Any, index: int) -> Tensor:
        return self._loss(run(model, Batch(index, x, None)), labels, index)

    def _loss(self, output: Any, labels: Any, index: int) -> Tensor:
        if labels is None:
            raise InputError(
                f"batch {index} holds no labels; give (input, labels) pairs with one class number for each input, or "
                "{teacher}, the original model, whose answers replace them",
                parameters=("teacher",),
            )
        assert self.reading is not None
        answer, kind = self.reading.read(output)[0], self.reading.parts[0].kind
        if isinstance(kind, Scores) and isinstance(labels, Tensor) and not labels.is_floating_point():
            scores = kind.rows(answer)
            target = labels.to(scores.device).long().reshape(len(labels), -1)
            # In maps a label outside the classes marks what is left out.
            outside = (target < 0) | (target >= scores.shape[1])
            target = target.masked_fill(outside, -100) if scores.shape[2] > 1 else target
            return functional.cross_entropy(scores, target)
        if isinstance(kind, Numbers) and isinstance(labels, Tensor) and labels.shape == answer.shape:
            return (answer - labels.to(answer)).square().mean()
        raise InputError(
            f"the answers are {self.reading}, and the labels of batch {index} do not say what is right; give "
            "{teacher}, the original model, or {loss}, a function of the model and a batch",
            parameters=("teacher", "loss"),
        )

    def judge(self, model: nn.Module, x: Any, labels: Any, index: int, tally: Tally) -> float:
        output = run(model, Batch(index, x, None))
        loss = self._loss(output, labels, index).item()
        answer = tally.answers.read(output)[0]
        numbers = isinstance(tally.answers.parts[0].kind, Numbers)
        tally.parts[0].add(answer, labels, labels.to(answer) if numbers else None)
        return loss

    def score(self, tally: Tally) -> float:
        assert tally.main is not None
        return tally.main.accuracy or tally.main.likeness or 0.0


class Teacher(Objective):
    """The answers of another model: the distance at every part of them, and how much the main part is alike.

    Of scores the distance is the Kullback–Leibler divergence, softened by ``temperature``; of numbers, and of the raw
    outputs behind boxes, the squared error relative to their variance.
    """

    def __init__(self, model: nn.Module, temperature: float, answers: Wish = None) -> None:
        super().__init__(answers)
        self._model, self._temperature = model, temperature
        self._variances: list[float] = []

    @property
    def measure(self) -> str:
        assert self.reading is not None
        return self.reading.measure

    @property
    def in_evaluation_mode(self) -> bool:
        return self.reading is not None and bool(self.reading.raw)

    def _read(self, model: nn.Module, batch: Batch) -> Answers:
        with torch.no_grad():
            reading = first_answers(self._model, Batch(batch.index, batch.inputs, None), self._wish)[1]
            tensors = reading.run(self._model, batch)[1]
        variances = [tensor.double().var(correction=0).item() if tensor.numel() else 0.0 for tensor in tensors]
        # Errors of a constant are absolute.
        self._variances = [variance if 0 < variance < float("inf") else 1.0 for variance in variances]
        return reading

    def _compared(self, model: nn.Module, x: Any, index: int) -> tuple[Tensor, Any, Any]:
        """The loss of a batch, and the outputs of model and teacher."""
        assert self.reading is not None
        batch = Batch(index, x, None)
        with torch.no_grad():
            target_output, targets = self.reading.run(self._model, batch)
        output, answers = self.reading.run(model, batch)
        for answer, target in zip(answers, targets, strict=False):
            if answer.shape != target.shape:
                raise InputError(
                    f"the model gives answers of shape {tuple(answer.shape)} and the teacher {tuple(target.shape)}; the"
                    " teacher must have the same classes, as the original of a compressed model does"
                )
        kinds = self.reading.kinds(len(targets))
        losses = [
            kind.distance(answer, target.to(answer), variance, self._temperature)
            for kind, answer, target, variance in zip(kinds, answers, targets, self._variances, strict=True)
        ]
        return torch.stack(losses).sum(), output, target_output

    def loss(self, model: nn.Module, x: Any, labels: Any, index: int) -> Tensor:
        return self._compared(model, x, index)[0]

    def judge(self, model: nn.Module, x: Any, labels: Any, index: int, tally: Tally) -> float:
        loss, output, target = self._compared(model, x, index)
        tally.add(output, len(x), None, target)
        return loss.item()

    def score(self, tally: Tally) -> float:
        tally.warn()
        return tally.likeness or 0.0


class Given(Objective):
    """A loss function of the user's; epochs are compared by likeness to the teacher or the labels, else by the loss."""

    def __init__(self, loss: LossFunction, teacher: nn.Module | None, answers: Wish = None) -> None:
        super().__init__(answers)
        self._loss, self._teacher = loss, teacher

    @property
    def measure(self) -> str:
        assert self.reading is not None
        if self._teacher is None and isinstance(self.reading.parts[0].kind, Scores):
            return "top1"
        return self.reading.measure

    def _read(self, model: nn.Module, batch: Batch) -> Answers:
        with torch.no_grad():
            return first_answers(self._teacher or model, batch, self._wish, ask=False)[1]

    def loss(self, model: nn.Module, x: Any, labels: Any, index: int) -> Tensor:
        loss = self._loss(model, (x, labels))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InputError("{loss} is a function that returns one number as a tensor", parameters=("loss",))
        return loss.reshape(())

    def judge(self, model: nn.Module, x: Any, labels: Any, index: int, tally: Tally) -> float:
        batch = Batch(index, x, None)
        tally.add(run(model, batch), len(x), labels, None if self._teacher is None else run(self._teacher, batch))
        # Some models, such as detectors, have their losses in training mode only; statistics must not move here.
        model.train()
        for module in model.modules():
            if isinstance(module, _NORMS):
                module.eval()
        try:
            return self.loss(model, x, labels, index).item()
        finally:
            model.eval()

    def score(self, tally: Tally) -> float:
        share = None if tally.main is None else tally.main.accuracy
        return (share if self._teacher is None else tally.likeness) or 0.0

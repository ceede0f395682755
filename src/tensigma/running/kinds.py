"""What a part of a model's answer means: class scores, plain numbers, or boxes with scores.

Each kind knows how two answers are compared: by which figures, and by which distance where a choice or a training step
needs one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.running.precision import Detections

#: Two outputs of models → their likeness between 0 and 1, of the batch or of each sample.
LikenessFunction = Callable[[Any, Any], Any]


# Smaller ones count as this one: a softmax in single precision may give 0, whose logarithm is infinite.
_LEAST_PROBABILITY = 1e-12
# Mean probability of the likeliest class at which answers are compared, and the highest temperature that leads there. A
# ResNet-20 on CIFAR-10 is sure of 0.99, and 4, at which all of CIFAR-10 has been refined, leaves it 0.86; a ResNet-50
# on ImageNet has 0.82 as it is, and 0.08 at 4.
_CERTAINTY, _SOFTEST, _BISECTIONS = 0.8, 4.0, 20


def are_probabilities(scores: Tensor, axis: int) -> bool:
    """Whether these numbers are probabilities of classes along ``axis``.

    >>> are_probabilities(torch.full((2, 4), 0.25), 1), are_probabilities(torch.eye(3) * 2, 1)
    (True, False)
    """
    return bool((scores >= 0).all()) and bool(((scores.sum(axis, dtype=torch.float64) - 1).abs() < 1e-3).all())


def _certainty(logits: Tensor) -> float:
    """The mean probability of the likeliest class; classes are the last axis."""
    return logits.softmax(-1).amax(-1).mean().item()


class Kind(ABC):
    """The meaning of one part of an answer."""

    #: The name of the share in [0, 1] by which two answers are alike.
    measure: ClassVar[str]

    @abstractmethod
    def check(self, part: Any, name: str) -> None:
        """Refuse a part that cannot have this meaning."""

    @abstractmethod
    def words(self, part: Any) -> str:
        """What the part is, for a reader."""


class Smooth(Kind):
    """A kind whose answers are one tensor, with a distance that has a gradient."""

    @abstractmethod
    def distance(self, answer: Tensor, target: Tensor, variance: Any, temperature: float = 1.0) -> Tensor:
        """The distance from ``target``, the mean over samples; ``variance`` is that of targets."""

    @abstractmethod
    def root(self, answer: Tensor, signs: Tensor, variance: float) -> Tensor:
        """R ``signs`` with R Rᵀ the curvature of the distance of a sample, so that random signs give random moves."""


@dataclass(frozen=True)
class Scores(Smooth):
    """Class scores along ``axis``, at one or many positions: the answer at a position is the class of the largest.

    Two models are alike as often as they give the same class. A *sample* counts as answered alike if that is so at a
    share ``least`` of its positions or more: with one position, as in a classifier, there is no difference.

    >>> Scores()
    Scores(axis=1, least=0.95)
    """

    axis: int = 1
    least: float = 0.95
    measure: ClassVar[str] = "agreement"

    def __post_init__(self) -> None:
        if isinstance(self.axis, bool) or not isinstance(self.axis, int) or self.axis == 0:
            raise InputError(f"Scores: axis is the number of the axis of classes, such as 1 or -1, got {self.axis!r}")
        if isinstance(self.least, bool) or not isinstance(self.least, int | float) or not 0 < self.least <= 1:
            raise InputError(f"Scores: least is a share above 0 and up to 1, got {self.least!r}")

    def check(self, part: Any, name: str) -> None:
        fits = isinstance(part, Tensor) and part.is_floating_point()
        fits = fits and part.dim() >= 2 and -part.dim() < self.axis < part.dim() and part.shape[self.axis] > 1
        if not fits:
            shape = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise InputError(
                f"{name} is {shape}; scores of at least two classes along axis {self.axis} are real numbers of shape "
                "(batch, classes) or, with positions, such as (batch, classes, height, width)"
            )

    def words(self, part: Any) -> str:
        return f"scores of {part.shape[self.axis]:,} classes along axis {self.axis}"

    def rows(self, scores: Tensor) -> Tensor:
        """Scores as (batch, classes, positions).

        >>> Scores(axis=-1).rows(torch.zeros(2, 7, 5)).shape
        torch.Size([2, 5, 7])
        """
        return scores.movedim(self.axis, 1).flatten(2) if scores.dim() > 2 else scores.unsqueeze(2)

    def distance(self, answer: Tensor, target: Tensor, variance: Any, temperature: float = 1.0) -> Tensor:
        """The Kullback–Leibler divergence of class probabilities; positions that ``target`` leaves open count 0.

        Scores are logits, or probabilities already, where the network ends with a softmax.

        >>> p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
        >>> torch.allclose(Scores().distance(q, p, 1.0), Scores().distance(q.log(), p.log() + 3, 1.0))
        True
        """
        if are_probabilities(target, self.axis):
            answer, target = (scores.clamp_min(_LEAST_PROBABILITY).log() for scores in (answer, target))
        log_q, log_p = (self.rows(scores / temperature).log_softmax(1) for scores in (answer, target))
        answered = self.rows(target).amax(1, keepdim=True).isfinite()
        p = log_p.exp()
        # A class that the target rules out adds nothing.
        terms = torch.where((p > 0) & answered, p * (log_p - log_q), 0.0)
        # T² keeps gradients at the scale they have at T = 1.
        return terms.sum() / (terms.shape[0] * terms.shape[2]) * temperature**2

    def softening(self, target: Tensor) -> float:
        """The temperature, from 1 to 4, at which the likeliest class has a mean probability of 0.8.

        At a lower one, answers of which a model is sure say nothing of other classes; at a higher one the many classes
        that it rules out would count most.

        >>> Scores().softening(torch.tensor([[20.0, 0.0]])), Scores().softening(torch.tensor([[1.0, 0.5]]))
        (4.0, 1.0)
        """
        if are_probabilities(target, self.axis):
            target = target.clamp_min(_LEAST_PROBABILITY).log()
        rows = self.rows(target.detach().double())
        rows = rows.movedim(1, -1)[rows.amax(1).isfinite()]  # (positions, classes)
        low, high = 1.0, _SOFTEST
        if not len(rows) or _certainty(rows / low) <= _CERTAINTY:
            return low
        if _certainty(rows / high) >= _CERTAINTY:
            return high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _certainty(rows / middle) > _CERTAINTY else (low, middle)
        return high

    def root(self, answer: Tensor, signs: Tensor, variance: float) -> Tensor:
        # ½ (diag p − p pᵀ) is the curvature of the divergence of probabilities, and this its root.
        given = are_probabilities(answer, self.axis)
        root = (answer.clamp_min(_LEAST_PROBABILITY) if given else answer.softmax(self.axis)).sqrt()
        n_positions = answer[0].numel() // answer.shape[self.axis]
        moves = root * (signs - root * (root * signs).sum(self.axis, keepdim=True)) / (2 * n_positions) ** 0.5
        # A logit moves by dp ÷ p.
        return moves / root.square() if given else moves


@dataclass(frozen=True)
class Numbers(Smooth):
    """Plain numbers: a regression, an image, an embedding. What counts is the relative error √(Σ|Δy|² ÷ Σ|y|²).

    >>> Numbers()
    Numbers()
    """

    measure: ClassVar[str] = "closeness"

    def check(self, part: Any, name: str) -> None:
        if not isinstance(part, Tensor) or not part.is_floating_point():
            shape = f"a tensor of {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
            raise InputError(f"{name} is {shape}; a tensor of real numbers is needed to compare numbers")

    def words(self, part: Any) -> str:
        return f"numbers of shape {tuple(part.shape[1:])}"

    def distance(self, answer: Tensor, target: Tensor, variance: Any, temperature: float = 1.0) -> Tensor:
        """The mean squared error relative to ``variance``, over values of ``target`` that are finite."""
        finite = target.isfinite()
        if not finite.any():
            return answer.sum() * 0.0
        return (answer - target)[finite].square().mean() / variance

    def root(self, answer: Tensor, signs: Tensor, variance: float) -> Tensor:
        return signs / (variance * answer[0].numel()) ** 0.5


@dataclass(frozen=True)
class Boxes(Kind):
    """Detections: boxes with scores and classes, one set an image.

    An answer is a list with a dict for each image, as torchvision's detectors return, or one dict of tensors whose
    first axis is the image. The original's detections with a score of at least ``score`` are what a small model has to
    find: the figure is its average precision at an overlap of ``iou`` (of several, the mean).

    Args:
        iou: Least intersection over union of a box with the one it finds, or several.
        score: The least score at which a detection of the original counts.
        boxes: The key of boxes, x₁ y₁ x₂ y₂.
        scores: The key of their scores.
        labels: The key of their classes; without it all boxes are of one class.

    >>> Boxes(iou=0.75).thresholds
    (0.75,)
    """

    iou: float | tuple[float, ...] = 0.5
    score: float = 0.5
    boxes: str = "boxes"
    scores: str = "scores"
    labels: str = "labels"
    measure: ClassVar[str] = "average precision"

    def __post_init__(self) -> None:
        numbers = all(not isinstance(each, bool) and isinstance(each, int | float) for each in self.thresholds)
        if not numbers or not self.thresholds or not all(0 < each <= 1 for each in self.thresholds):
            raise InputError(f"Boxes: iou is an overlap above 0 and up to 1, or several, got {self.iou!r}")
        if isinstance(self.score, bool) or not isinstance(self.score, int | float) or not 0 <= self.score <= 1:
            raise InputError(f"Boxes: score is the least score that counts, between 0 and 1, got {self.score!r}")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The overlaps that precision is averaged over."""
        return tuple(self.iou) if isinstance(self.iou, tuple | list) else (self.iou,)

    def check(self, part: Any, name: str) -> None:
        if not self.fits(part):
            raise InputError(
                f"{name} holds no boxes: a list with a dict for each image, or one dict, is needed, with the keys "
                f"{self.boxes!r} and {self.scores!r}; it is a {type(part).__name__}"
            )

    def fits(self, part: Any) -> bool:
        """Whether this is an answer with boxes and scores."""
        images = part if isinstance(part, list | tuple) else [part]
        return bool(images) and all(
            isinstance(image, Mapping)
            and isinstance(image.get(self.boxes), Tensor)
            and isinstance(image.get(self.scores), Tensor)
            and image[self.boxes].shape[-1:] == (4,)
            for image in images
        )

    def words(self, part: Any) -> str:
        return "boxes with scores" + (" and classes" if self._has_labels(part) else "")

    def _has_labels(self, part: Any) -> bool:
        first = part[0] if isinstance(part, list | tuple) else part
        return self.labels in first

    def detections(self, part: Any, *, labelled: bool = False) -> list[Detections]:
        """The boxes of every image, on the CPU; of labels, without scores, with ``labelled``."""
        if isinstance(part, Mapping):
            size = len(part[self.boxes])
            part = [{key: value[index] for key, value in part.items() if len(value) == size} for index in range(size)]
        detections = []
        for image in part:
            boxes = torch.as_tensor(image[self.boxes]).detach().cpu().double().reshape(-1, 4)
            classes = image.get(self.labels, torch.zeros(len(boxes)))
            scores = torch.ones(len(boxes)) if labelled else image[self.scores]
            scores, classes = (torch.as_tensor(each).detach().cpu().flatten() for each in (scores, classes))
            finite = boxes.isfinite().all(1) & scores.isfinite()
            detections.append(Detections(boxes[finite], scores[finite], classes[finite]))
        return detections


@dataclass(frozen=True)
class Likened(Kind):
    """Answers compared by a function of the user's."""

    function: LikenessFunction
    measure: ClassVar[str] = "likeness"

    def check(self, part: Any, name: str) -> None:
        """Any answer will do."""

    def words(self, part: Any) -> str:
        return f"compared by {self.name}"

    @property
    def name(self) -> str:
        """The name of the function, if it has one."""
        name = str(getattr(self.function, "__name__", "<>"))
        return "a function" if name.startswith("<") else name

    def likeness(self, answer: Any, reference: Any) -> tuple[float, Tensor | None]:
        """The mean likeness over samples; and whether each sample is alike, if that is what the function says.

        >>> Likened(lambda one, other: one == other).likeness(torch.tensor([1, 2]), torch.tensor([1, 3]))
        (0.5, tensor([ True, False]))
        """
        returned = torch.as_tensor(self.function(answer, reference))
        value = returned.double().mean().item()
        if not 0 <= value <= 1:
            raise InputError(f"answers= was given a function that returned {value:g}; a likeness lies in [0, 1]")
        return value, returned if returned.dtype == torch.bool and returned.dim() == 1 else None

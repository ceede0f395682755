"""How far the answers of a model are from the original's, on samples kept in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.running.answers import Answers, UnlikeAnswers, Wish, first_answers
from tensigma.running.batches import Batch, Batches, Key
from tensigma.running.borrowing import borrowed, kept_rng
from tensigma.running.digests import Digest
from tensigma.running.inputs import mapped, split, taken, tensors_in
from tensigma.running.kinds import Smooth
from tensigma.running.levels import levels
from tensigma.running.processes import all_notes, share_of, together

# The most samples in a piece, and the most bytes of all samples and answers.
_PIECE, _BYTES = 64, 256 * 2**20
#: Samples on which the meaning of answers is guessed.
_FIRST = 8


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some samples, and the original's answers to them."""

    batch: Batch
    answers: list[Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*tensors_in(self.batch.inputs), *self.answers))


class Probe:
    """The first ``samples`` samples of ``batches``, in memory, with the answers of ``original``. No labels.

    There are fewer if the batches hold fewer, or if samples and answers would take more than 256 MiB. ``answers`` says
    what the answers are; without it they are guessed, and what is unclear is compared as numbers.

    Under ``torchrun`` all processes make a probe and measure together: each holds its share of ``samples``, of the
    batches that it was given, and divergences are those over all shares.

    >>> model = nn.Linear(3, 4)
    >>> probe = Probe(model, [torch.randn(8, 3)], samples=5)
    >>> probe.samples, probe.divergence(model) < 1e-6, probe.divergence(nn.Linear(3, 4)) > 0.001
    (5, True, True)
    """

    def __init__(
        self, original: nn.Module, batches: Any, *, samples: int, input: Key = None, answers: Wish = None
    ) -> None:
        self._pieces: list[_Piece] = []
        self._wish = answers
        #: How answers are read; None before the first.
        self.reading: Answers | None = None
        # A loader that shuffles draws from the global generator.
        with kept_rng(), borrowed(original), torch.no_grad():
            together(lambda: self._read(original, batches, share_of(samples), input), alike=(UnlikeAnswers,))
        #: The variance of each answer over all samples.
        self._variances = _variances(
            together(lambda: _spreads([piece.answers for piece in self._pieces]), alike=(UnlikeAnswers,)),
            next(filter(None, all_notes(self._levels())), []),
        )

    def _read(self, original: nn.Module, batches: Any, samples: int, key: Key) -> None:
        n_bytes = 0
        # A stream that has ended gives nothing; its probe is silent.
        for batch in Batches(batches, input=key, max_samples=samples, name="data", allow_empty=True):
            if self.reading is None:
                few = Batch(batch.index, taken(batch.inputs, slice(_FIRST)), None)
                _, self.reading = first_answers(original, few, self._wish, ask=False)
            for inputs in split(batch.inputs, _PIECE):
                # Copies, so that the rest of a large batch need not be kept.
                part = Batch(batch.index, mapped(inputs, torch.clone), None)
                piece = _Piece(part, [tensor.cpu() for tensor in self.answers(original, part)])
                n_bytes += piece.n_bytes
                if self._pieces and n_bytes > _BYTES:
                    return
                self._pieces.append(piece)

    @property
    def samples(self) -> int:
        """How many samples this process holds."""
        return sum(len(piece.batch) for piece in self._pieces)

    @property
    def batches(self) -> list[Batch]:
        """The samples, in the pieces in which they are kept."""
        return [piece.batch for piece in self._pieces]

    @property
    def is_silent(self) -> bool:
        """Whether there is nothing to compare, in some process: no samples, or no real numbers in the answers."""
        return not all(all_notes(any(piece.answers for piece in self._pieces)))

    def add_to(self, digest: Digest) -> Digest:
        """Add the samples, the original's answers and how they are read."""
        digest.add([str(self.reading), self._variances])
        for piece in self._pieces:
            for tensor in (*tensors_in(piece.batch.inputs), *piece.answers):
                digest.add(tensor)
        return digest

    def first(self, samples: int) -> Probe:
        """The same with as many of the first pieces as it takes to hold ``samples`` samples.

        >>> Probe(nn.Linear(3, 4), [torch.randn(8, 3)] * 4, samples=32).first(10).samples
        16
        """
        other = copy.copy(self)
        other._pieces = []
        for piece in self._pieces:
            if other.samples >= samples:
                break
            other._pieces.append(piece)
        return other

    def answers(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        """The answers of ``model`` to ``batch``: tensors of real numbers, in order."""
        assert self.reading is not None
        return self.reading.run(model, batch)[1]

    def _kinds(self, answers: Sequence[Tensor]) -> list[Smooth]:
        assert self.reading is not None
        return self.reading.kinds(len(answers))

    def _levels(self) -> list[int]:
        """Which tensors are levels of one answer. Raw outputs of layers, which stand in for boxes, are not compared."""
        if not self._pieces or self.reading is None:
            return []
        answers = self._pieces[0].answers
        parts = answers[: len(self.reading.smooth)]
        return [*levels(parts, self._kinds(answers)), *range(len(parts), len(answers))]

    def mixture(self, answers: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        """A random mixture of answers, summed over samples, that tells how :meth:`divergence` reacts to changes.

        The expected square of its change, sample by sample, is the divergence that the change causes, to second order.

        >>> model = nn.Linear(3, 4)
        >>> probe = Probe(model, [torch.randn(8, 3)], samples=8)
        >>> probe.mixture(probe.answers(model, probe.batches[0]), torch.Generator().manual_seed(0)).shape
        torch.Size([])
        """
        parts = []
        for answer, kind, variance in zip(answers, self._kinds(answers), self._variances, strict=True):
            signs = (torch.randint(0, 2, answer.shape, generator=generator) * 2 - 1).to(answer)
            parts.append((kind.root(answer.detach(), signs, variance).nan_to_num() * answer).sum())
        return torch.stack(parts).sum()

    def divergence(self, model: nn.Module) -> float:
        """The mean divergence over samples; infinite if it is not a finite number.

        For class scores it is the Kullback–Leibler divergence of the probabilities, for numbers the squared error
        relative to their variance, which the levels of one answer have in common; for boxes, that of the raw outputs
        that they are computed from. Answers of the original that are not finite are left out.
        """
        shares = all_notes(together(lambda: (self._total(model), self.samples), alike=(UnlikeAnswers,)))
        total = sum(part for part, _ in shares)
        return total / sum(samples for _, samples in shares) if math.isfinite(total) else math.inf

    def _total(self, model: nn.Module) -> float:
        """The divergences of the samples of this process, added up."""
        total = 0.0
        with borrowed(model), torch.no_grad():
            for piece in self._pieces:
                answers = [tensor.cpu() for tensor in self.answers(model, piece.batch)]
                shapes, original_shapes = ([tensor.shape for tensor in side] for side in (answers, piece.answers))
                if shapes != original_shapes:
                    raise UnlikeAnswers(f"{[*map(tuple, shapes)]} in place of {[*map(tuple, original_shapes)]}")
                kinds = zip(self._kinds(answers), answers, piece.answers, self._variances, strict=True)
                for kind, answer, original, variance in kinds:
                    total += kind.distance(answer.double(), original.double(), variance).item() * len(piece.batch)
        return total


def _spreads(pieces: list[list[Tensor]]) -> list[tuple[int, float, float]]:
    """Count, mean and variance of the finite numbers of each answer over all pieces."""
    if len({len(answers) for answers in pieces}) > 1:
        raise UnlikeAnswers("the number of answers changes from batch to batch")
    spreads = []
    for answers in zip(*pieces, strict=True):
        values = torch.cat([answer.double().flatten() for answer in answers])
        finite = values[values.isfinite()]
        spread = (finite.mean().item(), finite.var(correction=0).item()) if len(finite) else (0.0, 0.0)
        spreads.append((len(finite), *spread))
    return spreads


def _variances(spreads: list[tuple[int, float, float]], groups: Sequence[int]) -> list[float]:
    """The variance of each answer over all processes; 1 if it is constant, so that its errors are absolute.

    Levels of one answer, those of the same number in ``groups``, have a variance in common: a level on which little
    happens would otherwise count more the less it says. It is divided by the level's share of the numbers, so that
    the errors of all levels, each relative to its variance, add up to the error of the whole.
    """
    everywhere = [each for each in all_notes(spreads) if each]
    if len({len(each) for each in everywhere}) > 1:
        raise UnlikeAnswers("the number of answers changes from process to process")
    variances = []
    for index, group in enumerate(groups):
        members = [other for other, its_group in enumerate(groups) if its_group == group]
        parts = [each[other] for each in everywhere for other in members]
        own, total = (max(1, sum(each[i][0] for each in everywhere for i in some)) for some in ([index], members))
        mean = sum(count * part_mean for count, part_mean, _ in parts) / total
        variance = sum(count * (within + (part_mean - mean) ** 2) for count, part_mean, within in parts) / total
        variances.append(variance * total / own if variance > 0 else 1.0)
    return variances

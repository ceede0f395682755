"""Counting answers: beside a plain loop over samples, and what counts as none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tensigma.running import Scores, ScoresTally, alike, answered, right


def scores(n_samples: int, n_classes: int, seed: int = 0) -> Tensor:
    """Random scores of which some rows are no answer."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n_samples, n_classes, generator=generator)
    values[1, 0] = math.nan
    values[2, 1] = math.inf
    values[3] = -math.inf
    values[4, 0] = -math.inf
    return values


def naive_answer(row: Tensor) -> int | None:
    """The class of one sample; None where there is no finite largest score."""
    numbers = row.tolist()
    if any(map(math.isnan, numbers)) or not math.isfinite(max(numbers)):
        return None
    return numbers.index(max(numbers))


@pytest.mark.parametrize("n_classes", [3, 9])
def test_counts_are_those_of_a_plain_loop(seed: int, n_classes: int) -> None:
    own, other = scores(60, n_classes, seed), scores(60, n_classes, seed + 100)[torch.arange(60).flip(0)]
    labels = torch.arange(60) % n_classes
    tally = ScoresTally(Scores())
    for part in (slice(25), slice(25, 60)):
        tally.add(own[part], labels[part], other[part])
    answers, others = ([naive_answer(row) for row in each] for each in (own, other))
    assert answered(own).tolist() == [answer is not None for answer in answers]
    hits = [answer == label for answer, label in zip(answers, labels.tolist(), strict=True)]
    agreed = [one is not None and one == another for one, another in zip(answers, others, strict=True)]
    assert right(own, labels).tolist() == hits
    assert alike(own, other).tolist() == agreed
    assert (tally.samples, tally.classes, tally.unanswered) == (60, n_classes, answers.count(None))
    assert (tally.hits, tally.agreed, tally.foreign) == (sum(hits), sum(agreed), 0)
    assert (tally.top1, tally.likeness) == (sum(hits) / 60, sum(agreed) / 60)
    among = [
        answer is not None and label in row.argsort(descending=True)[:5].tolist()
        for answer, row, label in zip(answers, own, labels.tolist(), strict=True)
    ]
    # Five of three classes would be all of them.
    assert tally.top5 == (sum(among) / 60 if n_classes > 5 else None)


def test_a_batch_without_labels_leaves_no_accuracy() -> None:
    tally, values = ScoresTally(Scores()), scores(8, 6)
    tally.add(values, torch.zeros(8, dtype=torch.long))
    assert tally.top1 is not None
    tally.add(values)
    assert (tally.top1, tally.top5, tally.likeness, tally.samples) == (None, None, None, 16)


def test_positions_of_a_process_without_labels_are_added_to_those_of_another() -> None:
    maps = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = maps.argmax(1)
    one, other = ScoresTally(Scores()), ScoresTally(Scores())
    one.add(maps[:2], labels[:2], maps[:2])
    other.add(maps[2:], None, maps[2:])
    one.merge(other)
    assert (one.figures["iou"], one.figures["label_iou"], one.positions) == (1, None, 20)
    assert int(one.beside["labels"].sum()) == 10


def test_labels_that_no_class_has_are_counted_and_never_hit() -> None:
    tally, values = ScoresTally(Scores()), torch.eye(6)
    tally.add(values, torch.tensor([0, 1, -1, 6, 4, 100]))
    assert (tally.hits, tally.hits5, tally.foreign) == (3, 3, 3)


def test_agreement_needs_two_answers() -> None:
    good, none = torch.eye(4), torch.full((4, 4), math.nan)
    for own, other, agreed in ((good, good, 4), (good, none, 0), (none, good, 0), (none, none, 0)):
        tally = ScoresTally(Scores())
        tally.add(own, None, other)
        assert (tally.agreed, tally.likeness) == (agreed, agreed / 4)

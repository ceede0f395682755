"""Figures of answers that are no classes of whole samples: maps, numbers, boxes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.errors import AnswersWarning, InputError, StoreError


class Fixed(nn.Module):
    """Answers rows of a table, by number."""

    def __init__(self, table: object) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> object:
        if isinstance(self.table, Tensor):
            return self.table[x]
        return [self.table[int(index)] for index in x]  # type: ignore[index]


def maps(seed: int, n: int = 5) -> Tensor:
    return torch.randn(n, 4, 3, 3, generator=torch.Generator().manual_seed(seed))


BATCHES = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]


def plain_iou(one: list[int], other: list[int], classes: int) -> float:
    values = []
    for wanted in range(classes):
        mine, theirs = ({k for k, c in enumerate(side) if c == wanted} for side in (one, other))
        if mine | theirs:
            values.append(len(mine & theirs) / len(mine | theirs))
    return sum(values) / len(values)


@pytest.mark.parametrize("axis", [1, -1])
def test_segmenters_are_counted_by_position_by_sample_and_by_overlap(axis: int) -> None:
    # Two of five maps are the original's, one but for one of nine positions.
    own, other = maps(0), maps(1)
    own[:2], own[2] = other[:2], other[2]
    own[2, :, 0, 0] = -own[2, :, 0, 0]
    tables = [table if axis == 1 else table.movedim(1, -1) for table in (own, other)]
    kind = ts.Scores(axis, least=0.8)
    result = ts.evaluate(Fixed(tables[0]), BATCHES, original=Fixed(tables[1]), answers=kind)
    classes = [table.argmax(1).flatten().tolist() for table in (own, other)]
    same = [one == another for one, another in zip(*classes, strict=True)]
    assert result.position_agreement == result.likeness == sum(same) / 45
    by_sample = [sum(same[9 * n : 9 * n + 9]) / 9 >= 0.8 for n in range(5)]
    assert 2 <= sum(by_sample) < 5
    assert result.agreement == sum(by_sample) / 5
    assert result.iou == pytest.approx(plain_iou(classes[0], classes[1], 4))
    assert (result.top1, result.label_iou, result.error) == (None, None, None)
    assert result.certificate is not None
    assert (result.certificate.samples, result.certificate.agreed) == (5, sum(by_sample))
    assert "agrees with the original (the same class at 80 % of positions or more) on" in str(result.certificate)
    assert ts.Evaluation.from_json(result.to_json()) == result
    assert {"agreement by position", "mean IoU with the original"} <= {
        line.rpartition("  ")[0].strip().partition("  ")[0] for line in str(result).splitlines()
    }


class Dict(nn.Module):
    """The same answers in a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"out": self.model(x), "aside": torch.zeros(len(x), 1)}


def test_the_certificate_says_which_share_of_positions_was_asked_for() -> None:
    models = [Dict(Fixed(maps(seed))) for seed in (0, 1)]
    kinds = {"aside": None, "out": ts.Scores(least=0.8)}
    result = ts.evaluate(models[0], BATCHES, original=models[1], answers=kinds)
    assert "(the same class at 80 % of positions or more)" in str(result.certificate)


def test_a_likeness_by_a_function_is_shown() -> None:
    models = [Fixed(maps(seed)) for seed in (0, 1)]
    result = ts.evaluate(models[0], BATCHES, original=models[1], answers=lambda one, other: 0.25)
    assert result.likened == result.likeness == 0.25
    assert any(line.startswith("likeness") and "25.00 %" in line for line in str(result).splitlines())
    assert ts.evaluate(models[0], BATCHES, original=models[1], answers=ts.Numbers()).likened is None


def test_a_function_that_says_yes_or_no_for_each_sample_has_a_certificate() -> None:
    scores = maps(0)
    models = [Fixed(scores), Fixed(scores + torch.arange(5.0)[:, None, None, None])]

    def near(one: Tensor, other: Tensor) -> Tensor:
        return (one - other).abs().amax((1, 2, 3)) < 2.5

    result = ts.evaluate(models[1], BATCHES, original=models[0], answers=near)
    assert (result.agreement, result.likeness, result.measure) == (3 / 5, 3 / 5, "likeness")
    assert result.certificate is not None
    assert (result.certificate.samples, result.certificate.agreed) == (5, 3)
    assert "agrees with the original (by near) on at least" in str(result.certificate)
    assert ts.Evaluation.from_json(result.to_json()) == result
    # Shares of a batch, or numbers in between, are no counts of samples.
    for vague in (lambda *pair: near(*pair).double(), lambda *pair: near(*pair).all(), lambda *pair: near(*pair)[:1]):
        other = ts.evaluate(models[1], BATCHES, original=models[0], answers=vague)
        assert (other.agreement, other.certificate) == (None, None)


def test_labels_of_positions_may_leave_some_out() -> None:
    scores = maps(0)
    labels = scores.argmax(1)
    labels[:, 0] = 255
    labels[0, 1, 1] = (labels[0, 1, 1] + 1) % 4
    data = [(batch, labels[batch]) for batch in BATCHES]
    result = ts.evaluate(Fixed(scores), data)
    assert result.top1 == 29 / 30
    kept = [
        (one, other) for one, other in zip(scores.argmax(1).flatten(), labels.flatten(), strict=True) if other < 255
    ]
    assert result.label_iou == pytest.approx(plain_iou([int(a) for a, _ in kept], [int(b) for _, b in kept], 4))


def test_numbers_have_a_relative_error_and_no_certificate() -> None:
    own, other = maps(0), maps(1)
    result = ts.evaluate(Fixed(own), BATCHES, original=Fixed(other), answers=ts.Numbers())
    assert result.error == pytest.approx(((own - other).norm() / other.norm()).item(), rel=1e-6)
    assert (result.likeness, result.measure) == (0.0, "closeness")
    assert (result.agreement, result.certificate) == (None, None)
    near = ts.evaluate(Fixed(other * 1.01), BATCHES, original=Fixed(other), answers=ts.Numbers())
    assert near.likeness == pytest.approx(0.99, abs=1e-5)


def detections(shift: float = 0.0, certain: float = 0.9) -> list[dict[str, Tensor]]:
    box = torch.tensor([[0.0, 0.0, 4.0, 4.0], [10.0, 10.0, 14.0, 14.0]])
    return [
        {"boxes": box + shift * index, "scores": torch.tensor([certain, 0.2]), "labels": torch.tensor([1, 2])}
        for index in range(5)
    ]


def test_detectors_are_judged_by_the_detections_of_the_original() -> None:
    result = ts.evaluate(Fixed(detections(shift=1.0)), BATCHES, original=Fixed(detections()))
    # Moved by 0, 1, 2, 3 and 4 of 4: overlaps of 1, 9/23, 1/7, 1/31 and 0.
    assert (result.precision, result.measure) == (1 / 5, "average precision")
    assert result.agreement == 1 / 5
    assert result.certificate is not None
    assert "(the same objects)" in str(result.certificate)
    loose = ts.evaluate(Fixed(detections(1.0)), BATCHES, original=Fixed(detections()), answers=ts.Boxes(iou=0.3))
    assert loose.precision == 2 / 5
    assert result.original is not None
    assert (result.original.precision, result.original.agreement) == (1, 1)


def test_two_detectors_that_find_nothing_agree_about_nothing() -> None:
    unsure = Fixed(detections(certain=0.3))
    with pytest.warns(AnswersWarning, match=r"no object with a score of 0\.5 or more in any of 5 images.*score=0\.1"):
        result = ts.evaluate(unsure, BATCHES, original=unsure)
    assert (result.precision, result.agreement, result.certificate) == (None, None, None)
    # Objects that the original does not see are disagreement.
    with pytest.warns(AnswersWarning, match="there is no average precision"):
        invented = ts.evaluate(Fixed(detections()), BATCHES, original=unsure)
    assert (invented.precision, invented.agreement) == (None, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ts.evaluate(unsure, BATCHES, original=unsure, answers=ts.Boxes(score=0.1)).precision == 1
        assert ts.evaluate(unsure, BATCHES).precision is None


def test_detectors_are_judged_by_labels_too() -> None:
    labels = [{"boxes": entry["boxes"][:1], "labels": entry["labels"][:1]} for entry in detections()]
    data = [(batch, [labels[int(index)] for index in batch]) for batch in BATCHES]
    result = ts.evaluate(Fixed(detections(1.0)), data)
    assert (result.label_precision, result.precision) == (1 / 5, None)
    nothing = ts.evaluate(Fixed(detections()), BATCHES, original=Fixed(detections(certain=0.3)))
    assert nothing.precision is None


def test_answers_of_other_shapes_are_refused() -> None:
    with pytest.raises(InputError, match=r"answers with shape \(3, 4, 3\) and the original with \(3, 4, 3, 3\)"):
        ts.evaluate(Fixed(maps(0)[..., 0]), BATCHES, original=Fixed(maps(0)))


class Rows(nn.Module):
    """Scores with other rows than samples: positions as rows, or as the first axis."""

    def __init__(self, table: Tensor, first: bool) -> None:
        super().__init__()
        self.table, self.first = table, first

    def forward(self, x: Tensor) -> Tensor:
        scores = self.table[x].flatten(2)  # (batch, classes, positions)
        return scores.permute(2, 1, 0) if self.first else scores.mT.flatten(0, 1)


@pytest.mark.parametrize("first", [False, True])
def test_rows_that_are_no_samples_have_no_agreement_by_sample_and_no_certificate(first: bool) -> None:
    own, other = maps(0), maps(1)
    result = ts.evaluate(Rows(own, first), BATCHES, original=Rows(other, first), answers=ts.Scores())
    same = (own.argmax(1) == other.argmax(1)).double().mean().item()
    assert result.samples == 5
    assert result.position_agreement == result.likeness == pytest.approx(same)
    assert (result.agreement, result.certificate) == (None, None)
    assert ts.Evaluation.from_json(result.to_json()) == result
    whole = ts.evaluate(Rows(own, first), BATCHES, original=Rows(own, first), answers=ts.Scores())
    assert (whole.position_agreement, whole.certificate) == (1, None)


class Parts(nn.Module):
    """Two kinds of scores and a number for each sample."""

    def __init__(self, tables: dict[str, Tensor]) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: table[x] for name, table in self.tables.items()}


def test_every_part_has_a_figure_and_the_certificate_names_its_own() -> None:
    main, side, age = torch.eye(5), torch.eye(5), torch.ones(5, 1)
    wrong = side[[0, 1, 2, 4, 3]]
    kinds = {"species": ts.Scores(), "pose": ts.Scores(), "age": ts.Numbers()}
    tables = [{"species": main, "pose": pose, "age": age * scale} for pose, scale in ((wrong, 1.1), (side, 1.0))]
    models = [Parts(table) for table in tables]
    result = ts.evaluate(models[0], BATCHES, original=models[1], answers=kinds)
    assert (result.agreement, result.part) == (1.0, "species")
    assert [(each.path, each.measure) for each in result.others] == [("pose", "agreement"), ("age", "closeness")]
    assert [each.likeness for each in result.others] == pytest.approx([0.6, 0.9])
    # Of the other parts nothing is promised.
    assert "agrees with the original (in the part 'species' alone) on at least" in str(result.certificate)
    rows = [" ".join(line.split()) for line in str(result).splitlines()]
    assert {"pose: agreement 100.00 % 60.00 %", "age: closeness 100.00 % 90.00 %"} <= set(rows)
    assert ts.Evaluation.from_json(result.to_json()) == result
    older = {key: value for key, value in result.to_json().items() if key not in ("part", "others")}
    assert ts.Evaluation.from_json(older).others == ()
    with pytest.raises(StoreError, match="the evaluation is damaged"):
        ts.Evaluation.from_json({**result.to_json(), "others": [{"path": "age"}]})
    alone = ts.evaluate(models[0], BATCHES, original=models[1], answers={"pose": ts.Scores()})
    assert (alone.agreement, alone.others) == (0.6, ())
    assert "alone" not in str(alone.certificate)


def test_the_error_of_several_numbers_is_that_of_all() -> None:
    models = [Parts({"one": torch.ones(5, 1), "other": scale * torch.ones(5, 2)}) for scale in (1.2, 1.0)]
    result = ts.evaluate(models[0], BATCHES, original=models[1], answers=ts.Numbers())
    assert (result.error, result.others) == (pytest.approx(0.2), ())

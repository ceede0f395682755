"""Evaluation: hits, agreement and costs that can be counted by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from cases import GEOMETRIES, LayerCase
from support_nets import batches, small_net
from tensigma.errors import InputError, StoreError
from tensigma.evaluation import EvaluationProgress, Size, compare, measure_latency
from tensigma.evaluation.size import count_macs
from tensigma.layers import Geometry
from tensigma.running import Progress


def scores(*best: int) -> Tensor:
    """Scores of six classes whose order is 0, 1, 2, … but for the best one."""
    rows = -torch.arange(6.0).repeat(len(best), 1)
    rows[torch.arange(len(best)), torch.tensor(best)] = 1
    return rows


def test_hits_are_counted() -> None:
    data = [(scores(0, 1, 2), torch.tensor([0, 0, 5])), (scores(3), torch.tensor([4]))]
    result = ts.evaluate(nn.Identity(), data)
    # Best five of (0, 1, 2, 3, 4, 5): all but one class, which is 5 unless 5 is the best.
    assert (result.samples, result.top1, result.top5, result.agreement) == (4, 1 / 4, 3 / 4, None)
    assert ts.evaluate(nn.Identity(), data, max_samples=2).top1 == 1 / 2


class Shift(nn.Module):
    """Answers the next class for inputs whose best class is even."""

    def forward(self, x: Tensor) -> Tensor:
        best = x.argmax(1)
        return nn.functional.one_hot(torch.where(best % 2 == 0, best + 1, best), x.shape[1]).float()


def test_agreement_needs_no_labels() -> None:
    result = ts.evaluate(Shift(), [scores(0, 1, 2, 3), scores(5)], original=nn.Identity(), answers=ts.Scores())
    assert (result.agreement, result.top1, result.top5) == (3 / 5, None, None)
    assert result.original is not None
    assert result.original.agreement == 1


class Broken(nn.Module):
    """Scores of six classes that are one odd value for inputs whose best class is even."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill((x.argmax(1) % 2 == 0)[:, None], self.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_no_numbers_are_no_answer(value: float, caplog: pytest.LogCaptureFixture) -> None:
    # The largest of six NaN is said to be the first, which is the right class of two samples.
    data = [(scores(0, 1, 0, 3), torch.tensor([0, 1, 0, 3])), (scores(5), torch.tensor([5]))]
    result = ts.evaluate(Broken(value), data, original=nn.Identity())
    assert (result.top1, result.top5, result.agreement) == (3 / 5, 3 / 5, 3 / 5)
    assert result.certificate is not None
    assert result.certificate.agreed == 3
    assert "the model gives scores that are not finite for 2 of 5 samples" in caplog.text
    assert ts.evaluate(Broken(value), data, original=Broken(value)).agreement == 3 / 5
    assert ts.evaluate(nn.Identity(), data, original=Broken(value)).agreement == 3 / 5


def test_classes_may_be_ruled_out(caplog: pytest.LogCaptureFixture) -> None:
    data = [(scores(1, 2).masked_fill(torch.arange(6) == 4, -float("inf")), torch.tensor([1, 2]))]
    assert ts.evaluate(nn.Identity(), data).top1 == 1
    assert not caplog.records


@pytest.mark.parametrize(
    ("batch", "top1"),
    [
        ({"pixels": scores(1, 2), "label": torch.tensor([1, 1])}, 0.5),
        ((scores(1, 2), np.array([1, 1])), 0.5),
        ((scores(1, 2), None), None),
        ((scores(1, 2), torch.rand(2, 6)), None),
        ((scores(1, 2), [2, 2]), 0.5),
    ],
    ids=["dict", "numpy", "none", "soft", "list"],
)
def test_labels_come_in_many_forms(batch: Any, top1: float | None) -> None:
    key = "pixels" if isinstance(batch, dict) else None
    assert ts.evaluate(nn.Identity(), [batch], input=key).top1 == top1


def test_few_classes_have_no_top_five() -> None:
    assert ts.evaluate(nn.Identity(), [(torch.eye(3), torch.arange(3))]).top5 is None


def test_wrong_data_is_refused() -> None:
    with pytest.raises(InputError, match="no batches"):
        ts.evaluate(nn.Identity(), [])
    with pytest.raises(InputError, match=r"scores of at least two classes along axis 1 .*\(batch, classes\)"):
        ts.evaluate(nn.Identity(), [torch.ones(2, 1, 4, 4)], original=nn.Identity(), answers=ts.Scores())
    with pytest.raises(InputError, match=r"6 numbers, which may be class scores or an embedding; say which with ans"):
        ts.evaluate(nn.Identity(), [scores(1, 2)], original=nn.Identity())
    with pytest.raises(InputError, match="2 inputs and 3 labels"):
        ts.evaluate(nn.Identity(), [(scores(1, 2), torch.tensor([1, 2, 3]))])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", GEOMETRIES)
def test_macs_by_hooks_are_those_of_the_geometry(case: LayerCase) -> None:
    layer = case.layer()
    assert count_macs(layer, case.inputs(1)) == Geometry.of(layer).macs_from(case.size)


@pytest.mark.slow
def test_everything_beside_the_original() -> None:
    net = small_net().train()
    small, report = ts.compress(net, batches(), budget=ts.Params(0.5))
    seen: list[Any] = []
    labelled = [(x, torch.zeros(len(x), dtype=torch.long)) for x in batches(seed=4)]
    result = ts.evaluate(small, labelled, original=net, latency=True, rounds=3, progress=seen.append)
    assert net.training
    assert [state.samples for state in seen] == [8, 16, 24]
    assert result.size.params == report.after.params
    assert result.size.macs == report.after.macs
    assert result.size.bytes == report.after.bytes
    assert result.rate == report.rate
    assert result.latency is not None
    assert result.speedup is not None
    assert 0 < result.latency.minimum <= result.latency.median
    assert ts.Evaluation.from_json(result.to_json()) == result
    assert str(result).splitlines()[0].split() == ["original", "model"]
    with pytest.raises(StoreError, match="not an evaluation"):
        ts.Evaluation.from_json({**result.to_json(), "format": "x"})
    with pytest.raises(StoreError, match="damaged"):
        ts.Evaluation.from_json({"format": "tensigma-evaluation", "version": 1})


def test_latency_leaves_threads_alone() -> None:
    threads = torch.get_num_threads()
    (found,) = measure_latency([nn.Linear(4, 4)], torch.ones(2, 4), rounds=4)
    assert (found.batch, found.rounds, torch.get_num_threads()) == (2, 4, threads)


def test_progress_tells_batches_samples_and_time() -> None:
    seen: list[EvaluationProgress] = []
    ts.evaluate(nn.Identity(), [scores(0, 1), scores(2), scores(3, 4)], progress=seen.append)
    assert [(state.done, state.total, state.samples) for state in seen] == [(1, 3, 2), (2, 3, 3), (3, 3, 5)]
    assert all(isinstance(state, Progress) for state in seen)
    assert all(0 < early.seconds < late.seconds for early, late in pairwise(seen))
    assert (seen[-1].share, seen[-1].remaining) == (1.0, 0.0)
    assert str(seen[0]).startswith("batch 1 of 3, ")
    seen.clear()
    ts.evaluate(nn.Identity(), iter([scores(0)]), progress=seen.append)
    assert (seen[0].total, seen[0].share, seen[0].remaining) == (None, None, None)
    assert str(seen[0]).startswith("batch 1, ")


def test_several_models_are_counted_as_each_would_be_alone() -> None:
    models: dict[str, nn.Module] = {"plain": nn.Identity(), "shifted": Shift(), "broken": Broken(float("nan"))}
    data = [(scores(0, 1, 2, 5), torch.tensor([0, 1, 3, 5])), (scores(3), torch.tensor([3]))]
    read: list[int] = []

    def once() -> Iterator[Any]:
        for index, batch in enumerate(data):
            read.append(index)
            yield batch

    together = compare(models, once(), reference="plain", latency=False)
    assert read == [0, 1]
    for name, model in models.items():
        alone = ts.evaluate(model, data, original=models["plain"], confidence=None)
        assert replace(alone, original=None) == together[name]
        assert alone.original == together["plain"]
    sizes = {"plain": Size(params=7, macs=None, bytes=28)}
    assert compare(models, data, sizes=sizes, latency=False)["plain"].size == sizes["plain"]

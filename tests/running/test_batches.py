"""Batches out of whatever people iterate over: what is cut, what is found, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tensigma.errors import InputError
from tensigma.running import Batch, Batches, count_batches, is_one_shot, iterate, run


def rows(*sizes: int) -> list[Tensor]:
    """Batches of these sizes, with samples numbered throughout."""
    return list(torch.arange(float(sum(sizes))).reshape(-1, 1).split(list(sizes)))


def pairs(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """The same with labels. A list that begins with a tensor is one batch, a list that begins with a pair is many."""
    return [(x, torch.arange(len(x))) for x in rows(*sizes)]


def samples(batches: Batches) -> list[int]:
    return [int(x) for batch in batches for x in batch.inputs]


@pytest.mark.parametrize("most", range(1, 12))
def test_samples_are_cut_where_asked(most: int) -> None:
    batches = Batches(rows(4, 3, 2), max_samples=most)
    assert samples(batches) == list(range(min(most, 9)))
    assert all(len(batch) for batch in batches)


def test_nothing_is_read_beyond_the_last_sample() -> None:
    read: list[int] = []

    def source() -> Iterator[Tensor]:
        for index, batch in enumerate(rows(2, 2, 2)):
            read.append(index)
            yield batch

    assert samples(Batches(source(), max_samples=4)) == [0, 1, 2, 3]
    assert read == [0, 1]


def test_batches_without_samples_are_left_out_and_the_others_keep_their_number() -> None:
    source = [torch.zeros(0, 1), *rows(2), torch.zeros(0, 1), *rows(3)]
    assert [(batch.index, len(batch)) for batch in Batches(source)] == [(1, 2), (3, 3)]


@pytest.mark.parametrize(
    "source", [[], [torch.zeros(0, 3)], iter([]), [[], []]], ids=["list", "batch", "iterator", "loaders"]
)
def test_nothing_at_all_is_refused_by_its_name_unless_it_is_allowed(source: Any) -> None:
    with pytest.raises(InputError, match="no batches: the iterable given as validation is empty"):
        list(Batches(source, name="validation"))
    assert list(Batches(source, allow_empty=True)) == []


class Endless:
    """An object that starts anew, and one that says that it cannot."""

    def __init__(self, *, once: bool) -> None:
        self.is_one_shot = once

    def __iter__(self) -> Iterator[Tensor]:
        return iter(rows(1))


ONE_SHOT = [
    pytest.param(lambda: iter(rows(1)), id="iterator"),
    pytest.param(lambda: (x for x in rows(1)), id="generator"),
    pytest.param(lambda: [pairs(1), iter(rows(1))], id="one-of-several"),
    pytest.param(lambda: Endless(once=True), id="says-so"),
]
REREADABLE = [
    pytest.param(lambda: rows(1), id="list"),
    pytest.param(lambda: [pairs(1), pairs(2)], id="lists"),
    pytest.param(lambda: pairs(1, 2), id="pairs"),
    pytest.param(lambda: DataLoader(TensorDataset(torch.zeros(4, 1))), id="loader"),
    pytest.param(lambda: Endless(once=False), id="object"),
]


@pytest.mark.parametrize("make", ONE_SHOT)
def test_what_can_be_read_once_is_refused_where_it_is_read_again(make: Any) -> None:
    assert is_one_shot(make())
    kind = type(make()).__name__
    with pytest.raises(InputError, match=f"training reads data more than once, but it is a {kind}.*DataLoader"):
        Batches(make(), name="data").check_rereadable("training")


@pytest.mark.parametrize("make", REREADABLE)
def test_what_starts_anew_is_read_again(make: Any) -> None:
    batches = Batches(make())
    batches.check_rereadable("training")
    assert samples(batches) == samples(batches) != []


def test_labels_follow_the_inputs() -> None:
    x, labels = torch.zeros(4, 2), torch.tensor([3, 1, 4, 1])
    for item in ((x, labels), (x, labels.tolist()), {"x": x, "label": labels}, {"x": x, "y": labels.numpy()}):
        batches = Batches([item], input="x" if isinstance(item, dict) else None, max_samples=3)
        (batch,) = batches
        assert batch.labels is not None
        assert batch.labels.tolist() == [3, 1, 4]


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(torch.zeros(4, 2), id="no-place"),
        pytest.param((torch.zeros(4, 2),), id="one-item"),
        pytest.param((torch.zeros(4, 2), torch.rand(4)), id="real-numbers"),
        pytest.param((torch.zeros(4, 2), torch.zeros(4, 5, dtype=torch.long)), id="more-axes"),
        pytest.param({"x": torch.zeros(4, 2)}, id="dict"),
    ],
)
def test_what_is_no_class_numbers_is_no_labels(item: Any) -> None:
    (batch,) = Batches([item])
    assert batch.labels is None


def test_labels_of_another_number_are_refused_when_they_are_read() -> None:
    source = [(torch.zeros(4, 2), torch.arange(4)), (torch.zeros(4, 2), torch.arange(3))]
    for most in (None, 6):
        first, second = Batches(source, max_samples=most)
        assert first.labels is not None
        with pytest.raises(InputError, match="batch 1 has 4 inputs and 3 labels"):
            _ = second.labels


def test_inputs_are_found_by_name_or_place() -> None:
    x, other = torch.ones(2, 3), torch.zeros(2, 3)
    cases: list[tuple[Any, str | int | None]] = [
        (x, None),
        (x.numpy(), None),
        ((x, other), None),
        ([other, x], 1),
        ((other, x), -1),
        ({"image": x}, None),
        ({"image": x, "mask": other}, "image"),
    ]
    for item, key in cases:
        (batch,) = Batches([item], input=key)
        assert torch.equal(batch.inputs, x)


@pytest.mark.parametrize(
    ("item", "key", "message"),
    [
        ({"a": torch.ones(1, 1), "b": 1}, None, r"batch 1 is a dict.*input=.*\['a', 'b'\]"),
        ({"a": torch.ones(1, 1)}, "b", r"batch 1 has no entry 'b'; it has \['a'\]"),
        ((torch.ones(1, 1),), 1, "batch 1 has 1 items, so input=1 does not exist"),
        (("text", torch.ones(1, 1)), None, "batch 1: the model input is a str"),
        (torch.tensor(1.0), None, "batch 1: the model input is a single number"),
    ],
)
def test_inputs_that_are_not_there_are_named(item: Any, key: Any, message: str) -> None:
    source = [torch.ones(1, 1), item]
    with pytest.raises(InputError, match=message):
        list(Batches(source, input=key))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (torch.zeros(8, 3), r"one array of shape \(8, 3\); pass an iterable of batches, such as \[batch\]"),
        (np.zeros((8, 3)), r"one array of shape \(8, 3\)"),
        ({"x": torch.zeros(8, 3)}, r"one dict with keys \['x'\]"),
        (3, "batches is a int; pass an iterable"),
    ],
)
def test_one_batch_is_not_taken_for_many(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(Batches(source))


def test_several_loaders_are_read_one_after_the_other() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4.0).reshape(-1, 1)), batch_size=3)
    nested = [pairs(2), [loader, [pairs(1)]]]
    batches = Batches(nested)
    assert [(batch.index, len(batch)) for batch in batches] == [(0, 2), (1, 3), (2, 1), (3, 1)]
    assert len(batches) == batches.n_batches == count_batches(nested) == 4
    assert len(list(iterate(nested))) == 4


def test_the_number_of_batches_where_it_is_known() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(rows(1))

    assert len(Batches(rows(2, 2))) == 2
    unknown = [iter(rows(1)), (x for x in rows(1)), DataLoader(Stream(), batch_size=None), [pairs(1), iter(rows(1))]]
    for source in unknown:
        assert Batches(source).n_batches is None
        with pytest.raises(TypeError, match="not known before they are read"):
            len(Batches(source))


def test_a_model_that_cannot_take_a_batch_names_it() -> None:
    batch = Batch(7, torch.zeros(2, 4), None)
    with pytest.raises(InputError, match=r"rejected batch 7 \(shape \(2, 4\), float32\): RuntimeError"):
        run(nn.Linear(3, 1), batch)

    class Refusing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise InputError("as it is")

    with pytest.raises(InputError, match=r"^as it is$"):
        run(Refusing(), batch)

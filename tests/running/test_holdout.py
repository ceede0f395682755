"""Parts of the data that are kept away from the rest: nothing is lost, nothing is on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from tensigma.errors import InputError
from tensigma.running import SetAside, hold_out, mixed


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(20.0).split(1))


@pytest.mark.parametrize("share", [0.1, 0.15, 0.5])
@pytest.mark.parametrize("kind", ["list", "loader", "shuffled", "stream", "several"])
def test_held_out_samples_are_never_trained_on(kind: str, share: float, seed: int) -> None:
    samples = torch.arange(20.0)
    data: Any = {
        "list": list(samples.split(6)),
        "loader": DataLoader(TensorDataset(samples), 6),
        "shuffled": DataLoader(TensorDataset(samples), 6, shuffle=True),
        "stream": DataLoader(Stream(), 6),
        "several": [[(x,) for x in samples[:9].split(4)], [(x,) for x in samples[9:].split(5)]],
    }[kind]
    training, validation = hold_out(data, None, share=share, seed=seed)
    held = torch.cat([x.flatten() for x, _ in validation]).tolist()
    assert len(held) in (int(20 * share), int(20 * share) + 1)
    passes = [torch.cat([x.flatten() for x, _ in training]).tolist() for _ in range(3)]
    for seen in passes:
        assert sorted(seen + held) == list(range(20))
    assert (passes[0] != passes[1]) == (kind == "shuffled")
    assert torch.cat([x.flatten() for x, _ in validation]).tolist() == held


class Halving(DataLoader[Any]):
    """A loader that changes batches on their way."""

    def __iter__(self) -> Any:
        return ((x / 2,) for (x,) in super().__iter__())


def test_a_loader_of_its_own_class_keeps_what_it_does() -> None:
    samples = torch.arange(20.0)
    training, validation = hold_out(Halving(TensorDataset(samples), 6), None, share=0.2, seed=0)
    came = torch.cat([x for x, _ in (*training, *validation)])
    assert sorted(came.tolist()) == (samples / 2).tolist()


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(100), replacement=True),
        RandomSampler(range(100), num_samples=40),
        RandomSampler(range(100), num_samples=300),
        RandomSampler(range(60)),
    ],
    ids=["replacement", "fewer", "more", "part"],
)
def test_a_sampler_that_draws_otherwise_is_not_replaced_by_a_shuffle(sampler: Any) -> None:
    loader = DataLoader(TensorDataset(torch.arange(100.0)), 10, sampler=sampler)
    training, validation = hold_out(loader, None, share=0.2, seed=0)
    assert sum(len(x) for x, _ in validation) == len(sampler) // 5
    with pytest.raises(InputError, match="another order"):
        list(training)


def test_a_sampler_of_the_first_samples_gives_no_others() -> None:
    loader = DataLoader(TensorDataset(torch.arange(100.0)), 10, sampler=SequentialSampler(range(30)))
    training, validation = hold_out(loader, None, share=0.2, seed=0)
    assert sorted(torch.cat([x for x, _ in (*training, *validation)]).tolist()) == list(range(30))


def test_mixing_keeps_pairs_and_sizes() -> None:
    pairs: Any = [(torch.arange(4.0), torch.arange(4)), (torch.arange(4.0, 7), torch.arange(4, 7))] * 2
    found = list(mixed(pairs, 2, torch.Generator().manual_seed(0)))
    assert [len(x) for x, _ in found] == [4, 3, 4, 3]
    assert all(torch.equal(x.long(), y) for x, y in found if y is not None)
    assert sorted(torch.cat([x for x, _ in found[:2]]).tolist()) == list(range(7))
    assert torch.cat([x for x, _ in found[:2]]).tolist() != torch.cat([x for x, _ in found[2:]]).tolist()


def test_setting_aside_splits_without_loss() -> None:
    for count in range(2, 14):
        batches = SetAside([torch.full((1, 1), float(n)) for n in range(count)])
        length = len(batches)
        first = [int(batch) for batch in batches]
        assert len(first) == length
        assert [int(batch) for batch in batches] == first
        assert sorted(first + [int(batch) for batch in batches.held]) == list(range(count))
    with pytest.raises(TypeError):
        len(SetAside(iter([])))

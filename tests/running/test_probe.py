"""How far answers are from the original's: beside formulas, and whatever the batches are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensigma.running import Probe, Scores


class Fixed(nn.Module):
    """Answers with what it was given."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer


def test_divergence_of_scores_and_of_other_answers() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(6, 4, generator=generator) for _ in range(2))
    x = [torch.zeros(6, 1)]
    scores = Probe(Fixed(one), x, samples=6, answers=Scores()).divergence(Fixed(other))
    chances = one.double().softmax(1)
    expected = (chances * (chances.log() - other.double().log_softmax(1))).sum(1).mean().item()
    assert scores == pytest.approx(expected, rel=1e-6)
    maps, others = (tensor.reshape(6, 2, 2) for tensor in (one, other))
    relative = Probe(Fixed({"maps": maps}), x, samples=6).divergence(Fixed({"maps": others}))
    assert relative == pytest.approx((((one - other) ** 2).mean() / one.var(correction=0)).item(), rel=1e-5)
    broken = Fixed(torch.full((6, 4), math.nan))
    assert Probe(Fixed(one), x, samples=6, answers=Scores()).divergence(broken) == math.inf
    assert Probe(Fixed(one), [], samples=6).is_silent
    assert Probe(Fixed(one.long()), x, samples=6).is_silent


def test_levels_of_one_answer_count_as_one() -> None:
    """The outputs of a detector at several resolutions: one on which nothing happens must not count most."""
    generator = torch.Generator().manual_seed(0)

    def answers(scale: float) -> list[Tensor]:
        sizes = {(40, 5): 0.001, (10, 5): 1.0, (40, 8): 3.0, (10, 8): 3.0}
        return [scale * size * torch.randn(6, *shape, generator=generator) for shape, size in sizes.items()]

    original, changes = answers(1), answers(0.1)
    changed = [one + change for one, change in zip(original, changes, strict=True)]

    def named(tensors: list[Tensor]) -> Fixed:
        return Fixed(dict(zip("abcd", tensors, strict=True)))

    def joined(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(tensors[:2], 1), torch.cat(tensors[2:], 1)]

    expected = sum(
        ((one - other) ** 2).mean() / one.var(correction=0)
        for one, other in zip(joined(original), joined(changed), strict=True)
    )
    divergence = Probe(named(original), [torch.zeros(6, 1)], samples=6).divergence(named(changed))
    assert divergence == pytest.approx(float(expected), rel=1e-5)


def test_what_the_original_leaves_unanswered_does_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(6, 4, generator=generator) for _ in range(2))
    x = [torch.zeros(6, 1)]
    masked = [torch.cat([scores, torch.full((6, 1), -math.inf)], 1) for scores in (one, other)]
    plain = Probe(Fixed(one), x, samples=6, answers=Scores()).divergence(Fixed(other))
    assert Probe(Fixed(masked[0]), x, samples=6, answers=Scores()).divergence(Fixed(masked[1])) == pytest.approx(plain)
    holed = one.clone()
    holed[2] = math.nan
    rest = [i for i in range(6) if i != 2]
    expected = Probe(Fixed(one[rest]), [torch.zeros(5, 1)], samples=5, answers=Scores()).divergence(Fixed(other[rest]))
    assert Probe(Fixed(holed), x, samples=6, answers=Scores()).divergence(Fixed(other)) == pytest.approx(
        expected * 5 / 6
    )
    maps, others = holed.reshape(6, 2, 2), other.reshape(6, 2, 2)
    assert math.isfinite(Probe(Fixed(maps), x, samples=6).divergence(Fixed(others)))


@pytest.mark.parametrize("size", [1, 7, 51, 65, 130])
def test_how_samples_come_in_batches_changes_nothing(size: int) -> None:
    """With a single column of answers too, where one sample has no variance of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)).eval() for _ in range(2))
    inputs = torch.randn(130, 32, generator=torch.Generator().manual_seed(1))
    whole = Probe(model, [inputs], samples=128)
    parts = Probe(model, list(inputs.split(size)), samples=128)
    assert parts.samples == whole.samples == 128
    assert parts.divergence(other) == pytest.approx(whole.divergence(other), rel=1e-4)
    assert 64 <= parts.first(64).samples < 64 + min(size, 64)


def test_no_more_is_kept_than_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensigma.running.probe._BYTES", 10 * (32 + 12) * 4)
    probe = Probe(nn.Linear(32, 12), [torch.randn(4, 32)] * 8, samples=200)
    assert probe.samples == 8


@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 2), (6, 1)], ids=["scores", "maps", "one-number"])
def test_random_mixtures_react_to_changes_as_the_divergence_does(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    answer, change = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    probe = Probe(Fixed(answer), [torch.zeros(6, 1)], samples=6)
    step, draws, squares = 1e-4, 1000, torch.zeros(6, dtype=torch.float64)
    expected = probe.divergence(Fixed(answer + step * change)) / step**2
    tracked = answer.clone().requires_grad_()
    for _ in range(draws):
        (slope,) = torch.autograd.grad(probe.mixture([tracked], generator), tracked)
        squares += (slope * change).flatten(1).sum(1).square() / draws
    assert squares.mean().item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_networks_that_end_with_a_softmax_count_as_those_without_it(seed: int) -> None:
    """The divergence of probabilities is that of their logits, at every position, and so is the way it reacts."""
    generator = torch.Generator().manual_seed(seed)
    one, change = (5 * torch.randn(6, 3, 40, generator=generator).double() for _ in range(2))
    other = one + 1e-3 * change
    x, kind = [torch.zeros(6, 1)], Scores(-1)
    softened = one.softmax(-1), other.softmax(-1)
    expected = Probe(Fixed(one), x, samples=6, answers=kind).divergence(Fixed(other))
    found = Probe(Fixed(softened[0]), x, samples=6, answers=kind).divergence(Fixed(softened[1]))
    assert found == pytest.approx(expected, rel=1e-6)
    signs = torch.randint(0, 2, one.shape, generator=generator).double() * 2 - 1
    moves = [
        (kind.root(before, signs, 1.0) * (after - before)).sum((1, 2))
        for before, after in ((one, other), (softened[0], softened[1]))
    ]
    # To first order a softmax moves by its derivative.
    torch.testing.assert_close(moves[1], moves[0], rtol=0.05, atol=1e-5)
    zeros = torch.eye(4)[None].float()
    assert math.isfinite(Probe(Fixed(zeros), x, samples=1, answers=kind).divergence(Fixed(zeros.flip(-1))))

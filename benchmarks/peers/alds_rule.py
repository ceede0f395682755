"""The rule of ALDS (Liebenwein, Maalouf, Feldman and Rus, NeurIPS 2021), rebuilt from the paper's description.

A layer's weight is a t × d matrix; its columns are split into k groups of input channels, and each group is replaced
by its SVD of rank j: a convolution with k groups of j filters each, then a pointwise one. The relative error of a layer
is bounded by √k · max over groups of the (j+1)-th singular value, divided by the largest singular value of the whole
matrix. Globally, the largest of these bounds over all layers is made as small as the number of parameters allows, by
bisection; locally, each layer takes the k with the lowest bound at the size that it was given; both are repeated until
nothing changes. Several random choices of the first k are tried.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_GROUPS = (1, 2, 3, 4, 5, 8, 16)
_STARTS, _ROUNDS, _BISECTIONS = 15, 20, 60


@dataclass(frozen=True)
class Choice:
    """Groups of channels, and the rank of each."""

    groups: int
    rank: int


class Spectrum:
    """Bounds and sizes of one layer for every number of groups."""

    def __init__(self, layer: nn.Conv2d | nn.Linear) -> None:
        weight = layer.weight.detach()
        t, s = weight.shape[:2]
        self.dense = weight.numel()
        largest = float(torch.linalg.matrix_norm(weight.flatten(1), 2))
        self.groups = tuple(k for k in _GROUPS if s % k == 0)
        self.bounds: dict[int, Tensor] = {}
        self.price: dict[int, int] = {}
        for k in self.groups:
            blocks = torch.stack([block.flatten(1) for block in weight.chunk(k, dim=1)])
            # Position j: the bound at rank j + 1, in which the first singular value that is lost is the (j + 2)-th.
            values = torch.linalg.svdvals(blocks).amax(0)
            lost = torch.cat([values[1:], values.new_zeros(1)])
            self.bounds[k] = k**0.5 * lost / max(largest, torch.finfo(torch.float32).tiny)
            self.price[k] = k * t + weight[0].numel()

    def rank_for(self, groups: int, bound: float) -> int | None:
        """The lowest rank that keeps the bound, or None where the layer as it is takes no more."""
        # Bounds never rise with the rank: count those that are still too high.
        rank = int((self.bounds[groups] > bound).sum()) + 1
        return rank if rank * self.price[groups] < self.dense else None

    def cost(self, choice: Choice | None) -> int:
        return self.dense if choice is None else choice.rank * self.price[choice.groups]

    def best_groups(self, size: int) -> int:
        """The number of groups with the lowest bound in a layer of at most ``size`` weights."""

        def bound(k: int) -> float:
            rank = min(size // self.price[k], len(self.bounds[k]))
            return float(self.bounds[k][rank - 1]) if rank else float("inf")

        return min(self.groups, key=bound)


def allocate(spectra: Mapping[str, Spectrum], limit: float, seed: int = 0) -> dict[str, Choice | None]:
    """Groups and rank of every layer, None where it stays dense, for at most ``limit`` weights.

    Raises ValueError where rank 1 everywhere is more.
    """
    rng = random.Random(seed)
    starts = [dict.fromkeys(spectra, 1)]
    starts += [{name: rng.choice(spectrum.groups) for name, spectrum in spectra.items()} for _ in range(_STARTS - 1)]
    found = [result for start in starts if (result := improve(spectra, start, limit)) is not None]
    if not found:
        raise ValueError(f"rank 1 everywhere leaves more than the {limit:,.0f} weights that may remain")
    return min(found, key=lambda result: result[0])[1]


def improve(
    spectra: Mapping[str, Spectrum], groups: Mapping[str, int], limit: float
) -> tuple[float, dict[str, Choice | None]] | None:
    """Global and local steps in turn, from these groups, while the bound falls."""
    best = share_out(spectra, groups, limit)
    for _ in range(_ROUNDS):
        if best is None:
            return None
        sizes = {name: spectra[name].cost(choice) for name, choice in best[1].items()}
        chosen = {name: spectra[name].best_groups(size) for name, size in sizes.items()}
        following = share_out(spectra, chosen, limit)
        if following is None or following[0] >= best[0]:
            return best
        best = following
    return best


def share_out(
    spectra: Mapping[str, Spectrum], groups: Mapping[str, int], limit: float
) -> tuple[float, dict[str, Choice | None]] | None:
    """The lowest bound that all layers can keep together, and their ranks; None where none fits."""

    def at(bound: float) -> dict[str, Choice | None]:
        ranks = {name: spectrum.rank_for(groups[name], bound) for name, spectrum in spectra.items()}
        return {name: None if rank is None else Choice(groups[name], rank) for name, rank in ranks.items()}

    def total(choices: Mapping[str, Choice | None]) -> int:
        return sum(spectra[name].cost(choice) for name, choice in choices.items())

    # Nowhere can a bound be above that of rank 1.
    low, high = 0.0, max(float(bounds[0]) for spectrum in spectra.values() for bounds in spectrum.bounds.values())
    if total(at(high)) > limit:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if total(at(middle)) > limit else (low, middle)
    return high, at(high)


def factors(weight: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """Weights of the grouped convolution (k·j, s/k, …) and of the pointwise one (t, k·j)."""
    first: list[Tensor] = []
    second: list[Tensor] = []
    for block in weight.chunk(choice.groups, dim=1):
        left, values, right = torch.linalg.svd(block.flatten(1), full_matrices=False)
        rank = min(choice.rank, len(values))
        first.append(right[:rank].reshape(rank, *block.shape[1:]))
        second.append(left[:, :rank] * values[:rank])
    return torch.cat(first), torch.cat(second, dim=1)

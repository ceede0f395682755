"""The rule of BALF (González-Martínez 2025, arXiv 2509.25136): whitened SVD of every layer, ranks shared out by energy.

Every convolution and Linear layer is a t × d matrix M. The energy e(r) of a layer at rank r is the share of the squared
singular values of M Σ^½ among the first r, its cost c(r) that of the two factors or, where this is more, of the layer
as it is. The sum of e over all layers is made as large as the sum of c allows, by Lagrangian relaxation: every layer
takes the r with the largest e(r) − λ c(r), and λ is bisected.

This follows the authors' published program: Σ is not centred, the first convolution is factorised too, no layer has a
weight, and what the relaxation leaves of the budget is not spent. Different is that the budget is a share of the whole
model, as everywhere here, and not of the factorised layers alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tensigma.calibration import Calibration
from tensigma.errors import InputError
from tensigma.layers import kernels_of
from tensigma.linalg import svd_errors
from tensigma.planning import CompressedEntry, CostBudget, Plan, Ranks, plan
from tensigma.solving import energy_views, layer_cost

# λ is known to the last bit after fewer.
_BISECTIONS = 200


class BALF:
    """Spectra of all layers, computed once; then a plan for any budget.

    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 10))
    >>> stats = ts.calibrate(model, [torch.randn(32, 3, 6, 6, generator=torch.Generator().manual_seed(0))])
    >>> made = BALF(model, stats).plan(ts.Params(0.5))
    >>> made.rate >= 2, {entry.method.name for entry in made.compressed}
    (True, {'svd'})
    """

    def __init__(self, model: nn.Module, stats: Calibration, layers: str | Sequence[str] = "all") -> None:
        self._model, self._stats, self._layers = model, stats, layers
        self._smallest = self._plan({"*": 1})
        entries = self._smallest.compressed
        self._energies = {entry.name: self._energy(entry) for entry in entries}
        self._costs = {
            measure: {entry.name: _costs(entry, measure, len(self._energies[entry.name])) for entry in entries}
            for measure in ("params", "macs")
        }

    def plan(self, budget: CostBudget) -> Plan:
        """The plan for ``Params`` or ``Macs``."""
        costs = self._costs[budget.field]
        total = getattr(self._smallest.before, budget.field)
        dense = sum(float(cost[-1]) for cost in costs.values())
        ranks = share_out(self._energies, costs, budget.share * total - (total - dense))
        kept = {name: rank for name, rank in ranks.items() if costs[name][rank - 1] < costs[name][-1]}
        return self._plan(kept)

    def _plan(self, ranks: Mapping[str, int]) -> Plan:
        return plan(
            self._model,
            self._stats,
            ranks=Ranks(ranks),
            method="svd",
            norm="sigma",
            layers=self._layers,
            skip=(),
            saving="none",
        )

    def _energy(self, entry: CompressedEntry) -> Tensor:
        """Shares of energy kept at rank 1, 2, …; the groups of a grouped layer share their rank."""
        kernels = [kernel.float() for kernel in kernels_of(self._model.get_submodule(entry.name))]
        assert entry.geometry is not None
        views = energy_views(kernels, entry.norm.targets(entry.geometry, self._stats[entry.name]))
        totals = [float(metric.norm(kernel)) ** 2 for kernel, metric in views]
        lost = sum(total * svd_errors(*view) for total, view in zip(totals, views, strict=True))
        assert isinstance(lost, Tensor)
        return 1 - lost / max(sum(totals), torch.finfo(torch.float64).tiny)


def share_out(energies: Mapping[str, Tensor], costs: Mapping[str, Tensor], limit: float) -> dict[str, int]:
    """The rank of every layer, by Lagrangian relaxation of: the most energy at a cost of at most ``limit``.

    Energies and costs are those of rank 1, 2, … and never fall with the rank.

    >>> energies = {"a": torch.tensor([0.9, 1.0]), "b": torch.tensor([0.5, 1.0])}
    >>> costs = dict.fromkeys("ab", torch.tensor([1.0, 2.0]))
    >>> share_out(energies, costs, 3), share_out(energies, costs, 4)
    ({'a': 1, 'b': 2}, {'a': 2, 'b': 2})
    """

    def choose(price: float) -> tuple[dict[str, int], float]:
        # argmax takes the first of equals: the lowest rank.
        indices = {name: int((energies[name] - price * costs[name]).argmax()) for name in energies}
        return {name: index + 1 for name, index in indices.items()}, sum(
            float(costs[name][index]) for name, index in indices.items()
        )

    full = {name: len(energy) for name, energy in energies.items()}
    if sum(float(cost[-1]) for cost in costs.values()) <= limit:
        return full
    smallest = sum(float(cost[0]) for cost in costs.values())
    if smallest > limit:
        raise InputError(f"rank 1 everywhere still costs {smallest:,.0f}, and {limit:,.0f} may remain; ask for more")
    low, high = 0.0, 1.0
    while choose(high)[1] > limit:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if choose(middle)[1] > limit else (low, middle)
    return choose(high)[0]


def _costs(entry: CompressedEntry, measure: str, n_ranks: int) -> Tensor:
    """The cost at rank 1, 2, …, nowhere above that of the layer as it is."""
    assert entry.geometry is not None
    dense = getattr(entry.before, measure)
    costs = []
    for rank in range(1, n_ranks + 1):
        format = entry.method.format((rank,))
        cost = getattr(layer_cost(entry.geometry, format, entry.input_size, entry.norm, entry.calls), measure)
        if cost >= dense:
            break
        costs.append(float(cost))
    return torch.tensor(costs + [float(dense)] * (n_ranks - len(costs)), dtype=torch.float64)

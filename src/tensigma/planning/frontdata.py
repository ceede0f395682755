"""The front of a plan as plain data: what becomes of every layer at some tens of budgets, for whoever has no solver."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tensigma.errors import InputError
from tensigma.planning.allocation import Allocation
from tensigma.planning.budget import Macs, Params
from tensigma.planning.entry import Entry
from tensigma.planning.plans import Plan

FRONT_VERSION = 1
#: How many budgets are worked out for each measure of cost, the plan itself aside.
N_BUDGETS = 40

_DIGITS = 5


def front_data(plan: Plan, *, n_budgets: int = N_BUDGETS) -> dict[str, Any] | None:
    """All budgets of ``plan`` at a glance, as dicts, lists, numbers and strings; None where it knows no front.

    ``layers`` holds what may become of each layer that shares the budget, as ``[method, ranks, parameters, MACs,
    expected error]`` (method and ranks None: as it is). ``measures`` holds for ``params`` and, where input sizes are
    known, ``macs`` columns by rising budget: the share asked for, the error (root mean square over the layers),
    parameters and MACs of the whole model, and for each layer the index of its option. ``chosen`` is the place of
    ``plan`` itself, whose own file is under ``plan``.

    >>> import torch
    >>> from torch import nn
    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(64, 10))
    >>> stats = ts.calibrate(model, [torch.randn(32, 3, 6, 6)])
    >>> data = front_data(ts.plan(model, stats, budget=ts.Params(0.5)))
    >>> sorted(data["measures"]), [layer["name"] for layer in data["layers"]], data["measures"]["params"]["share"][-1]
    (['macs', 'params'], ['2', '4'], 1.0)
    """
    try:
        allocation = plan.front()
    except InputError:
        return None
    names = [name for name in plan if name in allocation.curves]
    tables = {name: _Options() for name in names}
    measures: dict[str, Any] = {"params": _columns(plan, allocation, Params, n_budgets, tables)}
    if plan.before.macs and all(plan[name].input_size is not None for name in names):
        measures["macs"] = _columns(plan, allocation, Macs, n_budgets, tables)
    layers = [{"name": name, "options": tables[name].rows, "settings": tables[name].settings} for name in names]
    return {"version": FRONT_VERSION, "measures": measures, "layers": layers, "plan": _plain(plan.to_json())}


class _Options:
    """The options of one layer that some budget takes, each written once."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        #: Method → the options of its solver.
        self.settings: dict[str, dict[str, Any]] = {}
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, entry: Entry) -> int:
        """The index of what ``entry`` says."""
        method = None if entry.ranks is None or entry.method is None else entry.method.name
        key = (method, entry.ranks)
        if key not in self._places:
            cost, sized = entry.after, entry.input_size is not None
            ranks = None if entry.ranks is None else list(entry.ranks)
            self.rows.append([method, ranks, cost.params, cost.macs if sized else None, _rounded(entry.error or 0.0)])
            self._places[key] = len(self.rows) - 1
            if method is not None:
                self.settings[method] = dict(entry.options)
        return self._places[key]


def _columns(
    plan: Plan, allocation: Allocation, budget: type[Params | Macs], count: int, tables: Mapping[str, _Options]
) -> dict[str, Any]:
    field = budget.field
    own = getattr(plan.after, field) / max(getattr(plan.before, field), 1)
    shares = _shares(allocation.trade(budget)[0].share, count)
    found = [(share, allocation.plan(budget(share))) for share in shares]
    # A grid as fine as the options are coarse gives the same plan twice; the first has the tighter budget.
    kept = found[:1] + [after for before, after in pairwise(found) if before[1] != after[1]]
    others = [(share, other) for share, other in kept if other != plan and share != _up(own)]
    points = sorted([*others, (_up(own), plan)], key=lambda point: point[0])
    plans = [other for _, other in points]
    return {
        "share": [share for share, _ in points],
        "error": [_rounded(_error(other, list(tables))) for other in plans],
        "params": [other.after.params for other in plans],
        "macs": [other.after.macs for other in plans] if plan.before.macs else None,
        "choices": [[table.place(other[name]) for name, table in tables.items()] for other in plans],
        "chosen": plans.index(plan),
    }


def _shares(smallest: float, count: int) -> list[float]:
    """Budgets from the smallest that can be kept to the whole model, in equal ratios.

    >>> _shares(0.25, 3)
    [0.25, 0.5, 1.0]
    """
    low = min(_up(smallest), 1.0)
    shares = [_up(low ** (1 - index / (count - 1))) for index in range(count)]
    return sorted({min(max(share, low), 1.0) for share in shares})


def _up(share: float) -> float:
    """The next number of few digits, so that a person can copy the budget and still get the plan.

    >>> _up(0.123412), _up(0.5)
    (0.1235, 0.5)
    """
    return min(1.0, max(1, math.ceil(10_000 * share - 1e-9)) / 10_000)


def _error(plan: Plan, names: Sequence[str]) -> float:
    return math.sqrt(sum((plan[name].error or 0.0) ** 2 for name in names) / max(len(names), 1))


def _plain(data: dict[str, Any]) -> Any:
    """The same as it comes back from a file: lists where there were tuples."""
    return json.loads(json.dumps(data))


def _rounded(value: float) -> float:
    return round(value, _DIGITS)

"""Data that only a report page needs: plans for some tens of budgets, and how errors fall with rank.

It is computed when a page is requested.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tensigma.calibration import Calibration, LayerStats
from tensigma.errors import InputError, TensigmaError
from tensigma.layers import kernels_of
from tensigma.linalg import Spectra
from tensigma.planning.budgets import Bytes, CostBudget, Macs, Params
from tensigma.planning.entry import CompressedEntry, DenseEntry
from tensigma.planning.plans import Front, Plan
from tensigma.solving import energy_views

FRONT_VERSION = 1
#: How many budgets are planned for each measure of cost, besides the plan itself.
N_BUDGETS = 40

#: Points kept of each curve of error by rank.
N_POINTS = 48
# Eigenvalues of more directions than this would take longer than the picture is worth.
_LARGEST = 2048
_DIGITS = 5


def front_data(plan: Plan, *, n_budgets: int = N_BUDGETS) -> dict[str, Any] | None:
    """All budgets of ``plan`` at a glance, as dicts, lists, numbers and strings; None if it has no front.

    ``layers`` holds the options of each layer that shares the budget, as ``[method, ranks, parameters, MACs,
    expected error, bits, bytes]`` (method and ranks None: dense). ``measures`` holds for ``params``, where input sizes
    are known ``macs``, and for a plan with bits ``bytes``, columns by rising budget: the share asked for, the error
    (root mean square over the layers), parameters, MACs and bytes of the whole model, and for each layer the index of
    its option. ``chosen`` is the place of ``plan`` itself, whose own file is under ``plan``.

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
        front = plan.front()
    except InputError:
        return None
    names = [name for name in plan if name in front.curves]
    tables = {name: _Options() for name in names}
    measures: dict[str, Any] = {"params": _columns(plan, front, Params, n_budgets, tables)}
    if plan.before.macs and all(plan[name].input_size is not None for name in names):
        measures["macs"] = _columns(plan, front, Macs, n_budgets, tables)
    bits = plan.notes.get("bits")
    if bits:
        measures["bytes"] = _columns(plan, front, partial(Bytes, bits=tuple(bits)), n_budgets, tables)
    layers = [{"name": name, "options": tables[name].rows, "settings": tables[name].settings} for name in names]
    return {
        "version": FRONT_VERSION,
        "measures": measures,
        "layers": layers,
        "bits": bits,
        "plan": _plain(plan.to_json()),
    }


class _Options:
    """The options of one layer that some budget takes, each written once."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        #: Method → the options of its solver.
        self.settings: dict[str, dict[str, Any]] = {}
        self._places: dict[tuple[Any, ...], int] = {}

    def place(self, entry: DenseEntry | CompressedEntry) -> int:
        """The index of the option that ``entry`` takes."""
        method = entry.method.name if isinstance(entry, CompressedEntry) else None
        key = (method, entry.ranks, entry.bits)
        if key not in self._places:
            cost, sized = entry.after, entry.input_size is not None
            ranks = None if entry.ranks is None else list(entry.ranks)
            macs = cost.macs if sized else None
            error = _rounded(entry.error or 0.0)
            self.rows.append([method, ranks, cost.params, macs, error, entry.bits, cost.bytes])
            self._places[key] = len(self.rows) - 1
            if isinstance(entry, CompressedEntry):
                self.settings[entry.method.name] = dict(entry.options)
        return self._places[key]


def _columns(
    plan: Plan, front: Front, budget: Callable[[float], CostBudget], count: int, tables: Mapping[str, _Options]
) -> dict[str, Any]:
    whole = budget(1.0)
    field = whole.field
    plan_share = _up(getattr(plan.after, field) / max(getattr(plan.before, field), 1))
    shares = _shares(front.trade(whole)[0].share, count)
    grid = [(share, front.plan(budget(share))) for share in shares]
    # Neighbouring budgets may give the same plan; the first has the tighter budget.
    distinct = grid[:1] + [after for before, after in pairwise(grid) if before[1] != after[1]]
    others = [(share, other) for share, other in distinct if other != plan and share != plan_share]
    points = sorted([*others, (plan_share, plan)], key=lambda point: point[0])
    plans = [other for _, other in points]
    return {
        "share": [share for share, _ in points],
        "error": [_rounded(_error(other, list(tables))) for other in plans],
        "params": [other.after.params for other in plans],
        "macs": [other.after.macs for other in plans] if plan.before.macs else None,
        "bytes": [other.after.bytes for other in plans],
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
    """The share rounded up to four decimals, so that a reader can copy the budget and still get the plan.

    >>> _up(0.123412), _up(0.5)
    (0.1235, 0.5)
    """
    return min(1.0, max(1, math.ceil(10_000 * share - 1e-9)) / 10_000)


def _error(plan: Plan, names: Sequence[str]) -> float:
    return math.sqrt(sum((plan[name].error or 0.0) ** 2 for name in names) / max(len(names), 1))


def _plain(data: dict[str, Any]) -> Any:
    """The same as read back from a file: lists instead of tuples."""
    return json.loads(json.dumps(data))


def _rounded(value: float) -> float:
    return round(value, _DIGITS)


def spectra_data(plan: Plan, modules: Mapping[str, nn.Module], stats: Calibration | None) -> dict[str, Any]:
    """For each layer that could be compressed, the relative error of its best approximation at each rank: a lower bound
    for any format with as many output directions, under the norm of the plan.

    ``modules`` are the layers as they were. Layers with thousands of output directions are left out.

    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6))
    >>> plan = ts.plan(model, ranks=ts.Ranks({"*": 2}), norm="frobenius")
    >>> data = spectra_data(plan, dict(model.named_modules()), None)
    >>> data["1"]["rank"], data["1"]["error"][0], data["1"]["error"][-1]
    ([0, 1, 2, 3, 4, 5, 6], 1.0, 0.0)
    """
    spectra = {}
    for entry in plan.values():
        if entry.name in modules and _worth_it(entry):
            layer_stats = None if stats is None else stats.get(entry.name)
            try:
                spectra[entry.name] = _spectrum(entry, modules[entry.name], layer_stats)
            except TensigmaError:
                continue  # a layer without the statistics that its norm needs has no spectrum
    return spectra


def _worth_it(entry: DenseEntry | CompressedEntry) -> bool:
    geometry, method = entry.geometry, entry.method
    if geometry is None or method is None or method.why_not(geometry, entry.norm) is not None:
        return False
    return min(geometry.kernel_shape[0], geometry.patch_size) <= _LARGEST


def _spectrum(entry: DenseEntry | CompressedEntry, module: nn.Module, stats: LayerStats | None) -> dict[str, Any]:
    assert entry.geometry is not None
    with torch.no_grad():
        views = energy_views(kernels_of(module), entry.norm.targets(entry.geometry, stats))
        # Shown beside errors on the data itself.
        spectra = Spectra.of([(kernel, metric.observed) for kernel, metric in views], inputs=False)
    full = min(spectra.outs.shape[1], entry.geometry.patch_size)
    ranks = sorted({round(full * index / (N_POINTS - 1)) for index in range(N_POINTS)})
    # Rounding leaves a trace of energy in directions that have none.
    errors = [round(spectra.svd_error(rank), 5) if rank < full else 0.0 for rank in ranks]
    return {"rank": ranks, "error": errors}

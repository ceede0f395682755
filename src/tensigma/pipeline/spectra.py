"""How fast the energy of each layer's output falls, as plain data for pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tensigma.calibration import Calibration, LayerStats
from tensigma.errors import TensigmaError
from tensigma.layers import kernels_of
from tensigma.planning import Entry, Plan
from tensigma.planning.norms import energy_views
from tensigma.planning.spectra import Spectra

#: Points kept of each curve.
N_POINTS = 48
# Eigenvalues of more directions than this would take longer than the picture is worth.
_LARGEST = 2048


def spectra_data(plan: Plan, modules: Mapping[str, nn.Module], stats: Calibration | None) -> dict[str, Any]:
    """For each layer that could be compressed, the relative error of its best approximation by ranks: a lower bound of
    what any format with so many output directions can reach, under the norm of the plan.

    ``modules`` are the layers as they were. Layers with thousands of output directions are left out.

    >>> import tensigma as ts
    >>> model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 6))
    >>> plan = ts.plan(model, ranks=ts.Ranks({"*": 2}), norm="frobenius")
    >>> data = spectra_data(plan, dict(model.named_modules()), None)
    >>> data["1"]["rank"], data["1"]["error"][0], data["1"]["error"][-1]
    ([0, 1, 2, 3, 4, 5, 6], 1.0, 0.0)
    """
    found = {}
    for entry in plan.values():
        if entry.name in modules and _worth_it(entry):
            own = None if stats is None else stats.get(entry.name)
            try:
                found[entry.name] = _spectrum(entry, modules[entry.name], own)
            except TensigmaError:
                continue  # a layer without the statistics of its norm has no spectrum, and needs none
    return found


def _worth_it(entry: Entry) -> bool:
    geometry, method = entry.geometry, entry.method
    if geometry is None or method is None or method.why_not(geometry, entry.norm) is not None:
        return False
    return min(geometry.kernel_shape[0], geometry.patch_size) <= _LARGEST


def _spectrum(entry: Entry, module: nn.Module, stats: LayerStats | None) -> dict[str, Any]:
    assert entry.geometry is not None
    with torch.no_grad():
        views = energy_views(kernels_of(module), entry.norm.targets(entry.geometry, stats))
        spectra = Spectra.of(views, inputs=False)
    full = min(spectra.outs.shape[1], entry.geometry.patch_size)
    ranks = sorted({round(full * index / (N_POINTS - 1)) for index in range(N_POINTS)})
    # Rounding leaves a trace of energy in directions that have none.
    errors = [round(spectra.svd_error(rank), 5) if rank < full else 0.0 for rank in ranks]
    return {"rank": ranks, "error": errors}

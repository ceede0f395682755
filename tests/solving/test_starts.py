"""What was solved before is where the next solution starts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tensigma.calibration import LayerStats
from tensigma.layers import Geometry
from tensigma.solving import METHODS, Solutions, Treatment, norm_of, solution_store, solve

ITERATIVE = [name for name, method in METHODS.items() if "init" in method.options]


def _problem(method: str, groups: int = 1) -> tuple[nn.Conv2d, LayerStats, Treatment]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.Conv2d(12, 16, 3, padding=1, groups=groups)
        rows = torch.randn(groups, 400, 108 // groups) @ torch.randn(108 // groups, 108 // groups)
    stats = LayerStats.from_rows(rows if groups > 1 else rows[0], input_shape=(12, 8, 8))
    chosen = METHODS[method]
    treatment = Treatment(
        geometry=Geometry.of(layer),
        method=chosen,
        norm=norm_of("centred"),
        format=chosen.format((4,) * len(chosen.rank_names)),
    )
    return layer, stats, treatment


@pytest.mark.parametrize("method", ITERATIVE)
def test_a_solution_is_never_worse_than_where_it_started(method: str) -> None:
    layer, stats, treatment = _problem(method)
    rough = solve(treatment.roughly(), layer, stats)
    fine = solve(treatment, layer, stats, rough.modules)
    assert rough.error is not None
    assert fine.error is not None
    assert fine.error <= rough.error * (1 + 1e-6)
    # The end of a long search is where a start from it stays.
    again = solve(treatment.roughly(), layer, stats, fine.modules)
    assert again.error == pytest.approx(fine.error, rel=1e-3)


def test_groups_start_each_from_their_own_factors() -> None:
    layer, stats, treatment = _problem("tucker2", groups=2)
    rough = solve(treatment.roughly(), layer, stats)
    fine = solve(treatment, layer, stats, rough.modules)
    assert rough.error is not None
    assert fine.error is not None
    assert fine.error <= rough.error * (1 + 1e-6)


def test_a_layer_starts_from_its_latest_solution_in_the_same_format(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Any] = []

    def watched(treatment: Treatment, module: nn.Module, stats: LayerStats, start: Any = None) -> Any:
        starts.append(start)
        return solve(treatment, module, stats, start)

    monkeypatch.setattr(solution_store, "solve", watched)
    layer, stats, treatment = _problem("cp-joint")
    solutions = Solutions()
    solutions.get_or_solve(treatment.roughly(), layer, stats, name="conv")
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.mul_(1.01)
    solutions.get_or_solve(treatment, other, stats, name="conv")
    solutions.get_or_solve(treatment, other, stats, name="another")
    smaller = Treatment(
        geometry=treatment.geometry, method=treatment.method, norm=treatment.norm, format=treatment.method.format((3,))
    )
    solutions.get_or_solve(smaller, other, stats, name="conv")
    # From nothing; from the rough one; the third is the same problem as the second; not from another rank.
    assert [start is not None for start in starts] == [False, True, False]


def test_options_of_the_caller_go_before_a_start() -> None:
    layer, stats, treatment = _problem("cp-joint")
    rough = solve(treatment.roughly(), layer, stats)
    asked = Treatment(
        geometry=treatment.geometry,
        method=treatment.method,
        norm=treatment.norm,
        format=treatment.format,
        options={"init": "random", "seed": 3},
    )
    first, second = solve(asked, layer, stats), solve(asked, layer, stats, rough.modules)
    assert all(torch.equal(*pair) for pair in zip(first.tensors().values(), second.tensors().values(), strict=True))

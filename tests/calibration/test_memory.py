"""Estimates before the run, and passes that fit."""

from __future__ import annotations

import pytest
from torch import nn

from tensigma.calibration import estimate_memory, parse_bytes
from tensigma.calibration.memory import plan_passes
from tensigma.errors import InputError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("4 gib", 4 * 2**30), ("0.5M", 500_000), ("512", 512), (7, 7), ("2TB", 2 * 10**12)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4XB", "-1GB", "1e9", 0, -5])
def test_sizes_that_are_none(text):
    with pytest.raises(InputError, match="memory"):
        parse_bytes(text)


def layers() -> dict[str, nn.Module]:
    return {f"conv{i}": nn.Conv2d(64, 64, 3, padding=1) for i in range(6)}


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9, 1.5])
def test_passes_fit_and_cover_every_layer_once(share):
    memory = int(share * estimate_memory(layers()).total)
    estimate = estimate_memory(layers(), memory=memory)
    passes = plan_passes(estimate, memory)
    assert [name for names in passes for name in names] == list(layers())
    for names in passes:
        assert sum(estimate.results.values()) + estimate.working(names) <= memory


def test_less_memory_never_means_fewer_passes():
    total = estimate_memory(layers()).total
    counts = []
    for share in (0.3, 0.5, 0.7, 0.9, 1.5):
        memory = int(share * total)
        counts.append(len(plan_passes(estimate_memory(layers(), memory=memory), memory)))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 1


def test_results_of_double_precision_take_twice_as_much():
    for layer, rows in ((nn.Conv2d(8, 4, 3), None), (nn.Linear(4096, 2), 100)):
        single = estimate_memory({"layer": layer}, max_samples=rows).results["layer"]
        assert estimate_memory({"layer": layer.double()}, max_samples=rows).results["layer"] == 2 * single


def test_a_layer_that_cannot_fit_is_named():
    targets = {"small": nn.Linear(4, 4), "large": nn.Conv2d(512, 8, 3)}
    with pytest.raises(InputError, match="'large'"):
        plan_passes(estimate_memory(targets, memory=90_000_000), 90_000_000)


def test_wide_layers_are_counted_by_rows_where_samples_are_few():
    fc = {"fc": nn.Linear(25088, 16)}
    assert estimate_memory(fc, max_samples=1000).sums["fc"] == 4 * 25088 * 1000
    assert estimate_memory(fc).sums["fc"] == 8 * 25088**2


@pytest.mark.parametrize(
    "targets",
    [layers(), {"fc": nn.Linear(8192, 4)}, {"a": nn.Conv2d(64, 64, 7), "b": nn.Conv2d(3, 8, 3)}],
    ids=["convolutions", "wide", "large kernel"],
)
def test_the_least_memory_does_not_depend_on_what_was_asked_and_is_enough(targets):
    named = set()
    for asked in (1_000, 1_000_000, 5_000_000):
        with pytest.raises(InputError, match="is too little") as caught:
            plan_passes(estimate_memory(targets, memory=asked), asked)
        named.add(str(caught.value).partition("at least ")[2].partition(" in all")[0])
    (least,) = named
    memory = parse_bytes(least)
    estimate = estimate_memory(targets, memory=memory)
    for names in plan_passes(estimate, memory):
        assert sum(estimate.results.values()) + estimate.working(names) <= memory

"""Compressed layers are found by their structure, and nothing else is taken for one."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from cases import LayerCase
from layers.format_table import ACCEPTED, ROWS, FormatRow
from tensigma.layers import (
    Compressed,
    CPFormat,
    Geometry,
    SVDFormat,
    Tucker2Format,
    empty_modules,
    find_compressed,
    fingerprint,
    first_difference,
    original_fingerprint,
    recognise,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

CONV = Geometry.of(nn.Conv2d(8, 6, 3, padding=1))


def named(**modules: nn.Module) -> nn.Sequential:
    sequence = nn.Sequential()
    for name, module in modules.items():
        sequence.add_module(name, module)
    return sequence


@pytest.mark.parametrize(("case", "row"), ACCEPTED)
def test_format_and_geometry_are_found(case: LayerCase, row: FormatRow) -> None:
    geometry = Geometry.of(case.layer())
    # Geometries are equal in every field, padding="same" included.
    assert recognise(empty_modules(row.format, geometry)) == Compressed(row.format, geometry)


@pytest.mark.parametrize("row", ROWS)
def test_the_order_of_the_layers_counts(row: FormatRow) -> None:
    modules = dict(empty_modules(row.format, CONV).named_children())
    for order in itertools.permutations(modules):
        # Anybody may have one layer in a container; one that was built as a format says so.
        expected = Compressed(row.format, CONV) if order == tuple(modules) and not row.format.is_noted else None
        assert recognise(named(**{name: modules[name] for name in order})) == expected


@pytest.mark.parametrize("row", ROWS)
def test_layers_that_are_missing_or_changed_are_noticed(row: FormatRow) -> None:
    stages = row.format.stages(CONV)
    for missing in stages:
        # What is left may be another compressed layer: CP of a 3×3 kernel without one axis is CP of a 3×1 kernel.
        rest = named(**{name: stage.to_module() for name, stage in stages.items() if name != missing})
        assert recognise(rest) != Compressed(row.format, CONV)
    for changed in stages:
        for other in (nn.ReLU(), nn.Conv2d(5, 5, 3), nn.Conv1d(5, 5, 1), nn.Linear(5, 5)):
            modules = {name: stage.to_module() for name, stage in stages.items()} | {changed: other}
            assert recognise(named(**modules)) is None


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4)),
        nn.ModuleDict({"reduce": nn.Linear(4, 2), "expand": nn.Linear(2, 4)}),
        nn.Sequential(),
        nn.Linear(4, 4),
        named(reduce=nn.Conv2d(4, 2, 1), expand=nn.Conv2d(2, 4, 3)),
        named(reduce=nn.Linear(4, 2), expand=nn.Linear(2, 4)),
        named(reduce=nn.Linear(4, 2, bias=False), core=nn.Linear(2, 2, bias=False), expand=nn.Linear(2, 4)),
        named(reduce=nn.Conv2d(4, 2, 1, bias=False), depthx=nn.Conv2d(2, 2, 3), expand=nn.Conv2d(2, 4, 1)),
        named(reduce=nn.Conv2d(4, 2, 1, bias=False), depth7=nn.Conv2d(2, 2, 3), expand=nn.Conv2d(2, 4, 1)),
        named(
            reduce=nn.Conv2d(4, 4, 1), depth0=nn.Conv2d(4, 4, 3), depth1=nn.Conv1d(4, 4, 3), expand=nn.Conv2d(4, 4, 1)
        ),
        named(vertical=nn.Linear(4, 2, bias=False), horizontal=nn.Linear(2, 4)),
        named(rounded=nn.Linear(4, 2)),
    ],
    ids=[
        "unnamed",
        "no-sequence",
        "empty",
        "layer",
        "pointwise-first",
        "bias-inside",
        "linear-core",
        "axis-no-number",
        "axis-too-far",
        "axes-of-two-kinds",
        "linear-vertical",
        "somebody's own",
    ],
)
def test_other_modules_are_not_taken_for_compressed(module: nn.Module) -> None:
    assert recognise(module) is None


def test_the_same_layer_twice_is_not_taken_for_compressed() -> None:
    layer = nn.Linear(4, 4, bias=False)
    assert recognise(named(reduce=layer, expand=layer)) is None


def test_fingerprints_are_those_of_the_original() -> None:
    original = nn.Sequential(CONV.to_module(), nn.ReLU(), nn.Sequential(nn.Conv2d(6, 4, 3), nn.Linear(4, 2)))
    small = nn.Sequential(
        empty_modules(Tucker2Format(3, 2), CONV),
        nn.ReLU(),
        nn.Sequential(empty_modules(CPFormat(4), Geometry.of(nn.Conv2d(6, 4, 3))), nn.Linear(4, 2)),
    )
    assert {name: layer.format for name, layer in find_compressed(small).items()} == {
        "0": Tucker2Format(3, 2),
        "2.0": CPFormat(4),
    }
    assert original_fingerprint(small) == fingerprint(original)
    assert list(original_fingerprint(small)) == ["0", "2.0", "2.1"]
    assert first_difference(fingerprint(original), original_fingerprint(small)) is None
    assert list(original_fingerprint(small, ["0"])) == [
        "0",
        "2.0.reduce",
        "2.0.depth0",
        "2.0.depth1",
        "2.0.expand",
        "2.1",
    ]


def test_the_model_itself_is_not_a_compressed_layer() -> None:
    assert find_compressed(empty_modules(SVDFormat(2), CONV)) == {}


def test_first_difference() -> None:
    first, second = {"a": "linear 4→2", "b": "linear 2→2"}, {"a": "linear 4→2"}
    assert first_difference(first, second) == "layer 'b' (linear 2→2) of the first is missing in the second"
    assert (
        first_difference(second, first, mine="the store", yours="the model")
        == "layer 'b' (linear 2→2) of the model is missing in the store"
    )
    assert (
        first_difference(second, {"a": "linear 4→3"})
        == "layer 'a' is linear 4→2 in the first and linear 4→3 in the second"
    )

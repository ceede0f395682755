"""Formats on their own: ranks, JSON, the registry, and a format from outside the package."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from layers.format_table import ROWS, FormatRow
from tensigma.errors import InputError, RankError, StoreError
from tensigma.layers import (
    FORMATS,
    Compressed,
    CPFormat,
    Format,
    Geometry,
    SVDFormat,
    Tucker2Format,
    along,
    check,
    cost,
    find_compressed,
    format_from_json,
    format_of,
    format_to_json,
    from_modules,
    joined,
    original_fingerprint,
    pointwise,
    recognise,
    register_format,
    replace_,
    temporary_formats,
    to_modules,
)
from tensigma.linalg import SVDFactors


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, None, "2"])
@pytest.mark.parametrize("row", ROWS)
def test_ranks_are_positive_integers(row: FormatRow, rank: Any) -> None:
    for name in row.format.rank_names():
        with pytest.raises(RankError, match=f"got {name}={rank!r}; give an integer of at least 1"):
            replace(row.format, **{name: rank})


def test_ranks_and_variants() -> None:
    assert (Tucker2Format(4, 3).ranks, Tucker2Format(4, 3).variant) == ((4, 3), {})
    assert (CPFormat(5, joint=True).ranks, CPFormat(5, joint=True).variant) == ((5,), {"joint": True})
    with pytest.raises(InputError, match="CPFormat: got joint=1; give a bool"):
        CPFormat(5, joint=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS)
def test_json_round_trip(row: FormatRow) -> None:
    entry = json.loads(json.dumps(format_to_json(row.format)))
    assert format_from_json(entry) == row.format
    assert format_from_json(entry | {"bias": True}) == row.format


@pytest.mark.parametrize(
    ("entry", "format"),
    [
        ({"format": "svd", "ranks": [7], "joint": False, "bias": True}, SVDFormat(7)),
        ({"format": "tucker2", "ranks": [7, 5], "joint": False, "bias": False}, Tucker2Format(7, 5)),
        ({"format": "cp", "ranks": [7], "joint": False, "bias": True}, CPFormat(7)),
        ({"format": "cp", "ranks": [7], "joint": True, "bias": True}, CPFormat(7, joint=True)),
    ],
)
def test_entries_of_version_0_1_are_read(entry: dict[str, Any], format: Format) -> None:
    assert format_from_json(entry) == format


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (None, "got None for a format; expected an object"),
        (["svd", [2]], r"got \['svd', \[2\]\] for a format; expected an object"),
        ({"ranks": [2]}, "format None is unknown; known formats are .*svd.*"),
        ({"format": "hosvd", "ranks": [2]}, "format 'hosvd' is unknown; known formats are .*tucker2.*"),
        ({"format": ["svd"], "ranks": [2]}, r"format \['svd'\] is unknown"),
        ({"format": "svd"}, "got ranks None for format 'svd'; expected a list of rank"),
        ({"format": "svd", "ranks": 2}, "got ranks 2 for format"),
        ({"format": "svd", "ranks": "2"}, "got ranks '2' for format"),
        ({"format": "svd", "ranks": {"2": 2}}, "got ranks .* for format"),
        ({"format": "tucker2", "ranks": [2]}, r"got ranks \[2\] for format 'tucker2'; .* rank_out, rank_in"),
        ({"format": "svd", "ranks": [2, 2]}, r"got ranks \[2, 2\] for format"),
        ({"format": "svd", "ranks": ["2"]}, "got rank='2'; give an integer"),
        ({"format": "svd", "ranks": [2.0]}, "got rank=2.0; give an integer"),
        ({"format": "svd", "ranks": [True]}, "got rank=True; give an integer"),
        ({"format": "svd", "ranks": [0]}, "got rank=0; give an integer of at least 1"),
        ({"format": "svd", "ranks": [2], "joint": True}, "joint=True is unknown to format 'svd'; known variants: none"),
        ({"format": "svd", "ranks": [2], "joint": 0}, "joint=0 is unknown to format 'svd'"),
        ({"format": "cp", "ranks": [2], "joint": "yes"}, "got joint='yes'; give a bool"),
        ({"format": "cp", "ranks": [2], "joint": 1}, "got joint=1; give a bool"),
        ({"format": "cp", "ranks": [2], "order": 1}, "order=1 is unknown to format 'cp'; known variants: joint"),
        ({"format": "cp", "ranks": [2], "rank": 3}, "rank=3 is unknown to format 'cp'"),
    ],
)
def test_other_entries_are_refused(entry: Any, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        format_from_json(entry)


def test_geometries_that_cannot_be_joined() -> None:
    plane, line = Geometry.of(nn.Conv2d(4, 4, 3)), Geometry.of(nn.Conv1d(4, 4, 3))
    with pytest.raises(InputError, match=r"got axes \[0, 2\] for stages with \[2, 2\] spatial axes"):
        joined([0, 2], [plane, plane])
    with pytest.raises(InputError, match=r"got axes \[0, 1\] for stages with \[2, 1\] spatial axes"):
        joined([0, 1], [plane, line])


def test_parts_of_a_transposed_convolution_join() -> None:
    layer = nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2), dilation=(1, 2))
    geometry = Geometry.of(layer)
    assert along(geometry, [0]).output_padding == (1, 0)
    assert joined([0, 1], [along(geometry, [0]), along(geometry, [1])]) == geometry


# A format as another package would write it: factors, a format, one registration.


@dataclass(frozen=True, eq=False)
class ChainFactors:
    """``weight = left · middle · right``."""

    left: Tensor  # (t, r)
    middle: Tensor  # (r, r)
    right: Tensor  # (r, s)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.left.shape[0], self.right.shape[1])

    @property
    def n_params(self) -> int:
        return self.left.numel() + self.middle.numel() + self.right.numel()

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def note(self) -> str:
        return "three"

    def to_dense(self) -> Tensor:
        return self.left @ self.middle @ self.right


@dataclass(frozen=True)
class ChainFormat(Format[ChainFactors]):
    """Three Linear layers in place of one."""

    name: ClassVar[str] = "chain"
    factors_type: ClassVar[type] = ChainFactors
    rank: int
    note: str = "three"

    @classmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        return None if geometry.kind == "linear" else "chain takes Linear only; use method='svd' for it"

    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        check(self, geometry)
        return {
            "down": pointwise(geometry, geometry.in_channels, self.rank),
            "across": pointwise(geometry, self.rank, self.rank),
            "up": pointwise(geometry, self.rank, geometry.out_channels, bias=geometry.bias),
        }

    @classmethod
    def kernels(cls, factors: ChainFactors) -> list[Tensor]:
        return [factors.right[None], factors.middle[None], factors.left[None]]

    def factors(self, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[ChainFactors, ...]:
        right, middle, left = kernels
        return (ChainFactors(left[0], middle[0], right[0]),)

    @classmethod
    def guesses(cls, names: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
        if list(names) == ["down", "across", "up"]:
            down, _, up = stages
            yield Compressed(cls(down.out_channels), replace(down, out_channels=up.out_channels, bias=up.bias))


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(FORMATS)
    with temporary_formats():
        yield
    assert dict(FORMATS) == before


@pytest.mark.usefixtures("registry")
def test_a_format_from_outside_the_package() -> None:
    assert register_format(ChainFormat) is ChainFormat
    assert register_format(ChainFormat) is ChainFormat
    assert FORMATS["chain"] is ChainFormat
    layer = nn.Linear(6, 5)
    model = nn.Sequential(layer, nn.ReLU(), nn.Linear(5, 2)).double()
    geometry = Geometry.of(layer)
    generator = torch.Generator().manual_seed(0)
    factors = ChainFactors(*(torch.randn(n, m, generator=generator).double() for n, m in ((5, 3), (3, 3), (3, 6))))
    assert format_of(factors) == ChainFormat(3)
    fingerprint_before = original_fingerprint(model)

    small = to_modules(factors, geometry, layer.bias)
    x = torch.randn(4, 6, generator=generator).double()
    assert_close(small(x), x @ factors.to_dense().T + layer.bias)
    assert cost(ChainFormat(3), geometry).params == factors.n_params + 5
    replace_(model, {"0": small})

    assert find_compressed(model) == {"0": Compressed(ChainFormat(3), geometry)}
    assert original_fingerprint(model) == fingerprint_before
    (again,) = from_modules(small, ChainFormat(3), geometry)
    assert torch.equal(again.to_dense(), factors.to_dense())
    entry = json.loads(json.dumps(format_to_json(ChainFormat(3))))
    assert entry == {"format": "chain", "ranks": [3], "note": "three"}
    assert format_from_json(entry) == ChainFormat(3)
    assert format_from_json({"format": "chain", "ranks": [3]}) == ChainFormat(3)


def test_formats_registered_for_a_while_are_forgotten() -> None:
    factors = ChainFactors(torch.ones(5, 3), torch.ones(3, 3), torch.ones(3, 6))
    with contextlib.suppress(KeyError), temporary_formats():
        register_format(ChainFormat)
        small = to_modules(factors, Geometry.of(nn.Linear(6, 5)))
        assert recognise(small) is not None
        raise KeyError
    assert "chain" not in FORMATS
    assert recognise(small) is None
    with pytest.raises(InputError, match=r"got ChainFactors; formats are registered for .*SVDFactors"):
        format_of(factors)
    with pytest.raises(StoreError, match="format 'chain' is unknown"):
        format_from_json(format_to_json(ChainFormat(3)))


def test_factors_of_a_subclass_take_the_format_of_their_base() -> None:
    class SignedFactors(SVDFactors):
        pass

    assert format_of(SignedFactors(torch.ones(4, 2), torch.ones(2, 3))) == SVDFormat(2)


def test_the_table_of_formats_is_read_only() -> None:
    with pytest.raises(TypeError):
        FORMATS["svd"] = CPFormat  # type: ignore[index]


@dataclass(frozen=True)
class _SecondSVD(ChainFormat):
    name: ClassVar[str] = "svd"


@dataclass(frozen=True)
class _SecondForSVDFactors(ChainFormat):
    factors_type: ClassVar[type] = SVDFactors


@dataclass(frozen=True)
class _Nameless(ChainFormat):
    name: ClassVar[str] = ""


@dataclass(frozen=True)
class _WithoutFactors(ChainFormat):
    factors_type: ClassVar[type] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _Incomplete(Format[ChainFactors]):
    name: ClassVar[str] = "incomplete"
    factors_type: ClassVar[type] = ChainFactors


@dataclass(frozen=True)
class _FieldOfArchives(ChainFormat):
    bias: bool = False


@dataclass(frozen=True)
class _VariantOfAnotherType(ChainFormat):
    order: tuple[int, ...] = ()


class _NoDataclass(ChainFormat):
    pass


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("format_type", "message"),
    [
        (_SecondSVD, r"_SecondSVD: the name 'svd' belongs to tensigma\.layers\.svd_format\.SVDFormat; choose another"),
        (_SecondForSVDFactors, "SVDFactors belong to tensigma.*SVDFormat; define other factors"),
        (_Nameless, "_Nameless needs a class variable 'name', a string"),
        (_WithoutFactors, "_WithoutFactors needs a class variable 'factors_type', a class"),
        (_Incomplete, "_Incomplete does not define factors, guesses, kernels, stages, why_not"),
        (_FieldOfArchives, "a field cannot be named 'bias', which archives use"),
        (_VariantOfAnotherType, "the variant 'order' needs a default of type bool, int, float or str"),
        (_NoDataclass, r"_NoDataclass is not a dataclass; put @dataclass\(frozen=True\) below @register_format"),
        (ChainFactors, "register_format takes a subclass of tensigma.layers.Format"),
        (SVDFormat(2), "register_format takes a subclass of tensigma.layers.Format"),
    ],
)
def test_classes_that_cannot_be_registered(format_type: Any, message: str) -> None:
    before = dict(FORMATS)
    with pytest.raises(InputError, match=message):
        register_format(format_type)
    assert dict(FORMATS) == before

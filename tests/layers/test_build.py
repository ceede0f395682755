from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import CONVOLUTIONS, DEPTHWISE, GEOMETRIES, GROUPED, LINEAR, TRANSPOSED, LayerCase
from tensigma.errors import InputError, RankError, UnsupportedLayer
from tensigma.layers import (
    CPFormat,
    Format,
    Geometry,
    SVDFormat,
    Tucker2Format,
    cost,
    empty_modules,
    format_of,
    from_modules,
    kernels_of,
    to_layer,
    to_modules,
)
from tensigma.linalg import CPFactors, Factors, SVDFactors, Tucker2Factors

# The dense layer itself warns about this, once per process.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

FORMATS: list[Format] = [SVDFormat(2), Tucker2Format(3, 2), CPFormat(4), CPFormat(4, joint=True)]


def random_factors(format: Format, geometry: Geometry, seed: int = 0) -> tuple[Factors, ...]:
    t, s, *taps = geometry.kernel_shape
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    makers: dict[type, Callable[..., Factors]] = {
        SVDFormat: lambda f: SVDFactors(randn(t, f.rank), randn(f.rank, s, *taps)),
        Tucker2Format: lambda f: Tucker2Factors(
            randn(t, f.rank_out), randn(f.rank_out, f.rank_in, *taps), randn(s, f.rank_in)
        ),
        CPFormat: lambda f: CPFactors(
            randn(t, f.rank),
            randn(s, f.rank),
            (randn(geometry.n_taps, f.rank),) if f.joint else tuple(randn(k, f.rank) for k in taps),
            tuple(taps),
            f.joint,
        ),
    }
    return tuple(makers[type(format)](format) for _ in range(geometry.groups))


def pairs() -> list[Any]:
    """Every layer of the table with every format that can carry it."""
    return [
        pytest.param(case.values[0], format, id=f"{case.id}-{format.name}{'-joint' * getattr(format, 'joint', False)}")
        for case, format in itertools.product(GEOMETRIES, FORMATS)
        if format.why_not(Geometry.of(case.values[0].layer())) is None
    ]


def built(case: LayerCase, format: Format) -> tuple[nn.Module, nn.Sequential]:
    """The dense layer with the reconstructed kernel, and the layers made from the factors."""
    layer = case.layer()
    geometry = Geometry.of(layer)
    bias = layer.bias
    assert bias is None or isinstance(bias, Tensor)
    factors = random_factors(format, geometry)
    dense = to_layer(torch.stack([part.to_dense() for part in factors]), geometry, bias)
    return dense, to_modules(factors if geometry.groups > 1 else factors[0], geometry, bias)


@pytest.mark.parametrize(("case", "format"), pairs())
def test_layers_compute_what_the_dense_layer_computes(case: LayerCase, format: Format) -> None:
    dense, small = built(case, format)
    x = case.inputs()
    x_dense, x_small = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = dense(x_dense), small(x_small)
    assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected * weight).sum().backward()
    (actual * weight).sum().backward()
    assert_close(x_small.grad, x_dense.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("case", "format"), pairs())
def test_cost_is_what_the_layers_spend(case: LayerCase, format: Format) -> None:
    for module, asked in zip(built(case, format), (None, format), strict=True):
        macs: list[int] = []

        def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, macs: list[int] = macs) -> None:
            geometry = Geometry.of(layer)
            spatial = inputs[0] if geometry.kind == "conv_transpose" else output
            positions = spatial[0].numel() // (
                geometry.in_channels if geometry.kind == "conv_transpose" else geometry.out_channels
            )
            weight = layer.weight
            assert isinstance(weight, Tensor)
            macs.append(positions * weight.numel())

        for layer in module if isinstance(module, nn.Sequential) else [module]:
            layer.register_forward_hook(count)
        module(case.inputs())
        spent = cost(asked, Geometry.of(case.layer()), case.size)
        assert spent.params == sum(parameter.numel() for parameter in module.parameters())
        assert spent.macs == sum(macs)


@pytest.mark.parametrize("case", GEOMETRIES)
def test_geometry_knows_its_layer(case: LayerCase) -> None:
    layer = case.layer()
    geometry = Geometry.of(layer)
    assert repr(geometry.to_module()) == repr(layer)
    assert Geometry.of(geometry.to_module()) == geometry
    output = layer(case.inputs())
    if geometry.kind != "linear":
        assert geometry.output_size(case.size) == output.shape[2:]
    assert geometry.n_params == sum(parameter.numel() for parameter in layer.parameters())
    again = to_layer(torch.stack(kernels_of(layer)), geometry, layer.bias)  # type: ignore[arg-type]
    assert_close(again.state_dict(), layer.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("case", "format"), pairs())
def test_factors_come_back_from_the_layers(case: LayerCase, format: Format) -> None:
    dense, small = built(case, format)
    factors = from_modules(small, format, Geometry.of(dense))
    assert {format_of(part) for part in factors} == {format}
    kernels = torch.stack([part.to_dense() for part in factors])
    assert_close(kernels, torch.stack(kernels_of(dense)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("case", "format"), pairs())
def test_weights_load_into_empty_layers(case: LayerCase, format: Format) -> None:
    dense, small = built(case, format)
    empty = empty_modules(format, Geometry.of(dense))
    empty.load_state_dict(small.state_dict(), assign=True)
    assert repr(empty) == repr(small)
    x = case.inputs()
    assert torch.equal(empty(x), small(x))
    assert torch.equal(copy.deepcopy(small)(x), small(x))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=repr)
@pytest.mark.parametrize("case", [CONVOLUTIONS[5], CONVOLUTIONS[18]])
def test_export(case: LayerCase, format: Format) -> None:
    _, small = built(case, format)
    x = case.inputs()
    program = torch.export.export(small, (x,), strict=False)
    assert_close(program.module()(x), small(x))


def test_building_leaves_the_random_state_and_the_factors_alone() -> None:
    case = CONVOLUTIONS[0].values[0]
    geometry = Geometry.of(case.layer())
    (factors,) = random_factors(SVDFormat(2), geometry)
    before = torch.get_rng_state()
    small = to_modules(factors, geometry)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        small.get_submodule("reduce").weight.zero_()  # type: ignore[operator]
    assert isinstance(factors, SVDFactors)
    assert factors.right.abs().sum() > 0


def test_bias_only_at_the_end_and_allowed_where_there_was_none() -> None:
    geometry = Geometry.of(nn.Conv2d(6, 8, 3, bias=False))
    (factors,) = random_factors(CPFormat(3), geometry)
    small = to_modules(factors, geometry, torch.ones(8))
    assert [name for name, _ in small.named_parameters() if name.endswith("bias")] == ["expand.bias"]
    assert small.get_parameter("expand.bias").dtype == torch.float64


@pytest.mark.parametrize("case", DEPTHWISE)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_depthwise_is_refused(case: LayerCase, format: Format) -> None:
    with pytest.raises(UnsupportedLayer, match=r"depthwise convolution \(groups=6\).*leave it dense"):
        format.stages(Geometry.of(case.layer()))


@pytest.mark.parametrize(
    ("case", "format", "message"),
    [
        pytest.param(GROUPED[0], CPFormat(2), r"CP cannot carry groups=2; use method='tucker2'", id="cp-groups"),
        pytest.param(TRANSPOSED[0], CPFormat(2, joint=True), "transposed.*method='tucker2'", id="cp-transposed"),
        pytest.param(LINEAR[0], CPFormat(2), "Linear.*method='svd'", id="cp-linear"),
        pytest.param(LINEAR[0], Tucker2Format(2, 2), "Linear.*method='svd'", id="tucker2-linear"),
    ],
)
def test_refusals(case: Any, format: Format, message: str) -> None:
    geometry = Geometry.of(case.values[0].layer())
    with pytest.raises(UnsupportedLayer, match=message):
        to_modules(random_factors(format, geometry), geometry)
    with pytest.raises(UnsupportedLayer, match=message):
        cost(format, geometry, case.values[0].size)


def test_factors_that_do_not_fit() -> None:
    geometry = Geometry.of(nn.Conv2d(6, 8, 3, groups=2))
    first, second = random_factors(SVDFormat(2), geometry)
    with pytest.raises(InputError, match="factors for 1 groups came; the layer has groups=2"):
        to_modules(first, geometry)
    (other, _) = random_factors(SVDFormat(3), geometry)
    with pytest.raises(InputError, match=r"equal ranks; SVDFormat\(rank=2\), SVDFormat\(rank=3\)"):
        to_modules([first, other], geometry)
    with pytest.raises(InputError, match=r"\(4, 3, 3, 3\) came; this layer has \(4, 6, 3, 3\)"):
        to_modules([first, second], Geometry.of(nn.Conv2d(12, 8, 3, groups=2)))
    with pytest.raises(InputError, match=r"bias of shape \(3,\) came; this layer takes \(8,\)"):
        to_modules([first, second], geometry, torch.zeros(3))


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, None])
def test_ranks_are_positive_integers(rank: object) -> None:
    with pytest.raises(RankError, match="integer of at least 1"):
        SVDFormat(rank)  # type: ignore[arg-type]

"""Factors become layers that compute the same as the dense layer, at the cost foreseen, and can be read back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cases import LayerCase
from layers.format_table import ACCEPTED, REFUSED, ROWS, TABLE, FormatRow, case_of, tensors_of
from tensigma.errors import InputError, UnsupportedLayer
from tensigma.layers import (
    FORMATS,
    CPFormat,
    Geometry,
    SVDFormat,
    cost,
    empty_modules,
    format_of,
    from_modules,
    to_layer,
    to_modules,
    why_not,
)
from tensigma.linalg import CPFactors, SVDFactors

# The dense layer itself warns about this, once per process.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")

ROW_OF = {row.id: row for row in TABLE}


def build(case: LayerCase, row: FormatRow) -> tuple[nn.Module, nn.Sequential]:
    """The dense layer with the reconstructed kernel, and the layers built from the factors."""
    layer = case.layer()
    geometry = Geometry.of(layer)
    bias = layer.bias
    assert bias is None or isinstance(bias, Tensor)
    factors = row.factors(geometry)
    dense = to_layer(torch.stack([part.to_dense() for part in factors]), geometry, bias)
    return dense, to_modules(factors if geometry.groups > 1 else factors[0], geometry, bias)


def test_every_registered_format_has_a_row() -> None:
    assert {row.format.name for row in TABLE} == set(FORMATS)
    assert {type(row.format) for row in TABLE} == set(FORMATS.values())


@pytest.mark.parametrize(("case", "row"), ACCEPTED)
def test_layers_compute_what_the_dense_layer_computes(case: LayerCase, row: FormatRow) -> None:
    dense, small = build(case, row)
    x = case.inputs()
    x_dense, x_small = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, actual = dense(x_dense), small(x_small)
    assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (expected * weight).sum().backward()
    (actual * weight).sum().backward()
    assert_close(x_small.grad, x_dense.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("case", "row"), ACCEPTED)
def test_cost_is_what_the_layers_spend(case: LayerCase, row: FormatRow) -> None:
    for module, format in zip(build(case, row), (None, row.format), strict=True):
        macs: list[int] = []

        def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, macs: list[int] = macs) -> None:
            geometry = Geometry.of(layer)
            spatial = inputs[0] if geometry.kind == "conv_transpose" else output
            positions = spatial[0].numel() // (
                geometry.in_channels if geometry.kind == "conv_transpose" else geometry.out_channels
            )
            macs.append(positions * layer.get_parameter("weight").numel())

        for layer in module if isinstance(module, nn.Sequential) else [module]:
            layer.register_forward_hook(count)
        module(case.inputs())
        spent = cost(format, Geometry.of(case.layer()), case.size)
        assert spent.params == sum(parameter.numel() for parameter in module.parameters())
        assert spent.macs == sum(macs)


@pytest.mark.parametrize(("case", "row"), ACCEPTED)
def test_factors_come_back_bit_for_bit(case: LayerCase, row: FormatRow) -> None:
    geometry = Geometry.of(case.layer())
    factors = row.factors(geometry)
    assert {format_of(part) for part in factors} == {row.format}
    small = to_modules(factors, geometry)
    again = from_modules(small, row.format, geometry)
    assert len(again) == len(factors) == geometry.groups
    for part, part_again in zip(factors, again, strict=True):
        assert format_of(part_again) == row.format
        assert part_again.shape == part.shape == geometry.kernel_shape
        for tensor, tensor_again in zip(tensors_of(part), tensors_of(part_again), strict=True):
            assert torch.equal(tensor_again, tensor)


@pytest.mark.parametrize(("case", "row"), ACCEPTED)
def test_weights_load_into_empty_layers(case: LayerCase, row: FormatRow) -> None:
    dense, small = build(case, row)
    empty = empty_modules(row.format, Geometry.of(dense))
    empty.load_state_dict(small.state_dict(), assign=True)
    assert repr(empty) == repr(small)
    x = case.inputs()
    assert torch.equal(empty(x), small(x))
    assert torch.equal(copy.deepcopy(small)(x), small(x))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("case_id", ["stride-2x1", "reflect"])
def test_export(case_id: str, row: FormatRow) -> None:
    case = case_of(case_id)
    _, small = build(case, row)
    x = case.inputs()
    program = torch.export.export(small, (x,), strict=False)
    assert_close(program.module()(x), small(x))


@pytest.mark.parametrize(("case", "row"), REFUSED)
def test_refusals_name_a_way_out(case: LayerCase, row: FormatRow) -> None:
    layer = case.layer()
    geometry = Geometry.of(layer)
    reason = row.format.why_not(geometry)
    assert reason is not None
    assert "; use method=" in reason or "; leave it dense" in reason
    assert why_not(layer, row.format) == why_not(layer, type(row.format)) == reason
    for refused in (row.format.stages, lambda geometry: cost(row.format, geometry, case.size)):
        with pytest.raises(UnsupportedLayer) as error:
            refused(geometry)
        assert str(error.value) == reason


@pytest.mark.parametrize(
    ("case_id", "row_id", "message"),
    [
        ("groups-2", "cp", "CP cannot carry groups=2; use method='tucker2'"),
        ("transposed", "cp-joint", "CP cannot carry a transposed convolution; use method='tucker2'"),
        ("linear", "cp", "Linear has none; use method='svd'"),
        ("linear", "tucker2", "Linear has none; use method='svd'"),
        ("linear", "spatial-svd", "Linear has none; use method='svd'"),
        ("transposed", "tensor-train", "tensor train cannot carry a transposed convolution; use method='tucker2'"),
        ("conv1d", "spatial-svd", "needs two spatial axes and this convolution has 1; use method='tucker2'"),
        ("conv3d", "tensor-train", "needs two spatial axes and this convolution has 3; use method='tucker2'"),
        ("kernel-3x1", "spatial-svd", "more than one tap on both axes and the kernel is 3×1; use method='tucker2'"),
        ("pointwise", "tensor-train", "more than one tap on both axes and the kernel is 1×1; use method='svd'"),
        ("depthwise", "svd", "a depthwise convolution (groups=6) has one input channel per group"),
        ("depthwise", "spatial-svd", "not offered for a depthwise convolution (groups=6)"),
    ],
)
def test_reasons(case_id: str, row_id: str, message: str) -> None:
    reason = ROW_OF[row_id].format.why_not(Geometry.of(case_of(case_id).layer()))
    assert reason is not None
    assert message in reason


def test_factors_of_a_refused_layer_are_refused() -> None:
    geometry = Geometry.of(case_of("groups-2").layer())
    with pytest.raises(UnsupportedLayer, match="CP cannot carry groups=2"):
        to_modules(ROW_OF["cp"].factors(geometry), geometry)


@pytest.mark.parametrize("case_id", ["pointwise", "kernel-1x5-strided", "conv3d"])
def test_cp_factors_of_single_taps_scale_the_first_depthwise_layer(case_id: str) -> None:
    case = case_of(case_id)
    geometry = Geometry.of(case.layer())
    t, s, *taps = geometry.kernel_shape
    generator = torch.Generator().manual_seed(0)
    out_factor, in_factor, *spatial = (
        torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (t, s, *taps)
    )
    factors = CPFactors(out_factor, in_factor, tuple(spatial), tuple(taps))
    small = to_modules(factors, geometry)
    dense = to_layer(factors.to_dense()[None], geometry)
    x = case.inputs()
    assert_close(small(x), dense(x), rtol=1e-10, atol=1e-10)
    again = from_modules(small, CPFormat(4), geometry)
    assert_close(again[0].to_dense(), factors.to_dense(), rtol=1e-12, atol=1e-12)
    assert_close(to_modules(again, geometry).state_dict(), small.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("row", ROWS)
def test_building_leaves_the_random_state_and_the_factors_alone(row: FormatRow) -> None:
    geometry = Geometry.of(case_of("plain").layer())
    (factors,) = row.factors(geometry)
    before = [tensor.clone() for tensor in tensors_of(factors)]
    state = torch.get_rng_state()
    small = to_modules(factors, geometry)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.zero_()
    for tensor, original in zip(tensors_of(factors), before, strict=True):
        assert torch.equal(tensor, original)


@pytest.mark.parametrize("row", ROWS)
def test_bias_only_at_the_end_and_allowed_where_there_was_none(row: FormatRow) -> None:
    geometry = Geometry.of(nn.Conv2d(6, 8, 3, bias=False))
    small = to_modules(row.factors(geometry), geometry, torch.ones(8))
    *_, last = row.format.stages(geometry)
    assert [name for name, _ in small.named_parameters() if name.endswith("bias")] == [f"{last}.bias"]
    assert small.get_parameter(f"{last}.bias").dtype == torch.float64


def test_factors_that_do_not_fit() -> None:
    geometry = Geometry.of(nn.Conv2d(6, 8, 3, groups=2))
    first, second = ROW_OF["svd"].factors(geometry)
    with pytest.raises(InputError, match="got factors for 1 groups; the layer has groups=2"):
        to_modules(first, geometry)
    other = SVDFactors(torch.ones(4, 3), torch.ones(3, 3, 3, 3))
    with pytest.raises(InputError, match=r"equal ranks; got SVDFormat\(rank=2\), SVDFormat\(rank=3\)"):
        to_modules([first, other], geometry)
    with pytest.raises(InputError, match=r"got factors of a kernel \(4, 3, 3, 3\); this layer has \(4, 6, 3, 3\)"):
        to_modules([first, second], Geometry.of(nn.Conv2d(12, 8, 3, groups=2)))
    with pytest.raises(InputError, match=r"got a bias of shape \(3,\); this layer takes \(8,\)"):
        to_modules([first, second], geometry, torch.zeros(3))
    with pytest.raises(InputError, match=r"got 3 layers; SVDFormat.* has 2: reduce, expand"):
        from_modules(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), SVDFormat(2), Geometry.of(nn.Linear(2, 2)))

"""The streaming moments against the naive unfold in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reference_calibration import naive_moments
from tensigma.calibration import Moments
from tensigma.calibration.lag_recipe import recipe
from tensigma.calibration.lags import LagSums
from tensigma.calibration.moments import prefers_lags
from tensigma.calibration.window import Window
from tensigma.errors import InputError
from tensigma.layers import Geometry

LAYERS: list[Any] = [
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1), (9, 8), id="3x3"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3), (9, 8), id="valid"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, stride=2, padding=1), (9, 8), id="stride-2"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, stride=(2, 1), padding=(0, 1)), (9, 8), id="stride-2x1"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=2, dilation=2), (11, 9), id="dilation-2"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1, dilation=2), (11, 9), id="dilation-2-less-padding"),
    pytest.param(lambda: nn.Conv2d(5, 4, (3, 1), padding=(1, 0)), (9, 8), id="3x1"),
    pytest.param(lambda: nn.Conv2d(5, 4, (1, 5), padding=(0, 2)), (9, 12), id="1x5"),
    pytest.param(lambda: nn.Conv2d(3, 4, (5, 3), padding=(3, 1)), (12, 8), id="5x3-overpadded"),
    pytest.param(lambda: nn.Conv2d(3, 4, 5, padding=2), (12, 13), id="5x5"),
    pytest.param(lambda: nn.Conv2d(3, 4, 7, stride=2, padding=3), (16, 15), id="7x7-stride-2"),
    pytest.param(lambda: nn.Conv2d(5, 4, 2, padding="same"), (9, 8), id="2x2-same"),
    pytest.param(lambda: nn.Conv2d(5, 4, 4, padding="same", dilation=(1, 2)), (12, 15), id="4x4-same-dilated"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding="valid"), (9, 8), id="valid-by-name"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1, padding_mode="reflect"), (9, 8), id="reflect"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1, padding_mode="replicate"), (9, 8), id="replicate"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=2, padding_mode="circular"), (9, 8), id="circular"),
    pytest.param(
        lambda: nn.Conv2d(5, 4, 3, padding="same", padding_mode="reflect", dilation=2), (9, 8), id="reflect-same"
    ),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1), (2, 2), id="map-smaller-than-kernel"),
    pytest.param(lambda: nn.Conv2d(5, 4, 3, padding=1), (1, 9), id="map-one-row"),
    pytest.param(lambda: nn.Conv2d(5, 4, 5, padding=4), (1, 1), id="map-one-point"),
    pytest.param(lambda: nn.Conv2d(6, 4, 3, padding=1, groups=2), (9, 8), id="groups"),
    pytest.param(lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), (9, 8), id="depthwise"),
    pytest.param(lambda: nn.Conv2d(6, 4, 1), (9, 8), id="1x1"),
    pytest.param(lambda: nn.Conv2d(6, 4, 1, stride=2), (9, 8), id="1x1-stride-2"),
    pytest.param(lambda: nn.Conv2d(6, 4, 1, padding=1), (9, 8), id="1x1-padded"),
    pytest.param(lambda: nn.Conv1d(5, 4, 3, padding=1), (20,), id="conv1d"),
    pytest.param(lambda: nn.Conv1d(5, 4, 4, padding=2, stride=3, dilation=2), (20,), id="conv1d-stride-3"),
    pytest.param(lambda: nn.Conv3d(3, 4, 3, padding=1), (5, 6, 4), id="conv3d"),
    pytest.param(lambda: nn.Conv3d(4, 4, (1, 3, 2), stride=(1, 2, 1), groups=2), (5, 6, 4), id="conv3d-grouped"),
    pytest.param(lambda: nn.ConvTranspose2d(6, 4, 3, stride=2), (5, 4), id="transposed"),
    pytest.param(lambda: nn.ConvTranspose1d(6, 4, 4, padding=1, groups=2), (7,), id="transposed-grouped"),
    pytest.param(lambda: nn.Linear(7, 4), None, id="linear"),
]


def window_of(param) -> Window:
    return Window.of(Geometry.of(param.values[0]()))


def make_input(layer: nn.Module, size: tuple[int, ...] | None, n: int, seed: int, offset: float = 0.5) -> Tensor:
    """Correlated, skewed inputs, away from zero, as after a ReLU."""
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry.of(layer)
    if size is None:
        return torch.randn(n, 3, geometry.in_channels, generator=generator).relu() + offset
    x = torch.randn(n, geometry.in_channels, *size, generator=generator)
    return (x + 0.5 * x.roll(1, 1) + 0.3 * x.roll(1, -1)).relu() + offset


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def gather(layer: nn.Module, inputs: list[Tensor], **options: Any) -> Moments:
    moments = Moments(Geometry.of(layer), **options)
    for x in inputs:
        moments.update(x)
    return moments


@pytest.mark.parametrize(("make", "size"), LAYERS)
def test_equals_naive_unfold(make, size):
    layer = make()
    inputs = [make_input(layer, size, n, seed) for seed, n in enumerate([5, 1, 6])]
    stats = gather(layer, inputs).finish()
    count, mean, covariance, gram = naive_moments(layer, inputs)
    assert stats.count == count
    assert stats.mean.shape == mean.shape
    assert stats.covariance.shape == covariance.shape
    assert relative(stats.mean, mean) < 1e-6
    assert relative(stats.covariance, covariance) < 1e-6
    assert relative(stats.gram, gram) < 1e-6


LAG_LAYERS = [case for case in LAYERS if LagSums.applies(window_of(case), case.values[1] or ())]


@pytest.mark.parametrize(("make", "size"), LAG_LAYERS)
def test_lags_equal_naive_unfold(make, size, monkeypatch):
    monkeypatch.setattr("tensigma.calibration.moments.prefers_lags", LagSums.applies)
    test_equals_naive_unfold(make, size)


@pytest.mark.parametrize("n_batches", [1, 4])
@pytest.mark.parametrize("pending_bytes", [1, 10_000, 10**7])
def test_neither_batches_nor_buffers_change_the_result(seed, n_batches, pending_bytes):
    layer = nn.Conv2d(16, 4, 3, padding=1)
    x = make_input(layer, (10, 11), 12, seed)
    stats = gather(layer, list(x.chunk(n_batches)), pending_bytes=pending_bytes).finish()
    _, _, covariance, _ = naive_moments(layer, [x])
    assert relative(stats.covariance, covariance) < 1e-6
    torch.testing.assert_close(stats.covariance, stats.covariance.T, rtol=0, atol=1e-6)


def test_both_forms_are_in_use():
    window = Window.of(Geometry.of(nn.Conv2d(64, 64, 3, padding=1)))
    assert prefers_lags(window, (56, 56))
    assert prefers_lags(window, (7, 7))
    assert not prefers_lags(window, (2, 2))
    assert not prefers_lags(Window.of(Geometry.of(nn.Conv2d(3, 64, 3, padding=1))), (4, 4))


def test_maps_of_many_sizes_add_up_across_forms():
    layer = nn.Conv2d(32, 4, 3, padding=1)
    inputs = [make_input(layer, size, 4, seed) for seed, size in enumerate([(20, 20), (3, 2), (9, 17), (20, 20)])]
    moments = gather(layer, inputs)
    assert len(moments._sums) == 2
    count, mean, covariance, _ = naive_moments(layer, inputs)
    stats = moments.finish()
    assert stats.count == count
    assert relative(stats.mean, mean) < 1e-6
    assert relative(stats.covariance, covariance) < 1e-6


@pytest.mark.parametrize("size", [(30, 30), (4, 4)], ids=["lags", "unfold"])
def test_channels_last(size):
    layer = nn.Conv2d(16, 4, 3, padding=1)
    x = make_input(layer, size, 6, 0)
    plain = gather(layer, [x]).finish()
    turned = gather(layer, [x.contiguous(memory_format=torch.channels_last)]).finish()
    torch.testing.assert_close(turned.covariance, plain.covariance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    layer = nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect")
    # Large enough for sums of squares to leave the range of half precision.
    x = (100 * make_input(layer, (20, 20), 16, 0)).to(dtype)
    stats = gather(layer, [x]).finish()
    _, _, covariance, _ = naive_moments(layer, [x])
    assert stats.covariance.dtype == torch.float32
    assert relative(stats.covariance, covariance) < 1e-6


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        pytest.param(nn.Linear(12, 3), (1000, 12), id="linear"),
        pytest.param(nn.Conv2d(12, 3, 3), (10, 12, 12, 12), id="valid-3x3"),
        pytest.param(nn.Conv2d(12, 3, 3, padding=1, padding_mode="circular"), (10, 12, 10, 10), id="circular"),
    ],
)
def test_an_offset_of_ten_thousand_spreads_costs_nothing(layer, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(shape, generator=generator) + 1e4 for _ in range(100)]  # 10⁵ rows in all
    stats = gather(layer, batches).finish()
    count, _, covariance, gram = naive_moments(layer, batches)
    assert count == 100_000
    assert relative(stats.covariance, covariance) < 1e-6
    assert relative(stats.gram, gram) < 1e-6


def test_zero_padding_is_not_shifted():
    # One ring of zeros around large, nearly constant maps: the border is most of the covariance.
    layer = nn.Conv2d(3, 2, 3, padding=1)
    x = make_input(layer, (12, 12), 8, 0, offset=1000.0)
    stats = gather(layer, [x]).finish()
    _, mean, covariance, _ = naive_moments(layer, [x])
    assert relative(stats.mean, mean) < 1e-6
    assert relative(stats.covariance, covariance) < 1e-6


def test_unbatched_input():
    layer = nn.Conv2d(3, 2, 3, padding=1)
    x = make_input(layer, (8, 8), 1, 0)
    torch.testing.assert_close(gather(layer, [x[0]]).finish().gram, gather(layer, [x]).finish().gram)


def test_wide_linear_keeps_rows_until_there_are_as_many_as_columns():
    layer = nn.Linear(50, 2)
    x = torch.randn(80, 50, generator=torch.Generator().manual_seed(0)) + 3
    moments = Moments(Geometry.of(layer), wide=50)
    moments.update(x[:20])
    moments.update(x[20:49].reshape(1, 29, 50))
    kept = moments.finish()
    torch.testing.assert_close(kept.rows, x[:49])
    _, mean, covariance, gram = naive_moments(layer, [x[:49]])
    assert relative(kept.mean, mean) < 1e-6
    assert relative(kept.covariance, covariance) < 1e-6
    assert relative(kept.gram, gram) < 1e-6
    moments.update(x[49:])
    summed = moments.finish()
    assert summed.rows is None
    assert summed.count == 80
    _, mean, covariance, _ = naive_moments(layer, [x])
    assert relative(summed.mean, mean) < 1e-6
    assert relative(summed.covariance, covariance) < 1e-6


@pytest.mark.parametrize("later", [(4, 5), (6, 7)], ids=["same size", "larger maps"])
def test_wide_convolution_over_whole_maps_keeps_rows(later, seed):
    layer = nn.Conv2d(5, 2, (4, 5), stride=2)
    x = make_input(layer, (4, 5), 9, seed).to(memory_format=torch.channels_last)
    moments = Moments(Geometry.of(layer), wide=100)
    moments.update(x)
    kept = moments.finish()
    torch.testing.assert_close(kept.rows, x.flatten(1))
    _, mean, covariance, _ = naive_moments(layer, [x])
    assert relative(kept.mean, mean) < 1e-6
    assert relative(kept.covariance, covariance) < 1e-6
    # As many rows as columns, or maps that give several rows, are summed up.
    y = make_input(layer, later, 95, seed + 1)
    moments.update(y)
    summed = moments.finish()
    assert summed.rows is None
    count, mean, covariance, _ = naive_moments(layer, [x, y])
    assert summed.count == count
    assert relative(summed.mean, mean) < 1e-6
    assert relative(summed.covariance, covariance) < 1e-6


@pytest.mark.parametrize("wide", [4, 4096], ids=["rows", "sums"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_values_name_the_layer(wide, value):
    moments = Moments(Geometry.of(nn.Linear(4, 2)), name="head.fc", wide=wide)
    moments.update(torch.ones(2, 4))
    with pytest.raises(InputError, match=r"head\.fc.*NaN"):
        moments.update(torch.tensor([[1.0, value, 2.0, 3.0]]))


def test_finish_can_be_called_on_the_way():
    layer = nn.Conv2d(8, 4, 3, padding=1)
    first, second = make_input(layer, (9, 9), 4, 0), make_input(layer, (9, 9), 4, 1)
    moments = gather(layer, [first])
    half = moments.finish()
    moments.update(second)
    whole = moments.finish()
    assert relative(half.covariance, naive_moments(layer, [first])[2]) < 1e-6
    assert relative(whole.covariance, naive_moments(layer, [first, second])[2]) < 1e-6


def test_three_by_three_needs_29_sums():
    plan = recipe(Window.of(Geometry.of(nn.Conv2d(2, 2, 3, padding=1))))
    assert (len(plan.lags), len(plan.strips)) == (13, 16)


@pytest.mark.parametrize("size", [(20, 20), (2, 2)], ids=["lags", "unfold"])
@pytest.mark.parametrize("padding", [0, 1])
def test_channels_that_never_vary_have_no_variance(size, padding):
    layer = nn.Conv2d(16, 4, 2, padding=padding)
    x = make_input(layer, size, 16, 0)
    x[:, :8] = torch.linspace(-3, 3, 8)[:, None, None]
    stats = gather(layer, list(x.split(4))).finish()
    _, _, covariance, _ = naive_moments(layer, [x])
    variances = stats.covariance.diagonal()
    assert variances.min() >= 0
    torch.testing.assert_close(variances.double(), covariance.diagonal(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [9, 21])
def test_a_layer_that_steps_over_all_that_varies_sees_a_constant(rows, seed):
    layer = nn.Conv2d(4, 8, (1, 3), stride=2, padding=1)
    x = make_input(layer, (rows, 17), 24, seed)
    x[:, :, 1::2] = 0  # the only rows that the layer reads
    covariance = gather(layer, list(x.split(5))).finish().covariance
    # In float64 rounding alone would be left, neither symmetric nor positive.
    assert not covariance.any()


@pytest.mark.parametrize("block", [1, 3_000, 20_000, 10**9])
@pytest.mark.parametrize("groups", [2, 6, 12])
def test_unfolding_a_few_groups_at_a_time_changes_nothing(monkeypatch, groups, block, seed):
    monkeypatch.setattr("tensigma.calibration.moments.prefers_lags", lambda window, size: False)
    monkeypatch.setattr("tensigma.calibration.unfold.BLOCK_BYTES", block)
    layer = nn.Conv2d(12, 24, 3, padding=1, groups=groups)
    x = make_input(layer, (9, 8), 7, seed)
    stats = gather(layer, list(x.split(3))).finish()
    _, _, covariance, _ = naive_moments(layer, [x])
    assert relative(stats.covariance, covariance) < 1e-6


def test_depthwise_layers_on_large_maps_are_unfolded():
    depthwise = Window.of(Geometry.of(nn.Conv2d(256, 256, 5, padding=2, groups=256)))
    dense = Window.of(Geometry.of(nn.Conv2d(256, 256, 3, padding=1)))
    assert not prefers_lags(depthwise, (50, 38))
    assert prefers_lags(dense, (50, 38))

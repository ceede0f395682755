"""Equal channels between factors: the same function, and eight bits that suffice."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from support_nets import batches, small_net
from tensigma.deployment import equalise
from tensigma.deployment.equalisation import _scale_
from tensigma.errors import InputError
from tensigma.layers import CPFormat, Format, Geometry, SVDFormat, Tucker2Format, empty_modules

GEOMETRIES = [
    pytest.param(SVDFormat(5), nn.Linear(12, 9), (12,), id="svd-linear"),
    pytest.param(SVDFormat(3), nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 7, 7), id="svd-transposed-grouped"),
    pytest.param(Tucker2Format(4, 3), nn.Conv2d(8, 8, 3, padding=1, stride=2), (8, 7, 7), id="tucker2"),
    pytest.param(Tucker2Format(2, 3), nn.Conv2d(8, 8, 3, groups=2), (8, 7, 7), id="tucker2-grouped"),
    pytest.param(Tucker2Format(4, 3), nn.ConvTranspose2d(8, 6, 3, stride=2), (8, 5, 5), id="tucker2-transposed"),
    pytest.param(CPFormat(7), nn.Conv2d(6, 8, 3, padding=1), (6, 7, 7), id="cp"),
    pytest.param(CPFormat(7, joint=True), nn.Conv1d(6, 8, 3, padding=1), (6, 9), id="cp-joint-1d"),
]


def badly_scaled(format: Format, layer: nn.Module, seed: int) -> nn.Sequential:
    """Random factors whose channels differ a thousandfold."""
    generator = torch.Generator().manual_seed(seed)
    modules = empty_modules(format, Geometry.of(layer)).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for before, after in pairwise(modules):
            n_between = Geometry.of(before).out_channels
            scales = 10 ** torch.linspace(-1.5, 1.5, n_between)[torch.randperm(n_between, generator=generator)]
            _scale_(before, outputs=scales)
            # Columns that undo it: every channel matters, as in a real layer.
            _scale_(after, inputs=1 / scales)
    return nn.Sequential(modules).eval()


def between(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What passes between the factors."""
    found = []
    for layer in list(model.get_submodule("0").children())[:-1]:
        x = layer(x)
        found.append(x)
    return found


def channels(values: Tensor) -> Tensor:
    """The largest |value| of each channel of a batch."""
    return values.abs().movedim(1, 0).flatten(1).amax(1)


@pytest.mark.parametrize(("format", "layer", "shape"), GEOMETRIES)
@torch.no_grad()
def test_the_function_stays_and_ranges_become_equal(
    format: Format, layer: nn.Module, shape: tuple[int, ...], seed: int
):
    model = badly_scaled(format, layer, seed)
    x = torch.randn(16, *shape, generator=torch.Generator().manual_seed(seed))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    equal = equalise(model, [x[:9], x[9:]], strength=1)
    expected = model(x)
    torch.testing.assert_close(equal(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(equalise(model, [x])(x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    spread = [float(channels(values).max() / channels(values).min()) for values in between(model, x)]
    after = [float(channels(values).max() / channels(values).min()) for values in between(equal, x)]
    assert max(spread) > 20
    # The side that is shorter may decide, so that ranges are not quite equal.
    assert max(after) < 5


@torch.no_grad()
def test_the_longer_side_is_up():
    model = badly_scaled(CPFormat(9), nn.Conv2d(6, 8, 3, padding=1), 0)
    x = torch.randn(16, 6, 7, 7).abs()
    for values in between(equalise(model, [x]), x):
        flat = values.movedim(1, 0).flatten(1)
        assert (flat.amax(1) >= -flat.amin(1) - 1e-6).all()


def rounded(values: Tensor) -> Tensor:
    """Eight bits for the whole tensor, as INT8 has it."""
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    step = (high - low) / 255
    return (values / step).round() * step


@pytest.mark.parametrize(("format", "layer", "shape"), GEOMETRIES)
@torch.no_grad()
def test_rounding_hurts_less(format: Format, layer: nn.Module, shape: tuple[int, ...], seed: int):
    model = badly_scaled(format, layer, seed)
    x = torch.randn(32, *shape, generator=torch.Generator().manual_seed(seed))

    def error(model: nn.Module) -> float:
        first, *others = model.get_submodule("0").children()
        y = first(x)
        for layer in others:
            y = layer(rounded(y))
        expected = model(x)
        return float((y - expected).norm() / expected.norm())

    assert error(equalise(model, [x])) < 0.3 * error(model)


@torch.no_grad()
def test_weights_that_would_suffer_are_spared():
    """Channels that hardly matter but are large, before a layer whose rows have one large column each: equal channels
    would cost the weights more than they gain."""
    generator = torch.Generator().manual_seed(0)
    model = badly_scaled(SVDFormat(6), nn.Linear(12, 9), 0)
    model.get_parameter("0.expand.weight").copy_(torch.randn(9, 6, generator=generator))
    x = torch.randn(256, 12, generator=generator)
    expected = model(x)

    def error(model: nn.Module) -> float:
        first, second = copy.deepcopy(model).get_submodule("0").children()
        weight = second.get_parameter("weight")
        steps = weight.abs().amax(1, keepdim=True) / 127
        weight.copy_((weight / steps).round() * steps)
        return float((second(rounded(first(x))) - expected).norm() / expected.norm())

    errors = {strength: error(equalise(model, [x], strength=strength)) for strength in (0, 0.25, 0.5, 0.75, 1, None)}
    assert errors[None] <= 1.3 * min(errors.values())


def test_nothing_to_do_and_what_must_not_be_done():
    net = small_net()
    plain = equalise(net, batches())
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in plain.state_dict().items())
    # A factor that serves in two places cannot follow both.
    shared = badly_scaled(SVDFormat(4), nn.Linear(8, 8), 0)
    other = badly_scaled(SVDFormat(4), nn.Linear(8, 8), 1)
    other.get_submodule("0.reduce").weight = shared.get_submodule("0.reduce").weight
    both = nn.Sequential(shared[0], nn.ReLU(), other[0])
    equal = equalise(both, [torch.randn(8, 8)])
    assert all(torch.equal(value, both.state_dict()[key]) for key, value in equal.state_dict().items())
    with pytest.raises(InputError, match="strength"):
        equalise(shared, [torch.randn(8, 8)], strength=2)
    with pytest.raises(InputError, match="empty"):
        equalise(shared, [])


@torch.no_grad()
def test_silent_channels_and_half_strength():
    model = badly_scaled(SVDFormat(4), nn.Linear(8, 8), 2)
    model.get_parameter("0.reduce.weight")[1] = 0
    x = torch.randn(16, 8)
    ratios = []
    for strength in (0, 0.5, 1):
        equal = equalise(model, [x], strength=strength)
        torch.testing.assert_close(equal(x), model(x), rtol=1e-4, atol=1e-4 * float(model(x).abs().max()))
        sizes = channels(between(equal, x)[0])
        ratios.append(float(sizes.max() / sizes[sizes > 0].min()))
    assert ratios[0] > ratios[1] > ratios[2]


@pytest.mark.slow
@torch.no_grad()
def test_a_whole_compressed_network():
    model, data = small_net(), batches()
    stats = ts.calibrate(model, data)
    small, _ = ts.compress(model, ts.plan(model, stats, budget=ts.Params(0.6)), stats)
    small.train()
    equal = equalise(small, [{"image": x} for x in data])
    assert equal.training
    x = batches(1, seed=3)[0]
    torch.testing.assert_close(equal.eval()(x), small.eval()(x), rtol=1e-4, atol=1e-5)

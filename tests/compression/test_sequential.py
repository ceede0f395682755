"""Sequential fitting: the regression beside its twin, and what it promises."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from cases import CONVOLUTIONS, LayerCase
from reference_calibration import naive_rows
from support_nets import batches, small_net
from tensigma.compression import sequential
from tensigma.compression.sequential import fit_in_sequence
from tensigma.compression.targets import pair_moments, ridge_share, target_layer
from tensigma.errors import InputError
from tensigma.layers import Geometry, kernels_of
from tensigma.running import Batches, OutOfOrder, silent
from tensigma.solving import Solutions, Treatment, method_of, norm_of, solve


def disturbed(x: Tensor, seed: int) -> Tensor:
    """An input as a compressed prefix might give it."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    return 0.8 * x + 0.1 * noise + 0.3


def without_bias(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer computes but for its bias."""
    plain = copy.deepcopy(layer)
    if isinstance(plain.bias, Tensor):
        nn.init.zeros_(plain.bias)
    return plain(x)


def naive_target(layer: nn.Module, x: Tensor, off: Tensor, centred: bool) -> tuple[list[Tensor], Tensor]:
    """Ridge regression of the layer's outputs on unfolded rows, group by group: kernels and bias."""
    geometry = Geometry.of(layer)
    rows, kernels = naive_rows(layer, off), kernels_of(layer)
    original = naive_rows(layer, x)
    found, shifts = [], []
    for group, kernel in enumerate(kernels):
        own = kernel.flatten(1).double()
        u, y = rows[group], original[group] @ own.T
        mean_u, mean_y = (u.mean(0), y.mean(0)) if centred else (u.mean(0) * 0, y.mean(0) * 0)
        second = (u - mean_u).T @ (u - mean_u) / len(u)
        cross = (y - mean_y).T @ (u - mean_u) / len(u)
        ridge = (
            ridge_share(len(u), len(second)) * second.trace() / len(second) * torch.eye(len(second), dtype=second.dtype)
        )
        best = (cross + own @ ridge) @ torch.linalg.inv(second + ridge)
        found.append(best)
        shifts.append(mean_y - best @ mean_u)
    bias = layer.bias.double() if isinstance(layer.bias, Tensor) else torch.zeros(geometry.out_channels).double()
    return found, bias + torch.cat(shifts)


LINEAR = [
    pytest.param(LayerCase(nn.Linear, (6, 5), (4,)), id="linear-tokens"),
    pytest.param(LayerCase(nn.Linear, (6, 5), (), {"bias": False}), id="linear-no-bias"),
    pytest.param(LayerCase(nn.Conv2d, (6, 8), (6, 5), {"kernel_size": 3, "groups": 2, "padding": 1}), id="grouped"),
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("norm", ["centred", "sigma"])
@pytest.mark.parametrize("case", [*CONVOLUTIONS, *LINEAR])
def test_the_target_is_the_ridge_regression_on_unfolded_rows(case: LayerCase, norm: str) -> None:
    layer, x = case.layer(), case.inputs(5)
    geometry, svd, off = Geometry.of(layer), method_of("svd"), disturbed(x, 3)
    treatment = Treatment(geometry=geometry, method=svd, norm=norm_of(norm), format=svd.format((1,)))
    with torch.no_grad():
        # In two parts, as batches come.
        met = [([off[part]], [without_bias(layer, x[part])], len(x[part])) for part in (slice(2), slice(2, None))]
        stats, cross, output = pair_moments("layer", layer, met)
        target = target_layer(treatment, layer, stats, cross, output)
        kernels, bias = naive_target(layer, x, off, centred=norm == "centred")
    assert stats.samples == len(x)
    for found, expected in zip(kernels_of(target), kernels, strict=True):
        torch.testing.assert_close(found.flatten(1), expected, rtol=1e-6, atol=1e-8)
    if norm == "centred":
        torch.testing.assert_close(target.bias, bias, rtol=1e-6, atol=1e-8)
    else:
        torch.testing.assert_close(target.bias, layer.bias, rtol=0, atol=0)


def test_full_ranks_change_nothing(seed: int) -> None:
    model, data = small_net(seed).double(), [x.double() for x in batches(seed=seed)]
    stats = ts.calibrate(model, data)
    plan = ts.plan(
        model,
        stats,
        ranks=ts.Ranks({"block.0": 16, "pointwise": 16, "hidden": 12, "head": 10}),
        skip=(),
        saving="none",
        method="svd",
    )
    small, report = ts.compress(model, plan, stats, data=data, sequential=True)
    assert report.notes["sequential"] is True
    torch.testing.assert_close(small(data[0]), model(data[0]), rtol=1e-8, atol=1e-10)


def output_error(model: nn.Module, small: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return sum((model(x) - small(x)).square().mean().item() for x in data)


def chain(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1, bias=False),
            nn.ReLU(),
            nn.Conv2d(16, 8, 3, padding=1),
        )


def test_the_last_layer_ends_nearer_to_the_original_than_when_fitted_alone(seed: int) -> None:
    """With SVD, exact for its target, nothing of this rank does better behind the same prefix."""
    model, data = chain(seed), batches(6, seed=seed)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"2": 3, "4": 3}), method="svd", saving="none")
    alone, _ = ts.compress(model, plan, stats)
    joined, _ = ts.compress(model, plan, stats, data=data, sequential=True)
    assert output_error(model, joined, data) < output_error(model, alone, data)


def test_the_first_layer_is_fitted_as_ever_and_errors_are_those_of_what_the_layer_meets() -> None:
    model, data = chain(0), batches(4)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"2": 3, "4": 3}), method="svd", saving="none")
    _, alone = ts.compress(model, plan, stats)
    _, joined = ts.compress(model, plan, stats, data=data, sequential=True)
    assert joined["2"].error == pytest.approx(alone["2"].error, rel=1e-3)
    assert joined["4"].error != pytest.approx(alone["4"].error, rel=1e-3)


def layer_by_layer(model: nn.Module, plan: ts.Plan) -> sequential._LayerByLayer:
    return sequential._LayerByLayer(model, plan, None, Solutions(), silent)


class Twice(nn.Module):
    """One layer called twice, and defined after the one that runs behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 4)
        self.often = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.often(torch.relu(self.often(x)))))


def test_layers_go_in_the_order_of_calls_and_count_all_of_them() -> None:
    torch.manual_seed(0)
    model, data = Twice(), [torch.randn(50, 12), torch.randn(30, 12)]
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"*": 3}), skip=(), saving="none")
    seen: list[Any] = []
    solved = fit_in_sequence(model, plan, Batches(data), report=seen.append).solutions
    assert [state.layer for state in seen] == ["often", "last"]
    assert [state.done for state in seen] == [1, 2]
    assert list(solved) == ["last", "often"]
    with torch.no_grad():
        met = layer_by_layer(model, plan)._activations("often", 2, Batches(data))
        found, _, _ = pair_moments("often", model.often, met)
    assert found.count == stats["often"].count == 160
    torch.testing.assert_close(found.covariance, stats["often"].covariance, rtol=1e-4, atol=1e-5)


def test_data_is_cut_where_asked_and_automatic_fitting_needs_none_to_be_given() -> None:
    model, data = chain(0), batches(4)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"2": 3, "4": 3}), method="svd", saving="none")
    _, plain = ts.compress(model, plan, stats)
    assert plain.notes["sequential"] is False
    _, once = ts.compress(model, plan, stats, data=iter(data))
    assert once.notes["sequential"] is False
    _, joined = ts.compress(model, plan, stats, data=data)
    assert joined.notes["sequential"] is True
    met = layer_by_layer(model, plan)._activations("2", 1, Batches(data, max_samples=11))
    with torch.no_grad():
        assert pair_moments("2", model[2], met)[0].samples == 11


def test_what_cannot_be_is_refused() -> None:
    model, data = chain(0), batches(4)
    stats = ts.calibrate(model, data, fisher="model")
    plan = ts.plan(model, stats, ranks=ts.Ranks({"2": 3, "4": 3}), method="svd", saving="none")
    with pytest.raises(InputError, match="needs data="):
        ts.compress(model, plan, stats, sequential=True)
    with pytest.raises(InputError, match="can be read only once"):
        ts.compress(model, plan, stats, data=iter(data), sequential=True)
    with pytest.raises(InputError, match="choose True, False or 'auto'"):
        ts.compress(model, plan, stats, sequential="yes")  # type: ignore[arg-type]
    weighed = ts.plan(model, stats, ranks=ts.Ranks({"2": 4}), norm="fisher", saving="none")
    with pytest.raises(InputError, match="norm='fisher' does not have"):
        ts.compress(model, weighed, stats, data=data, sequential=True)
    _, report = ts.compress(model, weighed, stats, data=data)
    assert report.notes["sequential"] is False


def test_an_interrupted_run_goes_on_from_its_cache(tmp_path: Any) -> None:
    model, data = chain(0), batches(4)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"2": 3, "4": 3}), method="tucker2", saving="none")
    first, _ = ts.compress(model, plan, stats, data=data, cache=tmp_path)
    second, report = ts.compress(model, plan, stats, data=data, cache=tmp_path)
    assert all(layer.cached for layer in report.compressed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def wide_chain(seed: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(64, 10)).eval()


@pytest.mark.slow
def test_few_samples_are_not_learnt_by_heart() -> None:
    """On new inputs, as many samples as columns must do little harm, and many must help."""
    spread = torch.logspace(0, -1.5, 32)

    def inputs(count: int, seed: int) -> Tensor:
        return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed)) * spread

    ratios: dict[int, list[float]] = {64: [], 4096: []}
    for seed in range(4):
        model, fresh = wide_chain(seed), [inputs(2000, 100 + seed)]
        for count, found in ratios.items():
            data = [inputs(count, seed)]
            stats = ts.calibrate(model, data)
            plan = ts.plan(model, stats, ranks=ts.Ranks({"*": 12}), skip=(), method="svd", saving="none")
            alone, _ = ts.compress(model, plan, stats)
            joined, _ = ts.compress(model, plan, stats, data=data, sequential=True)
            found.append(output_error(model, joined, fresh) / output_error(model, alone, fresh))
    assert sum(ratios[64]) / 4 < 1.15
    assert sum(ratios[4096]) / 4 < 0.95


class Again(nn.Module):
    """A layer without bias whose outputs are changed in place before the next call of the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.again = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(3):
            h = h + self.act(self.again(h))
        return h


def test_what_is_changed_in_place_after_a_call_is_kept_as_it_was() -> None:
    torch.manual_seed(0)
    model, data = Again().eval(), batches(4)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"again": (8, 8)}), method="tucker2", saving="none")
    small, _ = ts.compress(model, plan, stats, data=data, sequential=True)
    torch.testing.assert_close(small(data[0]), model(data[0]), rtol=1e-3, atol=1e-4)


class Branch(nn.Module):
    """Batches with a large mean take another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.rare = nn.Linear(12, 12)
        self.last = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(torch.relu(self.rare(h)) if x.mean() > 1 else h)


def test_layers_that_only_some_batches_call_are_fitted_to_their_statistics() -> None:
    torch.manual_seed(0)
    model, data = Branch(), [torch.randn(40, 12), torch.randn(40, 12) + 3]
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"*": 3}), skip=(), saving="none", method="svd")
    small, report = ts.compress(model, plan, stats, data=data, sequential=True)
    assert {layer.name for layer in report.compressed} == {"first", "rare", "last"}
    alone, _ = ts.compress(model, plan, stats)
    own = small.get_submodule("rare").state_dict()
    for key, value in alone.get_submodule("rare").state_dict().items():
        torch.testing.assert_close(own[key], value)
    with pytest.raises(InputError, match="rare: not every batch calls this layer"):
        fit_in_sequence(model, plan, Batches(data))


@pytest.mark.slow
def test_half_precision_and_inference_tensors() -> None:
    model = chain(0).half()
    with torch.inference_mode():
        data = [100 * x.half() for x in batches(4)]
    small, report = ts.compress(model, data, budget=ts.Params(0.6))
    assert report.notes["sequential"] is True
    assert {parameter.dtype for parameter in small.parameters()} == {torch.float16}
    wanted, given = model(data[0].clone()).float(), small(data[0].clone()).float()
    assert (wanted - given).norm() < 0.5 * (wanted - wanted.mean()).norm()


def fitted(model: nn.Module, plan: ts.Plan, stats: ts.Calibration, data: list[Tensor], **options: Any) -> list[Tensor]:
    """The weights of all solutions, layer after layer."""
    solved = fit_in_sequence(model, plan, Batches(data), stats=stats, **options).solutions
    return [tensor for solution, _ in solved.values() for tensor in solution.tensors().values()]


@pytest.mark.parametrize("norm", ["centred", "sigma"])
def test_one_pass_gives_what_a_pass_for_every_layer_gives(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = small_net().double(), [x.double() for x in batches()]
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"*": 3}), norm=norm, skip=(), saving="none", method="svd")
    once = fitted(model, plan, stats, data)

    def refuse(self: Any, batches: Batches) -> None:
        raise OutOfOrder("no")

    monkeypatch.setattr(sequential._InOnePass, "fit", refuse)
    for found, expected in zip(once, fitted(model, plan, stats, data), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_each_network_runs_over_the_data_once() -> None:
    model, data = chain(0), batches(5)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"2": 3, "4": 3}), method="svd", saving="none")
    runs: list[int] = []
    model[0].register_forward_hook(lambda module, args, output: runs.append(len(args[0])))
    fitted(model, plan, stats, data)
    # Of each network every batch, and the first twice more: to see in which order it calls the layers, and what memory
    # that takes.
    assert runs.count(8) == len(runs) == 2 * len(data) + 2


def test_memory_limits_the_samples() -> None:
    model, data = chain(0), batches(5)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"2": 3, "4": 3}), method="svd", saving="none")
    # The maps at the second layer: 16 channels of 10 × 10 single-precision numbers, in both networks; and the input.
    per_batch = 2 * 8 * 16 * 10 * 10 * 4 + data[0].nbytes
    for memory, used in ((1, 1), (3 * per_batch, 3), (10 * per_batch, 5)):
        limited = fitted(model, plan, stats, data, memory=memory)
        for found, expected in zip(limited, fitted(model, plan, stats, data[:used]), strict=True):
            assert torch.equal(found, expected)


def test_more_samples_join_where_maps_are_smaller() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(5), nn.Conv2d(16, 16, 1)
    ).eval()
    data = batches(5)
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"1": 3, "3": 3}), method="svd", saving="none")
    side = data[0].shape[-1]
    memory = 2 * (2 * 8 * 16 * side**2 * 4 + data[0].nbytes)
    solved = fit_in_sequence(model, plan, Batches(data), stats=stats, memory=memory)
    assert (solved.first_samples, solved.samples) == (16, 40)
    # The last layer is fitted on all samples, behind a layer that was fitted on two batches: as if only the last layer
    # were to be fitted, in a network in which the other is replaced already.
    alone = ts.plan(model, stats, ranks=ts.Ranks({"1": 3}), method="svd", saving="none")
    first = fit_in_sequence(model, alone, Batches(data[:2]), stats=stats).solutions["1"][0]
    for found, expected in zip(solved.solutions["1"][0].tensors().values(), first.tensors().values(), strict=True):
        assert torch.equal(found, expected)
    small = copy.deepcopy(model)
    small[1] = copy.deepcopy(first.modules)
    original, compressed = ([met_by(net, x) for x in data] for net in (model, small))
    layer, treatment = model[3], plan.treatments["3"]
    pairs = zip(compressed, original, strict=True)
    activations = [([u], [without_bias(layer, x).detach()], len(u)) for u, x in pairs]
    layer_stats, cross, output = pair_moments("3", layer, activations)
    target = target_layer(treatment, layer, layer_stats, cross, output)
    wanted = solve(treatment, target, layer_stats)
    for found, expected in zip(solved.solutions["3"][0].tensors().values(), wanted.tensors().values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def met_by(net: nn.Sequential, x: Tensor) -> Tensor:
    """What the last layer is given."""
    return net[:-1](x)


class Either(nn.Module):
    """Two layers in one order or in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        order = (self.one, self.other) if x.mean() < 1 else (self.other, self.one)
        for layer in order:
            x = torch.relu(layer(x))
        return x


def test_where_batches_differ_in_the_order_of_calls_every_layer_has_its_own_pass() -> None:
    torch.manual_seed(0)
    model, data = Either(), [torch.randn(40, 12), torch.randn(40, 12) + 3]
    stats = ts.calibrate(model, data)
    plan = ts.plan(model, stats, ranks=ts.Ranks({"*": 3}), skip=(), saving="none", method="svd")
    small, report = ts.compress(model, plan, stats, data=data, sequential=True)
    assert report.notes["sequential"] is True
    expected = layer_by_layer(model, plan)
    with torch.no_grad():
        expected.fit(Batches(data))
    for key, value in expected.small.state_dict().items():
        torch.testing.assert_close(small.state_dict()[key], value)


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    model, data = chain(0), [*batches(2), torch.zeros(4, 5, 10, 10)]
    stats = ts.calibrate(model, data[:2])
    plan = ts.plan(model, stats, ranks=ts.Ranks({"2": 3, "4": 3}), method="svd", saving="none")
    with pytest.raises(InputError, match="rejected batch 2"):
        fitted(model, plan, stats, data)
    assert not any("forward" in vars(layer) for layer in model)
    assert not any(thread.name == "tensigma-pass" for thread in threading.enumerate())
    assert model.training

"""BatchNorm goes into the layer before it, where nothing else reads what is between them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from tensigma.errors import InputError, StoreError
from tensigma.evaluation import count_bytes
from tensigma.planning import Plan
from tensigma.planning.planner import float_bytes
from tensigma.solving import Folding, foldable, folded_copy, folded_norms


def trained(norm: Any, seed: int = 0) -> Any:
    """A BatchNorm with numbers of its own, some of its factors negative and one of them zero."""
    rng = torch.Generator().manual_seed(seed)
    n = norm.num_features
    norm.running_mean.copy_(torch.randn(n, generator=rng))
    norm.running_var.copy_(torch.rand(n, generator=rng) + 0.1)
    if norm.affine:
        norm.weight.data.copy_(torch.randn(n, generator=rng))
        norm.weight.data[0] = 0.0
        norm.bias.data.copy_(torch.randn(n, generator=rng))
    return norm


class Net(nn.Module):
    """Two convolutions with BatchNorm; ``between`` may do something to what the first hands over."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor] = lambda net, x: x) -> None:
        super().__init__()
        self.between = between
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
            self.norm = trained(nn.BatchNorm2d(8))
            self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
            self.norm2 = trained(nn.BatchNorm2d(8), 1)
            self.head = nn.Linear(8, 5)
            self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        x = self.norm(self.between(self, self.first(x)))
        x = torch.relu_(self.norm2(self.second(torch.relu_(x))))
        return self.head(x.mean((2, 3)))


def images(seed: int = 0) -> Tensor:
    return torch.randn(12, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Linear(3, 4), nn.BatchNorm1d, (5, 3)),
        (nn.Conv1d(4, 6, 3, groups=2, bias=False), nn.BatchNorm1d, (2, 4, 7)),
        (nn.Conv2d(4, 6, (3, 1), stride=2), nn.BatchNorm2d, (2, 4, 7, 6)),
        (nn.Conv3d(2, 4, 2, bias=False), nn.BatchNorm3d, (2, 2, 4, 3, 3)),
        (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d, (2, 4, 5, 5)),
    ],
    ids=["linear", "grouped", "strided", "3d", "transposed"],
)
def test_the_folded_model_computes_the_same(layer: nn.Module, norm: Any, shape: tuple[int, ...], affine: bool) -> None:
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    model = nn.Sequential(copy.deepcopy(layer), trained(norm(channels, affine=affine))).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stats = ts.calibrate(model, [x])
    folding = foldable(model, stats)
    assert folding.layers == {"0": "1"}
    folded = folded_copy(model, folding)
    torch.testing.assert_close(folded(x), model(x))
    assert folded_norms(folded) == ["1"]
    assert isinstance(model[1], norm)
    # What is saved is what the two models differ by.
    sizes = [sum(parameter.numel() for parameter in network.parameters()) for network in (model, folded)]
    assert folding.params == sizes[0] - sizes[1]
    assert folding.bytes == float_bytes(model) - float_bytes(folded)


def _kept(net: Net, x: Tensor) -> Tensor:
    net.kept.append(x.abs())
    return x


BETWEEN = {
    "relu": lambda net, x: torch.relu(x),
    "in place": lambda net, x: x.mul_(2),
    "a view": lambda net, x: x.flatten(1).reshape(x.shape),
    "added": lambda net, x: x + x,
    "also read": _kept,
    "bias read": lambda net, x: x + net.norm.bias.sum(),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_others_read_or_change_is_not_folded(between: Callable[[Net, Tensor], Tensor]) -> None:
    model = Net(between).eval()
    stats = ts.calibrate(model, [images()])
    assert stats.normalised_by == {"second": "norm2"}
    folding = foldable(model, stats)
    assert folding.layers == {"second": "norm2"}
    assert list(folding.left) == ["norm"]
    torch.testing.assert_close(folded_copy(model, folding)(images(1)), model(images(1)), atol=1e-5, rtol=1e-4)


class TestOtherUses:
    def test_an_output_of_the_model(self) -> None:
        class Both(Net):
            def forward(self, x: Tensor) -> Any:
                y = self.first(x)
                return self.head(self.norm(y).mean((2, 3))), y

        model = Both().eval()
        assert "first" not in ts.calibrate(model, [images()], layers="first").normalised_by

    def test_one_norm_for_two_layers_and_two_norms_for_one(self) -> None:
        class Shared(Net):
            def forward(self, x: Tensor) -> Any:
                y = self.norm(self.first(x))
                once = self.norm2(self.second(y))
                return self.head(self.norm(self.second(once)).mean((2, 3)))

        assert ts.calibrate(Shared().eval(), [images()], layers=["first", "second"]).normalised_by == {}

    def test_sequences_in_the_last_axis(self) -> None:
        """BatchNorm takes the second axis for channels, the layer has them in the last."""
        model = nn.Sequential(nn.Linear(3, 6), trained(nn.BatchNorm1d(6))).eval()
        assert ts.calibrate(model, [torch.randn(4, 6, 3)]).normalised_by == {}

    def test_norms_without_statistics_or_with_hooks(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)).eval()
        stats = ts.calibrate(model, [images()])
        assert "of each batch" in foldable(model, stats).left["1"]
        hooked = Net().eval()
        stats = ts.calibrate(hooked, [images()])
        hooked.norm.register_forward_hook(lambda *_: None)
        assert "hooks" in foldable(hooked, stats).left["norm"]

    def test_without_statistics_nothing_is_known(self) -> None:
        assert list(foldable(Net(), None).left) == ["norm", "norm2"]
        assert foldable(Net(), None).layers == {}


def test_calibration_leaves_no_hooks_and_keeps_what_it_saw(tmp_path: Path) -> None:
    model = Net().eval()
    stats = ts.calibrate(model, [images(), images(1)])
    assert stats.normalised_by == {"first": "norm", "second": "norm2"}
    assert stats.read_elsewhere == ()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    stats.save(tmp_path / "stats")
    assert ts.Calibration.load(tmp_path / "stats").normalised_by == stats.normalised_by
    assert stats.merge(stats).normalised_by == stats.normalised_by
    other = ts.calibrate(Net(BETWEEN["relu"]).eval(), [images()])
    assert stats.merge(other).normalised_by == other.merge(stats).normalised_by == {"second": "norm2"}
    part = ts.calibrate(model, [images()], layers="second")
    assert part.merge(ts.calibrate(model, [images()], layers="first")).normalised_by == stats.normalised_by


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(Net().eval(), [images()])


@pytest.fixture(scope="module")
def plan(stats: ts.Calibration) -> Plan:
    return ts.plan(Net().eval(), stats, budget=ts.Bytes(0.3), method="dense", weights=None)


@pytest.mark.slow
class TestBytes:
    def test_a_plan_counts_what_folding_saves(self, plan: Plan, stats: ts.Calibration) -> None:
        assert plan.folding.layers == {"first": "norm", "second": "norm2"}
        assert plan.after.bytes <= 0.3 * plan.before.bytes == 0.3 * count_bytes(Net())
        assert "BatchNorm is folded into 2 of the layers" in str(plan)
        small, report = ts.compress(Net().eval(), plan, stats, data=[images()])
        assert report.after.bytes == count_bytes(small) == plan.after.bytes
        assert report.before.params == plan.before.params
        assert report.after.params == plan.after.params
        assert folded_norms(small) == ["norm", "norm2"]
        assert report.notes["folded"] == 2

    def test_eight_bits_come_close_to_the_original(self, plan: Plan, stats: ts.Calibration) -> None:
        model = Net().eval()
        small, _ = ts.compress(model, plan.with_("*", bits=8), stats, sequential=False)
        wanted, got = model(images(1)), small(images(1))
        assert ((got - wanted).norm() / wanted.norm()).item() < 0.02

    def test_archives_are_loaded_into_the_original_architecture(
        self, plan: Plan, stats: ts.Calibration, tmp_path: Path
    ) -> None:
        # One layer stays dense and still takes up its BatchNorm.
        small, _ = ts.compress(Net().eval(), plan.with_("first", dense=True), stats, sequential=False)
        ts.save(small, tmp_path / "small")
        loaded = ts.load(tmp_path / "small", Net().eval())
        assert torch.equal(loaded(images()), small(images()))
        assert folded_norms(loaded) == ["norm", "norm2"]
        assert loaded.get_submodule("first").bias is not None
        ts.save(loaded, tmp_path / "again")
        for name in ("model.safetensors", "manifest.json"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()
        # A model that was loaded will do for the architecture too.
        assert torch.equal(ts.load(tmp_path / "small", loaded)(images()), small(images()))
        whole = ts.load(tmp_path / "small", Net().eval(), dense=True)
        torch.testing.assert_close(whole(images()), small(images()))
        without = Net().eval()
        without.norm2 = nn.Identity()
        with pytest.raises(StoreError, match="no BatchNorm 'norm2'"):
            ts.load(tmp_path / "small", without)

    def test_in_place(self, plan: Plan, stats: ts.Calibration) -> None:
        model = Net().eval()
        chosen = plan.with_("first", dense=True)
        small, _ = ts.compress(model, chosen, stats, sequential=False)
        ts.compress_(model, chosen, stats, sequential=False)
        assert torch.equal(model(images()), small(images()))

    def test_plans_are_read_back_and_refuse_other_models(self, plan: Plan, tmp_path: Path) -> None:
        plan.save(tmp_path / "plan.json")
        again = Plan.load(tmp_path / "plan.json")
        assert again == plan
        assert (again.folding, again.after) == (plan.folding, plan.after)
        again.check_model(Net())
        data = json.loads((tmp_path / "plan.json").read_text())
        data["folding"]["layers"]["first"] = "head"
        with pytest.raises(InputError, match="no plain BatchNorm"):
            Plan.from_json(data).check_model(Net())
        data["folding"]["layers"] = {"absent": "norm"}
        with pytest.raises(InputError, match="no such layer"):
            Plan.from_json(data).check_model(Net())
        data["folding"]["layers"] = {"first": "norm", "second": "norm"}
        with pytest.raises(InputError, match="into two layers"):
            Plan.from_json(data).check_model(Net())
        data["folding"]["bytes"] = 10**9
        with pytest.raises(StoreError, match="folding cannot save"):
            Plan.from_json(data)

    def test_other_budgets_and_norms_of_entries_leave_batchnorm_alone(self, stats: ts.Calibration) -> None:
        model = Net().eval()
        assert ts.plan(model, stats, budget=ts.Params(0.8), weights=None).folding == Folding()
        by_hand = ts.plan(model, stats, budget=ts.Bytes(0.8), norm="activation", weights=None)
        assert by_hand.folding.layers == {}
        assert "as they are" in by_hand.folding.left["norm"]
        assert "BatchNorm norm and 1 more are not folded" in str(by_hand)

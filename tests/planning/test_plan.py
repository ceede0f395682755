"""Plans: which layers, which format, which ranks, and what is said about the rest."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from support_nets import SmallNet, batches, small_net
from tensigma.errors import InputError, RankError, StoreError
from tensigma.linalg import cp_rank, svd_rank, tucker2_ranks
from tensigma.planning import CompressedEntry
from tensigma.running import weights_digest
from tensigma.solving import METHODS, NORMS


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(small_net(), batches())


def test_every_layer_has_an_entry_with_a_format_or_a_reason(stats: ts.Calibration) -> None:
    plan = ts.plan(small_net(), stats, ranks=ts.Ranks({"*": 2}))
    assert list(plan) == ["stem", "block.0", "grouped", "depthwise", "pointwise", "up", "hidden", "head"]
    assert all((entry.format is None) == (entry.reason is not None) for entry in plan.values())
    assert {name: entry.label for name, entry in plan.items()} == {
        "stem": "dense",
        "block.0": "tucker2 2 2",
        "grouped": "tucker2 2 2",
        "depthwise": "dense",
        "pointwise": "svd 2",
        "up": "tucker2 2 2",
        "hidden": "svd 2",
        "head": "svd 2",
    }
    assert "first convolution" in str(plan["stem"].reason)
    assert "depthwise" in str(plan["depthwise"].reason)


def test_costs_are_those_of_the_compressed_model(stats: ts.Calibration) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    small, report = ts.compress(net, plan, stats)
    assert plan.before.params == sum(p.numel() for p in net.parameters())
    assert plan.after.params == sum(p.numel() for p in small.parameters())
    assert plan.rate == report.rate == plan.before.params / plan.after.params
    # The block has no bias and gains one.
    block = plan["block.0"]
    assert isinstance(block, CompressedEntry)
    assert block.gains_bias
    assert block.after.params == 16 * 2 + 2 * 2 * 9 + 2 * 12 + 16
    evaluated = ts.evaluate(small, batches(), original=net)
    assert evaluated.original is not None
    assert (plan.before.macs, plan.after.macs) == (evaluated.original.size.macs, evaluated.size.macs)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_vbmf_gives_the_papers_ranks(alpha: float) -> None:
    net = small_net()
    kernel = net.get_parameter("block.0.weight").detach()
    ranks = {
        method: ts.plan(net, ranks=ts.VBMF(alpha), method=method, norm="frobenius", saving="none")["block.0"].ranks
        for method in ("tucker2", "auto", "cp", "cp-joint", "deflation", "svd")
    }
    assert ranks["tucker2"] == ranks["auto"] == tucker2_ranks(kernel, alpha)
    assert ranks["cp"] == ranks["deflation"] == (cp_rank(kernel, alpha),)
    assert ranks["cp-joint"] == (cp_rank(kernel, alpha, joint=True),)
    assert ranks["svd"] == (svd_rank(kernel, alpha),)


@pytest.mark.parametrize("norm", ["frobenius", "sigma", "centred"])
def test_energy_keeps_that_share_with_the_smallest_rank(norm: str) -> None:
    net = small_net()
    # So many that moments are taken as they are, and what is expected is what is lost on them.
    stats = ts.calibrate(net, batches(count=120))
    plan = ts.plan(net, stats, ranks=ts.Energy(0.99), norm=norm, saving="none", layers=["pointwise", "hidden"])
    _, report = ts.compress(net, plan, stats)
    for name in ("pointwise", "hidden"):
        rank = plan[name].ranks[0]  # type: ignore[index]
        error = plan[name].error
        assert error is not None
        assert error**2 <= 0.01
        actual = report[name].frobenius_error if norm == "frobenius" else report[name].error
        assert actual == pytest.approx(error, abs=1e-3)
        if rank == 1:
            continue
        _, smaller = ts.compress(net, plan.with_(name, ranks=rank - 1), stats)
        lost = smaller[name].frobenius_error if norm == "frobenius" else smaller[name].error
        assert lost is not None
        assert lost**2 > 0.01


def test_energy_ranks_grow_with_the_share(stats: ts.Calibration) -> None:
    for method in ("tucker2", "cp", "cp-joint"):
        plans = [
            ts.plan(small_net(), stats, ranks=ts.Energy(share), method=method, saving="none", layers="spatial")
            for share in (0.5, 0.8, 0.99, 1.0)
        ]
        for smaller, larger in pairwise(plans):
            for low, high in zip(smaller.compressed, larger.compressed, strict=True):
                assert all(a <= b for a, b in zip(low.ranks or (), high.ranks or (), strict=True))


def test_tucker2_at_some_energy_loses_at_most_twice_the_rest(stats: ts.Calibration) -> None:
    net = small_net()
    plan = ts.plan(net, ranks=ts.Energy(0.9), norm="frobenius", saving="none", layers="spatial")
    _, report = ts.compress(net, plan)
    assert all((row.frobenius_error or 0) ** 2 <= 0.2 for row in report.compressed)


def test_layers_and_skip_choose(stats: ts.Calibration) -> None:
    def chosen(**options: Any) -> list[str]:
        plan = ts.plan(small_net(), stats, ranks=ts.Ranks({"*": 1}), saving="none", **options)
        return [entry.name for entry in plan.compressed]

    spatial = ["block.0", "grouped", "up"]
    assert chosen(layers="spatial") == spatial
    assert chosen(layers="spatial", skip=()) == ["stem", *spatial]
    assert chosen(layers="h*") == ["hidden", "head"]
    assert chosen(layers=["stem", "up"], skip="up") == ["stem"]
    assert chosen(skip=["h*", "stem"]) == ["block.0", "grouped", "pointwise", "up"]


def test_overrides_change_some_layers(stats: ts.Calibration) -> None:
    plan = ts.plan(
        small_net(),
        stats,
        ranks=ts.VBMF(0.5),
        options={"max_sweeps": 3, "init": "hosvd"},
        overrides={
            "*": {"norm": "sigma"},
            "block*": {"method": "cp", "ranks": 5, "options": {"max_sweeps": 7}},
            "head": {"ranks": ts.Energy(0.5), "norm": "frobenius"},
        },
        saving="none",
    )
    block = plan["block.0"]
    assert (block.label, block.norm.name) == ("cp 5", "sigma")
    options = {entry.name: entry.options for entry in plan.compressed}
    assert options["block.0"] == {"max_sweeps": 7}
    assert options["up"] == {"max_sweeps": 3, "init": "hosvd"}
    assert options["hidden"] == {}
    assert plan["head"].norm.name == "frobenius"
    assert plan["head"].error is not None


def test_the_last_pattern_of_ranks_has_the_word(stats: ts.Calibration) -> None:
    ranks = ts.Ranks({"*": 100, "block.0": (3, 2), "h*": 4})
    plan = ts.plan(small_net(), stats, ranks=ranks, saving="none")
    assert plan["block.0"].ranks == (3, 2)
    assert plan["head"].ranks == (4,)
    assert plan["pointwise"].ranks == (16,)


def test_a_layer_that_would_not_shrink_stays_dense(stats: ts.Calibration) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.VBMF(0.0))
    assert not plan.compressed
    assert plan["up"].reason == "tucker2 12 20 would save no parameters"
    # Two layers of a stride-2 convolution work at the large resolution: fewer parameters, but not fewer MACs.
    options: dict[str, Any] = {"ranks": ts.Ranks({"block.0": (10, 12)}), "norm": "sigma"}
    assert ts.plan(net, stats, **options)["block.0"].ranks == (10, 12)
    assert ts.plan(net, stats, saving="macs", **options)["block.0"].reason == "tucker2 10 12 would save no MACs"


def test_tied_shared_and_unreached_layers_say_so() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))
            self.unused = nn.Linear(16, 16)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.three(self.two(self.one(x)))

    net = Net()
    with pytest.warns(UserWarning, match="no batch reached 'unused'"):
        stats = ts.calibrate(net, [torch.randn(20, 16)])
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    assert [entry.name for entry in plan.compressed] == ["three"]
    assert "tied" in str(plan["one"].reason)
    assert (plan["unused"].reason or "").startswith("calibration never reached it: the model does not call it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither was"),
        ({"ranks": ts.VBMF(1), "budget": ts.Params(0.5)}, "both were given"),
        ({"ranks": 4}, "ranks= takes VBMF"),
        ({"budget": 0.5}, "budget= takes Params"),
        ({"ranks": ts.VBMF(1), "method": "tucker3"}, "method 'tucker3' is unknown; choose one of 'auto'"),
        ({"ranks": ts.VBMF(1), "norm": "l1"}, "norm 'l1' is unknown; choose one of 'centred'"),
        ({"ranks": ts.VBMF(1), "layers": "stm"}, "no layer is called 'stm' \\(from layers=\\); similar names: stem"),
        ({"ranks": ts.VBMF(1), "skip": ["conv9"]}, "no layer is called 'conv9' \\(from skip=\\)"),
        ({"ranks": ts.Ranks({"layer9": 3})}, "no layer is called 'layer9' \\(from ranks=\\)"),
        ({"ranks": ts.VBMF(1), "overrides": {"stem": {"rank": 3}}}, "takes method, ranks, norm, options"),
        ({"ranks": ts.VBMF(1), "overrides": {"stem": {"ranks": 0}}}, "at least 1"),
        ({"ranks": ts.VBMF(1), "options": {"sweeps": 3}}, "no solver has an option 'sweeps'"),
        ({"ranks": ts.VBMF(1), "saving": "bytes"}, "saving='bytes' is unknown"),
        ({"ranks": ts.VBMF(1), "norm": "fisher"}, "calibrate with fisher='model'"),
        ({"ranks": ts.VBMF(1), "norm": "activation", "method": "cp"}, "no layer of SmallNet can be compressed"),
        ({"ranks": ts.VBMF(1), "layers": "depthwise"}, "no layer of SmallNet can be compressed"),
        ({"ranks": ts.Ranks({"head": (2, 2)})}, r"head: svd takes 1 rank\(s\) \(rank\), got \(2, 2\)"),
    ],
)
def test_wrong_wishes_are_refused(stats: ts.Calibration, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ts.plan(small_net(), stats, **options)


@pytest.mark.slow
def test_statistics_are_asked_for_and_compared(stats: ts.Calibration) -> None:
    with pytest.raises(InputError, match="norm='centred' needs stats="):
        ts.plan(small_net(), ranks=ts.VBMF(1))
    with pytest.raises(InputError, match=r"Macs\(…\) needs stats="):
        ts.plan(small_net(), budget=ts.Macs(0.5), norm="frobenius")
    other = small_net()
    other.head = nn.Linear(24, 11)
    with pytest.raises(StoreError, match=r"another architecture.*'head'"):
        ts.plan(other, stats, ranks=ts.VBMF(1))
    assert ts.plan(small_net(), ranks=ts.Ranks({"*": 2}), data=batches()).compressed
    with pytest.raises(InputError, match="no convolution or Linear layer"):
        ts.plan(nn.ReLU(), ranks=ts.VBMF(1), norm="frobenius")


@pytest.mark.parametrize(
    "make", [lambda: ts.VBMF(-1), lambda: ts.VBMF(True), lambda: ts.Energy(0), lambda: ts.Energy(2)]
)
def test_rules_check_themselves(make: Any) -> None:
    with pytest.raises(InputError):
        make()


@pytest.mark.parametrize("given", [{}, {"a": 0}, {"a": 1.5}, {"a": (2, 0)}, {"a": ()}, 3])
def test_explicit_ranks_check_themselves(given: Any) -> None:
    with pytest.raises(InputError):
        ts.Ranks(given)


def test_a_plan_is_changed_into_another(stats: ts.Calibration) -> None:
    plan = ts.plan(small_net(), stats, ranks=ts.Ranks({"*": 2}))
    other = plan.with_("block.0", ranks=(4, 3)).with_("h*", dense=True).with_("grouped", norm="sigma")
    assert plan["block.0"].ranks == (2, 2)
    assert (other["block.0"].ranks, other["head"].format, other["grouped"].norm.name) == ((4, 3), None, "sigma")
    assert plan.with_("stem", ranks=2)["stem"].label == "tucker2 2 2"
    assert plan.with_("block.0", method="cp", ranks=9, options={"seed": 1})["block.0"].label == "cp 9"
    for name, options, message in [
        ("block.0", {"ranks": (17, 2)}, "block.0: rank_out lies between 1 and 16"),
        ("block.0", {"method": "cp"}, "block.0: give ranks too; cp takes rank"),
        ("grouped", {"method": "cp", "ranks": 2}, "grouped: CP cannot carry groups=2"),
        ("depthwise", {"ranks": 1}, "depthwise: a depthwise convolution"),
        ("hidden", {"norm": "activation"}, "only Tucker-2 supports"),
        ("hidden", {"options": {"tol": 1}}, "has no option 'tol'"),
        ("nowhere", {"ranks": 1}, "no layer is called 'nowhere'"),
        ("head", {"ranks": 1, "dense": True}, "no other change"),
    ]:
        with pytest.raises(InputError, match=message):
            plan.with_(name, **options)  # type: ignore[arg-type]


def test_plans_come_back_from_their_file(stats: ts.Calibration, tmp_path: Path) -> None:
    net = small_net()
    plan = ts.plan(
        net, stats, ranks=ts.Energy(0.8), options={"tol": 1e-3}, overrides={"block.0": {"method": "cp-joint"}}
    )
    plan.save(tmp_path / "plan.json")
    again = ts.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert str(again) == str(plan)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    # Edited by hand: ranks decide, and costs follow.
    data = json.loads((tmp_path / "plan.json").read_text())
    data["layers"]["hidden"].update(ranks=[3], norm="sigma")
    (tmp_path / "plan.json").write_text(json.dumps(data))
    edited = ts.Plan.load(tmp_path / "plan.json")
    assert edited["hidden"].after.params == 3 * (12 + 24) + 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=99), "the plan has version 99; this library reads version 1"),
        (lambda data: data.update(format="other"), "this is not a plan"),
        (lambda data: data.pop("layers"), "damaged"),
        (lambda data: data["layers"]["head"].pop("ranks"), "layer 'head': the field 'ranks' is missing"),
        (lambda data: data["layers"]["head"].update(rank=[1]), "layer 'head': the key 'rank' is not.*mean 'ranks'"),
        (lambda data: data["layers"]["head"].update(ranks=[1000]), "layer 'head': rank lies between 1 and 10"),
        (lambda data: data["layers"]["head"].update(ranks=["x"]), "layer 'head'.*whole number"),
        (lambda data: data["layers"]["head"].update(method="magic"), "method 'magic' is unknown"),
        (lambda data: data["layers"]["head"].update(norm="magic"), "norm 'magic' is unknown"),
        (lambda data: data["layers"]["head"]["geometry"].update(depth=3), "layer 'head'.*depth"),
        (lambda data: data["layers"]["head"]["geometry"].update(in_channels=-3), "in_channels is -3"),
        (lambda data: data["layers"]["head"]["geometry"].update(stride=[1]), "no layer has this geometry"),
        (lambda data: data["layers"]["grouped"]["geometry"].update(groups=5), "no layer has this geometry"),
        (lambda data: data["layers"].update(head=3), "layer 'head' is 3; expected an object"),
        (lambda data: data["layers"]["head"].update(ranks={"a": 1}), "layer 'head': ranks are {'a': 1}"),
        (lambda data: data["layers"]["head"].update(calls=-1), "calls is -1"),
        (lambda data: data["layers"]["head"].update(input_size=[-1]), r"input_size\[0\] is -1"),
        (lambda data: data["layers"]["head"].update(error="x"), "error is 'x'"),
        (lambda data: data["layers"]["grouped"].update(options={"tol": "x"}), "layer 'grouped': "),
        (lambda data: data["layers"]["grouped"].update(options={"toll": 1}), "no option 'toll'"),
        (lambda data: data.update(n_params=10), "n_params is 10, but the compressed layers alone have"),
        (lambda data: data.update(notes=[1]), "notes is .1.; expected an object"),
        (lambda data: data.update(extra=[1]), "key 'extra', which is not known"),
    ],
)
def test_damaged_plans_are_refused(stats: ts.Calibration, tmp_path: Path, change: Any, message: str) -> None:
    file = tmp_path / "plan.json"
    ts.plan(small_net(), stats, ranks=ts.Ranks({"*": 2})).save(file)
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(StoreError, match=message):
        ts.Plan.load(file)


def test_a_plan_with_a_layer_deleted_or_renamed_is_refused(stats: ts.Calibration) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    plan.check_model(net)
    for name in plan:
        data = plan.to_json()
        entry = data["layers"].pop(name)
        with pytest.raises(InputError, match=f"says nothing about layer '{name}'"):
            ts.Plan.from_json(data).check_model(net)
        data["layers"]["strange"] = entry
        with pytest.raises(InputError, match="no layer 'strange'"):
            ts.Plan.from_json(data).check_model(net)


def other_weights() -> SmallNet:
    """The same network, but for the last digits of one weight."""
    net = small_net()
    with torch.no_grad():
        net.head.weight[0, 0] += 1e-5
    return net


@pytest.mark.slow
def test_plans_know_their_weights(stats: ts.Calibration, tmp_path: Path) -> None:
    net, other = small_net(), other_weights()
    plan = ts.plan(net, stats, budget=ts.Params(0.6))
    plan.save(tmp_path / "plan.json")
    same = [
        plan,
        ts.Plan.load(tmp_path / "plan.json"),
        plan.with_("head", ranks=2),
        plan.with_notes(remark="mine"),
        plan.front().plan(ts.Params(0.5)),
        ts.plan(net, ranks=ts.Ranks({"*": 2}), norm="frobenius"),
    ]
    for each in same:
        assert each.weights == weights_digest(net)
        each.check_model(net)
        each.check_model(net.train())
        with pytest.raises(InputError, match=r"other weights.*check=False"):
            each.check_model(other)
        each.check_model(other, weights=False)


def test_statistics_of_other_weights_make_no_plan(stats: ts.Calibration) -> None:
    other = other_weights()
    for wish in ({"budget": ts.Params(0.6)}, {"ranks": ts.VBMF(0.5)}):
        with pytest.raises(StoreError, match=r"other weights.*check=False"):
            ts.plan(other, stats, **wish)
    # Where they are welcome, the plan belongs to the weights that it was made for.
    plan = ts.plan(other, stats, ranks=ts.Ranks({"*": 2}), check=False)
    plan.check_model(other)
    with pytest.raises(InputError, match="other weights"):
        plan.check_model(small_net())


def test_plans_from_before_they_knew_their_weights_pass(stats: ts.Calibration) -> None:
    data = ts.plan(small_net(), stats, ranks=ts.Ranks({"*": 2})).to_json()
    del data["weights"]
    old = ts.Plan.from_json(data)
    assert old.weights is None
    old.check_model(other_weights())
    with pytest.raises(StoreError, match="weights is"):
        ts.Plan.from_json({**data, "weights": 3})


def test_unreadable_plans_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        ts.Plan.load(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(StoreError, match="cannot be read"):
        ts.Plan.load(tmp_path / "text.json")
    with pytest.raises(StoreError, match="nothing was changed there"):
        ts.plan(small_net(), ranks=ts.Ranks({"*": 2}), norm="frobenius").save(tmp_path / "no" / "folder.json")


@pytest.mark.slow
def test_planning_only_looks(stats: ts.Calibration) -> None:
    net = small_net().train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    modules = list(net.modules())
    ts.plan(net, stats, budget=ts.Params(0.6))
    assert net.training
    assert list(net.modules()) == modules
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_every_name_of_the_contract_is_known() -> None:
    assert {"tucker2", "cp", "cp-joint", "deflation", "svd", "spatial-svd", "tensor-train", "dense"} == set(METHODS)
    assert {"centred", "sigma", "frobenius", "fisher", "activation"} == set(NORMS)


def test_rank_errors_are_rank_errors(stats: ts.Calibration) -> None:
    with pytest.raises(RankError):
        ts.plan(small_net(), stats, ranks=ts.Ranks({"*": 2})).with_("head", ranks=0)

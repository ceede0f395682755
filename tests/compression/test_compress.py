"""Compression: laws that hold for every norm and method, and promises about what is left alone."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensigma as ts
from cases import GEOMETRIES, LayerCase
from support_nets import SmallNet, batches, small_net
from tensigma.calibration import CalibrationProgress
from tensigma.compression import Refine, execution
from tensigma.errors import InputError, StoreError
from tensigma.layers import Geometry
from tensigma.planning import EffectProgress, PlanningProgress, TrialProgress
from tensigma.solving import METHODS, NORMS, CompressionProgress, Solution, Treatment, solution_store, solve


@pytest.fixture(scope="module")
def stats() -> ts.Calibration:
    return ts.calibrate(small_net(), batches(), fisher="model")


def layer_errors(original: SmallNet, small: nn.Module, names: list[str], data: list[Tensor]) -> dict[str, float]:
    """Mean squared change of each layer's output on the inputs it met in calibration."""
    found: dict[str, float] = {}
    with torch.no_grad():
        for name in names:
            inputs: list[Tensor] = []
            layer = original.get_submodule(name)
            handle = layer.register_forward_hook(lambda module, args, output: inputs.append(args[0]))  # noqa: B023
            for x in data:
                original(x)
            handle.remove()
            x = torch.cat(inputs)
            found[name] = (layer(x) - small.get_submodule(name)(x)).square().mean().item()
    return found


#: Every method under every norm that it can follow. Deflation has no full rank: it adds one term at a time.
WAYS = [
    (method.name, norm.name)
    for method in METHODS.values()
    for norm in NORMS.values()
    if method.name != "deflation" and (method.weighted is not None or not norm.weighs_entries)
]


@pytest.mark.parametrize(("method", "norm"), WAYS)
def test_full_rank_changes_nothing(stats: ts.Calibration, method: str, norm: str) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.VBMF(0.0), method=method, norm=norm, saving="none", skip=())
    assert len(plan.compressed) >= 3
    small, report = ts.compress(net, plan, stats)
    x = batches(seed=1)[0]
    torch.testing.assert_close(small(x), net(x), rtol=1e-3, atol=1e-4)
    assert all((row.frobenius_error or 0) < 1e-3 for row in report.compressed)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("case", GEOMETRIES)
def test_the_bias_takes_up_the_mean_of_what_is_lost(case: LayerCase) -> None:
    """For every geometry: under the centred norm the mean output is that of the original, and the error is right."""
    layer = case.layer()
    x = case.inputs(20) + 0.5
    net = nn.Sequential(layer)
    stats = ts.calibrate(net, [x])
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}), skip=(), saving="none")
    small, report = ts.compress(net, plan, stats)
    geometry = Geometry.of(layer)
    # Transposed windows that overlap are known on average only, away from borders.
    exact = geometry.kind != "conv_transpose" or all(
        s >= k for s, k in zip(geometry.stride, geometry.kernel_size, strict=True)
    )
    with torch.no_grad():
        before, after = net(x), small(x)
    axis = before.dim() - 1 if geometry.kind == "linear" else 1
    others = [i for i in range(before.dim()) if i != axis]
    torch.testing.assert_close(after.mean(others), before.mean(others), rtol=1e-5, atol=1e-6 if exact else 5e-3)
    spread = (before - before.mean(others, keepdim=True)).square().sum()
    error = report["0"].error
    assert error is not None
    actual = ((before - after).square().sum() / spread).item()
    assert error**2 == pytest.approx(actual, rel=1e-3 if exact else 0.02, abs=1e-6)


def test_norms_that_know_the_data_lose_less_of_the_output() -> None:
    net = small_net()
    # So many that moments are taken as they are.
    data = batches(count=120)
    stats = ts.calibrate(net, data)
    names = ["block.0", "grouped", "pointwise", "up", "hidden"]
    errors = {}
    for norm in ("centred", "sigma", "frobenius"):
        plan = ts.plan(net, stats, ranks=ts.Ranks({name: 3 for name in names}), norm=norm, saving="none")
        small, report = ts.compress(net, plan, stats)
        errors[norm] = layer_errors(net, small, names, data)
        # Without the mean, what is reported is what happens.
        if norm == "sigma":
            for name in names:
                assert report[name].error is not None
    for name in names:
        # The solvers of Tucker-2 stop within a fraction of a per cent of where they are going.
        assert errors["centred"][name] <= 1.01 * errors["sigma"][name]
        assert errors["sigma"][name] <= 1.01 * errors["frobenius"][name]
    assert errors["centred"]["hidden"] < 0.9 * errors["sigma"]["hidden"]


@pytest.mark.parametrize("norm", ["sigma", "frobenius"])
def test_reported_errors_are_those_of_the_outputs(stats: ts.Calibration, norm: str) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"block.0": 3, "hidden": 3}), norm=norm, saving="none")
    small, report = ts.compress(net, plan, stats)
    silent = small_net()
    for name in ("block.0", "hidden"):
        layer = silent.get_submodule(name)
        assert isinstance(layer, nn.Conv2d | nn.Linear)
        nn.init.zeros_(layer.weight)
        energy = layer_errors(net, silent, [name], batches())[name]
        error = report[name].error
        assert error is not None
        assert error**2 == pytest.approx(layer_errors(net, small, [name], batches())[name] / energy, rel=1e-3)


def test_arguments_stay_as_they_were(stats: ts.Calibration) -> None:
    net = small_net().train()
    net.stem.weight.requires_grad_(False)
    modules, parameters = list(net.modules()), list(net.parameters())
    before = {key: value.clone() for key, value in net.state_dict().items()}
    moments = {name: layer.covariance.clone() for name, layer in stats.items()}
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}), skip=())
    text = str(plan)
    small, _ = ts.compress(net, plan, stats)
    assert list(net.modules()) == modules
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(torch.equal(layer.covariance, moments[name]) for name, layer in stats.items())
    assert (str(plan), net.training) == (text, True)
    # What takes over follows what it replaces.
    assert small.training
    stem = small.get_submodule("stem")
    assert not stem.get_submodule("reduce").weight.requires_grad
    assert all(not hasattr(module, "tensigma") for module in small.modules())
    assert {type(module).__module__.split(".")[0] for module in small.modules()} <= {"torch", "support_nets"}


def test_in_place_changes_the_model_itself(stats: ts.Calibration) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    small, report = ts.compress(net, plan, stats)
    head = net.head
    again = ts.compress_(net, plan, stats)
    assert net.head is not head
    x = batches()[0]
    torch.testing.assert_close(net(x), small(x))
    assert again.rate == report.rate


@pytest.mark.slow
def test_one_call_does_it_all() -> None:
    net = small_net()
    seen: list[Any] = []
    loader = [(x, torch.zeros(len(x))) for x in batches()]
    small, report = ts.compress(net, loader, budget=ts.Params(0.5), progress=seen.append)
    assert report.after.params <= 0.5 * report.before.params
    assert small(batches()[0]).shape == (8, 10)
    kinds = [type(state) for state in seen]
    assert list(dict.fromkeys(kinds)) == [
        CalibrationProgress,
        PlanningProgress,
        EffectProgress,
        TrialProgress,
        CompressionProgress,
    ]
    assert kinds.count(CalibrationProgress) == 3
    layers = [state for state in seen if isinstance(state, CompressionProgress)]
    assert (layers[-1].done, layers[-1].total, round(layers[-1].work, 9)) == (len(layers), len(layers), 1)
    by_rule = ts.Recipe(ranks=ts.VBMF(0.7), norm="fisher", layers="spatial")
    with_rule, _ = ts.compress(net, loader, recipe=by_rule)
    assert with_rule(batches()[0]).isfinite().all()


def test_progress_goes_to_the_log(stats: ts.Calibration, caplog: pytest.LogCaptureFixture) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"h*": 2}))
    with caplog.at_level(logging.INFO, "tensigma"):
        ts.compress(net, plan, stats, progress=True, workers=1)
    assert "compression: layer 2 of 2, head, error" in caplog.text


def test_half_precision_is_kept(stats: ts.Calibration) -> None:
    net = small_net().to(torch.bfloat16)
    # The statistics are those of the weights before they were rounded.
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}), check=False)
    small, report = ts.compress(net, plan, stats, check=False)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert report["hidden"].after.bytes == 2 * report["hidden"].after.params


def test_workers_do_not_change_the_result(stats: ts.Calibration) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 3}))
    threads = torch.get_num_threads()
    one, first = ts.compress(net, plan, stats, workers=1)
    two, second = ts.compress(net, plan, stats, workers=2)
    assert torch.get_num_threads() == threads
    assert [row.name for row in first.layers] == [row.name for row in second.layers]
    for key, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[key], value, rtol=1e-4, atol=1e-5)


def test_the_cache_never_solves_twice(stats: ts.Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 3}))
    first, report = ts.compress(net, plan, stats, cache=tmp_path / "cache")
    assert not any(row.cached for row in report.compressed)
    files = sorted(file.name for file in (tmp_path / "cache").iterdir())
    assert len(files) == len(plan.compressed)

    def refuse(*args: Any) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr(solution_store, "solve", refuse)
    second, again = ts.compress(net, plan, stats, cache=tmp_path / "cache")
    assert all(row.cached for row in again.compressed)
    assert [row.error for row in again.layers] == [row.error for row in report.layers]
    for key, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[key], value)
    assert sorted(file.name for file in (tmp_path / "cache").iterdir()) == files
    # Anything that matters gives another key: ranks, norm, options, weights, statistics.
    other = small_net()
    with torch.no_grad():
        other.hidden.weight[0, 0] += 1e-3
    for model, changed, moments in [
        (net, plan.with_("hidden", ranks=4), stats),
        (net, plan.with_("hidden", norm="sigma"), stats),
        (net, plan.with_("block.0", options={"max_sweeps": 1}), stats),
        (other, plan, stats),
        (net, plan, ts.calibrate(net, batches(seed=3))),
    ]:
        with pytest.raises(AssertionError, match="solved again"):
            ts.compress(model, changed, moments, cache=tmp_path / "cache", check=False)


def test_a_killed_run_goes_on_from_the_cache(
    stats: ts.Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 3}))
    whole, _ = ts.compress(net, plan, stats)

    def interrupt(state: CompressionProgress) -> None:
        if state.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ts.compress(net, plan, stats, cache=tmp_path, progress=interrupt, workers=1)
    # A file that was cut short by a crash counts for nothing.
    damaged = sorted(tmp_path.iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:100])
    resumed, report = ts.compress(net, plan, stats, cache=tmp_path, workers=1)
    assert sum(row.cached for row in report.compressed) == 2
    for key, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value)
    assert not list(tmp_path.glob("*.partial-*"))


KILLED = """
import os, signal, sys
import tensigma as ts
from support_nets import small_net

def stop(state):
    if state.done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

plan, stats = ts.Plan.load(sys.argv[1] + "/plan.json"), ts.Calibration.load(sys.argv[1] + "/stats")
ts.compress(small_net(), plan, stats, cache=sys.argv[1] + "/cache", progress=stop, workers=1)
"""


@pytest.mark.slow
def test_a_process_that_was_killed_leaves_what_it_solved(stats: ts.Calibration, tmp_path: Path) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 3}))
    plan.save(tmp_path / "plan.json")
    stats.save(tmp_path / "stats")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, timeout=120)
    assert done.returncode == -signal.SIGKILL
    loaded = ts.Calibration.load(tmp_path / "stats")
    resumed, report = ts.compress(net, plan, loaded, cache=tmp_path / "cache", workers=1)
    assert [row.cached for row in report.compressed] == [True] * 3 + [False] * (len(plan.compressed) - 3)
    whole, _ = ts.compress(net, plan, stats, workers=1)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[key], value)


def test_an_error_leaves_a_model_in_place_whole(stats: ts.Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))

    def fail(treatment: Treatment, module: nn.Module, *rest: Any) -> Solution:
        if module is net.head:
            raise InputError("no")
        return solve(treatment, module, *rest)

    monkeypatch.setattr(solution_store, "solve", fail)
    modules = list(net.modules())
    with pytest.raises(InputError, match="head: no"):
        ts.compress_(net, plan, stats)
    assert list(net.modules()) == modules


def test_wrong_calls_are_refused(stats: ts.Calibration, tmp_path: Path) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    with pytest.raises(InputError, match="a plan decides all that budget= and recipe= would"):
        ts.compress(net, plan, stats, budget=ts.Params(0.5))
    with pytest.raises(InputError, match="got batches instead of a plan"):
        ts.compress(net, batches())
    with pytest.raises(InputError, match="needs stats="):
        ts.compress(net, plan)
    with pytest.raises(InputError, match="workers is a whole number"):
        ts.compress(net, plan, stats, workers=0)
    with pytest.raises(InputError, match=r"belongs to another model: there is no layer 'block\.0'"):
        ts.compress(nn.Sequential(nn.Linear(3, 3)), plan, stats, data=None)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cache"):
        ts.compress(net, plan, stats, cache=tmp_path / "file")
    few = ts.calibrate(net, batches(), layers="head")
    with pytest.raises(InputError, match=r"block\.0: the plan's norm 'centred' needs statistics"):
        ts.compress(net, plan, few)
    small, _ = ts.compress(net, plan, data=batches())
    assert small(batches()[0]).shape == (8, 10)


@pytest.mark.slow
def test_other_weights_than_planned_or_calibrated_for_are_refused(stats: ts.Calibration) -> None:
    net, other = small_net(), small_net()
    with torch.no_grad():
        other.head.weight[0, 0] += 1e-5
    plan = ts.plan(net, stats, ranks=ts.Ranks({"*": 2}))
    with pytest.raises(InputError, match=r"the plan was made for other weights.*check=False"):
        ts.compress(other, plan, ts.calibrate(other, batches()))
    own = ts.plan(other, ranks=ts.Ranks({"*": 2}), data=batches())
    with pytest.raises(StoreError, match=r"statistics were gathered with other weights.*check=False"):
        ts.compress(other, own, stats)
    with pytest.raises(StoreError, match=r"statistics were gathered with other weights.*check=False"):
        ts.compress(other, batches(), stats, budget=ts.Params(0.6))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(InputError, match="other weights"):
        ts.compress_(other, plan, stats)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    # Welcome where that is said.
    for small, report in (
        ts.compress(other, plan, stats, check=False),
        ts.compress(other, batches(), stats, budget=ts.Params(0.6), check=False),
    ):
        assert report.compressed
        assert small(batches()[0]).shape == (8, 10)


def refuse_page_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("computed")

    for name in ("front_data", "spectra_data"):
        monkeypatch.setattr(execution, name, refuse)


def test_what_only_a_page_needs_is_computed_when_it_is_asked_for(
    stats: ts.Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = small_net()
    plan = ts.plan(net, stats, budget=ts.Params(0.6), method="svd")
    expected = ts.compress(net, plan, stats)[1].to_json()
    with monkeypatch.context() as patch:
        refuse_page_data(patch)
        _, report = ts.compress(net, plan, stats)
        ts.compress_(small_net(), plan, stats)
        noted = report.with_notes(remark="mine")
        assert str(report)
        assert report.rate > 1
        assert report["head"].before.params
        assert noted.compressed == report.compressed
        assert report == replace(report, seconds=report.seconds)
        for ask in (lambda: report.spectra, lambda: report.front, report.to_json, lambda: noted.front):
            with pytest.raises(AssertionError, match="computed"):
                ask()
    found = report.to_json()
    assert (found["front"], found["spectra"]) == (expected["front"], expected["spectra"])
    refuse_page_data(monkeypatch)
    # Once.
    assert report.front is found["front"] is noted.front
    assert noted.spectra == found["spectra"]


def test_reports_can_be_copied_and_sent(stats: ts.Calibration) -> None:
    net = small_net()
    _, report = ts.compress(net, ts.plan(net, stats, budget=ts.Params(0.6), method="svd"), stats)
    for again in (copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert again == report
        assert (again.front, again.spectra) == (report.front, report.spectra)


def test_spectra_are_those_of_the_original_also_where_it_is_changed_in_place(stats: ts.Calibration) -> None:
    net = small_net()
    plan = ts.plan(net, stats, ranks=ts.Ranks({"block.0": 2}))
    _, apart = ts.compress(net, plan, stats)
    expected = apart.spectra
    report = ts.compress_(net, plan, stats, data=batches(), sequential=False, refine=Refine(passes=48))
    assert report.notes["refinement"]["kept"]
    assert not torch.equal(net.head.weight, small_net().head.weight)
    assert set(report.spectra) == set(expected) > {"head"}
    assert report.spectra == expected


def test_reports_come_back_from_json(stats: ts.Calibration) -> None:
    net = small_net()
    _, report = ts.compress(net, ts.plan(net, stats, ranks=ts.Ranks({"*": 2})), stats)
    assert ts.Report.from_json(report.to_json()) == report
    assert report.before.params == sum(p.numel() for p in net.parameters())
    lines = str(report).splitlines()
    assert len(lines) == len(report.layers) + 3
    assert lines[-1] == f"rate {report.rate:.2f}"
    assert report["stem"].reason == "the first convolution is left dense"
    changes: list[tuple[dict[str, Any], str]] = [
        ({"format": "x"}, "not a report"),
        ({"version": 9}, "version 9"),
        ({"before": 1}, "damaged"),
    ]
    for change, message in changes:
        with pytest.raises(StoreError, match=message):
            ts.Report.from_json({**report.to_json(), **change})
    with pytest.raises(KeyError, match="no layer 'x'"):
        report["x"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:this plan has fewer parameters")
def test_a_compressed_model_is_compressed_again(stats: ts.Calibration) -> None:
    net = small_net()
    small, _ = ts.compress(net, ts.plan(net, stats, ranks=ts.Ranks({"up": 10})), stats)
    smaller, report = ts.compress(small, batches(), budget=ts.Params(0.8))
    assert report.after.params <= 0.8 * report.before.params
    assert smaller(batches()[0]).shape == (8, 10)

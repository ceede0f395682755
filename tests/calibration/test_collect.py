"""calibrate: what it accepts, what it gathers, and that it leaves no trace on the model."""

from __future__ import annotations

import copy
import json
import logging
import random
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tensigma as ts
from reference_calibration import naive_moments
from tensigma.calibration import CalibrationProgress, estimate_memory, remove_checkpoint, runner, select_layers
from tensigma.errors import CalibrationWarning, InputError, StoreError
from tensigma.files import seal
from tensigma.running import Batch


class Net(nn.Module):
    """A layer called twice, one with groups, a Linear over positions, dropout and BatchNorm to catch a wrong mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, stride=2, groups=2)
        self.drop = nn.Dropout(0.5)
        self.mix = nn.Linear(8, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = self.twice(self.twice(x).relu()).relu()
        x = self.drop(self.grouped(input=x)).relu()
        return self.head(self.mix(x.flatten(2).transpose(1, 2)).mean(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def images(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, 3, 8, 9, generator=torch.Generator().manual_seed(seed))


def assert_same(first: ts.Calibration, second: ts.Calibration, rtol: float = 1e-5) -> None:
    assert list(first) == list(second)
    for name in first:
        assert first[name].count == second[name].count
        assert first[name].samples == second[name].samples
        scale = second[name].gram.abs().max().item()
        torch.testing.assert_close(first[name].gram, second[name].gram, rtol=rtol, atol=rtol * scale)
        torch.testing.assert_close(first[name].covariance, second[name].covariance, rtol=rtol, atol=rtol * scale)
        torch.testing.assert_close(first[name].mean, second[name].mean, rtol=rtol, atol=rtol * scale**0.5)
        torch.testing.assert_close(first[name].output_abs_mean, second[name].output_abs_mean, rtol=rtol, atol=rtol)


def test_gathers_what_each_layer_sees(model):
    x = images(7)
    seen: dict[str, list[torch.Tensor]] = {}
    outputs: dict[str, list[torch.Tensor]] = {}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    model.eval()

    def listen(name):
        def hook(layer, args, kwargs, output):
            seen.setdefault(name, []).append(args[0] if args else kwargs["input"])
            outputs.setdefault(name, []).append(output)

        return hook

    handles = [layer.register_forward_hook(listen(name), with_kwargs=True) for name, layer in layers.items()]
    with torch.no_grad():
        for part in x.split(3):
            model(part)
    for handle in handles:
        handle.remove()

    stats = ts.calibrate(model, x.split(3))

    assert list(stats) == ["stem", "twice", "grouped", "mix", "head"]
    for name, layer in layers.items():
        count, mean, covariance, gram = naive_moments(layer, seen[name])
        assert stats[name].count == count
        assert stats[name].samples == 7
        scale = gram.abs().max().item()
        torch.testing.assert_close(stats[name].mean.double(), mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(stats[name].gram.double(), gram, rtol=1e-5, atol=1e-6 * scale)
        torch.testing.assert_close(stats[name].covariance.double(), covariance, rtol=1e-5, atol=1e-6 * scale)
        channels = torch.cat([y.movedim(1 if y.dim() == 4 else -1, -1).flatten(0, -2) for y in outputs[name]])
        torch.testing.assert_close(stats[name].output_abs_mean, channels.abs().mean(0), rtol=1e-4, atol=1e-6)
    assert stats["twice"].count == 2 * 7 * 8 * 9
    assert stats["grouped"].gram.shape == (2, 36, 36)
    assert stats["grouped"].input_shape == (8, 8, 9)
    assert stats["grouped"].output_shape == (8, 3, 4)
    assert stats["mix"].input_shape == (12, 8)


def as_dataset(n: int) -> DataLoader:
    return DataLoader(TensorDataset(images(n), torch.arange(n)), batch_size=3)


@pytest.mark.parametrize(
    ("batches", "options"),
    [
        pytest.param([images(6)], {}, id="tensors"),
        pytest.param([images(6)], {"device": "cpu"}, id="device"),
        pytest.param([(images(6), torch.zeros(6))], {}, id="tuples"),
        pytest.param([[images(6), torch.zeros(6)]], {}, id="lists"),
        pytest.param([{"x": images(6), "y": torch.zeros(6)}], {"input": "x"}, id="dicts"),
        pytest.param([{"x": images(6)}], {}, id="dict-of-one"),
        pytest.param([(torch.zeros(6), images(6))], {"input": 1}, id="second-item"),
        pytest.param([images(6).numpy()], {}, id="numpy"),
        pytest.param((part for part in images(6).split(2)), {}, id="generator"),
        pytest.param(as_dataset(6), {}, id="loader"),
        pytest.param([[(x,) for x in images(6)[:2].split(1)], [(images(6)[2:],)]], {}, id="several-lists"),
        pytest.param(
            [DataLoader(TensorDataset(images(6)[:4]), batch_size=2), [images(6)[4:]]], {}, id="several-loaders"
        ),
        pytest.param(as_dataset(10), {"max_samples": 6}, id="max-samples"),
        pytest.param([images(20)], {"max_samples": 6}, id="max-samples-cuts-a-batch"),
        pytest.param(as_dataset(10), {"max_batches": 2}, id="max-batches"),
    ],
)
def test_accepts_batches_of_many_kinds(model, batches, options):
    assert_same(ts.calibrate(model, batches, **options), ts.calibrate(model, [images(6)]))


def snapshot(model: nn.Module) -> dict[str, object]:
    return {
        "modes": [m.training for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].copy(),  # noqa: NPY002
        "python": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_untouched(model: nn.Module, before: dict[str, object]) -> None:
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


def bad_batches(kind: str):
    yield images(2)
    torch.rand(3)
    np.random.rand(3)  # noqa: NPY002
    random.random()
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "loader":
        raise OSError("disk gone")
    if kind == "rejected":
        yield torch.rand(2, 4, 8, 9)
    yield images(2)


@pytest.mark.parametrize("fisher", [None, "model"])
@pytest.mark.parametrize(
    ("kind", "error"),
    [("fine", None), ("interrupt", KeyboardInterrupt), ("loader", OSError), ("rejected", InputError)],
)
def test_the_model_comes_back_as_it_was(model, kind, error, fisher):
    model.train()
    model.norm.eval()
    model.stem.weight.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.twice.register_forward_hook(lambda *args: None)
    before = snapshot(model)
    if error is None:
        ts.calibrate(model, bad_batches(kind), fisher=fisher)
    else:
        with pytest.raises(error):
            ts.calibrate(model, bad_batches(kind), fisher=fisher)
    assert_untouched(model, before)


def test_a_rejected_batch_is_named(model):
    with pytest.raises(InputError, match=r"batch 1 \(shape \(2, 4, 8, 9\), float32\)"):
        ts.calibrate(model, bad_batches("rejected"))


@pytest.mark.parametrize("empty", [[], iter(()), [images(0)], DataLoader(TensorDataset(images(0)))])
def test_no_data(model, empty):
    with pytest.raises(InputError, match="empty"):
        ts.calibrate(model, empty)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (images(2), {}, "iterable of batches"),
        ({"x": images(2)}, {}, "iterable of batches"),
        (3, {}, "iterable"),
        ([{"x": images(2), "y": 1}], {}, r"input=.*\['x', 'y'\]"),
        ([{"x": images(2)}], {"input": "image"}, "no entry 'image'"),
        (["a"], {}, "str"),
        ([images(2)], {"max_samples": 0}, "at least 1"),
        ([images(2)], {"checkpoint_every": 0}, "at least 1"),
        ([images(2)], {"fisher": "laplace"}, "fisher"),
        ([images(2)], {"memory": "much"}, "memory"),
        ([images(2)], {"memory": "10kB"}, "too little"),
        ([images(2)], {"fisher": "labels"}, "labels"),
        ([images(2)], {"layers": "twise"}, "'twise'.*similar names: .*twice"),
        ([images(2)], {"layers": ["stem", "nothing.*"]}, "nothing"),
    ],
)
def test_bad_arguments_say_what_to_do(model, batches, options, message):
    with pytest.raises(InputError, match=message):
        ts.calibrate(model, batches, **options)


def test_a_model_without_layers():
    with pytest.raises(InputError, match="no convolution or Linear"):
        ts.calibrate(nn.ReLU(), [images(2)])


def test_bad_activations_name_the_first_layer_that_meets_them(model):
    with torch.no_grad():
        model.stem.bias[3] = float("nan")
    with pytest.raises(InputError, match=r"'twice'.*NaN"):
        ts.calibrate(model, [images(2)])


def test_layers_by_name_and_pattern(model):
    assert list(ts.calibrate(model, [images(2)], layers=["h*", "stem"])) == ["stem", "head"]


def test_layers_that_are_never_reached_are_named(model):
    model.spare = nn.Conv2d(3, 3, 1)
    with pytest.warns(CalibrationWarning, match="'spare'"):
        stats = ts.calibrate(model, [images(2)])
    assert stats.unreached == ("spare",)
    assert "spare" not in stats


def test_progress_is_reported_and_nothing_is_printed(model, capsys, caplog):
    states: list[CalibrationProgress] = []
    ts.calibrate(model, as_dataset(7), progress=states.append)
    assert [(state.done, state.total, state.samples) for state in states] == [(1, 3, 3), (2, 3, 6), (3, 3, 7)]
    assert states[-1].remaining == 0
    states.clear()
    ts.calibrate(model, as_dataset(9), progress=states.append, max_samples=5)
    assert [(state.done, state.total, state.samples) for state in states] == [(1, 2, 3), (2, 2, 5)]
    assert states[0].seconds > 0
    assert states[0].memory == estimate_memory(select_layers(model, None)).total
    with caplog.at_level(logging.INFO, logger="tensigma"):
        ts.calibrate(model, as_dataset(7), progress=True)
    assert "batch 3 of 3" in caplog.text
    assert "GB" in caplog.text
    assert capsys.readouterr() == ("", "")


def test_limited_memory_takes_more_passes_to_the_same_result(model):
    shuffled = DataLoader(TensorDataset(images(9)), batch_size=3, shuffle=True)
    states: list[CalibrationProgress] = []
    torch.manual_seed(5)
    limited = ts.calibrate(model, shuffled, memory="110kB", max_samples=5, progress=states.append)
    assert states[-1].passes > 1
    torch.manual_seed(5)
    assert_same(limited, ts.calibrate(model, shuffled, max_samples=5))


def test_limited_memory_with_a_generator_of_the_loader(model):
    def loader():
        return DataLoader(
            TensorDataset(images(9)), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    assert_same(
        ts.calibrate(model, loader(), memory="110kB", max_samples=5), ts.calibrate(model, loader(), max_samples=5)
    )


def test_limited_memory_refuses_an_iterator(model):
    with pytest.raises(InputError, match="read once"):
        ts.calibrate(model, iter([images(2)]), memory="110kB")


@pytest.mark.parametrize(
    ("options", "stop_at"),
    [
        pytest.param({}, 2, id="plain-2"),
        pytest.param({}, 5, id="plain-5"),
        pytest.param({"memory": "110kB"}, 5, id="first-pass"),
        pytest.param({"memory": "110kB"}, 7, id="second-pass-begun"),
        pytest.param({"memory": "110kB"}, 9, id="second-pass"),
        pytest.param({"fisher": "model"}, 5, id="fisher"),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_result(model, tmp_path, options, stop_at):
    data = DataLoader(TensorDataset(images(12)), batch_size=2, shuffle=True)
    torch.manual_seed(1)
    whole = ts.calibrate(model, data, **options)
    torch.manual_seed(1)

    def interrupt(state: CalibrationProgress) -> None:
        if state.done == stop_at:
            raise KeyboardInterrupt

    settings = {"checkpoint": tmp_path / "run", "checkpoint_every": 2, **options}
    with pytest.raises(KeyboardInterrupt):
        ts.calibrate(model, data, progress=interrupt, **settings)
    torch.manual_seed(99)
    done: list[CalibrationProgress] = []
    resumed = ts.calibrate(model, data, resume=True, progress=done.append, **settings)
    assert_same(resumed, whole)
    # What a checkpoint holds is not computed again.
    assert done[0].done == (stop_at - 1) // 2 * 2 + 1
    if "fisher" in options:
        torch.testing.assert_close(resumed["stem"].fisher, whole["stem"].fisher)


@pytest.mark.parametrize("change", [lambda rng: [*rng, 0], lambda rng: rng[:-4], lambda rng: [255] * len(rng)])
def test_a_checkpoint_with_a_damaged_generator_is_refused(model, tmp_path, change):
    folder = tmp_path / "run"
    with pytest.raises(ZeroDivisionError):
        ts.calibrate(model, (images(2) if i < 2 else 1 / 0 for i in range(3)), checkpoint=folder, checkpoint_every=1)
    (manifest,) = folder.rglob("manifest.json")
    content = json.loads(manifest.read_text())
    content["rng"] = change(content["rng"])
    manifest.write_text(json.dumps(seal(content)))
    with pytest.raises(StoreError, match="generator"):
        ts.calibrate(model, [images(2)] * 3, checkpoint=folder, checkpoint_every=1, resume=True)


class TestCache:
    @pytest.fixture
    def run_again(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The batches that a model runs over."""
        runs: list[int] = []
        real = runner.run

        def noted(model: nn.Module, batch: Batch) -> object:
            runs.append(batch.index)
            return real(model, batch)

        monkeypatch.setattr(runner, "run", noted)
        return runs

    @pytest.mark.parametrize("options", [{}, {"memory": "110kB"}, {"fisher": "model"}, {"max_samples": 5}])
    def test_what_is_kept_is_not_gathered_again(self, model, tmp_path, run_again, options):
        whole = ts.calibrate(model, [images(2)] * 3, **options)
        data = [images(2)] * 3
        first = ts.calibrate(model, data, cache=tmp_path, **options)
        run_again.clear()
        second = ts.calibrate(model, data, cache=tmp_path, **options)
        assert run_again == []
        for stats in (first, second):
            assert stats.keys() == whole.keys()
            assert (stats.fingerprint, stats.weights) == (whole.fingerprint, whole.weights)
            assert (stats.read_elsewhere, stats.normalised_by) == (whole.read_elsewhere, whole.normalised_by)
            for name, layer in stats.items():
                assert layer._fields() == whole[name]._fields()
                assert all(tensor.equal(whole[name]._tensors()[key]) for key, tensor in layer._tensors().items())

    def test_a_loader_that_shuffles_gives_the_same_statistics_as_without_a_cache(self, model, tmp_path):
        data = DataLoader(TensorDataset(images(12)), batch_size=5, shuffle=True)
        results = []
        for cache in (None, tmp_path, tmp_path):
            torch.manual_seed(1)
            results.append(ts.calibrate(model, data, cache=cache, max_samples=5))
        for stats in results[1:]:
            assert stats["stem"].covariance.equal(results[0]["stem"].covariance)

    @pytest.mark.parametrize("change", ["batches", "fewer batches", "weights", "layers", "damage", "no digest"])
    def test_anything_else_is_gathered(self, model, tmp_path, run_again, change):
        data = [images(2), images(2) + 1]
        options: dict[str, Any] = {}
        ts.calibrate(model, data, cache=tmp_path)
        run_again.clear()
        if change == "batches":
            data[1] = data[1] + 1
        elif change == "fewer batches":
            data.pop()
        elif change == "weights":
            with torch.no_grad():
                model.stem.weight += 1
        elif change == "layers":
            options["layers"] = "stem"
        else:
            (manifest,) = tmp_path.rglob("manifest.json")
            content = json.loads(manifest.read_text())
            if change == "damage":
                content["samples"] += 1
            else:
                del content["inputs"]
            manifest.write_text(json.dumps(content if change == "damage" else seal(content)))
        found = ts.calibrate(model, data, cache=tmp_path, **options)
        assert len(run_again) == len(data)
        assert_same(found, ts.calibrate(model, data, **options))

    @pytest.mark.parametrize("same", [True, False], ids=["same batches", "other batches"])
    def test_an_interrupted_run_goes_on_if_its_batches_are_the_same(self, model, tmp_path, same):
        data = DataLoader(TensorDataset(images(10)), batch_size=2, shuffle=True)
        settings = {"cache": tmp_path, "checkpoint_every": 1}
        torch.manual_seed(1)
        with pytest.raises(KeyboardInterrupt):
            ts.calibrate(model, data, progress=_interrupt_at(3), **settings)
        if not same:
            data = DataLoader(TensorDataset(images(10) + 1), batch_size=2, shuffle=True)
        torch.manual_seed(1)
        whole = ts.calibrate(model, data)
        # Another state of the generator: the order is that of the interrupted run, or a new one.
        torch.manual_seed(1 if not same else 99)
        done: list[CalibrationProgress] = []
        assert_same(ts.calibrate(model, data, progress=done.append, **settings), whole)
        assert len(done) == (3 if same else 5)
        assert [path.suffix for path in tmp_path.iterdir()] == [""]

    def test_two_runs_at_once_do_not_disturb_each_other(self, model, tmp_path):
        whole, twin = ts.calibrate(model, [images(2)] * 3), copy.deepcopy(model)
        inner: list[ts.Calibration] = []
        settings: dict[str, Any] = {"cache": tmp_path, "checkpoint_every": 1}

        def another(state: CalibrationProgress) -> None:
            if state.done == 2:
                thread = Thread(target=lambda: inner.append(ts.calibrate(twin, [images(2)] * 3, **settings)))
                thread.start()
                thread.join()

        assert_same(ts.calibrate(model, [images(2)] * 3, progress=another, **settings), whole)
        assert_same(inner[0], whole)
        assert [path.suffix for path in tmp_path.iterdir()] == [""]

    def test_an_iterator_is_not_read_to_look_at_it(self, model, tmp_path):
        for _ in range(2):
            assert ts.calibrate(model, iter([images(2)]), cache=tmp_path).samples == 2


@pytest.mark.parametrize(
    ("stop_at", "options", "change"),
    [
        pytest.param(3, {}, lambda data: [data[0] + 1, *data[1:]], id="another first batch"),
        pytest.param(3, {}, lambda data: data[:1], id="too few"),
        pytest.param(3, {}, lambda data: [data[1], data[0], *data[2:]], id="another order"),
        pytest.param(5, {"memory": "110kB"}, lambda data: [data[0] + 1, *data[1:]], id="between passes"),
    ],
)
def test_a_run_is_not_resumed_with_other_batches(model, tmp_path, stop_at, options, change):
    data = [images(2) + n for n in range(4)]
    settings = {"checkpoint": tmp_path / "run", "checkpoint_every": 1, **options}
    with pytest.raises(KeyboardInterrupt):
        ts.calibrate(model, data, progress=_interrupt_at(stop_at), **settings)
    with pytest.raises(StoreError, match="was made with other batches"):
        ts.calibrate(model, change(data), resume=True, **settings)
    ts.calibrate(model, data, resume=True, **settings)


@pytest.mark.parametrize("left", [".step-000002.claim", ".step-000002.partial-999999999"])
def test_what_a_kill_left_in_a_checkpoint_does_not_keep_it_from_being_removed(model, tmp_path, left):
    folder = tmp_path / "run"
    ts.calibrate(model, [images(2)], checkpoint=folder, checkpoint_every=1)
    (folder / left).write_text("999999999")
    remove_checkpoint(folder)
    assert not folder.exists()


def test_a_run_that_stopped_after_its_last_batch_knows_what_it_saw_besides_moments(tmp_path):
    """Who reads a weight and what follows a layer is not in a checkpoint, and decides what may be replaced."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.norm(self.first(x))) + self.second.weight.sum()

    model, data = Reading().eval(), [images(2), images(2)]
    whole = ts.calibrate(model, data)
    assert (whole.read_elsewhere, whole.normalised_by) == (("second",), {"first": "norm"})
    settings = {"checkpoint": tmp_path / "run", "checkpoint_every": 1}
    ts.calibrate(model, data, **settings)
    resumed = ts.calibrate(model, data, resume=True, **settings)
    assert (resumed.read_elsewhere, resumed.normalised_by) == (whole.read_elsewhere, whole.normalised_by)
    assert_same(resumed, whole)


def _interrupt_at(batch: int) -> Callable[[CalibrationProgress], None]:
    def interrupt(state: CalibrationProgress) -> None:
        if state.done == batch:
            raise KeyboardInterrupt

    return interrupt


def test_a_checkpoint_is_not_overlooked_or_misused(model, tmp_path):
    folder = tmp_path / "run"
    ts.calibrate(model, [images(2)] * 2, checkpoint=folder, checkpoint_every=1)
    with pytest.raises(StoreError, match="resume=True"):
        ts.calibrate(model, [images(2)] * 2, checkpoint=folder)
    with pytest.raises(StoreError, match="max_samples"):
        ts.calibrate(model, [images(2)] * 2, checkpoint=folder, resume=True, max_samples=3)
    with pytest.raises(StoreError, match="checkpoint"):
        ts.Calibration.load(next(folder.iterdir()))
    with torch.no_grad():
        model.stem.weight += 1
    with pytest.raises(StoreError, match="weights"):
        ts.calibrate(model, [images(2)] * 2, checkpoint=folder, resume=True)
    with pytest.raises(StoreError, match="another architecture"):
        ts.calibrate(nn.Sequential(nn.Conv2d(3, 2, 1)), [images(2)], checkpoint=folder, resume=True)


def test_double_precision_models_give_double_precision_moments(model):
    stats = ts.calibrate(model.double(), [images(4).double()])
    assert stats["stem"].gram.dtype == torch.float64
    _, _, covariance, _ = naive_moments(model.stem, [images(4)])
    torch.testing.assert_close(stats["stem"].covariance, covariance, rtol=1e-12, atol=1e-14)

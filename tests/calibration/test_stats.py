"""LayerStats and Calibration: merging, saving, loading, comparing."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import json
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensigma as ts
from tensigma.calibration import Calibration, CalibrationProgress, LayerStats, distance, store
from tensigma.errors import InputError, StoreError
from tensigma.files import seal
from tensigma.running import weights_digest


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, groups=2), nn.Flatten(1), nn.LazyLinear(5)
    )


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    model = make_model()
    model(torch.zeros(1, 3, 6, 6))
    return model


def images(n: int, seed: int = 0, size: int = 6) -> torch.Tensor:
    return torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def assert_same(first: LayerStats, second: LayerStats, tol: float = 1e-6) -> None:
    assert (first.count, first.samples) == (second.count, second.samples)
    for field in ("mean", "covariance", "gram", "output_abs_mean", "fisher"):
        mine, other = getattr(first, field), getattr(second, field)
        if mine is None:
            assert other is None
        else:
            torch.testing.assert_close(mine, other, rtol=10 * tol, atol=tol * other.abs().max().item())


class TestMerge:
    @pytest.mark.parametrize("offset", [0.0, 1e4])
    def test_equals_all_rows_together_in_any_order(self, generator, offset):
        rows = torch.randn(60, 5, generator=generator) + offset
        whole = LayerStats.from_rows(rows)
        a, b, c = (LayerStats.from_rows(part) for part in rows.split([7, 40, 13]))
        for merged in (a.merge(b).merge(c), a.merge(b.merge(c)), c.merge(a).merge(b)):
            assert_same(merged, whole)

    def test_kept_rows_stay_rows_while_they_are_few(self, generator):
        rows = torch.randn(12, 10, generator=generator) + 2

        def keep(part):
            return LayerStats(mean=part.double().mean(0), rows=part, count=len(part))

        few = keep(rows[:4]).merge(keep(rows[4:9]))
        assert torch.equal(few.rows, rows[:9])
        assert_same(few, LayerStats.from_rows(rows[:9]))
        many = few.merge(keep(rows[9:]))
        assert many.rows is None
        assert_same(many, LayerStats.from_rows(rows))
        assert_same(keep(rows[:4]).merge(LayerStats.from_rows(rows[4:])), LayerStats.from_rows(rows))

    def test_calibrations_of_two_halves(self, model):
        options: dict[str, Any] = {"fisher": "labels"}
        labelled = [(images(4, seed), torch.arange(4)) for seed in range(3)]
        whole = ts.calibrate(model, labelled, **options)
        parts = [ts.calibrate(model, [batch], data_name=f"part {i}", **options) for i, batch in enumerate(labelled)]
        merged = functools.reduce(Calibration.merge, parts)
        assert merged.data == "part 0 + part 1 + part 2"
        for name in whole:
            assert_same(merged[name], whole[name])

    def test_resolutions_weigh_by_rows(self, model):
        convolutions = model[:3]
        small, large = [images(3, 0, 6)], [images(2, 1, 12)]
        merged = ts.calibrate(convolutions, small).merge(ts.calibrate(convolutions, large))
        whole = ts.calibrate(convolutions, small + large)
        for name in whole:
            assert_same(merged[name], whole[name])

    def test_layers_of_only_one_side_are_kept(self, model):
        first = ts.calibrate(model, [images(3)], layers="0")
        second = ts.calibrate(model, [images(3)], layers=["0", "4"])
        assert set(first.merge(second)) == {"0", "4"}
        assert first.merge(second)["4"].count == 3

    def test_refuses_other_shapes_and_architectures(self, model):
        with pytest.raises(InputError, match="shape"):
            LayerStats.from_rows(torch.rand(3, 2)).merge(LayerStats.from_rows(torch.rand(3, 4)))
        other = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1))
        with pytest.raises(StoreError, match="layer '0'"):
            ts.calibrate(model, [images(2)]).merge(ts.calibrate(other, [images(2)]))


class TestStore:
    @pytest.fixture
    def stats(self, model) -> Calibration:
        return ts.calibrate(model, [(images(4), torch.arange(4))], fisher="labels", data_name="noise, été")

    def test_comes_back_as_it_was(self, stats, tmp_path):
        stats.save(tmp_path / "deep" / "stats")
        loaded = ts.Calibration.load(tmp_path / "deep" / "stats")
        assert list(loaded) == list(stats)
        assert (loaded.data, loaded.fingerprint, loaded.samples) == ("noise, été", stats.fingerprint, 4)
        for name in stats:
            assert_same(loaded[name], stats[name], tol=0)
            assert loaded[name].input_shape == stats[name].input_shape
            assert loaded[name].output_shape == stats[name].output_shape
        assert [path.name for path in (tmp_path / "deep").iterdir()] == ["stats"]

    def test_manifest_tells_what_is_inside(self, stats, tmp_path):
        stats.save(tmp_path / "stats")
        manifest = json.loads((tmp_path / "stats" / "manifest.json").read_text())
        assert manifest["data"] == "noise, été"
        assert manifest["library"] == f"tensigma {ts.__version__}"
        assert manifest["version"] == 1
        assert set(manifest["layers"]["2"]["digests"]) == set(manifest["layers"]["2"]["tensors"])
        assert manifest["layers"]["2"] | {"file": "", "digests": {}} == {
            "file": "",
            "digests": {},
            "d": 27,
            "groups": 2,
            "count": 64,
            "samples": 4,
            "input_shape": [6, 6, 6],
            "output_shape": [4, 4, 4],
            "output_count": 64,
            "fisher_samples": 4,
            "dtype": "float32",
            "tensors": ["mean", "covariance", "output_abs_mean", "fisher"],
        }

    def test_rows_survive(self, tmp_path):
        rows = torch.rand(3, 8)
        Calibration({"fc": LayerStats(mean=rows.mean(0), rows=rows, count=3)}).save(tmp_path / "stats")
        torch.testing.assert_close(Calibration.load(tmp_path / "stats")["fc"].rows, rows, rtol=0, atol=0)

    def test_layers_are_read_when_asked_for_and_forgotten_when_unused(self, stats, tmp_path, monkeypatch):
        stats.save(tmp_path / "stats")
        read: list[str] = []
        original = store.read_tensor

        def noting(file: Path, key: str, entry: dict[str, object]) -> torch.Tensor:
            read.append(key)
            return original(file, key, entry)

        monkeypatch.setattr("tensigma.calibration.layer_stats.read_tensor", noting)
        loaded = ts.Calibration.load(tmp_path / "stats")
        assert loaded.samples == 4
        assert read == []
        layer = loaded["0"]
        _ = layer.mean, layer.count
        assert "covariance" not in read
        covariance = layer.covariance
        assert layer.gram is not None
        assert loaded["0"].covariance is covariance
        assert read.count("covariance") == 1
        gone = weakref.ref(layer)
        del layer, covariance
        gc.collect()
        assert gone() is None

    def test_a_plan_knows_the_statistics_of_all_layers_and_holds_none_in_memory(
        self, model, stats, tmp_path, monkeypatch
    ):
        stats.save(tmp_path / "stats")
        tensors: list[weakref.ref[torch.Tensor]] = []
        original = store.read_tensor

        def noting(file: Path, key: str, entry: dict[str, object]) -> torch.Tensor:
            tensor = original(file, key, entry)
            if key == "covariance":
                tensors.append(weakref.ref(tensor))
            return tensor

        monkeypatch.setattr("tensigma.calibration.layer_stats.read_tensor", noting)
        loaded = ts.Calibration.load(tmp_path / "stats")
        plans = [ts.plan(model, each, budget=ts.Params(0.8), skip=(), weights=None) for each in (stats, loaded)]
        small, expected = (ts.compress(model, plan, each)[0] for plan, each in zip(plans, (stats, loaded), strict=True))
        gc.collect()
        assert tensors
        assert not any(tensor() is not None for tensor in tensors)
        assert plans[1].front() is not None
        assert list(small.state_dict()) == list(expected.state_dict())
        assert all(torch.equal(small.state_dict()[key], value) for key, value in expected.state_dict().items())

    def test_names_that_only_differ_in_case_or_signs(self, tmp_path):
        layers = {
            name: LayerStats.from_rows(torch.full((2, 2), float(i))) for i, name in enumerate(["a/b", "A/B", "a:b"])
        }
        Calibration(layers).save(tmp_path / "stats")
        loaded = Calibration.load(tmp_path / "stats")
        assert [loaded[name].mean[0].item() for name in layers] == [0, 1, 2]

    def test_refuses_to_overwrite(self, stats, tmp_path):
        stats.save(tmp_path / "stats")
        with pytest.raises(StoreError, match="force=True"):
            stats.save(tmp_path / "stats")
        Calibration({"fc": LayerStats.from_rows(torch.eye(3))}).save(tmp_path / "stats", force=True)
        assert list(Calibration.load(tmp_path / "stats")) == ["fc"]
        assert [path.name for path in tmp_path.iterdir()] == ["stats"]
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "letter.txt").write_text("dear")
        with pytest.raises(StoreError, match="holds something else"):
            stats.save(tmp_path / "mine", force=True)
        assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"

    @pytest.mark.parametrize("force", [False, True], ids=["new", "replace"])
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
    @pytest.mark.parametrize("at", [0, 2])
    def test_a_full_disk_leaves_no_store(self, stats, tmp_path, monkeypatch, error, at, force):
        folder = tmp_path / "stats"
        if force:
            Calibration({"old": LayerStats.from_rows(torch.eye(3))}).save(folder)
        original, calls = store.save_file, []

        def failing(tensors, file):
            calls.append(file)
            original(tensors, file)
            if len(calls) > at:
                raise error

        monkeypatch.setattr(store, "save_file", failing)
        if isinstance(error, OSError):
            with pytest.raises(StoreError, match="No space left"):
                stats.save(folder, force=force)
        else:
            with pytest.raises(KeyboardInterrupt):
                stats.save(folder, force=force)
        assert [path.name for path in tmp_path.iterdir()] == (["stats"] if force else [])
        if force:
            assert list(Calibration.load(folder)) == ["old"]

    def test_what_a_killed_process_left_is_cleared_away(self, stats, tmp_path):
        (tmp_path / ".stats.partial-999999999").mkdir()
        stats.save(tmp_path / "stats")
        assert [path.name for path in tmp_path.iterdir()] == ["stats"]

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
            (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json"),
            (lambda folder: (folder / "manifest.json").write_text("[]"), "not the manifest"),
            (lambda folder: next(folder.glob("*.safetensors")).unlink(), "incomplete"),
            (lambda folder: _edit(folder, version=2), "version 2"),
            (lambda folder: _truncate(sorted(folder.glob("*.safetensors"))[0]), "0000-0.safetensors"),
        ],
    )
    def test_damage_is_named(self, stats, tmp_path, damage, message):
        stats.save(tmp_path / "stats")
        damage(tmp_path / "stats")
        with pytest.raises(StoreError, match=message):
            _ = Calibration.load(tmp_path / "stats")["0"].covariance

    def test_missing_folder(self, tmp_path):
        with pytest.raises(StoreError, match="nowhere"):
            Calibration.load(tmp_path / "nowhere")


def _edit(folder: Path, **fields: object) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def _edit_layer(folder: Path, name: str, *, sealed: bool, drop: str = "", **fields: object) -> None:
    """Change the entry of a layer, as a hand would that also mends the digest, or in a store of 0.1, which has none."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    entry = manifest["layers"][name]
    entry.update(fields)
    entry.pop(drop, None)
    if not sealed:
        del manifest["digest"], entry["digests"]
    file.write_text(json.dumps(seal(manifest) if sealed else manifest))


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "of 0.1"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"drop": "count"}, "layer|'0': the field 'count' is missing"),
        ({"count": 0}, "count is 0; expected a whole number of at least 1"),
        ({"count": -5}, "count is -5"),
        ({"count": 2.5}, "count is 2.5"),
        ({"count": True}, "count is True"),
        ({"samples": -1}, "samples is -1"),
        ({"samples": 0}, "samples is 0; expected a whole number of at least 1"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of float32, float64"),
        ({"dtype": "float64"}, "says float64"),
        ({"d": 26}, r"shape \(27,\); its entry in manifest.json says \(26,\)"),
        ({"groups": 3}, "its entry in manifest.json says"),
        ({"input_shape": [3, -8, 8]}, r"input_shape\[1\] is -8"),
        ({"input_shape": "3x8x8"}, "expected a list"),
        ({"file": "../../x.safetensors"}, "expected the name of a file in this folder"),
        ({"file": "/etc/passwd"}, "expected the name of a file in this folder"),
        ({"tensors": ["mean"]}, "expected mean and one of rows and covariance"),
        ({"tensors": ["mean", "covariance", "rows"]}, "expected mean and one of rows and covariance"),
        ({"tensors": ["mean", "mean", "covariance"]}, "holds 'mean' twice"),
        ({"counts": 3}, "key 'counts', which is not known"),
    ],
)
def test_a_manifest_is_checked_where_it_is_read(tmp_path: Path, fields: dict, message: str, sealed: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    ts.calibrate(net, [images(2)]).save(tmp_path / "stats")
    _edit_layer(tmp_path / "stats", "0", sealed=sealed, **fields)
    with pytest.raises(StoreError, match=message):
        _ = ts.Calibration.load(tmp_path / "stats")["0"].covariance


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_moments_that_cannot_be_are_refused_without_digests_too(tmp_path: Path, value: float) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    ts.calibrate(net, [images(2)]).save(tmp_path / "stats")
    (file,) = (tmp_path / "stats").glob("*.safetensors")
    tensors = load_file(file)
    tensors["covariance"][3, 3] = value
    save_file(tensors, file)
    with pytest.raises(StoreError, match="does not match its digest"):
        _ = ts.Calibration.load(tmp_path / "stats")["0"].covariance
    _edit_layer(tmp_path / "stats", "0", sealed=False)
    with pytest.raises(StoreError, match=r"NaN or infinity|negative variance"):
        _ = ts.Calibration.load(tmp_path / "stats")["0"].covariance


def test_no_flipped_byte_of_a_store_is_read_in_silence(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3))
    stats = ts.calibrate(net, [images(2)])
    stats.save(tmp_path / "stats")
    generator = torch.Generator().manual_seed(0)
    for file in sorted((tmp_path / "stats").iterdir()):
        good = file.read_bytes()
        for position in torch.randint(len(good), (60,), generator=generator).tolist():
            damaged = bytearray(good)
            damaged[position] ^= 1 << (position % 8)
            file.write_bytes(damaged)
            with suppress(StoreError):
                loaded = ts.Calibration.load(tmp_path / "stats")
                # Space between tokens of JSON and in a header means nothing.
                assert list(loaded) == ["0"]
                assert_same(loaded["0"], stats["0"], tol=0)
                assert loaded["0"].input_shape == stats["0"].input_shape
        file.write_bytes(good)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


class TestArchitecture:
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU()), "layer '2'.*missing in the model"),
            (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), "layer '0' is conv 3→6.*conv 3→8"),
            (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, stride=2)), "stride 1×1.*stride 2×2"),
        ],
    )
    def test_another_one_is_refused_naming_the_first_difference(self, model, other, message):
        stats = ts.calibrate(model, [images(2)])
        stats.check_model(model)
        with pytest.raises(StoreError, match=message):
            stats.check_model(other())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param("2", [6, 6], id="too few axes"),
        pytest.param("2", [6, 6, 6, 6], id="too many axes"),
        pytest.param("2", [5, 6, 6], id="other channels"),
        pytest.param("2", [6, 6, 2], id="smaller than the kernel"),
        pytest.param("2", [6, 0, 6], id="nothing in it"),
        pytest.param("4", [7], id="other width"),
    ],
)
def test_sizes_that_no_input_of_the_layer_has_are_refused(
    model: nn.Module, tmp_path: Path, name: str, shape: list[int]
) -> None:
    """In a store without digests: multiply-adds, and budgets of them, follow from these sizes."""
    ts.calibrate(model, [images(4)]).save(tmp_path / "stats")
    _edit_layer(tmp_path / "stats", name, sealed=False, input_shape=shape)
    stats = ts.Calibration.load(tmp_path / "stats")
    with pytest.raises(StoreError, match=rf"layer '{name}' .* cannot have met an input of shape"):
        ts.plan(model, stats, budget=ts.Params(0.7))


class TestWeights:
    """Statistics say what reaches a layer with the weights they were gathered with, and with no others."""

    @pytest.fixture
    def other(self, model) -> nn.Module:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[0].weight[0, 0, 0, 0] += 1e-3
        return other

    def test_others_are_refused_unless_they_are_welcome(self, model, other):
        stats = ts.calibrate(model, [images(2)])
        assert stats.weights == weights_digest(model)
        stats.check_model(model)
        with pytest.raises(StoreError, match=r"other weights.*calibrate again.*check=False"):
            stats.check_model(other)
        stats.check_model(other, weights=False)

    def test_the_architecture_is_compared_in_any_case(self, model):
        stats = ts.calibrate(model, [images(2)])
        with pytest.raises(StoreError, match="another architecture"):
            stats.check_model(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), weights=False)

    def test_mode_and_memory_format_do_not_matter(self, model):
        stats = ts.calibrate(model, [images(2)])
        stats.check_model(copy.deepcopy(model).train().to(memory_format=torch.channels_last))

    def test_a_store_carries_them(self, model, other, tmp_path):
        ts.calibrate(model, [images(2)]).save(tmp_path / "stats")
        loaded = Calibration.load(tmp_path / "stats")
        loaded.check_model(model)
        with pytest.raises(StoreError, match="other weights"):
            loaded.check_model(other)

    def test_an_older_store_knows_none_and_passes(self, model, other, tmp_path):
        ts.calibrate(model, [images(2)]).save(tmp_path / "stats")
        file = tmp_path / "stats" / "manifest.json"
        manifest = json.loads(file.read_text())
        del manifest["weights"], manifest["digest"]
        for entry in manifest["layers"].values():
            del entry["digests"]
        file.write_text(json.dumps(manifest))
        loaded = Calibration.load(tmp_path / "stats")
        assert loaded.weights is None
        loaded.check_model(other)

    def test_two_sets_are_not_merged(self, model, other):
        first, second = (ts.calibrate(each, [images(2)]) for each in (model, other))
        with pytest.raises(StoreError, match="two sets of weights"):
            first.merge(second)
        assert first.merge(first).weights == first.weights
        # Where one side does not know its weights, those of the other are taken.
        unknown = Calibration(dict(second), fingerprint=second.fingerprint)
        assert first.merge(unknown).weights == unknown.merge(first).weights == first.weights

    def test_an_unfinished_run_goes_on_with_the_same(self, model, other, tmp_path):
        def interrupt(state: CalibrationProgress) -> None:
            if state.done == 2:
                raise KeyboardInterrupt

        settings: dict[str, Any] = {"checkpoint": tmp_path / "run", "checkpoint_every": 1}
        data = [images(2, seed) for seed in range(4)]
        with pytest.raises(KeyboardInterrupt):
            ts.calibrate(model, data, progress=interrupt, **settings)
        with pytest.raises(StoreError, match="weights"):
            ts.calibrate(other, data, resume=True, **settings)
        resumed = ts.calibrate(model, data, resume=True, **settings)
        assert resumed.weights == weights_digest(model)
        resumed.check_model(model)


class TestDistance:
    def test_grows_with_the_difference(self, model):
        stats = {
            c: ts.calibrate(model, [images(20, 0) * c + (1 - c) * images(20, 1).mean(1, True)]) for c in (1, 0.9, 0)
        }
        same, near, far = (distance(stats[1], stats[c]).total for c in (1, 0.9, 0))
        assert same == 0
        assert 0 < near < far < 1

    def test_is_symmetric_and_free_of_scale(self, generator):
        u, v = torch.randn(2, 50, 6, generator=generator)
        v = v * torch.tensor([1, 2, 3, 1, 1, 0.1]) + 1
        first, second = (Calibration({"a": LayerStats.from_rows(x)}) for x in (u, v))
        scaled = [Calibration({"a": LayerStats.from_rows(100 * x)}) for x in (u, v)]
        found = distance(first, second).total
        assert distance(second, first).total == pytest.approx(found)
        assert distance(*scaled).total == pytest.approx(found)

    def test_rows_and_covariances_agree(self, generator):
        u, v = torch.randn(2, 5, 9, generator=generator)
        rows = [Calibration({"a": LayerStats(mean=x.mean(0), rows=x, count=5)}) for x in (u, v)]
        sums = [Calibration({"a": LayerStats.from_rows(x)}) for x in (u, v)]
        assert distance(*rows).total == pytest.approx(distance(*sums).total, rel=1e-5)

    def test_orthogonal_spreads_have_nothing_in_common(self):
        first = LayerStats.from_rows(torch.tensor([[1.0, 0], [-1, 0]]))
        second = LayerStats.from_rows(torch.tensor([[0.0, 1], [0, -1]]))
        found = distance(Calibration({"a": first}), Calibration({"a": second}))
        assert found.layers["a"].covariance == 1
        assert found.layers["a"].mean == 0

    def test_nothing_shared(self):
        stats = LayerStats.from_rows(torch.eye(2))
        with pytest.raises(InputError, match="share no layer"):
            distance(Calibration({"a": stats}), Calibration({"b": stats}))

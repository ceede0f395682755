"""The common parts of the comparison with other tools: jobs, training, counting, judging, the run and the page."""

from __future__ import annotations

import copy
import json
import subprocess
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from peers import __main__ as command
from peers import page
from peers.alds_rule import Choice, Spectrum, allocate, factors
from peers.catalogue import PEERS, Peer
from peers.comparison import Difference, ours_beside
from peers.counting import macs_of
from peers.environments import NoEnvironment, make, python_of, reason, requirements
from peers.factorised import conv, layers_of, linear
from peers.job import TRACKS, Job
from peers.judge import Judge, to_onnx
from peers.pictures import picture
from peers.records import Records, tracks_of
from peers.run import Bench
from peers.search import n_params, nearest_above
from peers.statistics import with_better_statistics
from peers.subjects import SUBJECTS, Subject
from peers.training import SETTINGS, mean_loss, train_, trained
from peers.worker import Assignment, do
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tensigma as ts
from tensigma.experiments import pack_hits


class Net(nn.Module):
    """A little of everything that is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 8, (3, 1), stride=2, groups=2, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.grouped(x)).mean((2, 3)))


@pytest.fixture
def material(tmp_path: Path) -> Path:
    """Images of a tiny network's folder."""
    place = tmp_path / "material" / "tiny"
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("calibration", 8), ("training", 20), ("test", 12)):
        np.save(place / f"{part}.npy", torch.randn(count, 3, 8, 8, generator=generator).numpy())
        np.save(place / f"{part}-labels.npy", torch.randint(0, 4, (count,), generator=generator).numpy())
    return place


def job_in(material: Path, out: Path, **changes: Any) -> Job:
    out.mkdir(exist_ok=True)
    job = Job(
        method="fake",
        network="unused",
        weights="unused",
        rate=2.0,
        tracks=TRACKS,
        material=str(material),
        out=str(out),
        batch=8,
    )
    return replace(job, **changes)


def test_jobs_are_read_as_they_were_written(tmp_path: Path) -> None:
    job = job_in(tmp_path, tmp_path / "out", tracks=("closed", "labels"))
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job


def test_every_tool_has_a_file_and_every_environment_its_pins() -> None:
    tools = Path(command.__file__).parent / "tools"
    for peer in PEERS.values():
        assert (tools / f"{peer.tool}.py").exists()
        if peer.environment is not None:
            lines = requirements(peer.environment).read_text(encoding="utf-8").splitlines()
            assert "torch==2.13.0" in lines
            assert all("==" in line for line in lines if line and not line.startswith("#"))


def test_an_environment_that_cannot_be_made_says_why_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def make(place: Path, wanted: Path) -> str:
        attempts.append(wanted.name)
        place.mkdir()
        return "no wheel for this system"

    monkeypatch.setattr("peers.environments.make", make)
    for _ in range(2):
        with pytest.raises(NoEnvironment, match="no wheel for this system"):
            python_of("aimet", tmp_path)
    assert attempts == ["requirements-aimet.txt"]
    assert reason("Collecting x\nERROR: no such version\nhint: none") == "ERROR: no such version"
    assert reason("Traceback\nValueError: too small\n") == "ValueError: too small"


@pytest.mark.slow
def test_an_environment_shares_what_is_installed_here(tmp_path: Path) -> None:
    pytest.importorskip("pip")
    wanted = tmp_path / "requirements.txt"
    wanted.write_text(f"numpy=={np.__version__}\n")
    assert make(tmp_path / "made", wanted) is None
    code = "import numpy, sys; print(numpy.__file__, sys.prefix)"
    done = subprocess.run(
        [tmp_path / "made" / "bin" / "python", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [np.__file__, str(tmp_path / "made")]


def test_a_search_ends_at_the_nearest_setting_above() -> None:
    sizes = [round(1000 * (1 - step / 100)) for step in range(100)]
    found = nearest_above(lambda share: sizes[int(100 * share)], 333.0, low=0.0, high=0.99, steps=20)
    assert sizes[int(100 * found)] == 340
    # Past 80 % the model grows again: the first crossing counts.
    found = nearest_above(
        lambda share: sizes[int(100 * share)] if share < 0.8 else 900, 333.0, low=0, high=0.99, scan=9
    )
    assert sizes[int(100 * found)] == 340
    with pytest.raises(ValueError, match="the smallest setting leaves 500 parameters"):
        nearest_above(lambda share: 500, 100.0, low=0.0, high=1.0)


@pytest.mark.parametrize("labels", [False, True])
def test_training_takes_equal_steps_and_lowers_its_loss(labels: bool, material: Path) -> None:
    torch.manual_seed(1)
    original, model = Net().eval(), Net()
    images = torch.from_numpy(np.load(material / "training.npy"))
    classes = torch.from_numpy(np.load(material / "training-labels.npy"))

    shown = images, classes if labels else None
    before, answers = mean_loss(model, original, *shown), original(images)
    with torch.no_grad():
        if labels:
            expected = nn.functional.cross_entropy(model(images), classes)
        else:
            expected = nn.functional.kl_div(model(images).log_softmax(1), answers.softmax(1), reduction="batchmean")
    assert before == pytest.approx(float(expected), rel=1e-5)
    steps = {train_(model, original, *shown, batch=8, learning_rate=0.02, seed=seed) for seed in range(8)}
    assert steps == {2}
    assert mean_loss(model, original, *shown) < before
    assert not model.training
    assert torch.equal(original(images), answers)


def test_training_may_keep_the_statistics_of_batchnorm() -> None:
    torch.manual_seed(0)
    original, images = Net().eval(), torch.randn(8, 3, 8, 8)
    for frozen in (True, False):
        model = copy.deepcopy(original)
        train_(model, original, images, None, batch=8, learning_rate=1e-3, seed=0, frozen=frozen)
        name = "norm.running_mean"
        assert torch.equal(model.get_buffer(name), original.get_buffer(name)) is frozen


def test_a_model_is_trained_where_images_held_out_gain_by_it(material: Path) -> None:
    torch.manual_seed(1)
    original, far = Net().eval(), Net().eval()
    images = torch.from_numpy(np.load(material / "training.npy")).repeat(8, 1, 1, 1)
    result, facts = trained(far, original, images, None, batch=4, seed=0)
    assert facts["trained"]
    assert facts["training_images"] == 128
    assert facts["training_steps"] == 32
    assert (facts["learning_rate"], facts["frozen_statistics"]) in SETTINGS
    held_out = images[128:]
    assert mean_loss(result, original, held_out, None) < mean_loss(far, original, held_out, None)


def test_a_model_stays_as_it_is_where_training_leads_away(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lead_away(model: nn.Module, *args: Any, **options: Any) -> None:
        with torch.no_grad():
            model.get_parameter("head.bias").add_(torch.tensor([9.0, 0.0, 0.0, 0.0]))

    monkeypatch.setattr("peers.training.train_", lead_away)
    model, images = Net().eval(), torch.from_numpy(np.load(material / "training.npy"))
    labels = torch.ones(len(images), dtype=torch.long)
    result, facts = trained(model, model, images, labels, batch=4, seed=0)
    assert result is model
    assert not facts["trained"]
    assert facts["held_out_loss"]["after"] > facts["held_out_loss"]["before"]


def test_a_model_for_another_rate_is_not_compared(tmp_path: Path) -> None:
    records = Records(tmp_path / "results.json")
    records.add(record("tensigma", 2.0, [True] * 20))
    for share, compared in ((1.0, True), (0.91, True), (0.89, False)):
        other = record("aimet-weight", 2.0, [False] * 20, params=500 * share)
        assert (ours_beside(other, records) is not None) is compared


def test_statistics_are_taken_anew_where_that_helps() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    original = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    images = torch.randn(64, 3, 8, 8) + 2 * torch.randn(64, 3, 1, 1)
    with torch.no_grad():
        original(images)  # statistics that fit the images somewhat
    small = copy.deepcopy(original.eval())
    small.get_buffer("1.running_mean").add_(torch.tensor([9.0, 0.0, 0.0, 0.0]))
    better, anew = with_better_statistics(small, original, images)
    assert anew
    assert not better.training
    expected = original[0](images[:32]).mean((0, 2, 3))
    torch.testing.assert_close(better.get_buffer("1.running_mean"), expected)
    assert [module.momentum for module in better.modules() if isinstance(module, nn.BatchNorm2d)] == [norm.momentum]
    # Nothing beats the original's own, and what has no BatchNorm stays as it is.
    assert with_better_statistics(original, original, images) == (original, False)
    plain = nn.Flatten()
    assert with_better_statistics(plain, plain, images) == (plain, False)


def halved(assignment: Assignment) -> nn.Module:
    """A tool that needs nothing: the largest weights stay."""
    with torch.no_grad():
        assignment.model.get_parameter("head.weight").mul_(0.5)
    assignment.notes["setting"] = assignment.job.rate
    return assignment.model


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    torch.manual_seed(0)
    model = Net().eval()
    monkeypatch.setattr("peers.worker.load_model", lambda network, weights: copy.deepcopy(model))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return model


@pytest.mark.slow
def test_a_tool_leaves_a_model_and_its_facts_for_every_track(net: nn.Module, material: Path, tmp_path: Path) -> None:
    job = job_in(material, tmp_path / "out")
    do(job, halved)
    answers, changed = [], []
    for track in TRACKS:
        artefact = job.artefact(track)
        assert artefact is not None
        images = torch.from_numpy(np.load(material / "test.npy")[:1])
        answers.append(torch.export.load(artefact).module()(images))
        facts = json.loads(job.facts_file(track).read_text())
        assert facts["params"] == n_params(net)
        assert facts["notes"] == {"setting": 2.0}
        assert facts["training_steps"] == (0 if track == "closed" else 2)
        changed.append(facts.get("trained", False))
        assert facts["peak_bytes"] > 1e6
    # Both trainings start from the closed model, and neither changes it.
    torch.testing.assert_close(answers[0], halved_answers(net, material))
    assert not changed[0]
    for answer, trained_further in zip(answers, changed, strict=True):
        assert torch.allclose(answer, answers[0]) is not trained_further


def halved_answers(net: nn.Module, material: Path) -> Tensor:
    model = copy.deepcopy(net)
    with torch.no_grad():
        model.get_parameter("head.weight").mul_(0.5)
        return model(torch.from_numpy(np.load(material / "test.npy")[:1]))


@pytest.mark.slow
def test_multiply_adds_and_answers_are_those_of_the_model(net: nn.Module, material: Path, tmp_path: Path) -> None:
    images = torch.from_numpy(np.load(material / "test.npy"))
    program = tmp_path / "model.pt2"
    with torch.no_grad():
        torch.export.save(torch.export.export(net, (images[:1],)), program)
    to_onnx(program).replace(material / "original.onnx")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(images[:1])
    assert macs_of(material / "original.onnx") == counter.get_total_flops() // 2
    judge = Judge.of(material)
    figures = judge.figures(material / "original.onnx")
    classes = net(images).argmax(1)
    labels = torch.from_numpy(np.load(material / "test-labels.npy"))
    assert figures["top1"] == pytest.approx(100 * float((classes == labels).float().mean()), abs=1e-3)
    assert (figures["agreement"], figures["time_ratio"]) == (100.0, 1.0)
    assert figures["hits"] == pack_hits((classes == labels).tolist())
    # Another model: agreement is the share of equal answers.
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.get_parameter("head.bias").add_(torch.tensor([3.0, 0.0, 0.0, 0.0]))
        torch.export.save(torch.export.export(other, (images[:1],)), tmp_path / "other.pt2")
    found = judge.figures(tmp_path / "other.pt2")
    same = float((other(images).argmax(1) == classes).float().mean())
    assert found["agreement"] == pytest.approx(100 * same, abs=1e-3)
    assert found["macs"] == figures["macs"]


@pytest.mark.slow
def test_multiply_adds_of_a_file_for_any_batch_are_those_of_one_image(
    net: nn.Module, material: Path, tmp_path: Path
) -> None:
    images = torch.from_numpy(np.load(material / "test.npy"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(images[:1])
    ts.export(net, tmp_path / "any.onnx", images[:3])
    ts.quantize(net, tmp_path / "int8.onnx", [images[:8]], latency=False)
    for name in ("any.onnx", "int8.onnx"):
        assert macs_of(tmp_path / name) == counter.get_total_flops() // 2
    graph = onnx.load(tmp_path / "any.onnx")
    graph.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    onnx.save(graph, tmp_path / "unknown.onnx")
    with pytest.raises(ValueError, match="is not known"):
        macs_of(tmp_path / "unknown.onnx")


FAKE = Peer(name="tensigma", title="Fake", tool="fake", method="fake", environment=None)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_failures_are_kept(
    net: nn.Module, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def process(self: Bench, peer: Peer, job: Job) -> str | None:
        """In this process: closed and labels work, label-free ends with an error, and rate 3 leaves nothing."""
        done.append((job.rate, job.tracks))
        if job.rate == 3.0:
            return "ValueError: the smallest setting leaves too many parameters"
        do(replace(job, tracks=tuple(track for track in job.tracks if track != "label-free")), halved)
        return "RuntimeError: out of luck"

    monkeypatch.setattr(Bench, "_do", process)
    monkeypatch.setattr(Subject, "prepare", lambda self, data, folder: material)
    monkeypatch.setattr(Subject, "load", lambda self, data: net)
    subject = replace(SUBJECTS["resnet20"], name="tiny")
    records = Records(tmp_path / "results.json")
    bench = Bench(data=tmp_path, cache=tmp_path, environments=tmp_path, records=records, say=lambda line: None)
    bench.run(subject, [FAKE], rates=[2.0], tracks=["closed"])
    bench.run(subject, [FAKE], rates=[2.0, 3.0], tracks=TRACKS)
    # What another run knows is in the file; nothing is done twice.
    again = Bench(
        data=tmp_path,
        cache=tmp_path,
        environments=tmp_path,
        records=Records(tmp_path / "results.json"),
        say=lambda line: None,
    )
    again.run(subject, [FAKE], rates=[2.0, 3.0], tracks=TRACKS)
    assert done == [(2.0, ("closed",)), (2.0, ("label-free", "labels")), (3.0, TRACKS)]
    closed = again.records.find("tensigma", "tiny", 2.0, "closed")
    original = again.records.find("original", "tiny", 1.0, "closed")
    assert closed is not None
    assert original is not None
    assert (closed["params"], closed["macs"]) == (n_params(net), original["macs"])
    failures = {(record["rate"], record["track"]): record["failure"] for record in again.records if "failure" in record}
    assert failures[2.0, "label-free"] == "RuntimeError: out of luck"
    assert set(failures) == {(2.0, "label-free"), *((3.0, track) for track in TRACKS)}
    again.records.forget_failures()
    assert len(list(Records(tmp_path / "results.json"))) == 3


def record(peer: str, rate: float, hits: list[bool], **more: Any) -> dict[str, Any]:
    return {
        "peer": peer,
        "model": "resnet20",
        "rate": rate,
        "track": "closed",
        "params": round(1000 / rate),
        "macs": 5000,
        "bytes": 4000,
        "top1": 100 * float(np.mean(hits)),
        "agreement": 50.0,
        "time_ratio": 0.5,
        "cpu_seconds": 3.0,
        "peak_bytes": 2e9,
        "hits": pack_hits(hits),
    } | more


@pytest.mark.slow
def test_the_page_says_who_is_behind_and_what_has_not_run(tmp_path: Path) -> None:
    good, fair, bad = [True] * 100, [True] * 98 + [False] * 2, [True] * 50 + [False] * 50
    records = Records(tmp_path / "results.json")
    records.add(record("original", 1.0, good))
    for rate, ours in ((2.0, good), (3.0, bad)):
        records.add(record("tensigma", rate, ours))
        records.add(record("balf", rate, bad if rate == 2 else good))
        records.add(record("alds", rate, fair if rate == 2 else bad))
    records.add({"peer": "vbmf", "model": "resnet20", "rate": 2.0, "track": "closed", "failure": "a | b"})
    verdicts = {
        (entry["peer"], entry["rate"]): difference.verdict
        for entry in records
        if (difference := ours_beside(entry, records)) is not None
    }
    expected = {
        ("balf", 2.0): "ahead",
        ("alds", 2.0): "level",
        ("balf", 3.0): "behind",
        ("alds", 3.0): "level",
    }
    assert verdicts == expected
    text = page.page(records)
    cells = sum(len(peer.rates) * len(tracks_of(peer)) for peer in PEERS.values()) * len(SUBJECTS)
    assert f"So far 7 of {cells} cells have run, 1 of them without a model to judge." in text
    assert "ahead in 1, level in 2, behind in 1" in text
    assert "| 3 | BALF's rule, rebuilt | 0.33 | 1.00 | 1.00 | 0.50 | 100.0 | 50.0 | 3 | 2.0 GB | -50.0 (" in text
    assert "a \\| b" in text
    assert "Smaller and slower" not in text
    slow = {**record("tensigma", 5.0, fair), "time_ratio": 1.25}
    assert "1 of 1 models of Tensigma's: resnet20 at 5 (1.25)" in page.slower([slow])[0]
    # Every row of a table has the same number of cells.
    for table in page.table([entry for entry in records if entry["peer"] != "original"], records), page.quoted.table():
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1
    cell = {"network": "resnet56", "saving": "91 % fewer parameters", "before": 93.0, "closed": 80.0, "refined": 85.0}
    lines = page.quoted.table([{**cell, "labels": 10_000, "finetuned": 86.0}]).splitlines()
    place = next(index for index, line in enumerate(lines) if "Tensigma" in line)
    assert "80.00 in closed form, 85.00 refined" in lines[place]
    assert "NORTON (quoted) | 91 %" in lines[place + 1]
    page.write(records, tmp_path / "docs")
    assert (tmp_path / "docs" / picture("resnet20", "closed")).read_bytes().startswith(b"<?xml")
    assert (tmp_path / "docs" / "peers.md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("interval", "verdict"), [((1, 0.1, 2), "ahead"), ((1, -0.1, 2), "level"), ((-1, -2, -0.1), "behind")]
)
def test_verdicts(interval: tuple[float, float, float], verdict: str) -> None:
    assert Difference(*interval).verdict == verdict


def test_full_rank_in_groups_changes_nothing(seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Conv2d(6, 5, 3, stride=2, padding=1).double()
    x = torch.randn(2, 6, 7, 7).double()
    for groups in (1, 2, 3):
        inner, outer = factors(layer.weight.detach(), Choice(groups, 99))
        chain = nn.Sequential(
            conv(inner, layer, axes="hw", groups=groups), conv(outer[..., None, None], layer, bias=layer.bias)
        )
        torch.testing.assert_close(chain(x), layer(x))
    plain = linear(torch.eye(3), torch.ones(3))
    torch.testing.assert_close(plain(torch.zeros(1, 3)), torch.ones(1, 3))


def test_bounds_of_alds_hold(seed: int) -> None:
    """The relative error in the operator norm is never above the bound."""
    torch.manual_seed(seed)
    layer = nn.Conv2d(6, 8, 3)
    spectrum = Spectrum(layer)
    whole = layer.weight.detach().flatten(1)
    for groups in spectrum.groups:
        for rank in (1, 2, 4):
            inner, outer = factors(layer.weight.detach(), Choice(groups, rank))
            blocks = [
                a @ b.flatten(1) for a, b in zip(outer.chunk(groups, dim=1), inner.chunk(groups, dim=0), strict=True)
            ]
            approximation = torch.cat([block.unflatten(1, (-1, 9)) for block in blocks], dim=1).flatten(1)
            error = torch.linalg.matrix_norm(whole - approximation, 2) / torch.linalg.matrix_norm(whole, 2)
            assert float(error) <= float(spectrum.bounds[groups][rank - 1]) * (1 + 1e-5)


def test_alds_keeps_its_budget_and_no_layer_could_do_better(seed: int) -> None:
    """At one group each, brute force over all ranks finds no lower largest bound."""
    torch.manual_seed(seed)
    spectra = {name: Spectrum(nn.Conv2d(5, 7, 3)) for name in "ab"}
    for spectrum in spectra.values():
        spectrum.groups = (1,)
    limit = 0.6 * sum(spectrum.dense for spectrum in spectra.values())
    chosen = allocate(spectra, limit)

    def bound(spectrum: Spectrum, choice: Choice | None) -> float:
        return 0.0 if choice is None else float(spectrum.bounds[1][choice.rank - 1])

    assert sum(spectra[name].cost(choice) for name, choice in chosen.items()) <= limit
    reached = max(bound(spectra[name], choice) for name, choice in chosen.items())
    options = [None, *(Choice(1, rank) for rank in range(1, 8))]
    for first in options:
        for second in options:
            if spectra["a"].cost(first) + spectra["b"].cost(second) <= limit:
                assert reached <= max(bound(spectra["a"], first), bound(spectra["b"], second)) + 1e-6
    with pytest.raises(ValueError, match="rank 1 everywhere"):
        allocate(spectra, 10.0)


class Wide(nn.Module):
    """Layers of every kind that tools replace, with strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 24, 3, padding=1)
        self.strided = nn.Conv2d(24, 32, 3, stride=2, padding=1, bias=False)
        self.pointwise = nn.Conv2d(32, 48, 1, stride=2)
        self.head = nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.strided(torch.relu(self.first(x))))
        return self.head(torch.relu(self.pointwise(x)).mean((2, 3)))


#: Tools that run in this environment.
HERE = [("alds", "alds"), ("tensorly", "tucker"), ("tensorly", "cp"), ("tensigma", "balf")]


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "method"), HERE)
def test_tools_come_near_their_rate(tool: str, method: str, material: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorly")
    compress = import_module(f"peers.tools.{tool}").compress
    images = torch.from_numpy(np.load(material / "calibration.npy"))
    reached = []
    for rate in (1.01, 1.5, 2.0):
        model = Wide().eval()
        job = job_in(material, tmp_path / "out", method=method, rate=rate)
        small = compress(Assignment(job=job, model=copy.deepcopy(model), images=images, notes={}))
        assert small(images).shape == model(images).shape
        reached.append(n_params(model) / n_params(small))
        # Those that keep a budget end above the rate, those whose setting is searched below it.
        assert 0.9 * rate <= reached[-1] <= 1.15 * rate
    assert reached == sorted(reached)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tucker", "cp"])
def test_factors_of_tensorly_become_the_layer(method: str) -> None:
    """At full rank the layers compute what the original does; CP is given a kernel of low rank."""
    pytest.importorskip("tensorly")
    from peers.tools import tensorly as tool

    tool.tl.set_backend("pytorch")
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 5, 3, stride=(2, 1), padding=1)
    x = torch.randn(2, 4, 8, 8)
    ranks: tuple[int, ...] = (5, 4)
    if method == "cp":
        modes = [torch.randn(size, 1) for size in layer.weight.shape]
        layer.weight.data = torch.einsum("tr,sr,hr,wr->tshw", *modes)
        ranks = (1,)
    with torch.no_grad():
        torch.testing.assert_close(tool.factorised(layer, method, ranks, 0)(x), layer(x), rtol=1e-3, atol=1e-3)
        for matrix in (nn.Linear(6, 4), nn.Conv2d(6, 4, 1, stride=2)):
            inputs = torch.randn(2, 6) if isinstance(matrix, nn.Linear) else torch.randn(2, 6, 5, 5)
            chain = tool.factorised(matrix, method, (4,), 0)
            torch.testing.assert_close(chain(inputs), matrix(inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_int8_is_judged_like_any_other_file(net: nn.Module, material: Path, tmp_path: Path) -> None:
    from peers.tools import onnxruntime as tool

    images = torch.from_numpy(np.load(material / "calibration.npy"))
    with torch.no_grad():
        torch.export.save(torch.export.export(net, (images[:1],)), tmp_path / "model.pt2")
    to_onnx(tmp_path / "model.pt2").replace(material / "original.onnx")
    job = job_in(material, tmp_path / "out", rate=1.0, tracks=("closed",))
    do(job, tool.compress)
    artefact = job.artefact("closed")
    assert artefact is not None
    assert artefact.suffix == ".onnx"
    assert json.loads(job.facts_file("closed").read_text())["params"] == n_params(net)
    figures = Judge.of(material).figures(artefact)
    # Eight bits change no multiply-add.
    assert figures["macs"] == macs_of(material / "original.onnx")


def test_layers_to_replace_leave_out_the_first_and_grouped_ones() -> None:
    assert list(layers_of(Net())) == ["head"]


def test_the_page_is_that_of_its_results() -> None:
    records = Records(command.RESULTS)
    text = (command.ROOT / "docs" / "peers.md").read_text(encoding="utf-8")
    assert text == page.page(records, command.runtimes_table(), command.finetuned.cells()), (
        "run: python -m peers --page"
    )
    for line in text.splitlines():
        if line.startswith("!["):
            assert (command.ROOT / "docs" / line.partition("(")[2].rstrip(")")).exists()

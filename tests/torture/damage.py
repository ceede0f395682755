"""Every file that Tensigma reads, damaged in every way: refused by our own error, or read as it was."""

from __future__ import annotations

import json
import random
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import tensigma as ts
from support_grids import round_
from tensigma.cli.report import read_report
from tensigma.errors import TensigmaError
from tensigma.finetuning.history import Epoch, FineTuning, RateHistory
from tensigma.finetuning.unfinished import Unfinished
from tensigma.layers import HALF, Geometry
from tensigma.running.timetable import TimeTable
from tensigma.running.timing import Eager
from tensigma.solving import Solutions, Treatment, method_of, norm_of
from tensigma.zoo import load_data
from tensigma.zoo.weights import read_weights
from torture.tally import Tally

#: What a reader returns, in a form that can be compared.
Value = Any


@dataclass(frozen=True)
class Parser:
    """Something that reads files: how good files are written, and how they are read."""

    name: str
    write: Callable[[Path], None]
    read: Callable[[Path], Value]
    #: Whether files are meant to be edited, or come from elsewhere without a digest, so that other content is no fault.
    editable: bool = False
    #: Whether a damaged file is replaced by computing again, instead of being refused.
    heals: bool = False


def network() -> nn.Module:
    """A network that is quick to build and to load."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, groups=2),
            nn.Flatten(),
            nn.Linear(8 * 4 * 4, 5),
        ).eval()


def images(n: int = 12) -> torch.Tensor:
    return torch.randn(n, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def _plan() -> ts.Plan:
    return ts.plan(network(), ranks=ts.Ranks({"*": 2}), norm="frobenius")


def _tensors(tensors: Any) -> Value:
    return {key: (str(tensor.dtype), tensor.tolist()) for key, tensor in tensors.items()}


def _write_archive(folder: Path) -> None:
    ts.save(ts.compress(network(), _plan())[0], folder / "small")


def _read_archive(folder: Path) -> Value:
    return _tensors(ts.load(folder / "small", network()).state_dict())


def _without_digests(folder: Path) -> None:
    """The manifest as version 0.1 wrote it: nothing tells damage there but the values themselves."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    for entry in (manifest, *manifest["layers"].values()):
        for key in ("digest", "digests"):
            entry.pop(key, None)
    file.write_text(json.dumps(manifest))


def _write_old_archive(folder: Path) -> None:
    _write_archive(folder)
    _without_digests(folder / "small")


def _write_packed_archive(folder: Path) -> None:
    small = ts.compress(network(), _plan())[0]
    weights = [layer for layer in small.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    for index, layer in enumerate(weights):
        round_(layer, (3, 4, 8, HALF)[index % 4])
    ts.save(small, folder / "small")


def _write_stats(folder: Path) -> None:
    ts.calibrate(network(), [images()], data_name="noise").save(folder / "stats")


def _read_stats(folder: Path) -> Value:
    stats = ts.Calibration.load(folder / "stats")
    layers = {
        name: (layer._fields(), _tensors(layer._tensors()), layer.count, layer.samples) for name, layer in stats.items()
    }
    return (layers, stats.samples, stats.data, stats.fingerprint, stats.weights, stats.unreached)


def _write_old_stats(folder: Path) -> None:
    _write_stats(folder)
    _without_digests(folder / "stats")


def _read_and_plan(folder: Path) -> Value:
    """Statistics that are read and used, since without digests damaged ones may be read."""
    value = _read_stats(folder)
    stats = ts.Calibration.load(folder / "stats")
    plan = ts.plan(network(), stats, budget=ts.Params(0.8), method="svd")
    sizes = (plan.before.params, plan.after.params, plan.before.macs, plan.after.macs)
    if min(sizes) < 0:
        raise AssertionError(f"negative totals {sizes}")
    ts.compress(network(), plan, stats)
    return value, sizes


def _halting(state: Any) -> None:
    if state.done >= 2:
        raise KeyboardInterrupt


def _write_checkpoint(folder: Path) -> None:
    try:
        ts.calibrate(
            network(), images().split(4), checkpoint=folder / "unfinished", checkpoint_every=1, progress=_halting
        )
    except KeyboardInterrupt:
        return
    raise AssertionError("the calibration was not interrupted")


def _read_checkpoint(folder: Path) -> Value:
    stats = ts.calibrate(network(), images().split(4), checkpoint=folder / "unfinished", resume=True)
    return {name: (layer.count, _tensors(layer._tensors())) for name, layer in stats.items()}


def _write_plan(folder: Path) -> None:
    plan = ts.plan(network(), ts.calibrate(network(), [images()]), budget=ts.Params(0.8), data=[images()])
    plan.save(folder / "plan.json")


def _read_plan(folder: Path) -> Value:
    plan = ts.Plan.load(folder / "plan.json")
    # All that anybody does with a plan before it is carried out.
    str(plan), repr(plan), plan.rate
    weighing, drop = plan.notes.get("weighing"), plan.notes.get("drop")
    if weighing is not None:
        ts.planning.weighing_in_words(weighing), weighing.get("data")
    if drop is not None:
        drop.get("data")
    sizes = (plan.before.params, plan.after.params, plan.before.macs, plan.after.macs)
    if min(sizes) < 0:
        raise AssertionError(f"negative totals {sizes}")
    try:
        plan.check_model(network())
    except TensigmaError:
        pass
    return json.dumps(plan.to_json())


_START = Epoch(epoch=0, loss=None, validation_loss=0.7, score=0.5, samples=0, seconds=0.0)


def _write_report(folder: Path) -> None:
    stats = ts.calibrate(network(), [images()])
    plan = ts.plan(network(), stats, budget=ts.Params(0.7), data=[images()])
    small, report = ts.compress(network(), plan, stats)
    evaluation = ts.evaluate(small, [images()], original=network(), latency=True, rounds=1, confidence=0.95)
    first = Epoch(epoch=1, loss=0.5, validation_loss=0.6, score=0.6, samples=10, seconds=1.0)
    tuning = FineTuning(
        measure="top1",
        optimizer="adam",
        start=_START,
        rates=(RateHistory(learning_rate=0.1, epochs=(first,), ended="all epochs"),),
        learning_rate=0.1,
        epoch=1,
        validation_samples=10,
        seconds=1.0,
    )
    noted = report.with_notes(
        evaluation=evaluation.to_json(), model="mine", comparison=[], finetuning=tuning.to_json(), samples=12
    )
    (folder / "report.json").write_text(json.dumps(noted.to_json()))


def _read_report(folder: Path) -> Value:
    report, evaluation, runs = read_report(folder / "report.json")
    str(report), str(evaluation)
    ts.report.render_report(report, evaluation=evaluation, comparison=runs)
    return json.dumps([report.to_json(), evaluation and evaluation.to_json()])


def _write_sealed_report(folder: Path) -> None:
    _write_report(folder)
    data = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(ts.files.seal(data)))


def _treatment(layer: nn.Module) -> Treatment:
    method = method_of("tucker2")
    return Treatment(
        geometry=Geometry.of(layer), method=method, norm=norm_of("frobenius"), format=method.format((3, 2))
    )


def _write_solution(folder: Path) -> None:
    layer = network()[0]  # type: ignore[index]
    Solutions(folder).get_or_solve(_treatment(layer), layer, None)


def _read_solution(folder: Path) -> Value:
    layer = network()[0]  # type: ignore[index]
    solution, _ = Solutions(folder).get_or_solve(_treatment(layer), layer, None)
    return (_tensors(solution.tensors()), solution.error, solution.frobenius_error, solution.converged)


_FACTS = {"epochs": 3, "rates": [0.1, 0.01]}


def _write_tuning(folder: Path) -> None:
    first = Epoch(epoch=1, loss=0.5, validation_loss=0.6, score=0.6, samples=10, seconds=1.0)
    Unfinished(folder / "tuning", _FACTS, _START).save(0, network().state_dict(), [first])


def _read_tuning(folder: Path) -> Value:
    state = Unfinished(folder / "tuning", _FACTS, _START).load(0)
    if state is None:
        return None
    return (_tensors(state[0]), [vars(epoch) for epoch in state[1]])


def _write_times(folder: Path) -> None:
    table = TimeTable(Eager(), folder)
    table._times = {"a": 1.0, "b": 2.0}
    table._write()


def _read_times(folder: Path) -> Value:
    # Without a file that can be read, shapes are timed again.
    return TimeTable(Eager(), folder)._read() or {"a": 1.0, "b": 2.0}


def _write_safetensors(folder: Path) -> None:
    save_file(network().state_dict(), folder / "weights.safetensors")


def _write_pth(folder: Path) -> None:
    torch.save(network().state_dict(), folder / "weights.pth")


def _read_weights(folder: Path) -> Value:
    (file,) = folder.glob("weights.*")
    state = read_weights(file)
    ts.zoo.weights.load_weights_(network(), file)
    return _tensors(state)


def _write_npz(folder: Path) -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 255, (6, 6, 6, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=values, labels=np.arange(6) % 5)


def _read_npz(folder: Path) -> Value:
    return [
        [part.tolist() for part in batch if part is not None] for batch in load_data(f"npz:{folder / 'images.npz'}")
    ]


def _write_photo(folder: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    for kind in ("png", "jpeg"):
        (folder / "photos" / kind).mkdir(parents=True)
        Image.fromarray(values).save(folder / "photos" / kind / f"photo.{kind}")


def _read_photo(folder: Path) -> Value:
    return [batch[0].sum().item() for batch in load_data(f"imagefolder:{folder / 'photos'}?size=16")]


PARSERS = (
    Parser("archive", _write_archive, _read_archive),
    Parser("archive with packed weights", _write_packed_archive, _read_archive),
    Parser("archive without digests", _write_old_archive, _read_archive, editable=True),
    Parser("statistics", _write_stats, _read_stats),
    Parser("statistics without digests", _write_old_stats, _read_and_plan, editable=True),
    Parser("unfinished calibration", _write_checkpoint, _read_checkpoint),
    Parser("plan", _write_plan, _read_plan, editable=True),
    Parser("report", _write_sealed_report, _read_report),
    Parser("report without a digest", _write_report, _read_report, editable=True),
    Parser("cached solution", _write_solution, _read_solution, heals=True),
    Parser("unfinished fine-tuning", _write_tuning, _read_tuning),
    Parser("times", _write_times, _read_times, heals=True),
    Parser("weights, safetensors", _write_safetensors, _read_weights, editable=True),
    Parser("weights, pth", _write_pth, _read_weights, editable=True),
    Parser("npz", _write_npz, _read_npz, editable=True),
    Parser("photos", _write_photo, _read_photo, editable=True),
)


# --- ways to damage a file ------------------------------------------------------------------------------------------


def _flip(data: bytearray, dice: random.Random) -> None:
    for _ in range(dice.choice((1, 1, 1, 8))):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(len(data)) :]


def _remove(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    del data[start : start + dice.randrange(1, 50)]


def _insert(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    data[start:start] = dice.randbytes(dice.randrange(1, 50))


def _zero(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    length = min(dice.randrange(1, 600), len(data) - start)
    data[start : start + length] = bytes(length)


def _double(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    data[start:start] = data[start : start + dice.randrange(1, 200)]


def _swap(data: bytearray, dice: random.Random) -> None:
    middle = dice.randrange(len(data))
    data[:] = data[middle:] + data[:middle]


def _empty(data: bytearray, dice: random.Random) -> None:
    data.clear()


_BYTES = (_flip, _flip, _flip, _flip, _cut, _remove, _insert, _zero, _double, _swap, _empty)
_DEEP: Any = []
for _ in range(300):
    _DEEP = [_DEEP]
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    -5,
    3,
    10**9,
    10**30,
    0.5,
    -0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../x",
    "float16",
    [],
    [1],
    [-1, 2],
    ["x"],
    {},
    {"x": 1},
    _DEEP,
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in ``data``, from ``path`` on."""
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in children for place in places(value, (*path, key)))]


def changed_at(text: str, path: tuple[Any, ...], value: Any) -> str:
    """The same JSON with another value in one place."""
    data = json.loads(text)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return json.dumps(data)


def _change_json(text: str, dice: random.Random) -> str:
    """The same JSON with one value replaced, removed, moved or given twice."""
    data = json.loads(text)
    every = places(data)
    # Names of layers have large subtrees; half of the changes are near the root.
    shallow = [place for place in every if len(place) <= 2]
    path = dice.choice(shallow if dice.random() < 0.5 else every)
    if not path:
        return json.dumps(dice.choice(_VALUES))
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    kind = dice.random()
    if kind < 0.2:
        del parent[path[-1]]
    elif kind < 0.3 and isinstance(parent, dict):
        parent[f"{path[-1]}x"] = parent.pop(path[-1])
    elif kind < 0.4:
        other = data
        for key in dice.choice(every):
            other = other[key]
        parent[path[-1]] = json.loads(json.dumps(other))
    else:
        parent[path[-1]] = dice.choice(_VALUES)
    return json.dumps(data)


def damage(file: Path, dice: random.Random) -> str:
    """Damage a file, and say how."""
    content = file.read_bytes()
    if file.suffix == ".json" and dice.random() < 0.5:
        file.write_text(_change_json(content.decode(), dice))
        return "a changed value"
    if dice.random() < 0.02:
        file.unlink()
        file.mkdir()
        return "a folder in its place"
    data = bytearray(content)
    way = dice.choice(_BYTES)
    way(data, dice)
    file.write_bytes(data)
    return way.__name__.strip("_")


def torture(parser: Parser, n: int, seed: int, folder: Path, tally: Tally) -> None:
    """Damage the files of one parser ``n`` times and read them."""
    dice = random.Random(f"{parser.name} {seed}")
    good = folder / "good"
    good.mkdir(parents=True)
    parser.write(good)
    shutil.copytree(good, folder / "first")
    expected = repr(parser.read(folder / "first"))
    files = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())
    for number in range(n):
        place = folder / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(good, place)
        file = dice.choice(files)
        case = f"{parser.name}, case {number} of seed {seed}: {damage(place / file, dice)} in {file}"
        read_into(tally, parser, place, case, expected)
    shutil.rmtree(folder)


def read_into(tally: Tally, parser: Parser, place: Path, case: str, expected: str = "") -> None:
    """Read a damaged file, and count how it ends."""
    try:
        value = repr(parser.read(place))
    except TensigmaError:
        tally.add("refused", case)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        tally.add("crashed", f"{case}: {type(error).__name__}: {error!s:.100} ({where.filename}:{where.lineno})")
    else:
        if value == expected:
            tally.add("solved again" if parser.heals else "unchanged", case)
        else:
            tally.add("edited" if parser.editable else "silently wrong", case)

"""Kills at random moments: what was complete stays complete, and the same work again ends in the same bits."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

import tensigma as ts
from tensigma.errors import TensigmaError
from tensigma.running import weights_digest
from torture.damage import images, network
from torture.tally import Tally

_STATS, _PLAN, _SMALL, _TUNED, _EXPORTED = "stats", "plan.json", "small", "tuned", "small.pt2"
# Curves, effects and trials of several plans, in little time.
_RECIPE = {"budget": ts.Params(0.6), "method": "svd", "skip": ()}


def work(folder: Path, *, export: bool) -> None:
    """Calibrate, plan, compress, save, fine-tune and export, each step going on where an earlier run stopped."""
    model = network()
    checkpoint = folder / "stats.checkpoint"
    if not (folder / _STATS).exists():
        stats = ts.calibrate(
            model, images(24).split(4), checkpoint=checkpoint, checkpoint_every=1, resume=checkpoint.exists()
        )
        stats.save(folder / _STATS)
    stats = ts.Calibration.load(folder / _STATS)
    batches = images(24).split(12)
    plan = ts.plan(model, stats, **_RECIPE, data=batches, cache=folder / "cache")  # type: ignore[arg-type]
    plan.save(folder / _PLAN)
    small, _ = ts.compress(model, plan, stats, data=batches, cache=folder / "cache", workers=1)
    ts.save(small, folder / _SMALL, force=True)
    labelled = [(part, torch.arange(len(part)) % 5) for part in images(24).split(4)]
    tuned, _ = ts.finetune(small, labelled, epochs=2, learning_rates=(1e-3,), checkpoint=folder / "tuning")
    ts.save(tuned, folder / _TUNED, force=True)
    if export:
        ts.export(small, folder / _EXPORTED, images(2), format="torch-export")


def check(folder: Path) -> None:
    """Every result is absent, or complete and readable."""
    if (folder / _STATS).exists():
        for layer in ts.Calibration.load(folder / _STATS).values():
            _ = layer.covariance
    if (folder / _PLAN).exists():
        ts.Plan.load(folder / _PLAN)
    for name in (_SMALL, _TUNED):
        if (folder / name).exists():
            ts.load(folder / name, network())
    if (folder / _EXPORTED).exists():
        ts.deployment.read_exported(folder / _EXPORTED, "torch-export")


def digests(folder: Path) -> tuple[str, str]:
    """What the work ended in."""
    small, tuned = (weights_digest(ts.load(folder / name, network())) for name in (_SMALL, _TUNED))
    return small, tuned


def _forked(folder: Path, seconds: float | None, *, export: bool) -> int:
    """Do the work in a child, killed after some seconds of its own; its exit code, negative for a signal."""
    child = os.fork()
    if not child:
        code = 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                work(folder, export=export)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if seconds is not None:
        # Time on the processor, so that kills are spread evenly on a busy machine too.
        while (spent := _processor_seconds(child)) is not None and spent < seconds:
            time.sleep(0.003)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _processor_seconds(process: int) -> float | None:
    """What a process has used so far; None if it has ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return None if fields[0] == "Z" else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _whole(folder: Path, *, export: bool) -> float:
    """Do the work without a kill; the processor time it takes."""
    folder.mkdir(parents=True)
    before = os.times()
    assert _forked(folder, None, export=export) == 0
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def torture(n: int, seed: int, folder: Path, tally: Tally, *, export: bool = True) -> None:
    """At least ``n`` kills, counted when they hit. Needs Linux and a process of its own, because it forks."""
    torch.set_num_threads(1)
    # What optimizers and exports import takes seconds; children find it imported.
    importlib.import_module("torch._dynamo")
    dice = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    seconds = {False: _whole(folder / "whole", export=False)}
    expected = digests(folder / "whole")
    # Exporting takes longer than all the rest.
    if export:
        seconds[True] = _whole(folder / "exported", export=True)
    kills = number = 0
    while kills < n:
        number += 1
        place = folder / "killed"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        exports = export and number % 8 == 0
        # Half of the kills hit the work a second time, when there is something to lose.
        moments = [dice.uniform(0, seconds[exports]) for _ in range(dice.choice((1, 2)))]
        case = f"case {number} of seed {seed}, after {', '.join(f'{moment:.2f}' for moment in moments)} s"
        try:
            for moment in moments:
                kills += _forked(place, moment, export=exports) == -signal.SIGKILL
                tally.facts["kills"] = kills
                check(place)
            tally.add(*_resumed(place, case, expected, export=exports))
        except TensigmaError as error:
            tally.add("damaged", f"{case}: {error}")
    shutil.rmtree(folder)


def _resumed(place: Path, case: str, expected: tuple[str, str], *, export: bool) -> tuple[str, str]:
    """Do the work to its end: the outcome, and the case."""
    if _forked(place, None, export=export) != 0:
        return "not resumed", case
    if digests(place) != expected:
        return "resumed to something else", case
    left = [path.name for path in place.rglob("*") if ".partial-" in path.name or ".old-" in path.name]
    return ("left behind", f"{case}: {left}") if left else ("resumed", case)


if __name__ == "__main__":
    counted = Tally()
    torture(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), counted, export=False)
    counted.check()

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
    plan = ts.plan(model, stats, ranks=ts.Ranks({"*": 2}))
    plan.save(folder / _PLAN)
    small, _ = ts.compress(model, plan, stats, cache=folder / "cache", workers=1)
    ts.save(small, folder / _SMALL, force=True)
    batches = [(part, torch.arange(len(part)) % 5) for part in images(24).split(4)]
    tuned, _ = ts.finetune(small, batches, epochs=2, learning_rates=(1e-3,), checkpoint=folder / "tuning")
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
    """Do the work in a child, killed after some seconds; its exit code, negative for a signal."""
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
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def torture(n: int, seed: int, folder: Path, tally: Tally, *, export: bool = True) -> None:
    """``n`` kills. Needs a process of its own, because it forks."""
    torch.set_num_threads(1)
    # What optimizers and exports import takes seconds; children find it imported.
    importlib.import_module("torch._dynamo")
    dice = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "whole").mkdir(parents=True)
    start = time.perf_counter()
    assert _forked(folder / "whole", None, export=export) == 0
    seconds = time.perf_counter() - start
    expected = digests(folder / "whole")
    for number in range(n):
        place = folder / "killed"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        # Half of the kills hit the work a second time, when there is something to lose.
        moments = [dice.uniform(0, seconds) for _ in range(dice.choice((1, 2)))]
        case = f"kill {number} of seed {seed}, after {', '.join(f'{moment:.2f}' for moment in moments)} s"
        try:
            for moment in moments:
                _forked(place, moment, export=export)
                check(place)
            if _forked(place, None, export=export) != 0:
                tally.add("not resumed", case)
            elif digests(place) != expected:
                tally.add("resumed to something else", case)
            else:
                left = [path.name for path in place.rglob("*") if ".partial-" in path.name or ".old-" in path.name]
                tally.add("resumed" if not left else "left behind", f"{case}: {left}")
        except TensigmaError as error:
            tally.add("damaged", f"{case}: {error}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    counted = Tally()
    torture(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), counted, export=False)
    counted.check()

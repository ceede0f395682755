"""``tensigma demo``: see what the library does, in less than a minute and without any data of one's own."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tensigma.cli.calibrate import run_calibration
from tensigma.cli.command import command
from tensigma.cli.compress import Result
from tensigma.cli.options import Seed
from tensigma.cli.outputs import check_folder, write_text
from tensigma.cli.progress import Step, duration
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import StoreError
from tensigma.evaluation import Evaluation, evaluate
from tensigma.experiments import DEFAULT, MODEL, TEST, TRAIN, Trial, compare, find_front, n_trials, train_once
from tensigma.report import Run, check_renderer, number, percent, short, write_report
from tensigma.zoo import load_data

_FORMAT = "tensigma-demo"
# Of the library's own results, the smallest that still answers like the original this often is kept.
_KEPT_AGREEMENT = 0.99

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where everything is written.")]
Cache = Annotated[
    Path | None,
    typer.Option("--cache", metavar="DIR", help="Keep the trained network here instead of in --out."),
]


@functools.partial(command, threads=1)
def demo(screen: Screen, out: Out = Path("demo-output"), cache: Cache = None, seed: Seed = 0) -> None:
    """Train a small CNN on handwritten digits, compress it in several ways, and compare.

    At each rate three ways get the same ranks: the usual decomposition of the
    weights (Frobenius), the norm of the paper (Σ) and the centred one. The last
    line of each rate is what tensigma does by default with as many parameters.
    Accuracy is measured on images that neither training nor calibration saw;
    calibration reads no labels. Training happens once and takes seconds.

    [bold]Examples[/bold]

      tensigma demo
      tensigma demo --seed 1 --out demo-1/ --json
    """
    start = time.perf_counter()
    check_renderer()
    _check_out(out)
    train_data, test_data = load_data(TRAIN), load_data(TEST, batch_size=256)
    weights = (cache or out) / f"digits-cnn-{seed}.safetensors"
    with screen.progress("training") as progress:
        network = train_once(weights, train_data, seed=seed, progress=progress)
    stats = run_calibration(screen, network, train_data)
    original = evaluate(network, test_data)
    trials = []
    with screen.progress("planning") as progress:
        front = find_front(network, stats, progress=progress)
    with screen.progress("compressing") as progress:
        begin = time.perf_counter()
        for trial in compare(network, stats, test_data, front):
            trials.append(trial)
            progress(_comparing(trial, len(trials), time.perf_counter() - begin))
    runs = [trial.run for trial in trials]
    chosen = _chosen(trials)
    notes: dict[str, Any] = {
        "title": "A small CNN for handwritten digits",
        "command": ["tensigma", "compress", MODEL, "--weights", str(weights), "--data", TRAIN, "--eval-data", TEST],
        "model": MODEL,
        "weights": str(weights),
        "data": TRAIN,
        "samples": stats.samples,
        "evaluated_on": TEST,
        "evaluation": chosen.evaluation.to_json(),
        "comparison": [run.to_json() for run in runs],
    }
    report = chosen.report.with_notes(**notes)
    out.mkdir(parents=True, exist_ok=True)
    small = out / "compressed"
    Result(chosen.model, chosen.plan, report, chosen.evaluation).write(small, force=True, page=False)
    write_report(report, out / "report.html", evaluation=chosen.evaluation, comparison=runs)
    seconds = time.perf_counter() - start
    data = {
        "out": str(out),
        "original": original.to_json(),
        "runs": [run.to_json() for run in runs],
        "chosen": runs.index(chosen.run),
        "seconds": seconds,
    }
    write_text(out / "demo.json", json.dumps({"format": _FORMAT, **data}, indent=1, ensure_ascii=False) + "\n")
    screen.result("demo", data, _table(original, runs))
    screen.note(f"done in {duration(seconds)}")
    screen.note(f"look at {out / 'report.html'}; the model of {chosen.run.rate:.1f}× is in {small}")


def _check_out(out: Path) -> None:
    """Earlier results of the demonstration may be replaced; anything else stays."""
    if not out.exists() or not any(out.iterdir()):
        check_folder(out, force=False, format=_FORMAT)
        return
    try:
        ours = json.loads((out / "demo.json").read_text(encoding="utf-8")).get("format") == _FORMAT
    except (OSError, ValueError, AttributeError):
        # A run that was stopped has left at most the trained network.
        ours = all(file.name.startswith(("digits-cnn-", ".digits-cnn-")) for file in out.iterdir())
    if not ours:
        raise StoreError(f"{out} exists and holds something else; choose another --out")


def _comparing(trial: Trial, done: int, seconds: float) -> Step:
    total = n_trials()
    text = f"{done} of {total}, {trial.run.series} at {trial.run.rate:.1f}×"
    return Step(done=done, total=total, text=text, remaining=seconds / done * (total - done))


def _chosen(trials: list[Trial]) -> Trial:
    own = [trial for trial in trials if trial.run.series == DEFAULT]
    good = [trial for trial in own if (trial.run.agreement or 0.0) >= _KEPT_AGREEMENT]
    return max(good or own[:1], key=lambda trial: trial.run.rate)


def _table(original: Evaluation, runs: list[Run]) -> Columns:
    size = original.size
    rows = [["original", "", "1.00", number(size.params), short(size.macs), percent(original.top1), "", ""]]
    for run in runs:
        rows.append(
            [
                run.series,
                run.setting,
                f"{run.rate:.2f}",
                number(run.params),
                short(run.macs),
                percent(run.top1),
                percent(run.agreement),
                f"{run.seconds:.2f}",
            ]
        )
    header = ["norm", "ranks", ">rate", ">parameters", ">MACs", ">top-1", ">agreement", ">seconds"]
    return Columns(header, rows, sections=[1 + index for index in range(0, len(runs), 4)])

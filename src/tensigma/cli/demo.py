"""``tensigma demo``: what the library does, in less than a minute and without data of the user's own."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Annotated

import typer

import tensigma as ts
from tensigma.cli.calibrate import run_calibration
from tensigma.cli.command import command
from tensigma.cli.compress import Result
from tensigma.cli.options import Seed
from tensigma.cli.outputs import check_folder, to_json, write_text
from tensigma.cli.progress import Step, duration
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import StoreError
from tensigma.files import claimed, read_json

_FORMAT = "tensigma-demo"
# The smallest default result whose agreement with the original is at least this is kept.
_KEPT_AGREEMENT = 0.99

Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for everything that is written.")]
Cache = Annotated[
    Path | None,
    typer.Option("--cache", metavar="DIR", help="Folder for the trained network, instead of --out."),
]


@functools.partial(command, threads=1)
def demo(screen: Screen, out: Out = Path("demo-output"), cache: Cache = None, seed: Seed = 0) -> None:
    """Train a small CNN on handwritten digits, compress it in several ways, and compare.

    At each rate, three norms are compared at the same ranks: the usual one of the
    weights (Frobenius), the paper's (Σ) and the centred one. The last line of
    each rate is tensigma's default with as many parameters. Accuracy is measured
    on images that neither training nor calibration saw; calibration reads no
    labels. Training happens once and takes seconds.

    [bold]Examples[/bold]

      tensigma demo
      tensigma demo --seed 1 --out demo-1/ --json
    """
    start = time.perf_counter()
    experiments = ts.experiments
    ts.report.check_renderer()
    _check_out(out)
    screen.until_end.enter_context(claimed(out))
    train_data = ts.zoo.load_data(experiments.TRAIN)
    test_data = ts.zoo.load_data(experiments.TEST, batch_size=256)
    weights = (cache or out) / f"digits-cnn-{seed}.safetensors"
    with screen.progress("training") as progress:
        network = experiments.train_once(weights, train_data, seed=seed, progress=progress)
    stats = run_calibration(screen, network, train_data)
    original = ts.evaluate(network, test_data)
    with screen.progress("planning") as progress:
        front = experiments.find_front(network, stats, progress=progress)
    trials: list[ts.experiments.Trial] = []
    with screen.progress("compressing") as progress:
        begin = time.perf_counter()
        for trial in experiments.compare(network, stats, test_data, front):
            trials.append(trial)
            progress(_step(trial, len(trials), time.perf_counter() - begin))
    best = _best(trials)
    runs = [trial.run for trial in trials]
    report = _report(best, runs, weights, stats.samples)
    out.mkdir(parents=True, exist_ok=True)
    small = out / "compressed"
    Result(best.model, best.plan, report, best.evaluation).written(small, network, force=True)
    ts.write_report(report, out / "report.html", evaluation=best.evaluation, comparison=runs)
    seconds = time.perf_counter() - start
    data = {
        "out": str(out),
        "original": original.to_json(),
        "runs": [run.to_json() for run in runs],
        "chosen": runs.index(best.run),
        "seconds": seconds,
    }
    write_text(out / "demo.json", to_json({"format": _FORMAT, **data}))
    screen.result("demo", data, _table(original, runs))
    screen.note(f"done in {duration(seconds)}")
    screen.note(f"open {out / 'report.html'} in a browser; the model of {best.run.rate:.1f}× is in {small}")


def _check_out(out: Path) -> None:
    """Refuse a folder that holds anything but earlier results of this command."""
    if not out.exists() or not any(out.iterdir()):
        check_folder(out, force=False, format=_FORMAT)
        return
    try:
        ours = read_json(out / "demo.json").get("format") == _FORMAT
    except (StoreError, AttributeError):
        # An interrupted run leaves at most the trained network.
        ours = all(file.name.startswith(("digits-cnn-", ".digits-cnn-")) for file in out.iterdir())
    if not ours:
        raise StoreError(f"{out} exists and holds something else; choose another --out")


def _step(trial: ts.experiments.Trial, done: int, seconds: float) -> Step:
    total = ts.experiments.n_trials()
    text = f"{done} of {total}, {trial.run.series} at {trial.run.rate:.1f}×"
    return Step(done=done, total=total, text=text, remaining=seconds / done * (total - done))


def _best(trials: list[ts.experiments.Trial]) -> ts.experiments.Trial:
    """The default result to keep: the smallest that agrees with the original often enough."""
    defaults = [trial for trial in trials if trial.run.series == ts.experiments.DEFAULT]
    good = [trial for trial in defaults if (trial.run.agreement or 0.0) >= _KEPT_AGREEMENT]
    return max(good or defaults[:1], key=lambda trial: trial.run.rate)


def _report(best: ts.experiments.Trial, runs: list[ts.report.Run], weights: Path, samples: int) -> ts.Report:
    model, train, test = ts.experiments.MODEL, ts.experiments.TRAIN, ts.experiments.TEST
    return best.report.with_notes(
        title="A small CNN for handwritten digits",
        command=["tensigma", "compress", model, "--weights", str(weights), "--data", train, "--eval-data", test],
        model=model,
        weights=str(weights),
        data=train,
        samples=samples,
        evaluated_on=test,
        evaluation=best.evaluation.to_json(),
        comparison=[run.to_json() for run in runs],
    )


def _table(original: ts.Evaluation, runs: list[ts.report.Run]) -> Columns:
    number, short, percent = ts.report.number, ts.report.short, ts.report.percent
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

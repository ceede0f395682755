"""``tensigma finetune``: a few epochs that win back what a compression lost."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from tensigma.cli.command import command
from tensigma.cli.loading import compressed_of, data_of, is_untrained, model_of, name_of, needed
from tensigma.cli.options import BatchSize, DataNames, Device, Force, Seed, Weights, Workers
from tensigma.cli.outputs import MODEL, check_folder, is_output
from tensigma.cli.parsing import listed
from tensigma.cli.progress import duration
from tensigma.cli.report import read_report
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.cli.tuning_options import (
    Archive,
    Checkpoint,
    Eliminate,
    Epochs,
    FreezeBN,
    LearningRates,
    Mix,
    Momentum,
    Optimizer,
    Original,
    Out,
    Patience,
    TeacherOption,
    Temperature,
    ValidationData,
    ValidationShare,
    WeightDecay,
    WhichOptimizer,
    parse_rate,
)
from tensigma.compression import Report
from tensigma.deployment import save
from tensigma.errors import InputError, MissingExtra, StoreError
from tensigma.files import whole_folder
from tensigma.finetuning import FineTuning, remove_unfinished
from tensigma.finetuning import finetune as train
from tensigma.report import number, percent, render_report
from tensigma.text import share
from tensigma.zoo import Spec


@command
def finetune(
    screen: Screen,
    archive: Archive,
    out: Out,
    data: DataNames = None,
    teacher: TeacherOption = False,
    original: Original = None,
    weights: Weights = None,
    validation: ValidationData = None,
    validation_share: ValidationShare = 0.1,
    epochs: Epochs = 30,
    learning_rates: LearningRates = None,
    optimizer: WhichOptimizer = Optimizer.adam,
    momentum: Momentum = 0.9,
    weight_decay: WeightDecay = 0.0,
    temperature: Temperature = 4.0,
    patience: Patience = None,
    eliminate: Eliminate = False,
    freeze_bn: FreezeBN = False,
    mix: Mix = 16,
    checkpoint: Checkpoint = None,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    device: Device = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Train a compressed model for a few epochs and keep the best of them.

    Several learning rates are tried, each from the same start. The best epoch of
    all is found on images that no rate trains on; where none is better than the
    model as it came, that is what is kept. Layers stay factorised: the result is
    as small as before, and a folder of the same form.

    [bold]Examples[/bold]

    With labels, one rate fewer after every epoch, able to go on if it is killed:

      tensigma finetune small/ --data imagefolder:train --epochs 10 \\
          --eliminate --checkpoint state/ --out tuned/

    Without labels, from the answers of the original:

      tensigma finetune small/ --teacher --weights r18.pth \\
          --data imagefolder:photos --epochs 3 --out tuned/

    The sweep of the paper:

      tensigma finetune small/ --data imagefolder:train --out tuned/ \\
          --learning-rates 1e-5,1e-6,1e-7,1e-8,1e-9,1e-10

    The result beside the original:

      tensigma evaluate torchvision:resnet18 --weights r18.pth \\
          --compressed tuned/ --data imagefolder:val
    """
    if screen.size > 1:
        raise InputError("fine-tuning runs in one process; start it without torchrun")
    check_folder(out, force=force, format=MODEL)
    rates = tuple(map(parse_rate, listed(learning_rates))) or (1e-3, 1e-4, 1e-5)
    carried, extra = _carried(archive)
    name, file = _original(archive, carried, original, weights, teacher)
    images = needed(data_of(data, batch_size, workers), "no data was named; give for example --data imagefolder:DIR")
    judged = data_of(validation, batch_size, workers)
    whole = model_of(screen, name, file, device, seed, warn=False)
    network = compressed_of(screen, archive, whole).requires_grad_(True)
    screen.note(f"fine-tuning on {name_of(images)} by {'the answers of the original' if teacher else 'labels'}")
    try:
        with screen.progress("fine-tuning") as progress:
            tuned, history = train(
                network,
                images,
                validation=judged,
                validation_share=validation_share,
                epochs=epochs,
                learning_rates=rates,
                optimizer=optimizer.value,
                momentum=momentum,
                weight_decay=weight_decay,
                teacher=whole if teacher else None,
                temperature=temperature,
                patience=patience,
                eliminate=eliminate,
                freeze_bn=freeze_bn,
                mix=mix,
                seed=seed,
                checkpoint=checkpoint,
                progress=progress,
            )
    except BaseException:
        if checkpoint is not None and checkpoint.exists():
            screen.note(f"finished epochs are in {checkpoint}; the same command goes on from there")
        raise
    _write(tuned, history, out, carried, extra, force=force)
    if checkpoint is not None:
        remove_unfinished(checkpoint)
    facts = {"archive": str(archive), "model": name, "data": name_of(images), "out": str(out), **history.to_json()}
    screen.result("finetune", facts, _table(history))
    if history.learning_rate is None:
        screen.note("no epoch was better than the model as it came, which is kept; try other --learning-rates")
    screen.note(
        f"{history.measure} on {number(history.validation_samples)} validation samples;"
        f" done in {duration(history.seconds)}; written to {out}"
    )


def _carried(archive: Path) -> tuple[Report | None, dict[str, str]]:
    """What lies beside the weights: the report, and the text of the plan."""
    report, _, _ = read_report(archive / "report.json") if (archive / "report.json").is_file() else (None, None, ())
    plan = archive / "plan.json"
    return report, {plan.name: plan.read_text(encoding="utf-8")} if plan.is_file() else {}


def _original(
    archive: Path, report: Report | None, name: str | None, weights: Path | None, teacher: bool
) -> tuple[str, Path | None]:
    """The original by name, and where its weights are."""
    if not is_output(archive, MODEL):
        raise StoreError(f"{archive} holds no compressed model; give a folder that 'tensigma compress' wrote")
    noted = {} if report is None else report.notes
    if name is None:
        name = noted.get("model")
        if not name:
            raise InputError(f"{archive} does not tell its original; give --original, such as torchvision:resnet18")
        # A name in a folder from elsewhere must not make us execute a file.
        if Spec.parse(name).scheme == "file":
            raise InputError(f"the original is {name}, a file that would be executed; say so with --original {name}")
    if teacher and weights is None and noted.get("weights") and Path(noted["weights"]).is_file():
        weights = Path(noted["weights"])
    if teacher and is_untrained(name, weights):
        raise InputError("--teacher needs the trained weights of the original; give --weights FILE")
    return name, weights


def _write(
    model: nn.Module, history: FineTuning, out: Path, report: Report | None, extra: dict[str, str], *, force: bool
) -> None:
    """The archive, the history, and what lay beside the weights, all of it or nothing."""
    texts = {**extra, "finetuning.json": _json(history.to_json())}
    if report is not None:
        # Accuracy was measured before.
        tuned = report.with_notes(evaluation=None, evaluated_on=None, comparison=[], finetuning=history.to_json())
        texts["report.json"] = _json(tuned.to_json())
        with suppress(MissingExtra):
            texts["report.html"] = render_report(tuned)
    with whole_folder(out, force=force, is_ours=lambda folder: is_output(folder, MODEL)) as place:
        save(model, place)
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _table(history: FineTuning) -> Columns:
    measure = {"top1": "top-1"}.get(history.measure, history.measure)
    start = history.start
    rows = [["as it came", "", "", "", share(start.validation_loss), percent(start.score), ""]]
    for rate in history.rates:
        best = max(rate.epochs, key=lambda epoch: epoch.key)
        kept = " (kept)" if rate.learning_rate == history.learning_rate else ""
        rows.append(
            [
                f"{rate.learning_rate:g}{kept}",
                number(len(rate.epochs)),
                number(best.epoch),
                share(best.loss),
                share(best.validation_loss),
                percent(best.score),
                rate.ended,
            ]
        )
    header = ["learning rate", ">epochs", ">best epoch", ">loss", ">validation loss", f">{measure}", "ended by"]
    return Columns(header, rows, sections=[1])

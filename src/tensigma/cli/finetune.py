"""``tensigma finetune``: a few epochs that recover accuracy lost by compression."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.loading import Network, compressed_of, data_of, is_untrained, model_of, name_of, required_data
from tensigma.cli.options import AnswersOption, BatchSize, DataNames, Device, Force, Seed, Weights, Workers
from tensigma.cli.outputs import MODEL, claim_folder, is_output, to_json
from tensigma.cli.parsing import parse_rates
from tensigma.cli.progress import duration
from tensigma.cli.report import read_report
from tensigma.cli.screen import Screen
from tensigma.cli.subject import check_archive, original_of, weights_in
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
    OptimizerName,
    Original,
    Out,
    Patience,
    TeacherOption,
    Temperature,
    ValidationData,
    ValidationShare,
    WeightDecay,
)
from tensigma.errors import InputError, MissingExtra
from tensigma.files import seal, whole_folder
from tensigma.text import share


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
    optimizer: OptimizerName = Optimizer.adam,
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
    answers: AnswersOption = None,
) -> None:
    """Train a compressed model for a few epochs and keep the best one.

    Several learning rates are tried, each from the same start. The best epoch of
    all is chosen on images that are not trained on; if none improves the model,
    it is kept unchanged. Layers stay factorised: the result is as small as
    before, in a folder of the same form.

    [bold]Examples[/bold]

    With labels; one learning rate is dropped after every epoch, and the same
    command continues an interrupted run:

      tensigma finetune small/ --data imagefolder:train --epochs 10 \\
          --eliminate --checkpoint state/ --out tuned/

    Without labels, from the answers of the original:

      tensigma finetune small/ --teacher --weights r18.pth \\
          --data imagefolder:photos --epochs 3 --out tuned/

    The learning rates of the paper:

      tensigma finetune small/ --data imagefolder:train --out tuned/ \\
          --learning-rates 1e-5,1e-6,1e-7,1e-8,1e-9,1e-10

    On several cores, each of which takes its part of every batch:

      torchrun --nproc_per_node=4 -m tensigma finetune small/ \\
          --data imagefolder:train --threads 1 --out tuned/

    The result beside the original:

      tensigma evaluate torchvision:resnet18 --weights r18.pth \\
          --compressed tuned/ --data imagefolder:val
    """
    claim_folder(screen, out, force=force, format=MODEL)
    rates = parse_rates(learning_rates) or (1e-3, 1e-4, 1e-5)
    check_archive(archive)
    report = read_report(archive / "report.json")[0] if (archive / "report.json").is_file() else None
    notes = {} if report is None else report.notes
    name = original_of(archive, notes, original)
    if teacher:
        weights = weights or weights_in(notes)
        if is_untrained(name, weights):
            raise InputError("--teacher needs the trained weights of the original; give --weights FILE")
    images = required_data(data, batch_size, workers)
    judges = data_of(validation, batch_size, workers)
    whole = model_of(screen, name, weights, device, seed, warn=False)
    network = compressed_of(screen, archive, whole).requires_grad_(True)
    screen.note(f"fine-tuning on {name_of(images)} with {'the answers of the original' if teacher else 'labels'}")
    try:
        with screen.progress("fine-tuning") as progress:
            tuned, history = ts.finetune(
                network,
                images,
                validation=judges,
                validation_share=validation_share,
                epochs=epochs,
                learning_rates=rates,
                optimizer=optimizer.value,
                momentum=momentum,
                weight_decay=weight_decay,
                teacher=whole if teacher else None,
                temperature=temperature,
                answers=answers,
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
            screen.note(f"{checkpoint} holds the finished epochs; the same command continues from there")
        raise
    if not screen.speaks:
        return
    _write(tuned, history, out, archive, report, force=force)
    if checkpoint is not None:
        ts.finetuning.remove_unfinished(checkpoint)
    facts = {"archive": str(archive), "model": name, "data": name_of(images), "out": str(out), **history.to_json()}
    screen.result("finetune", facts, _table(history))
    if history.learning_rate is None:
        screen.note("no epoch improved the model, so it is kept unchanged; try other --learning-rates")
    screen.note(
        f"{history.measure} on {ts.report.number(history.validation_samples)} validation samples;"
        f" done in {duration(history.seconds)}; written to {out}"
    )


def _write(
    model: Network, history: ts.FineTuning, out: Path, archive: Path, report: ts.Report | None, *, force: bool
) -> None:
    """Write the model, its history, and the plan and report of the archive, completely or not at all."""
    texts = {"finetuning.json": to_json(history.to_json())}
    if (archive / "plan.json").is_file():
        texts["plan.json"] = (archive / "plan.json").read_text(encoding="utf-8")
    if report is not None:
        # The accuracy in the report was measured before fine-tuning.
        tuned = report.with_notes(evaluation=None, evaluated_on=None, comparison=[], finetuning=history.to_json())
        texts["report.json"] = to_json(seal(tuned.to_json()))
        with suppress(MissingExtra):
            texts["report.html"] = ts.report.render_report(tuned)
    with whole_folder(out, force=force, is_ours=lambda folder: is_output(folder, MODEL)) as place:
        ts.save(model, place)
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")


def _table(history: ts.FineTuning) -> Columns:
    number, percent = ts.report.number, ts.report.percent
    start = history.start
    rows = [["before", "", "", "", share(start.validation_loss), percent(start.score), ""]]
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
    measure = {"top1": "top-1"}.get(history.measure, history.measure)
    header = ["learning rate", ">epochs", ">best epoch", ">loss", ">validation loss", f">{measure}", "ended by"]
    return Columns(header, rows, sections=[1])

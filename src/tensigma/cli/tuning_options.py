"""Options of ``tensigma finetune``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_HOW = "How to train"


class Optimizer(StrEnum):
    """Optimizers by the names that are typed."""

    adam = "adam"
    sgd = "sgd"


Archive = Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="A folder from 'tensigma compress'.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder for the fine-tuned model.")]
Original = Annotated[
    str | None,
    typer.Option(
        "--original",
        metavar="MODEL",
        help="The original architecture; by default the one that DIR/report.json names.",
        rich_help_panel="Model",
    ),
]
TeacherOption = Annotated[
    bool,
    typer.Option("--teacher", help="Learn from the answers of the original (--weights) instead of labels."),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", metavar="T", help="Temperature that softens the teacher's answers.", rich_help_panel=_HOW
    ),
]
ValidationData = Annotated[
    list[str] | None,
    typer.Option(
        "--validation",
        metavar="DATA",
        help="Images for choosing the best epoch; by default a part of --data is held out.",
        rich_help_panel="Data",
    ),
]
ValidationShare = Annotated[
    float,
    typer.Option("--validation-share", metavar="X", help="Share of --data to hold out.", rich_help_panel="Data"),
]
Mix = Annotated[
    int,
    typer.Option(
        "--mix", min=1, metavar="N", help="Shuffle the images of N successive batches.", rich_help_panel="Data"
    ),
]
Epochs = Annotated[
    int, typer.Option("--epochs", min=1, metavar="N", help="Epochs for each learning rate.", rich_help_panel=_HOW)
]
LearningRates = Annotated[
    list[str] | None,
    typer.Option(
        "--learning-rates",
        metavar="X,X…",
        help="Learning rates to try; 1e-3,1e-4,1e-5 by default.",
        rich_help_panel=_HOW,
    ),
]
OptimizerName = Annotated[Optimizer, typer.Option("--optimizer", help="Optimizer.", rich_help_panel=_HOW)]
Momentum = Annotated[float, typer.Option("--momentum", metavar="X", help="Momentum of sgd.", rich_help_panel=_HOW)]
WeightDecay = Annotated[float, typer.Option("--weight-decay", metavar="X", help="Weight decay.", rich_help_panel=_HOW)]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience",
        min=1,
        metavar="N",
        help="Stop a learning rate after N epochs without improvement.",
        rich_help_panel=_HOW,
    ),
]
Eliminate = Annotated[
    bool,
    typer.Option(
        "--eliminate", help="After each epoch stop the worst learning rate, until one is left.", rich_help_panel=_HOW
    ),
]
FreezeBN = Annotated[
    bool, typer.Option("--freeze-bn", help="Keep the statistics of BatchNorm layers.", rich_help_panel=_HOW)
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Folder for the state after each epoch; the same command continues from there.",
        rich_help_panel=_HOW,
    ),
]

"""Options of ``tensigma finetune``, each described once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_HOW = "How to train"


class Optimizer(StrEnum):
    """What takes the steps."""

    adam = "adam"
    sgd = "sgd"


def parse_rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; write --learning-rates 1e-3,1e-4") from None


Archive = Annotated[
    Path, typer.Argument(metavar="DIR", show_default=False, help="A folder that 'tensigma compress' wrote.")
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder for the fine-tuned model.")]
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
    float, typer.Option("--temperature", metavar="T", help="Softens the teacher's answers.", rich_help_panel=_HOW)
]
ValidationData = Annotated[
    list[str] | None,
    typer.Option(
        "--validation",
        metavar="DATA",
        help="Images to choose the best epoch by; a part of --data where not given.",
        rich_help_panel="Data",
    ),
]
ValidationShare = Annotated[
    float, typer.Option("--validation-share", metavar="X", help="How large that part is.", rich_help_panel="Data")
]
Mix = Annotated[
    int,
    typer.Option(
        "--mix", min=1, metavar="N", help="Batches in a row whose images are shuffled together.", rich_help_panel="Data"
    ),
]
Epochs = Annotated[int, typer.Option("--epochs", min=1, metavar="N", help="For each rate.", rich_help_panel=_HOW)]
LearningRates = Annotated[
    list[str] | None,
    typer.Option(
        "--learning-rates", metavar="X,X…", help="All are tried; 1e-3,1e-4,1e-5 by default.", rich_help_panel=_HOW
    ),
]
WhichOptimizer = Annotated[Optimizer, typer.Option("--optimizer", help="What takes the steps.", rich_help_panel=_HOW)]
Momentum = Annotated[float, typer.Option("--momentum", metavar="X", help="Of sgd.", rich_help_panel=_HOW)]
WeightDecay = Annotated[
    float, typer.Option("--weight-decay", metavar="X", help="Pulls weights towards 0.", rich_help_panel=_HOW)
]
Patience = Annotated[
    int | None,
    typer.Option(
        "--patience", min=1, metavar="N", help="Give a rate up after N epochs without a new best.", rich_help_panel=_HOW
    ),
]
Eliminate = Annotated[
    bool,
    typer.Option("--eliminate", help="Give up the worst rate after each epoch, to the last.", rich_help_panel=_HOW),
]
FreezeBN = Annotated[
    bool, typer.Option("--freeze-bn", help="Keep the statistics of BatchNorm layers.", rich_help_panel=_HOW)
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Keep the state here; the same command goes on.",
        rich_help_panel=_HOW,
    ),
]

"""Options that several commands share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from tensigma.cli.parsing import (
    METHOD_NAMES,
    NORM_NAMES,
    parse_budget,
    parse_device,
    parse_method,
    parse_norm,
    parse_ranks,
)
from tensigma.planning import Budget, RankRule

_MODEL, _DATA, _WHAT = "Model", "Data", "What to do"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", show_default=False, help="torchvision:NAME, timm:NAME, zoo:NAME or path/to/file.py:function."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="Trained weights: .safetensors, or a .pth that holds tensors only. Without it they are random.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    torch.device | None,
    typer.Option(
        "--device", parser=parse_device, metavar="DEVICE", help="cpu (default), cuda, cuda:1 …", rich_help_panel=_MODEL
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", min=0, metavar="N", help="Of whatever is random.", rich_help_panel=_WHAT),
]
DataNames = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="imagefolder:DIR, cifar10:DIR, npz:FILE, digits: or path/to/file.py:function; several make a mixture.",
        rich_help_panel=_DATA,
    ),
]
Weigh = Annotated[
    bool | None,
    typer.Option(
        "--weigh/--no-weigh",
        help="Share out --budget by what an error in each layer does to the answers, measured on some images of "
        "--data, where plans that are tried on them say that it does better than counting all layers alike; always "
        "with drop=X, on its held-out images. By default wherever there are such images.",
        rich_help_panel=_WHAT,
        show_default=False,
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, metavar="N", help="Images at a time.", rich_help_panel=_DATA)
]
Workers = Annotated[
    int, typer.Option("--workers", min=0, metavar="N", help="Threads that read images.", rich_help_panel=_DATA)
]
MaxSamples = Annotated[
    int | None,
    typer.Option("--max-samples", min=1, metavar="N", help="Use no more than N images.", rich_help_panel=_DATA),
]
Stats = Annotated[
    Path | None,
    typer.Option("--stats", metavar="DIR", help="Statistics that 'tensigma calibrate' wrote.", rich_help_panel=_DATA),
]
BudgetOption = Annotated[
    Budget | None,
    typer.Option(
        "--budget",
        parser=parse_budget,
        metavar="KIND=X",
        help="The share of the whole model that may remain: params=0.5, macs=40%, latency=0.6 (time on this machine; "
        "more exactly latency=0.6,runtime=eager,batch=8). Or the share of its answers that may be lost: drop=0.01, "
        "searched on --holdout.",
        rich_help_panel=_WHAT,
    ),
]
RanksOption = Annotated[
    RankRule | None,
    typer.Option(
        "--ranks",
        parser=parse_ranks,
        metavar="RULE=X",
        help="A rule instead of a budget: vbmf=0.5 (from the weights), sigma-vbmf=0.5 (from what they do to the data), "
        "energy=0.99 (of each layer's output).",
        rich_help_panel=_WHAT,
    ),
]
Holdout = Annotated[
    list[str] | None,
    typer.Option(
        "--holdout",
        metavar="DATA",
        help="Images on which --budget drop=X is searched: others than those of --data and of any evaluation. Labels "
        "are read where there are any. Without it every fifth batch of --data is held out.",
        rich_help_panel=_DATA,
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        parser=parse_method,
        metavar="NAME",
        help=f"{', '.join(METHOD_NAMES)}. 1×1 and Linear layers take svd in any case.",
        rich_help_panel=_WHAT,
    ),
]
NormName = Annotated[
    str,
    typer.Option(
        "--norm",
        parser=parse_norm,
        metavar="NAME",
        help=f"{', '.join(NORM_NAMES)}. Only frobenius does without data.",
        rich_help_panel=_WHAT,
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        "--layers",
        metavar="NAMES",
        help="all (default), spatial (kernels larger than 1), or names and patterns such as 'layer4.*'.",
        rich_help_panel=_WHAT,
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip",
        metavar="NAMES",
        help="Layers to leave as they are; the first convolution by default, 'none' for none.",
        rich_help_panel=_WHAT,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace earlier output of the same kind.", rich_help_panel=_WHAT)]

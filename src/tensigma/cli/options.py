"""Options that several commands share, each described once.

typer evaluates these annotations, so none of them may need torch: an option whose parser makes a type of the library is
Any here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tensigma.cli.parsing import (
    METHODS,
    NORMS,
    parse_answers,
    parse_bits,
    parse_budget,
    parse_device,
    parse_memory,
    parse_method,
    parse_norm,
    parse_ranks,
)

_MODEL, _DATA, _WHAT = "Model", "Data", "What to do"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="torchvision:NAME, timm:NAME, zoo:NAME, path/to/file.py:function or path/to/model.onnx.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="Trained weights: .safetensors, or a .pth that holds tensors only. Without them the weights are random.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    Any,
    typer.Option(
        "--device", parser=parse_device, metavar="DEVICE", help="cpu (default), cuda, cuda:1 …", rich_help_panel=_MODEL
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", min=0, metavar="N", help="Seed for everything random.", rich_help_panel=_WHAT),
]
DataNames = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Images: imagefolder:DIR, cifar10:DIR, npz:FILE, digits: or path/to/file.py:function. Repeat the option "
        "to mix several.",
        rich_help_panel=_DATA,
    ),
]
Weigh = Annotated[
    bool | None,
    typer.Option(
        "--weigh/--no-weigh",
        help="Share out --budget by how much an error in each layer changes the model's answers, measured on some "
        "images of --data, if trial plans do better that way than with all layers counted alike. With drop=X it is "
        "always done, on the held-out images. On by default if there are such images.",
        rich_help_panel=_WHAT,
        show_default=False,
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, metavar="N", help="Images in a batch.", rich_help_panel=_DATA)
]
Workers = Annotated[
    int, typer.Option("--workers", min=0, metavar="N", help="Threads that read images.", rich_help_panel=_DATA)
]
MaxSamples = Annotated[
    int | None,
    typer.Option("--max-samples", min=1, metavar="N", help="Use at most N images.", rich_help_panel=_DATA),
]
Memory = Annotated[
    Any,
    typer.Option(
        "--memory",
        parser=parse_memory,
        metavar="SIZE",
        help="Use at most this much memory, such as 4GB; if need be, in several passes over the data.",
        rich_help_panel=_DATA,
    ),
]
Stats = Annotated[
    Path | None,
    typer.Option(
        "--stats", metavar="DIR", help="Folder of statistics from 'tensigma calibrate'.", rich_help_panel=_DATA
    ),
]
BudgetOption = Annotated[
    Any,
    typer.Option(
        "--budget",
        parser=parse_budget,
        metavar="KIND=X",
        help="The share of the whole model that may remain: params=0.5, macs=40%, bytes=0.125 (see --bits) or "
        "latency=0.6 (time on this machine; in full latency=0.6,runtime=eager,batch=8); several as in "
        "bytes=0.125,macs=0.5. Or the share of its answers that may be lost: drop=0.01, measured "
        "on --holdout.",
        rich_help_panel=_WHAT,
    ),
]
BitsOption = Annotated[
    Any,
    typer.Option(
        "--bits",
        parser=parse_bits,
        metavar="N,N",
        help="Bits that weights may take under --budget bytes=X, of 2 to 8 and 16. Without it, 3 to 6, 8 and 16.",
        rich_help_panel=_WHAT,
    ),
]
RanksOption = Annotated[
    Any,
    typer.Option(
        "--ranks",
        parser=parse_ranks,
        metavar="RULE=X",
        help="A rule instead of a budget: vbmf=0.5 (from the weights), sigma-vbmf=0.5 (from the weights and the data) "
        "or energy=0.99 (the share of each layer's output energy to keep).",
        rich_help_panel=_WHAT,
    ),
]
Holdout = Annotated[
    list[str] | None,
    typer.Option(
        "--holdout",
        metavar="DATA",
        help="Images on which --budget drop=X is measured. Take none of --data and none that the result will be "
        "evaluated on. Labels are used if there are any. Without this option every fifth batch of --data is held out.",
        rich_help_panel=_DATA,
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        parser=parse_method,
        metavar="NAME",
        help=f"{', '.join(METHODS)}. 1×1 convolutions and Linear layers always take svd.",
        autocompletion=lambda: list(METHODS),
        rich_help_panel=_WHAT,
    ),
]
NormName = Annotated[
    str,
    typer.Option(
        "--norm",
        parser=parse_norm,
        metavar="NAME",
        help=f"{', '.join(NORMS)}. Only frobenius needs no data.",
        autocompletion=lambda: list(NORMS),
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
        help="Layers to leave as they are. By default the first convolution; 'none' for no layer.",
        rich_help_panel=_WHAT,
    ),
]
AnswersOption = Annotated[
    Any,
    typer.Option(
        "--answers",
        parser=parse_answers,
        metavar="KIND",
        help="What the model answers: scores (of classes along axis 1; scores=-1 for the last axis), numbers, or boxes "
        "(boxes=0.75 for that overlap). By default it is guessed, and the guess is shown.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace earlier output of the same kind.", rich_help_panel=_WHAT)]
ForceWeights = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Replace earlier output of the same kind, and accept statistics and plans made with other weights.",
        rich_help_panel=_WHAT,
    ),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        metavar="DIR",
        help="Folder for gathered statistics, curves, effects, trials and solved layers. What is found there is not "
        "computed again: after an interruption, the same command goes on where it stopped.",
    ),
]

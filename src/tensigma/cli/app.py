"""All sub-commands under one name."""

from __future__ import annotations

from typing import Annotated

import typer

import tensigma as ts
from tensigma.cli.calibrate import calibrate
from tensigma.cli.command import EXIT_CODES, Command, Group
from tensigma.cli.compress import compress
from tensigma.cli.demo import demo
from tensigma.cli.evaluate import evaluate
from tensigma.cli.export import export
from tensigma.cli.finetune import finetune
from tensigma.cli.inspect import inspect
from tensigma.cli.plan import plan
from tensigma.cli.quantize import quantize
from tensigma.cli.report import report
from tensigma.cli.reproduce import reproduce
from tensigma.cli.stats import stats

app = typer.Typer(
    name="tensigma",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    # Commands show errors themselves, as one message.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tensigma {ts.__version__}")
        raise typer.Exit


@app.callback()
def tensigma_(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Shrink a trained CNN by tensor decomposition that knows the data: no labels,
    no retraining.

    [bold]In one command[/bold]: calibrate, plan, compress, evaluate, write a report.

      tensigma compress torchvision:resnet18 --weights resnet18.pth \\
          --data imagefolder:photos --budget params=0.5 --out small/

    [bold]Step by step[/bold], so that statistics and plans can be kept and changed:

      M="torchvision:resnet18 --weights resnet18.pth"
      tensigma inspect   $M
      tensigma calibrate $M --data imagefolder:photos --out stats/
      tensigma plan      $M --stats stats/ --budget macs=0.4 --out plan.json
      tensigma compress  $M --stats stats/ --plan plan.json --out small/
      tensigma evaluate  $M --compressed small/ --data imagefolder:val

    [bold]Models[/bold] are named torchvision:NAME, timm:NAME, zoo:NAME or
    path/to/file.py:function (the file is executed). Nothing is downloaded: give
    trained weights with --weights (.safetensors, or .pth with tensors only).
    Options may follow, as in 'timm:resnet50?in_chans=1&num_classes=7'.

    [bold]Data[/bold] is named imagefolder:DIR, webdataset:FILE.tar, hf:PATH,
    cifar10:DIR, npz:FILE, digits: or path/to/file.py:function. Options may
    follow, such as size, samples, split, mean and std, as in
    'imagefolder:photos?size=160&samples=500'. Several --data are mixed.
    Labels are used only to measure accuracy and to fine-tune.

    [bold]Exit codes[/bold]: 0 done; 1 failed, and a message says why; 2 wrong usage;
    3 compressed and written, but not evaluated; 130 interrupted.

    Results go to standard output, everything else to standard error. Existing
    output is never replaced without --force.
    """


for command in (inspect, calibrate, plan, compress, evaluate, finetune, quantize, export, report, reproduce, demo):
    app.command(cls=Command, epilog=EXIT_CODES)(command)
app.add_typer(stats, name="stats")

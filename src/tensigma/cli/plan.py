"""``tensigma plan``: which layers, which format, which ranks, before anything is solved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.loading import data_of, model_of
from tensigma.cli.options import (
    AnswersOption,
    BatchSize,
    BitsOption,
    BudgetOption,
    CacheFolder,
    DataNames,
    Device,
    ForceWeights,
    Holdout,
    Layers,
    MaxSamples,
    MethodName,
    ModelName,
    NormName,
    RanksOption,
    Seed,
    Skip,
    Stats,
    Weigh,
    Weights,
    Workers,
)
from tensigma.cli.outputs import claim_file
from tensigma.cli.screen import Screen
from tensigma.cli.sources import Sources, check_choice, recipe_of, saying_how_to_resume, with_bits
from tensigma.cli.tables import plan_table

Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the plan as JSON, to keep it or to edit it.")
]


@command
def plan(
    screen: Screen,
    model: ModelName,
    budget: BudgetOption = None,
    bits: BitsOption = None,
    ranks: RanksOption = None,
    method: MethodName = "auto",
    norm: NormName = "centred",
    layers: Layers = None,
    skip: Skip = None,
    weights: Weights = None,
    stats: Stats = None,
    data: DataNames = None,
    weigh: Weigh = None,
    holdout: Holdout = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    cache: CacheFolder = None,
    device: Device = None,
    seed: Seed = 0,
    out: Out = None,
    force: ForceWeights = False,
    answers: AnswersOption = None,
) -> None:
    """Decide what to do with every layer, and show it. Nothing is compressed yet.

    Give --budget or --ranks, and statistics: --stats, or --data to gather them
    now. Only --norm frobenius needs neither.

    [bold]Examples[/bold]

      tensigma plan torchvision:resnet18 --weights r18.pth --stats stats/ \\
          --budget params=0.5 --out plan.json
      tensigma plan zoo:digits-cnn --weights digits.pth \\
          --norm frobenius --ranks vbmf=0.8 --layers spatial

    The smallest model that loses at most 1 % of the answers, and one that takes
    60 % of the time on this machine:

      tensigma plan torchvision:resnet18 --weights r18.pth --stats stats/ \\
          --budget drop=0.01 --holdout imagefolder:others
      tensigma plan torchvision:resnet18 --weights r18.pth --stats stats/ \\
          --budget latency=0.6

    An eighth of the bytes and half of the multiply-adds, by lower ranks and by
    weights of few bits:

      tensigma plan torchvision:resnet18 --weights r18.pth --stats stats/ \\
          --budget bytes=0.125,macs=0.5 --bits 4,8

    Ranks, bits, methods and norms in the file may be edited before
    'tensigma compress --plan plan.json' carries it out.
    """
    check_choice(budget=budget, ranks=ranks)
    if out is not None:
        claim_file(screen, out, force=force)
    recipe = recipe_of(with_bits(budget, bits), ranks, method, norm, layers, skip, seed, weigh, answers)
    network = model_of(screen, model, weights, device, seed)
    images, held_out = data_of(data, batch_size, workers), data_of(holdout, batch_size, workers)
    sources = Sources(stats, images, held_out, max_samples, seed, device, check=not force, cache=cache)
    with saying_how_to_resume(screen, cache):
        chosen = sources.plan(screen, network, recipe, weigh).plan
    if out is not None and screen.speaks:
        out.parent.mkdir(parents=True, exist_ok=True)
        chosen.save(out)
        screen.note(f"written to {out}")
    facts = {"model": model, "out": None if out is None else str(out), **plan_facts(chosen)}
    screen.result("plan", facts, plan_table(chosen))


def plan_facts(plan: ts.Plan) -> dict[str, Any]:
    """A plan as plain data."""
    return {
        "rate": plan.rate,
        "params": [plan.before.params, plan.after.params],
        "macs": [plan.before.macs, plan.after.macs] if plan.before.macs else None,
        "bytes": [plan.before.bytes, plan.after.bytes],
        "notes": plan.notes,
        "layers": {name: entry.to_json() for name, entry in plan.items()},
    }

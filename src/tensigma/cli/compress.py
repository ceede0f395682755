"""``tensigma compress``: calibrate, plan, compress and evaluate in one go."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from tensigma.cli.command import command, command_line
from tensigma.cli.loading import data_of, first_of, is_untrained, model_of, name_of
from tensigma.cli.options import (
    BatchSize,
    BudgetOption,
    DataNames,
    Device,
    Force,
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
from tensigma.cli.outputs import MODEL, check_folder, is_output
from tensigma.cli.plan import (
    Sources,
    check_absent,
    check_choice,
    check_holdout,
    check_weigh,
    make_plan,
    plan_facts,
    plan_notes,
    recipe_of,
)
from tensigma.cli.progress import duration
from tensigma.cli.screen import Screen
from tensigma.cli.tables import plan_table, report_table, summary_table
from tensigma.compression import Report
from tensigma.compression import compress as carry_out
from tensigma.deployment import save
from tensigma.errors import MissingExtra
from tensigma.evaluation import Evaluation
from tensigma.evaluation import evaluate as measure
from tensigma.files import whole_folder
from tensigma.planning import Plan
from tensigma.report import check_renderer, write_report
from tensigma.running import SetAside, process_group
from tensigma.zoo import may_share

_HOW = "How to fit"
Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="A new folder for the model, plan.json, report.json and report.html."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="A plan to carry out, instead of --budget and --ranks."),
]
EvalData = Annotated[
    list[str] | None,
    typer.Option("--eval-data", metavar="DATA", help="Images to evaluate on; those of --data where not given."),
]
Evaluate = Annotated[bool, typer.Option("--evaluate/--no-evaluate", help="Compare the result with the original.")]
WithLatency = Annotated[bool, typer.Option("--latency", help="Also measure time, on one thread.")]
Sequential = Annotated[
    bool | None,
    typer.Option(
        "--sequential/--no-sequential",
        help="Fit each layer on what the layers compressed before it give, towards what the original gives: better, "
        "and as many runs over the images as there are layers. By default on up to 1,000 images of --data; "
        "--sequential takes all of them.",
        rich_help_panel=_HOW,
        show_default=False,
    ),
]
RefinePasses = Annotated[
    int | None,
    typer.Option(
        "--refine",
        min=1,
        metavar="N",
        help="Then train the small model to answer like the original, without labels: N images of --data in all, round "
        "after round, such as 20000.",
        rich_help_panel=_HOW,
    ),
]
ReestimateBN = Annotated[
    bool,
    typer.Option(
        "--reestimate-bn", help="Then take the statistics of BatchNorm anew from --data.", rich_help_panel=_HOW
    ),
]
CacheFolder = Annotated[
    Path | None,
    typer.Option("--cache", metavar="DIR", help="Keep solutions here, so that no layer is ever solved twice."),
]


@command
def compress(
    screen: Screen,
    context: typer.Context,
    model: ModelName,
    out: Out,
    budget: BudgetOption = None,
    ranks: RanksOption = None,
    plan: PlanFile = None,
    method: MethodName = "auto",
    norm: NormName = "centred",
    layers: Layers = None,
    skip: Skip = None,
    weights: Weights = None,
    data: DataNames = None,
    weigh: Weigh = None,
    eval_data: EvalData = None,
    holdout: Holdout = None,
    stats: Stats = None,
    max_samples: MaxSamples = None,
    batch_size: BatchSize = 64,
    workers: Workers = 1,
    sequential: Sequential = None,
    refine: RefinePasses = None,
    reestimate_bn: ReestimateBN = False,
    evaluate: Evaluate = True,
    latency: WithLatency = False,
    cache: CacheFolder = None,
    device: Device = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Make a smaller model: calibrate, plan, compress, evaluate, write a report.

    Say how small with --budget or --ranks, or give a --plan; say what the model
    sees with --data, or with --stats gathered before. The result is a folder of
    plain layers in safetensors, which tensigma.load puts into the architecture.

    [bold]Examples[/bold]

      tensigma compress torchvision:resnet18 --weights r18.pth \\
          --data imagefolder:photos --eval-data imagefolder:val \\
          --budget params=0.5 --out small/
      tensigma compress zoo:digits-cnn --weights digits.pth \\
          --stats stats/ --budget macs=0.3 --out small/
      tensigma compress torchvision:resnet18 --weights r18.pth \\
          --stats stats/ --plan plan.json --out small/
      tensigma compress torchvision:resnet18 --weights r18.pth \\
          --data imagefolder:photos --holdout imagefolder:others \\
          --eval-data imagefolder:val --budget drop=0.01 --out small/

    With --data layers are fitted one after the other, each making up for those
    before it. --refine adds a few label-free training steps, for high rates:

      tensigma compress torchvision:resnet18 --weights r18.pth \\
          --data imagefolder:photos --budget params=0.2 \\
          --refine 20000 --out small/

    Images of --eval-data that had no part in --data, --stats and --holdout give
    a certificate: a bound on agreement for images nobody has seen.

    The recipe of the paper:

      --method tucker2 --norm sigma --ranks vbmf=0.5 --layers spatial
    """
    check_choice(budget=budget, ranks=ranks, plan=plan)
    if plan is not None:
        check_absent(context, "method", "norm", "layers", "skip", "holdout", "weigh")
    check_folder(out, force=force, format=MODEL)
    ready = None if plan is None else Plan.load(plan)
    recipe = None if plan is not None else recipe_of(budget, ranks, method, norm, layers, skip, seed, weigh)
    page = _can_render(screen)
    network = model_of(screen, model, weights, device, seed)
    images, tried = data_of(data, batch_size, workers), data_of(holdout, batch_size, workers)
    judged = (data_of(eval_data, batch_size, workers) or images) if evaluate else None
    wishes = {"--sequential": sequential, "--refine": refine is not None, "--reestimate-bn": reestimate_bn}
    for wish in (wish for wish, wanted in wishes.items() if wanted and images is None):
        raise typer.BadParameter(f"{wish} reads images, without their labels: name them with --data")
    sources = Sources(stats, images, tried, max_samples, seed, check=not force)
    with process_group(device):
        if recipe is not None:
            check_holdout(recipe, tried)
            check_weigh(weigh, recipe, images if tried is None else tried)
            prepared = sources.prepare(screen, network, recipe, device)
            known, fit_data = prepared.stats, prepared.fit_data
            ready = make_plan(screen, network, recipe, prepared)
            for note in plan_notes(ready):
                screen.note(note)
        else:
            assert ready is not None
            ready.check_model(network, weights=not force)
            known, fit_data = sources.gathered(screen, network, ready, device), first_of(images, max_samples)
        if screen.verbose and not screen.json:
            screen.show(plan_table(ready))
        screen.note(f"compressing {len(ready.compressed)} of {len(ready)} layers")
        if fit_data is None and sequential is None and known is not None:
            screen.note("layers are fitted independently; with --data each would make up for those before it")
        with screen.progress("compressing") as progress:
            small, report = carry_out(
                network,
                ready,
                known,
                data=fit_data,
                sequential="auto" if sequential is None else sequential,
                refine=refine,
                reestimate_bn=reestimate_bn,
                check=not force,
                progress=progress,
                cache=cache,
            )
    if not screen.speaks:
        return
    evaluation = None
    searched_on = name_of(tried) if tried is not None else ready.notes.get("drop", {}).get("data")
    if isinstance(fit_data, SetAside):
        searched_on = fit_data.name
    if judged is not None:
        screen.note(f"evaluating with {name_of(judged)}")
        # What a model was made with proves nothing about other images.
        weighed_on = ready.notes.get("weighing", {}).get("data")
        used = [
            None if known is None else known.data,
            None if images is None else name_of(images),
            searched_on,
            weighed_on,
        ]
        fresh = judged is not images and not any(may_share(name_of(judged), name) for name in used if name)
        with screen.progress("evaluating") as progress:
            evaluation = measure(
                small,
                judged,
                original=network,
                latency=latency,
                max_samples=max_samples if judged is images else None,
                confidence=0.95 if fresh else None,
                progress=progress,
            )
    elif evaluate:
        screen.note("not evaluated: give --data or --eval-data")
    noted = report.with_notes(
        command=command_line(),
        model=model,
        weights=None if weights is None else str(weights),
        untrained=is_untrained(model, weights),
        data=None if known is None else known.data,
        samples=None if known is None else known.samples,
        searched_on=searched_on,
        evaluated_on=None if judged is None else name_of(judged),
        evaluation=None if evaluation is None else evaluation.to_json(),
    )
    result = Result(small, ready, noted, evaluation)
    result.write(out, force=force, page=page)
    result.show(screen, out)


def _can_render(screen: Screen) -> bool:
    """Whether pages can be written here; what is missing is said."""
    try:
        check_renderer()
    except MissingExtra as error:
        screen.warn(f"report.html is left out: {error}")
        return False
    return True


@dataclass(frozen=True)
class Result:
    """Everything that a compression leaves behind."""

    model: nn.Module
    plan: Plan
    report: Report
    evaluation: Evaluation | None

    def write(self, out: Path, *, force: bool, page: bool = True, comparison: Any = ()) -> None:
        """The archive, the plan and the reports in one folder, all of it or nothing."""
        with whole_folder(out, force=force, is_ours=lambda folder: is_output(folder, MODEL)) as place:
            save(self.model, place)
            self.plan.save(place / "plan.json")
            text = json.dumps(self.report.to_json(), indent=1, ensure_ascii=False)
            (place / "report.json").write_text(text + "\n", encoding="utf-8")
            if page:
                write_report(self.report, place / "report.html", evaluation=self.evaluation, comparison=comparison)

    def show(self, screen: Screen, out: Path) -> None:
        """The figures, and where everything is."""
        data = {
            "out": str(out),
            "report": self.report.to_json(),
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
            "plan": plan_facts(self.plan),
        }
        layers = report_table(self.report, dense=screen.verbose)
        screen.result("compress", data, layers, summary_table(self.report, self.evaluation))
        n_dense = len(self.report.layers) - len(self.report.compressed)
        if n_dense and not screen.verbose:
            screen.note(
                f"{n_dense} of {len(self.report.layers)} layers stay as they are; tensigma report {out} tells why"
            )
        screen.note(f"compressed in {duration(self.report.seconds)}; written to {out}")

"""``tensigma compress``: calibrate, plan, compress and evaluate in one command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import tensigma as ts
from tensigma.cli.command import INCOMPLETE, command, command_line, message_of
from tensigma.cli.exporting import Exporting
from tensigma.cli.judging import judged, runtime_of, speed_of
from tensigma.cli.loading import Network, data_of, is_untrained, model_of, name_of
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
    Memory,
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
from tensigma.cli.outputs import MODEL, claim_folder, is_output, to_json, write_text
from tensigma.cli.plan import plan_facts
from tensigma.cli.progress import duration
from tensigma.cli.screen import Screen
from tensigma.cli.sources import (
    Planned,
    Sources,
    check_absent,
    check_choice,
    check_resumable,
    recipe_of,
    saying_how_to_resume,
    with_bits,
)
from tensigma.cli.tables import plan_table, report_table, summary_table
from tensigma.errors import MissingExtra
from tensigma.files import seal, whole_folder

_HOW = "How to fit"
Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="New folder for the model, plan.json, report.json and report.html."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="A plan to carry out, instead of --budget or --ranks."),
]
EvalData = Annotated[
    list[str] | None,
    typer.Option("--eval-data", metavar="DATA", help="Images to evaluate on; by default those of --data."),
]
Evaluate = Annotated[bool, typer.Option("--evaluate/--no-evaluate", help="Compare the result with the original.")]
WithLatency = Annotated[bool, typer.Option("--latency", help="Also measure latency, on one thread.")]
Export = Annotated[
    bool,
    typer.Option(
        "--export",
        help="Also write DIR/model.onnx, for other runtimes, with weights of few bits as integers. 'tensigma export' "
        "does so later, and has more to choose.",
    ),
]
Sequential = Annotated[
    bool | None,
    typer.Option(
        "--sequential/--no-sequential",
        help="Fit the layers one after another, each on the outputs of the compressed layers before it, so that it "
        "corrects their errors: more accurate, but slower. By default on up to 2,000 images of --data; --sequential "
        "takes all of them.",
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
        help="Then train the small model, without labels, to answer like the original: on N images of --data in total, "
        "such as 20000, going through them as often as needed.",
        rich_help_panel=_HOW,
    ),
]
SeeViews = Annotated[
    bool,
    typer.Option(
        "--views",
        help="With --refine, train on random crops, mirror images and mixtures of the images: where they are few, they "
        "themselves have little left to teach.",
        rich_help_panel=_HOW,
    ),
]
ReestimateBN = Annotated[
    bool,
    typer.Option("--reestimate-bn", help="Then estimate BatchNorm statistics again on --data.", rich_help_panel=_HOW),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on where the same command stopped. It is the same command again: --cache alone does that, and this "
        "option only refuses a --cache that holds nothing.",
    ),
]


@command
def compress(
    screen: Screen,
    context: typer.Context,
    model: ModelName,
    out: Out,
    budget: BudgetOption = None,
    bits: BitsOption = None,
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
    memory: Memory = None,
    sequential: Sequential = None,
    refine: RefinePasses = None,
    views: SeeViews = False,
    reestimate_bn: ReestimateBN = False,
    evaluate: Evaluate = True,
    latency: WithLatency = False,
    export: Export = False,
    cache: CacheFolder = None,
    resume: Resume = False,
    device: Device = None,
    seed: Seed = 0,
    force: ForceWeights = False,
    answers: AnswersOption = None,
) -> None:
    """Make a smaller model: calibrate, plan, compress, evaluate, write a report.

    Say how small with --budget or --ranks, or give a --plan. Name images with
    --data, or statistics gathered before with --stats. The result is a folder:
    plain layers in safetensors, which tensigma.load puts into the architecture.
    A model that comes as an ONNX file goes as one: DIR/model.onnx has the same
    graph, in which compressed layers are replaced.

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
      tensigma compress model.onnx --data imagefolder:photos \\
          --budget macs=0.5 --out small/
      tensigma compress torchvision:resnet18 --weights r18.pth \\
          --data imagefolder:photos --budget bytes=0.125 \\
          --export --out small/

    With --data, layers are fitted one after another, each correcting the errors
    of those before it. For high rates, --refine adds training without labels:

      tensigma compress torchvision:resnet18 --weights r18.pth \\
          --data imagefolder:photos --budget params=0.2 \\
          --refine 20000 --out small/

    If none of the images of --eval-data are in --data, --stats or --holdout, the
    result gets a certificate: a lower bound on its agreement with the original
    on new images of the same kind.

    The recipe of the paper:

      --method tucker2 --norm sigma --ranks vbmf=0.5 --layers spatial
    """
    check_choice(budget=budget, ranks=ranks, plan=plan)
    if plan is not None:
        check_absent(context, "bits", "method", "norm", "layers", "skip", "holdout", "weigh")
    if resume:
        check_resumable(cache)
    claim_folder(screen, out, force=force, format=MODEL)
    plan_or_recipe = (
        recipe_of(with_bits(budget, bits), ranks, method, norm, layers, skip, seed, weigh, answers)
        if plan is None
        else ts.Plan.load(plan)
    )
    page = _can_render(screen)
    network = model_of(screen, model, weights, device, seed)
    images, held_out = data_of(data, batch_size, workers), data_of(holdout, batch_size, workers)
    judges = (data_of(eval_data, batch_size, workers) or images) if evaluate else None
    exporting = Exporting.of(network, model, judges or images) if export else None
    fitting = Fitting(
        sequential, refinement(refine, views, seed), reestimate_bn, cache, memory, check=not force, answers=answers
    )
    fitting.check_images(images)
    if refine is not None:
        ts.running.check_gradients(network, "--refine", ts.compression.WITHOUT_REFINEMENT)
    sources = Sources(stats, images, held_out, max_samples, seed, device, check=not force, memory=memory, cache=cache)
    with saying_how_to_resume(screen, cache), ts.running.process_group(device):
        if isinstance(plan_or_recipe, ts.Plan):
            planned = sources.load(screen, network, plan_or_recipe)
        else:
            planned = sources.plan(screen, network, plan_or_recipe, weigh)
        small, report = fitting.carry_out(screen, network, planned)
    if not screen.speaks:
        return
    runtime = runtime_of(screen, network, small, report)
    noted = report.with_notes(
        command=command_line(),
        model=model,
        weights=None if weights is None else str(weights),
        untrained=is_untrained(model, weights),
        data=None if planned.stats is None else planned.stats.data,
        samples=None if planned.stats is None else planned.stats.samples,
        searched_on=planned.searched_on,
        **runtime,
    )
    result = Result(small, planned.plan.with_notes(**runtime), noted, None)
    # Before it is evaluated, which may fail: what took an hour to make is not lost.
    result = result.written(out, network, force=force)
    exported = exporting is None or exporting.write(screen, small, out)
    if evaluate and judges is None:
        screen.note("not evaluated; to evaluate, name images with --data or --eval-data")
    most = max_samples if judges is images else None
    try:
        evaluation = judged(screen, small, network, judges, planned, latency=latency, max_samples=most, answers=answers)
        timed_on = judges if planned.fit_data is None else planned.fit_data
        speed = None if latency else speed_of(screen, network, small, timed_on)
    except Exception as error:
        result.write_report(out, page=page)
        screen.error(f"the compressed model is in {out}, but it could not be evaluated: {message_of(screen, error)}")
        raise typer.Exit(INCOMPLETE) from None
    except KeyboardInterrupt:
        screen.note(f"the compressed model is in {out}, but it was not evaluated")
        raise
    if evaluation is not None:
        evaluated = result.report.with_notes(evaluated_on=name_of(judges), evaluation=evaluation.to_json())
        result = Result(small, result.plan, evaluated, evaluation)
    if speed is not None:
        result = replace(result, report=result.report.with_notes(speed=speed))
    result.write_report(out, page=page)
    result.show(screen, out)
    if not exported:
        raise typer.Exit(INCOMPLETE)


def _can_render(screen: Screen) -> bool:
    """Whether report.html can be written; a warning says what is missing."""
    try:
        ts.report.check_renderer()
    except MissingExtra as error:
        screen.warn(f"report.html is not written: {error}")
        return False
    return True


def refinement(passes: int | None, views: bool, seed: int) -> ts.Refine | None:
    """What ``--refine`` and ``--views`` ask for."""
    if passes is None:
        if views:
            raise typer.BadParameter("--views says what --refine trains on; give --refine N too, or leave it out")
        return None
    return ts.Refine(passes=passes, augment=ts.Views(seed=seed) if views else None)


@dataclass(frozen=True)
class Fitting:
    """How a plan is carried out."""

    sequential: bool | None
    refine: ts.Refine | None
    reestimate_bn: bool
    cache: Path | None
    memory: int | None
    check: bool
    answers: Any = None

    def check_images(self, images: Any) -> None:
        """Refuse options that need images if there are none."""
        options = {
            "--sequential": self.sequential,
            "--refine": self.refine is not None,
            "--reestimate-bn": self.reestimate_bn,
        }
        for option, wanted in options.items():
            if wanted and images is None:
                raise typer.BadParameter(f"{option} needs images, without labels; name them with --data")

    def carry_out(self, screen: Screen, network: Network, planned: Planned) -> tuple[Network, ts.Report]:
        """The smaller model and the report."""
        plan = planned.plan
        if screen.verbose and not screen.json:
            screen.show(plan_table(plan))
        screen.note(f"compressing {len(plan.compressed)} of {len(plan)} layers")
        if planned.fit_data is None and self.sequential is None and planned.stats is not None:
            screen.note("layers are fitted independently; with --data each would correct the errors of those before it")
        with screen.progress("compressing") as progress:
            return ts.compress(
                network,
                plan,
                planned.stats,
                data=planned.fit_data,
                sequential="auto" if self.sequential is None else self.sequential,
                refine=self.refine,
                reestimate_bn=self.reestimate_bn,
                answers=self.answers,
                check=self.check,
                progress=progress,
                cache=self.cache,
                memory=self.memory,
            )


@dataclass(frozen=True)
class Result:
    """Everything that a compression produces."""

    model: Network
    plan: ts.Plan
    report: ts.Report
    evaluation: ts.Evaluation | None

    def written(self, out: Path, original: Network, *, force: bool) -> Result:
        """Write the model, the plan and the report into one folder, completely or not at all.

        Returns the result with a note of what the weights take on disk, those of the original unpacked.
        """
        with whole_folder(out, force=force, is_ours=lambda folder: is_output(folder, MODEL)) as place:
            ts.save(self.model, place)
            sizes = {"before": ts.deployment.plain_bytes(original), "after": ts.deployment.stored_bytes(place)}
            noted = replace(self, report=self.report.with_notes(file_bytes=sizes))
            self.plan.save(place / "plan.json")
            noted.write_report(place, page=False)
        return noted

    def write_report(self, place: Path, *, page: bool) -> None:
        """Write or replace the reports in a folder."""
        write_text(place / "report.json", to_json(seal(self.report.to_json())))
        if page:
            ts.write_report(self.report, place / "report.html", evaluation=self.evaluation)

    def show(self, screen: Screen, out: Path) -> None:
        """Show the figures, and where the files are."""
        data = {
            "out": str(out),
            "report": self.report.to_json(),
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
            "plan": plan_facts(self.plan),
        }
        layers = report_table(self.report, dense=screen.verbose)
        screen.result("compress", data, layers, summary_table(self.report, self.evaluation))
        n_layers = len(self.report.layers)
        n_dense = n_layers - len(self.report.compressed)
        if n_dense and not screen.verbose:
            screen.note(f"{n_dense} of {n_layers} layers are not compressed; 'tensigma report {out}' says why")
        if self.evaluation is not None and self.evaluation.answers:
            if self.evaluation.answers != self.plan.compared:  # which was said when the plan was made
                screen.note(f"compared: {self.evaluation.answers}")
            if self.evaluation.certificate is not None:
                screen.note(str(self.evaluation.certificate))
        screen.note(f"compressed in {duration(self.report.seconds)}; written to {out}")

"""Past the paper: one budget for the whole model instead of ranks from the weights, and what each ingredient adds.

Options of the config::

    [options.rates]                        # in parameters, by model
    resnet20 = [2.05, 3.5, 7.15]

    [options.macs]                         # in multiply-adds, by model
    resnet50 = [1.5, 2.0]

    [[options.variants]]
    name = "Σ + VBMF (the paper)"
    ranks = "vbmf"                         # or "sigma-vbmf", "balf" or "budget"
    method = "tucker2"
    norm = "sigma"
    layers = "spatial"
    models = ["resnet20"]                  # where not all
    rates = { resnet20 = [3.5] }           # where not all, by model; likewise macs
    sequential = false
    reestimate_bn = false
    weigh = "effects"                      # weights="auto" of tensigma.plan; a number is a power of the weights that
                                           # tensigma.planning.sensitivities finds from gradients, 0 for none
    refine = { resnet20 = 40000 }          # samples passed, by model

    [options.refine_batch]                 # samples in a step of refinement, by model; 50 where it is not said
    resnet50 = 16

A model with a ``runtime`` is judged there: accuracy, agreement on the same images, and the time of one image.
Rules have no budget: their ratio α is chosen so that the rate comes as near to the wanted one as it can from below,
which is to their advantage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration import Calibration
from tensigma.compression import Refine, Report, blocks_around, compress, reestimate_bn_, refine_
from tensigma.errors import InputError
from tensigma.experiments.beyond_tables import table_by_rate, tables_by_measure
from tensigma.experiments.deployed import bench_of
from tensigma.experiments.hits import unpack_hits
from tensigma.experiments.kinds import Cell, Cells, facts_of
from tensigma.experiments.rates import Planner
from tensigma.experiments.settings import Config, Study
from tensigma.experiments.variants import Target, Variant
from tensigma.experiments.workshop import BATCH, Workshop
from tensigma.report import Panel, Table
from tensigma.running import alike

#: Settings of a cell that say what follows the closed form, or how the result is judged.
_AFTERWARDS = ("passes", "batch", "reestimate_bn", "evaluation", "runtime")


class Beyond:
    """Rows are variants, columns are rates; with a runtime, columns are figures of one compressed model."""

    def __init__(self) -> None:
        self._planners: dict[str, Planner] = {}

    def check(self, config: Config) -> None:
        where = f"{config.name} ({config.config})"
        for study in config.study:
            if not self._targets(config, study) or study.source is None or study.evaluation is None:
                raise InputError(f"{where}: {study.model} needs options.rates, a source and an evaluation")
        self._variants(config)

    def cells(self, config: Config, seed: int) -> list[Cell]:
        found = []
        # The quick form is to exercise the code, which one rate of one model does.
        studies = config.study[:1] if config.quick else config.study
        for index, study in enumerate(studies):
            base = facts_of(config, study) | {"source": config.sources[study.source or ""], "seed": seed}
            found.append(Cell(key=f"{config.title_of(study)} | original", study=index, settings=base))
            for target in self._targets(config, study):
                for variant in self._variants(config, study):
                    if not variant.wants(study.model, target):
                        continue
                    settings = base | {"rate": target.rate, **variant.settings}
                    settings |= {"passes": variant.refine.get(study.model)}
                    if study.model in variant.refine and study.model in config.options.get("refine_batch", {}):
                        settings["batch"] = config.options["refine_batch"][study.model]
                    settings |= {} if target.measure == "params" else {"measure": target.measure}
                    key = f"{config.title_of(study)} | {variant.name} | {target}"
                    found.append(Cell(key=key, study=index, settings=settings))
        return found

    def run(self, config: Config, cell: Cell, workshop: Workshop) -> dict[str, Any]:
        study = config.study[cell.study]
        about = config.models[study.model]
        model = workshop.model(study.model, about, config.sources)
        assert study.source is not None
        if "rate" not in cell.settings:
            return self._judged(config, study, model, model, workshop)
        variant = next(each for each in self._variants(config, study) if cell.key.split(" | ")[1] == each.name)
        seed = cell.settings["seed"]
        stats = workshop.stats(study.model, about, config.sources, study.source, seed=seed, fisher=None)
        data = workshop.data(study.source, config.sources[study.source], seed=seed)
        target = Target(rate=cell.settings["rate"], measure=cell.settings.get("measure", "params"))
        made_from = {key: value for key, value in cell.settings.items() if key not in _AFTERWARDS}
        # With the data that the command line may have put in place of that of the config.
        made_from["data"] = workshop.facts_of(study.source, config.sources[study.source])
        small, report = self._closed_form(variant, made_from, model, stats, target, data, workshop)
        passes, facts = cell.settings["passes"], {}
        if passes is not None:
            passes = passes if workshop.limit is None else 2 * workshop.limit
            augment = _Moved(**config.options["augment"][study.model], seed=seed)
            blocks = blocks_around(model, [layer.name for layer in report.compressed])
            settings = Refine(passes=passes, augment=augment)
            spec, batch = config.sources[study.source], cell.settings.get("batch", BATCH)
            batches = workshop.data(study.source, spec, seed=seed, batch_size=batch)
            facts = refine_(small, model, batches, settings, blocks=blocks, progress=workshop.report)
        if variant.reestimate_bn:
            reestimate_bn_(small, data)
        # Effects are many, and the settings of a cell name its data without the place of this machine.
        left_out = ("effects", "data")
        weighing = {key: value for key, value in report.notes.get("weighing", {}).items() if key not in left_out}
        assert report.after.macs is not None
        assert report.before.macs is not None
        return {
            "rate": report.rate,
            "macs_rate": report.before.macs / report.after.macs,
            "params": report.after.params,
            "macs": report.after.macs,
            "formats": dict(Counter(layer.method for layer in report.compressed)),
            "sequential": report.notes["sequential"],
            "compression_seconds": round(report.seconds, 1),
            **({"weighing": weighing} if weighing else {}),
            **({"refinement": _plain(facts)} if facts else {}),
            **self._judged(config, study, small, model, workshop),
        }

    def _closed_form(
        self,
        variant: Variant,
        made_from: Mapping[str, Any],
        model: nn.Module,
        stats: Calibration,
        target: Target,
        data: Any,
        workshop: Workshop,
    ) -> tuple[nn.Module, Report]:
        """The model before anything is trained or re-estimated, which variants share."""

        def make() -> tuple[nn.Module, Report]:
            made = self._planner(variant, model, stats, data, workshop).plan(target)
            sequential: Any = "auto" if variant.sequential else False
            cache, report = workshop.solutions, workshop.report
            return compress(model, made, stats, data=data, sequential=sequential, cache=cache, progress=report)

        return workshop.compressed(made_from, model, make)

    def _planner(
        self, variant: Variant, model: nn.Module, stats: Calibration, data: Any, workshop: Workshop
    ) -> Planner:
        """One for each way of planning, and only for the model that is being compressed."""
        self._planners = {key: each for key, each in self._planners.items() if each.stats is stats}
        key = repr([variant.settings[name] for name in ("ranks", "method", "norm", "layers", "weigh")])
        if key not in self._planners:
            layers = workshop.layers_of(model, variant.layers)
            quick, cache = workshop.limit is not None, workshop.solutions
            self._planners[key] = Planner(variant, model, stats, data, layers, quick=quick, cache=cache)
        return self._planners[key]

    def tables(self, config: Config, cells: Cells) -> list[Table]:
        tables: list[Table] = []
        for study in config.study:
            if f"{config.title_of(study)} | original" not in cells:
                continue
            variants, targets = self._variants(config, study), self._targets(config, study)
            if config.models[study.model].runtime is None:
                tables.append(table_by_rate(config.title_of(study), variants, targets, cells))
            else:
                tables += tables_by_measure(config.title_of(study), variants, targets, cells)
        return tables

    def panels(self, config: Config, cells: Cells) -> list[Panel]:
        return []

    def _targets(self, config: Config, study: Study) -> list[Target]:
        targets = [Target(rate=rate) for rate in config.options.get("rates", {}).get(study.model, ())]
        targets += [Target(rate=rate, measure="macs") for rate in config.options.get("macs", {}).get(study.model, ())]
        return targets[:1] if config.quick else targets

    def _variants(self, config: Config, study: Study | None = None) -> list[Variant]:
        where = f"{config.name} ({config.config})"
        found = [Variant.of(table, where) for table in config.options.get("variants", ())]
        if not found:
            raise InputError(f"{where}: options.variants is missing")
        return [each for each in found if study is None or each.models is None or study.model in each.models]

    def _judged(
        self, config: Config, study: Study, model: nn.Module, original: nn.Module, workshop: Workshop
    ) -> dict[str, Any]:
        """Accuracy on the evaluation and agreement with the original.

        Agreement is on images that are held out from everything else or, with a runtime, on those of the evaluation.
        """
        assert study.evaluation is not None
        spec = config.sources[study.evaluation]
        if config.models[study.model].runtime is not None:
            return bench_of(original, workshop, study.evaluation, spec).figures(model)
        hits = workshop.hits(model, study.evaluation, spec)
        right = unpack_hits(hits)
        found = {"top1": float(right.mean()), "images": len(right), "hits": hits}
        held = config.options.get("held_out", {}).get(study.model)
        if held is not None:
            found["agreement"] = _agreement(model, original, workshop.data(held, config.sources[held]))
        return found


@torch.inference_mode()
def _agreement(model: nn.Module, original: nn.Module, data: Any) -> float:
    same, samples = 0, 0
    for images, _ in data:
        scores, wanted = model(images), original(images)
        same += int(alike(scores, wanted).sum())
        samples += len(images)
    return same / samples


class _Moved:
    """Batches mirrored at random and moved by up to ``shift`` pixels, with zeros for what comes in."""

    def __init__(self, *, shift: int, seed: int) -> None:
        self._shift, self._generator = shift, torch.Generator().manual_seed(seed)

    def __call__(self, x: Tensor) -> Tensor:
        if torch.rand((), generator=self._generator) < 0.5:
            x = x.flip(-1)
        if not self._shift:
            return x
        down, right = torch.randint(0, 2 * self._shift + 1, (2,), generator=self._generator).tolist()
        padded = nn.functional.pad(x, [self._shift] * 4)
        return padded[..., down : down + x.shape[-2], right : right + x.shape[-1]]


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in facts.items()}

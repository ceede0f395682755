"""Past the paper: one budget for the whole model instead of ranks from the weights, and what each ingredient adds.

Options of the config::

    [options.rates]                        # by model
    resnet20 = [2.05, 3.5, 7.15]

    [[options.variants]]
    name = "Σ + VBMF (the paper)"
    ranks = "vbmf"                         # or "sigma-vbmf", or "budget"
    method = "tucker2"
    norm = "sigma"
    layers = "spatial"
    models = ["resnet20"]                  # where not all
    rates = { resnet20 = [3.5] }           # where not all, by model
    sequential = false
    reestimate_bn = false
    weigh = "effects"                      # weights="auto" of tensigma.plan; a number is a power of the weights that
                                           # tensigma.planning.sensitivities finds from gradients, 0 for none
    refine = { resnet20 = 40000 }          # samples passed, by model

Rules have no budget: their ratio α is chosen so that the rate comes as near to the wanted one as it can from below,
which is to their advantage.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from tensigma.calibration import Calibration
from tensigma.compression import Refine, Report, blocks_around, compress, reestimate_bn_, refine_
from tensigma.errors import InputError
from tensigma.experiments.hits import unpack_hits
from tensigma.experiments.kinds import Cell, Cells, facts_of
from tensigma.experiments.settings import Config, Study
from tensigma.experiments.workshop import Workshop
from tensigma.planning import VBMF, Params, Plan, SigmaVBMF, plan, sensitivities
from tensigma.report import Panel, Table
from tensigma.running import alike

_RULES = {"vbmf": VBMF, "sigma-vbmf": SigmaVBMF}
_STEPS = 13


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of compressing."""

    name: str
    ranks: str
    method: str
    norm: str
    layers: str
    models: list[str] | None = None
    rates: Mapping[str, list[float]] = field(default_factory=dict)
    sequential: bool = False
    reestimate_bn: bool = False
    weigh: float | str = 0.0
    refine: Mapping[str, int] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """What a result depends on: all but what it is called and where it is wanted."""
        return {key: value for key, value in vars(self).items() if key not in ("name", "models", "rates", "refine")}

    @classmethod
    def of(cls, table: Mapping[str, Any], where: str) -> Variant:
        known = {each.name for each in fields(cls)}
        unknown = [key for key in table if key not in known]
        if unknown:
            raise InputError(f"{where}: a variant has {unknown[0]!r}; it takes {', '.join(sorted(known))}")
        try:
            made = cls(**table)
        except TypeError as error:
            raise InputError(f"{where}: a variant is incomplete: {error}") from None
        if isinstance(made.weigh, str) and made.weigh != "effects":
            raise InputError(f"{where}: weigh is 'effects' or a power of gradients, got {made.weigh!r}")
        if made.ranks not in (*_RULES, "budget"):
            raise InputError(f"{where}: ranks {made.ranks!r} are unknown; there are {', '.join(_RULES)} and budget")
        return made


class Beyond:
    """Rows are variants, columns are rates."""

    def __init__(self) -> None:
        self._last: tuple[Any, tuple[nn.Module, Report]] | None = None

    def check(self, config: Config) -> None:
        where = f"{config.name} ({config.config})"
        rates = config.options.get("rates", {})
        for study in config.study:
            if not rates.get(study.model) or study.source is None or study.evaluation is None:
                raise InputError(f"{where}: {study.model} needs options.rates, a source and an evaluation")
        self._variants(config)

    def cells(self, config: Config, seed: int) -> list[Cell]:
        found = []
        # The quick form is to exercise the code, which one rate of one model does.
        studies = config.study[:1] if config.quick else config.study
        for index, study in enumerate(studies):
            base = facts_of(config, study) | {"source": config.sources[study.source or ""], "seed": seed}
            found.append(Cell(key=f"{config.title_of(study)} | original", study=index, settings=base))
            for rate in self._rates(config, study):
                for variant in self._variants(config, study):
                    if rate not in variant.rates.get(study.model, [rate]):
                        continue
                    settings = base | {"rate": rate, **variant.settings, "passes": variant.refine.get(study.model)}
                    key = f"{config.title_of(study)} | {variant.name} | {rate:g}"
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
        rate, passes = cell.settings["rate"], cell.settings["passes"]
        small, report = self._closed_form(variant, model, stats, rate, data, workshop)
        facts: dict[str, Any] = {}
        if passes is not None:
            passes = passes if workshop.limit is None else 2 * workshop.limit
            augment = _Moved(**config.options["augment"][study.model], seed=seed)
            blocks = blocks_around(model, [layer.name for layer in report.compressed])
            settings = Refine(passes=passes, augment=augment)
            facts = refine_(small, model, data, settings, blocks=blocks, progress=workshop.report)
        if variant.reestimate_bn:
            reestimate_bn_(small, data)
        weighing = {key: value for key, value in report.notes.get("weighing", {}).items() if key != "effects"}
        assert report.after.macs is not None
        assert report.before.macs is not None
        return {
            "rate": report.rate,
            "macs_rate": report.before.macs / report.after.macs,
            "formats": dict(Counter(layer.method for layer in report.compressed)),
            "sequential": report.notes["sequential"],
            "compression_seconds": round(report.seconds, 1),
            **({"weighing": weighing} if weighing else {}),
            **({"refinement": _plain(facts)} if facts else {}),
            **self._judged(config, study, small, model, workshop),
        }

    def _closed_form(
        self, variant: Variant, model: nn.Module, stats: Calibration, rate: float, data: Any, workshop: Workshop
    ) -> tuple[nn.Module, Report]:
        """A copy of the model before anything is trained or re-estimated, which variants in a row may share."""
        key = (id(model), rate, variant.settings | {"reestimate_bn": None})
        if self._last is None or self._last[0] != key:
            made = self._plan(variant, model, stats, rate, data, workshop)
            sequential: Any = "auto" if variant.sequential else False
            cache, report = workshop.solutions, workshop.report
            done = compress(model, made, stats, data=data, sequential=sequential, cache=cache, progress=report)
            self._last = key, done
        small, found = self._last[1]
        return copy.deepcopy(small), found

    def tables(self, config: Config, cells: Cells) -> list[Table]:
        tables = []
        for study in config.study:
            title = config.title_of(study)
            original = cells.get(f"{title} | original")
            if original is None:
                continue
            rates = sorted(self._rates(config, study))
            rows = []
            for variant in self._variants(config, study):
                found = [cells.get(f"{title} | {variant.name} | {rate:g}") for rate in rates]
                if any(found):
                    rows.append([variant.name, *(_shown(cell, rate) for cell, rate in zip(found, rates, strict=True))])
            top1 = 100 * original["top1"]
            head = ["", *(f"rate {rate:g}" for rate in rates)]
            tables.append(Table(title=f"{title}: {top1:.1f} % before compression", columns=head, rows=rows))
        return tables

    def panels(self, config: Config, cells: Cells) -> list[Panel]:
        return []

    def _rates(self, config: Config, study: Study) -> list[float]:
        rates = config.options["rates"][study.model]
        return rates[:1] if config.quick else rates

    def _variants(self, config: Config, study: Study | None = None) -> list[Variant]:
        where = f"{config.name} ({config.config})"
        found = [Variant.of(table, where) for table in config.options.get("variants", ())]
        if not found:
            raise InputError(f"{where}: options.variants is missing")
        return [each for each in found if study is None or each.models is None or study.model in each.models]

    def _plan(
        self, variant: Variant, model: nn.Module, stats: Calibration, rate: float, data: Any, workshop: Workshop
    ) -> Plan:
        common: dict[str, Any] = {
            "method": variant.method,
            "norm": variant.norm,
            "layers": workshop.layers_of(model, variant.layers),
        }
        if variant.ranks == "budget":
            if workshop.limit is not None:
                rate = 1.02  # the few layers of the quick form have little to give
            weights: Any = None
            if isinstance(variant.weigh, str):
                weights = "auto"
            elif variant.weigh:
                weights = sensitivities(model, data, power=variant.weigh)
            return plan(model, stats, budget=Params(1 / rate), weights=weights, data=data, **common)
        rule = _RULES[variant.ranks]

        def attempt(alpha: float) -> Plan:
            return plan(model, stats, ranks=rule(alpha), saving="none", **common)

        # Beyond 1 the rule takes ranks below those of VBMF.
        low, high = 0.0, 2.0
        best = attempt(high)
        if best.rate <= rate:
            return best
        best = None  # type: ignore[assignment]
        for _ in range(_STEPS if workshop.limit is None else 2):
            middle = (low + high) / 2
            made = attempt(middle)
            if made.rate <= rate:
                low, best = middle, made
            else:
                high = middle
        return best or attempt(high)

    def _judged(
        self, config: Config, study: Study, model: nn.Module, original: nn.Module, workshop: Workshop
    ) -> dict[str, Any]:
        """Accuracy on the evaluation, and agreement on images that are held out from everything else."""
        assert study.evaluation is not None
        hits = workshop.hits(model, study.evaluation, config.sources[study.evaluation])
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
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in facts.items()}


def _shown(cell: Mapping[str, Any] | None, rate: float) -> str:
    if cell is None:
        return "–"
    own = "" if abs(cell["rate"] / rate - 1) < 0.01 else f" at {cell['rate']:.2f}"
    agreement = f" ({100 * cell['agreement']:.1f})" if "agreement" in cell else ""
    return f"{100 * cell['top1']:.1f}{agreement}{own}"

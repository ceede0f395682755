"""Accuracy of compressed models over rank parameters, ways of compressing, and seeds.

A cell is one compressed model: solved, and where its series says so fine-tuned or quantized, then evaluated.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensigma.compression import compress
from tensigma.deployment import OnnxModel, quantize
from tensigma.errors import InputError
from tensigma.experiments.deployed import bench_of
from tensigma.experiments.hits import advantage, unpack_hits
from tensigma.experiments.kinds import Cell, Cells, facts_of
from tensigma.experiments.settings import Config, Series, Study
from tensigma.experiments.workshop import Workshop, state_hash
from tensigma.finetuning import finetune
from tensigma.planning import VBMF, plan
from tensigma.report import Line, Panel, Table
from tensigma.solving import norm_of

ORIGINAL = "original"
# Batches whose images are put in random order together while fine-tuning.
_MIX = 16


class Accuracy:
    """Rows are rank parameters, columns are series."""

    def check(self, config: Config) -> None:
        for study in config.study:
            if study.evaluation is None or not study.alphas:
                raise InputError(f"{config.name} ({config.config}): every study needs evaluation and alphas")
        if not config.series:
            raise InputError(f"{config.name} ({config.config}): there is no [[series]]")

    def cells(self, config: Config, seed: int) -> list[Cell]:
        found = []
        for index, study in enumerate(config.study):
            facts = facts_of(config, study)
            title = config.title_of(study)
            found.append(Cell(key=f"{title} | {ORIGINAL}", study=index, settings=facts))
            for alpha in study.alphas:
                for series in config.series_of(study):
                    for number in _seeds(config, study, series):
                        settings = facts | _settings(config, series) | {"alpha": alpha, "seed": seed + number}
                        key = f"{title} | α={alpha:g} | {series.name} | seed {seed + number}"
                        found.append(Cell(key=key, study=index, settings=settings))
        return found

    def run(self, config: Config, cell: Cell, workshop: Workshop) -> dict[str, Any]:
        study = config.study[cell.study]
        model = workshop.model(study.model, config.models[study.model], config.sources)
        assert study.evaluation is not None
        spec = config.sources[study.evaluation]
        runtime = config.models[study.model].runtime

        def hits_of(network: nn.Module) -> str:
            assert study.evaluation is not None
            if runtime is None:
                return workshop.hits(network, study.evaluation, spec)
            return bench_of(model, workshop, study.evaluation, spec).figures(network)["hits"]

        n_params = sum(parameter.numel() for parameter in model.parameters())
        if "alpha" not in cell.settings:
            hits = hits_of(model)
            return {"series": ORIGINAL, "rate": 1.0, "params": n_params, **_accuracy(hits)}
        name = cell.settings["series"]
        series = next(each for each in config.series_of(study) if each.name == name)
        alpha, seed = cell.settings["alpha"], cell.settings["seed"]
        small, found = _compressed(config, study, series, alpha, seed, workshop)
        if series.finetune:
            found["finetuning"] = _finetune_(config, small, seed, workshop)
        if series.precision == "fp32":
            hits = hits_of(small)
        else:
            quantized = _quantized(config, study, series, small, workshop)
            hits, found["bytes"] = quantized["hits"], quantized["bytes"]
        return {"series": name, "alpha": alpha, "seed": seed, **found, **_accuracy(hits)}

    def tables(self, config: Config, cells: Cells) -> list[Table]:
        tables = []
        for study in config.study:
            title = config.title_of(study)
            series = config.series_of(study)
            original = cells.get(f"{title} | {ORIGINAL}")
            rows = []
            for alpha in study.alphas:
                groups = [_matching(cells, title, alpha, each) for each in series]
                rates = [cell["rate"] for group in groups for cell in group]
                if rates:
                    reference = _reference(config, series, groups)
                    entries = [_spread(group) + _behind(group, reference) for group in groups]
                    # A centred norm adds a few biases; the largest rate is that without them.
                    rows.append([f"{alpha:g}", f"{max(rates):.2f}", *entries])
            if not rows and original is None:
                continue
            head = title if original is None else f"{title}: {100 * original['top1']:.2f} % before compression"
            columns = ["α", "rate", *(each.name for each in series)]
            tables.append(Table(title=head, columns=columns, rows=rows, notes=_order(cells, title, study, series)))
        return tables

    def panels(self, config: Config, cells: Cells) -> list[Panel]:
        panels = []
        for study in config.study:
            title = config.title_of(study)
            lines = []
            for series in config.series_of(study):
                points = []
                for alpha in study.alphas:
                    group = _matching(cells, title, alpha, series)
                    if group:
                        top1 = statistics.fmean(cell["top1"] for cell in group)
                        points.append((group[0]["rate"], 100 * top1))
                lines.append(Line(name=series.name, points=points, dashed=series.finetune))
            original = cells.get(f"{title} | {ORIGINAL}")
            reference = None if original is None else 100 * original["top1"]
            panel = Panel(title=title, x_label="compression rate", y_label="top-1, %", lines=lines, reference=reference)
            panels.append(panel)
        return panels


def _settings(config: Config, series: Series) -> dict[str, Any]:
    source = series.source and config.sources[series.source]
    tuning = None
    if series.finetune and config.finetune is not None:
        own = config.finetune
        tuning = {**vars(own), "source": config.sources[own.source], "validation": config.sources[own.validation]}
    return {
        "series": series.name,
        "method": series.method,
        "norm": series.norm,
        "source": source,
        "precision": series.precision,
        "finetune": tuning,
        **({"init": "random"} if config.seeds_of == "solver" else {}),
    }


def _seeds(config: Config, study: Study, series: Series) -> Iterable[int]:
    """The seeds that make a difference to a series."""
    if config.seeds_of == "images" and (series.source is None or "{seed}" not in config.sources[series.source]):
        return study.seeds[:1]
    return study.seeds


def _compressed(
    config: Config, study: Study, series: Series, alpha: float, seed: int, workshop: Workshop
) -> tuple[nn.Module, dict[str, Any]]:
    settings = config.models[study.model]
    model = workshop.model(study.model, settings, config.sources)
    norm = norm_of(series.norm)
    stats = None
    if norm.needs_stats:
        assert series.source is not None
        stats = workshop.stats(study.model, settings, config.sources, series.source, seed=seed, fisher=norm.fisher)
    options: dict[str, Any] = {}
    if series.method in ("cp", "cp-joint"):
        # The usual start is computed from the kernel and knows no chance, so that a seed would change nothing.
        options = {"seed": seed, "init": "random"} if config.seeds_of == "solver" else {"seed": 0}
    made = plan(
        model,
        stats,
        ranks=VBMF(alpha),
        method=series.method,
        norm=series.norm,
        layers=workshop.layers_of(model, config.layers),
        saving="none",
        options=options,
    )
    small, report = compress(model, made, stats, cache=workshop.solutions, progress=workshop.report)
    return small, {
        "rate": report.rate,
        "params": report.after.params,
        "macs": report.after.macs,
        "seconds": round(sum(layer.seconds for layer in report.layers), 2),
    }


def _finetune_(config: Config, small: nn.Module, seed: int, workshop: Workshop) -> dict[str, Any]:
    own = config.finetune
    assert own is not None
    epochs, rates = (1, own.learning_rates[:2]) if config.quick else (own.epochs, own.learning_rates)

    def tune() -> tuple[nn.Module, dict[str, Any]]:
        def load(name: str) -> Any:
            return workshop.data(name, config.sources[name], batch_size=own.batch_size)

        tuned, history = finetune(
            small.requires_grad_(True).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
            load(own.source),
            validation=load(own.validation),
            epochs=epochs,
            learning_rates=rates,
            optimizer=own.optimizer,
            eliminate=own.eliminate,
            mix=_MIX,
            seed=seed,
            progress=workshop.report,
        )
        kept = {"learning_rate": history.learning_rate, "epoch": history.epoch, "seconds": round(history.seconds, 1)}
        return tuned, kept | {"before": history.start.score, "after": history.best.score}

    sources = [config.sources[own.source], config.sources[own.validation]]
    return workshop.kept_weights("finetuned", [vars(own), epochs, rates, sources, seed, workshop.limit], small, tune)


def _quantized(config: Config, study: Study, series: Series, small: nn.Module, workshop: Workshop) -> dict[str, Any]:
    """Hits and bytes of the model in lower precision, calibrated on the images behind Σ."""
    if series.source is None or series.precision == "fp32":
        raise InputError(f"{config.name}: the series {series.name!r} is quantized, which needs a source")
    precision, evaluation, source = series.precision, study.evaluation, series.source
    assert evaluation is not None

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            images = workshop.data(source, config.sources[source])
            made = quantize(small, Path(folder) / "model.onnx", images, precision=precision, latency=False)
            model = OnnxModel(made.path, threads=torch.get_num_threads())
        return {"hits": workshop.count_hits(model, evaluation, config.sources[evaluation]), "bytes": made.bytes}

    facts = [precision, config.sources[source], config.sources[evaluation], workshop.limit, state_hash(small)]
    return workshop.kept("quantized", facts, measure)


def _order(cells: Cells, title: str, study: Study, series: list[Series]) -> list[str]:
    """In how many rows each series is ahead of the classical one on the same images, and in how many behind."""
    classical = next((each for each in series if each.norm == "frobenius" and not each.finetune), None)
    if classical is None:
        return []
    counts = []
    for each in series:
        if each is classical or each.precision != classical.precision:
            continue
        ahead = behind = total = 0
        for alpha in study.alphas:
            pair = [_matching(cells, title, alpha, way)[:1] for way in (each, classical)]
            if all(pair):
                _, low, high = advantage(pair[0][0]["hits"], pair[1][0]["hits"])
                ahead, behind, total = ahead + (low > 0), behind + (high < 0), total + 1
        if total:
            counts.append(
                f"{each.name} ahead in {ahead}" + (f" and behind in {behind}" if behind else "") + f" of {total}"
            )
    if not counts:
        return []
    return [f"Beside {classical.name}, on the same images and beyond chance (95 %): {'; '.join(counts)} rows."]


def _accuracy(hits: str) -> dict[str, Any]:
    right = unpack_hits(hits)
    return {"top1": float(right.mean()), "images": len(right), "hits": hits}


def _matching(cells: Cells, title: str, alpha: float, series: Series) -> list[Any]:
    start = f"{title} | α={alpha:g} | {series.name} | seed "
    return [cell for key, cell in cells.items() if key.startswith(start)]


def _reference(config: Config, series: list[Series], groups: list[list[Any]]) -> list[Any]:
    """The cells that the others of a row are compared with; greedy ones share their norm but are compared too."""
    for each, group in zip(series, groups, strict=True):
        if config.beside is not None and each.norm == config.beside and each.method != "deflation":
            return group
    return []


def _behind(group: list[Any], reference: list[Any]) -> str:
    """By how many points the reference is ahead on the same images, with its 95 % interval."""
    if not group or not reference or group is reference:
        return ""
    points, low, high = advantage(reference[0]["hits"], group[0]["hits"])
    return f" ({points:+.1f}: {low:+.1f} to {high:+.1f})"


def _spread(group: list[Any]) -> str:
    """Mean, and the standard deviation where there are several."""
    values = [100 * cell["top1"] for cell in group]
    if not values:
        return "–"
    mean = statistics.fmean(values)
    return f"{mean:.1f}" if len(values) == 1 else f"{mean:.2f} ± {statistics.stdev(values):.2f}"

"""Σ-error of single layers, by several methods at the same rank."""

from __future__ import annotations

import statistics
from typing import Any

from tensigma.compression import compress
from tensigma.errors import InputError
from tensigma.experiments.kinds import Cell, Cells, facts_of
from tensigma.experiments.settings import Config
from tensigma.experiments.workshop import Workshop
from tensigma.planning import VBMF, plan
from tensigma.report import Panel, Table
from tensigma.solving import norm_of


class LayerErrors:
    """Rows are layers, columns are methods."""

    def check(self, config: Config) -> None:
        for study in config.study:
            if len(study.alphas) != 1 or not study.layers:
                raise InputError(f"{config.name} ({config.config}): every study needs layers and one alpha")
        if not config.series or any(series.source is None for series in config.series):
            raise InputError(f"{config.name} ({config.config}): every series needs a source, and there is at least one")

    def cells(self, config: Config, seed: int) -> list[Cell]:
        found = []
        for index, study in enumerate(config.study):
            for layer in study.layers or ():
                for series in config.series_of(study):
                    assert series.source is not None
                    settings = facts_of(config, study) | {
                        "layer": layer,
                        "series": series.name,
                        "method": series.method,
                        "norm": series.norm,
                        "source": config.sources[series.source],
                        "alpha": study.alphas[0],
                        "seed": seed,
                    }
                    key = f"{config.title_of(study)} | {layer} | {series.name}"
                    found.append(Cell(key=key, study=index, settings=settings))
        return found

    def run(self, config: Config, cell: Cell, workshop: Workshop) -> dict[str, Any]:
        study = config.study[cell.study]
        given = cell.settings
        series = next(each for each in config.series if each.name == given["series"])
        settings = config.models[study.model]
        model = workshop.model(study.model, settings, config.sources)
        assert series.source is not None
        fisher = norm_of(series.norm).fisher
        stats = workshop.stats(study.model, settings, config.sources, series.source, seed=given["seed"], fisher=fisher)
        made = plan(
            model,
            stats,
            ranks=VBMF(given["alpha"]),
            method=series.method,
            norm=series.norm,
            layers=[given["layer"]],
            skip=(),
            saving="none",
            options={"seed": given["seed"]} if series.method in ("cp", "cp-joint") else None,
        )
        _, report = compress(model, made, stats, cache=workshop.solutions, progress=workshop.report)
        row = report[given["layer"]]
        return {
            "layer": row.name,
            "series": series.name,
            "ranks": list(row.ranks or ()),
            "error": row.error,
            "frobenius_error": row.frobenius_error,
            "seconds": round(row.seconds, 2),
        }

    def tables(self, config: Config, cells: Cells) -> list[Table]:
        tables = []
        for study in config.study:
            series = config.series_of(study)
            rows, ratios = [], []
            for layer in study.layers or ():
                found = [cells.get(f"{config.title_of(study)} | {layer} | {each.name}") for each in series]
                if not any(found):
                    continue
                rank = next("×".join(map(str, cell["ranks"])) for cell in found if cell)
                row = [layer, rank, *("–" if cell is None else f"{cell['error']:.3f}" for cell in found)]
                if len(found) == 2:
                    ratio = found[0]["error"] / max(found[1]["error"], 1e-12) if found[0] and found[1] else None
                    ratios += [] if ratio is None else [ratio]
                    row.append("–" if ratio is None else f"{ratio:.1f}")
                rows.append(row)
            head = ["layer", "rank", *(each.name for each in series), *(["ratio"] if len(series) == 2 else [])]
            notes = [f"Ratio of the errors: median {statistics.median(ratios):.1f}."] if ratios else []
            title = f"{config.title_of(study)}, α = {study.alphas[0]:g}: relative Σ-error"
            tables.append(Table(title=title, columns=head, rows=rows, notes=notes))
        return tables

    def panels(self, config: Config, cells: Cells) -> list[Panel]:
        return []

"""One layer at a time at growing rank, fitted under the Frobenius norm: which error tells how accuracy will fare?"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tensigma.errors import InputError
from tensigma.experiments.hits import unpack_hits
from tensigma.experiments.kinds import Cell, Cells, facts_of
from tensigma.experiments.settings import Config, Study
from tensigma.experiments.workshop import Workshop
from tensigma.linalg import CP, Metric, max_rank
from tensigma.report import Line, Panel, Table


class Reconstruction:
    """Rows are ranks; columns are both errors and accuracy."""

    def check(self, config: Config) -> None:
        for study in config.study:
            if not study.ranks or study.source is None or study.evaluation is None or len(study.layers or ()) != 1:
                raise InputError(
                    f"{config.name} ({config.config}): every study needs one layer, ranks, source and evaluation"
                )

    def cells(self, config: Config, seed: int) -> list[Cell]:
        found = []
        for index, study in enumerate(config.study):
            assert study.source is not None
            for rank in study.ranks:
                settings = facts_of(config, study) | {
                    "layer": _layer(study),
                    "rank": rank,
                    "source": config.sources[study.source],
                    "seed": seed,
                }
                found.append(Cell(key=f"{config.title_of(study)} | rank {rank}", study=index, settings=settings))
        return found

    def run(self, config: Config, cell: Cell, workshop: Workshop) -> dict[str, Any]:
        study = config.study[cell.study]
        settings = config.models[study.model]
        model = workshop.model(study.model, settings, config.sources)
        name, seed = _layer(study), cell.settings["seed"]
        assert study.source is not None
        assert study.evaluation is not None
        stats = workshop.stats(study.model, settings, config.sources, study.source, seed=seed, fisher=None)
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Conv2d) or layer.groups != 1:
            raise InputError(f"{name} of {settings.title} is no plain convolution; name another layer")
        kernel = layer.weight.detach().cpu()
        # Ranks beyond the largest that a kernel can have would add nothing.
        rank = min(cell.settings["rank"], max_rank(tuple(kernel.shape)))
        fit = CP(rank, seed=seed).fit(kernel, Metric.identity(kernel[0].numel()))
        dense = fit.factors.to_dense().to(kernel.dtype)
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.get_parameter(f"{name}.weight").copy_(dense)
        right = unpack_hits(workshop.hits(changed, study.evaluation, config.sources[study.evaluation]))
        functional = Metric.from_gram(stats[name].gram.cpu()).relative_error(kernel, dense)
        return {
            "rank": rank,
            "frobenius_error": fit.error,
            "sigma_error": float(functional),
            "top1": float(right.mean()),
            "images": len(right),
        }

    def tables(self, config: Config, cells: Cells) -> list[Table]:
        tables = []
        for study in config.study:
            rows = []
            for rank in study.ranks:
                cell = cells.get(f"{config.title_of(study)} | rank {rank}")
                if cell is not None:
                    errors = [f"{cell[key]:.3f}" for key in ("frobenius_error", "sigma_error")]
                    rows.append([str(cell["rank"]), *errors, f"{100 * cell['top1']:.1f}"])
            head = ["rank", "Frobenius error", "Σ-error", "top-1, %"]
            tables.append(Table(title=config.title_of(study), columns=head, rows=rows))
        return tables

    def panels(self, config: Config, cells: Cells) -> list[Panel]:
        names = {"frobenius_error": "Frobenius error", "sigma_error": "Σ-error", "top1": "top-1"}
        panels = []
        for study in config.study:
            found = [cells.get(f"{config.title_of(study)} | rank {rank}") for rank in study.ranks]
            lines = [
                Line(name=text, points=[(cell["rank"], cell[key]) for cell in found if cell], dashed=key == "top1")
                for key, text in names.items()
            ]
            title = config.title_of(study)
            panels.append(Panel(title=title, x_label="rank", y_label="error; share right", lines=lines, log_x=True))
        return panels


def _layer(study: Study) -> str:
    assert study.layers
    return study.layers[0]

"""Model cards: what was done to a model, and what it costs and answers now, in Markdown with metadata for the Hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensigma.compression import LayerReport, Report
from tensigma.evaluation import Evaluation
from tensigma.hub.config import LIBRARY, Config
from tensigma.report import error, facts, headline, number
from tensigma.zoo import Spec, require

_TAGS = (LIBRARY, "model-compression", "tensor-decomposition")


def model_card(
    report: Report | None,
    *,
    evaluation: Evaluation | None = None,
    config: Config | None = None,
    base_model: str | None = None,
    license: str | None = None,
    tags: Sequence[str] = (),
    title: str | None = None,
) -> str:
    """The text of ``README.md``: metadata, figures with the certificate, how to load the model, how it was made.

    Without a report there are no figures in it. Layers that stay dense are counted, not listed.
    """
    config = config or Config()
    if evaluation is None and report is not None and report.notes.get("evaluation"):
        evaluation = Evaluation.from_json(report.notes["evaluation"])
    parts = [
        _metadata(config, base_model=base_model, license=license, tags=tags),
        f"# {title or _name(config, report)}",
        _summary(report, config),
    ]
    if report is not None:
        rows = [(card.name, card.before, card.after, card.change) for card in headline(report, evaluation)]
        parts += ["## Figures", _table(("", "original", "this model", ""), rows)]
    parts += ["## Use", _use(config)]
    if config.preparation:
        parts += ["Inputs are prepared like this:", _table(("", ""), [*_preparation(config.preparation)])]
    if report is not None:
        parts += ["## How it was made", _table(("", ""), facts(report, evaluation))]
        if report.compressed:
            parts += ["## Layers that were replaced", _table(_HEADER, [_row(layer) for layer in report.compressed])]
    return "\n\n".join(parts) + "\n"


def _metadata(config: Config, *, base_model: str | None, license: str | None, tags: Sequence[str]) -> str:
    hub = require("huggingface_hub", "hub", "a model card")
    scheme = () if config.model is None else (Spec.parse(config.model).scheme,)
    data = hub.ModelCardData(
        library_name=LIBRARY,
        license=license,
        base_model=base_model,
        tags=list(dict.fromkeys([*_TAGS, *(name for name in scheme if name != "zoo"), *tags])),
    )
    return f"---\n{data.to_yaml()}\n---"


def _name(config: Config, report: Report | None) -> str:
    noted = None if report is None else report.notes.get("title")
    if noted:
        return str(noted)
    return "Compressed model" if config.model is None else f"{Spec.parse(config.model).target}, compressed"


def _summary(report: Report | None, config: Config) -> str:
    of = "A model" if config.model is None else f"`{config.model}`"
    made = "in which Tensigma replaced layers by smaller ones, by tensor decomposition that knows the data"
    if report is None:
        return f"{of} {made}."
    return (
        f"{of} {made}: {number(report.before.params)} parameters became {number(report.after.params)}, "
        f"{report.rate:.2f} times fewer. All layers are plain `nn.Conv*` and `nn.Linear` layers."
    )


def _use(config: Config) -> str:
    if config.model is None:
        call = 'model = ts.from_pretrained("REPOSITORY_OR_FOLDER", build_the_original())'
    else:
        call = 'model = ts.from_pretrained("REPOSITORY_OR_FOLDER")'
    return f"```python\nimport tensigma as ts\n\n{call}\n```"


def _preparation(noted: Any) -> list[tuple[str, str]]:
    def plain(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    return [(key.replace("_", " "), plain(value)) for key, value in noted.items()]


_HEADER = ("layer", "format", "ranks", "parameters", "now", "error of its output")


def _row(layer: LayerReport) -> tuple[str, ...]:
    ranks = " × ".join(map(str, layer.ranks or ()))
    params = number(layer.before.params), number(layer.after.params)
    return f"`{layer.name}`", layer.method, ranks, *params, error(layer.error)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

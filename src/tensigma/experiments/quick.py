"""The quick form of an experiment: the same code over few images, one rank parameter, one seed and few layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tensigma.experiments.settings import Config, ModelSettings, Series, Study

IMAGES = 16
_N_LAYERS = 2
_N_RANKS = 2


def quick_form(config: Config) -> Config:
    """A config that takes seconds instead of minutes; its results are good for nothing but to see that it runs.

    >>> from tensigma.experiments.catalogue import load_config
    >>> quick = quick_form(load_config("r18-samplesize", "paper"))
    >>> quick.study[0].alphas, quick.study[0].seeds, quick.limit
    ((0.55,), (0,), 16)
    """
    return replace(
        config,
        quick=True,
        limit=IMAGES,
        models={name: _briefly(model) for name, model in config.models.items()},
        study=tuple(map(_small, _light(config))),
        series=tuple(_distinct(config.series)),
    )


def _distinct(series: Sequence[Series]) -> Iterator[Series]:
    """All that are cheap, and one of each that are not."""
    seen = set()
    for each in series:
        step = each.finetune, each.precision
        if step == (False, "fp32") or step not in seen:
            yield each
        seen.add(step)


def _light(config: Config) -> Sequence[Study]:
    """Without networks so large that they need another runtime, unless there are no others."""
    return [study for study in config.study if config.models[study.model].runtime is None] or config.study[:1]


def _small(study: Study) -> Study:
    return replace(
        study,
        # The last is the smallest model.
        alphas=study.alphas[-1:],
        seeds=study.seeds[:1],
        ranks=study.ranks[:_N_RANKS],
        layers=None if study.layers is None else study.layers[:_N_LAYERS],
    )


def _briefly(model: ModelSettings) -> ModelSettings:
    return model if model.train is None else replace(model, train=replace(model.train, epochs=1))

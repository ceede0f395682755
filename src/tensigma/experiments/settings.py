"""What an experiment is made of: one TOML file, read strictly into these types.

::

    kind = "accuracy"                      # which file of this room runs it
    title = "Tucker-2 with Σ from several sets"
    substitute = "ResNet-20 stands in for ResNet-18"   # absent where the models are the paper's own

    [models.resnet20]
    title = "ResNet-20"
    spec = "zoo:resnet20-cifar"
    weights = "{data}/cifar10/resnet20.safetensors"

    [sources]                              # every set of images by name
    test = "cifar10:{data}/cifar10?split=test&shuffle=false"
    train = "cifar10:{data}/cifar10?samples=2000&seed={seed}"

    [[series]]                             # a column of the table, or a line of the figure
    name = "Σ of CIFAR-10"
    method = "tucker2"
    norm = "sigma"
    source = "train"

    [[study]]                              # a block of rows, or a panel
    model = "resnet20"
    evaluation = "test"
    alphas = [0.5, 0.7]
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from tensigma.errors import InputError

T = TypeVar("T")
Value = float | int | str


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained, once, where there are no trained weights."""

    source: str
    epochs: int
    learning_rate: float
    batch_size: int = 64
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """A model by name, and where its weights come from: a file, or training."""

    spec: str
    title: str
    weights: str | None = None
    train: Training | None = None
    #: What runs the evaluation, where not PyTorch: large networks take half as long in ONNX Runtime.
    runtime: Literal["onnxruntime"] | None = None


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Fine-tuning of a compressed model, the best learning rate chosen on images of its own."""

    source: str
    validation: str
    epochs: int
    learning_rates: tuple[float, ...]
    optimizer: str = "adam"
    batch_size: int = 64
    #: Drop learning rates that fall behind early, instead of training with all of them to the end.
    eliminate: bool = False


@dataclass(frozen=True, kw_only=True)
class Series:
    """One way of compressing."""

    name: str
    method: str
    norm: str
    #: Images for Σ and the like, where not the study's; not needed under the Frobenius norm.
    source: str | None = None
    finetune: bool = False
    precision: Literal["fp32", "fp16", "int8"] = "fp32"


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model, and what is varied on it."""

    model: str
    #: What it is called, where the model's own title does not tell studies apart.
    title: str | None = None
    #: Images on which accuracy is measured.
    evaluation: str | None = None
    alphas: tuple[float, ...] = ()
    seeds: tuple[int, ...] = (0,)
    #: Names of series, where not all apply.
    series: tuple[str, ...] | None = None
    #: Layers of which errors are shown, or that are taken apart one at a time.
    layers: tuple[str, ...] | None = None
    ranks: tuple[int, ...] = ()
    #: Images for Σ and the like, for series that name none.
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Numbers that the paper itself prints. ``rows`` are as in its table, under ``columns``."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Value, ...], ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment with one choice of models and data."""

    name: str
    config: str
    kind: str
    title: str
    shown: Literal["table", "figure"] = "table"
    #: What stands in for what; None where models and data are the paper's own.
    substitute: str | None = None
    #: Why figures differ from the paper's, or what to look at.
    remark: str = ""
    #: Folders of data without which it cannot run, and what to call what is missing.
    needs: dict[str, str] = field(default_factory=dict)
    models: dict[str, ModelSettings]
    sources: dict[str, str]
    series: tuple[Series, ...] = ()
    study: tuple[Study, ...]
    #: Norm of the series that the others are compared with, image by image.
    beside: str | None = None
    #: Which layers are compressed; the first convolution never is.
    layers: str = "spatial"
    #: What a seed changes: the start of the solver, or which images are drawn.
    seeds_of: Literal["solver", "images"] = "images"
    finetune: FineTuning | None = None
    printed: Printed = field(default_factory=Printed)
    #: Whatever else a kind of experiment understands; it is for that kind to check.
    options: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    #: At most so many images of any set; None for all. Set by the quick form.
    limit: int | None = None

    def title_of(self, study: Study) -> str:
        """What a study is called."""
        return study.title or self.models[study.model].title

    def series_of(self, study: Study) -> list[Series]:
        """The series that apply to a study, each with the images it takes there."""
        chosen = [each for each in self.series if study.series is None or each.name in study.series]
        return [
            each if each.source or each.norm == "frobenius" else replace(each, source=study.source) for each in chosen
        ]


def parse_config(table: Mapping[str, Any], *, name: str, config: str) -> Config:
    """A config from the content of its file; ``name`` and ``config`` come from where the file lies.

    >>> parse_config({"kind": "accuracy"}, name="fisher", config="mine")
    Traceback (most recent call last):
    ...
    tensigma.errors.InputError: fisher (mine): 'title' is missing
    """
    where = f"{name} ({config})"
    for key in ("name", "config", "quick", "limit"):
        if key in table:
            raise InputError(f"{where}: {key!r} is not for the file to say; remove it")
    parsed = _read(Config, {**table, "name": name, "config": config}, where)
    _check_names(parsed, where)
    return parsed


def _check_names(config: Config, where: str) -> None:
    """Refuse whatever is named but not there."""

    def known(what: str, name: str | None, names: Any) -> None:
        if name is not None and name not in names:
            raise InputError(f"{where}: there is no {what} {name!r}; there are {', '.join(map(repr, names))}")

    titles = [study.title or study.model for study in config.study]
    if len(set(titles)) < len(titles):
        raise InputError(f"{where}: two studies of one model need titles that tell them apart")
    for study in config.study:
        known("model", study.model, config.models)
        known("source", study.evaluation, config.sources)
        known("source", study.source, config.sources)
        for each in study.series or ():
            known("series", each, [series.name for series in config.series])
    for series in config.series:
        known("source", series.source, config.sources)
        studies = [study for study in config.study if study.series is None or series.name in study.series]
        unsourced = series.source is None and any(study.source is None for study in studies)
        if series.norm != "frobenius" and unsourced:
            raise InputError(f"{where}: the series {series.name!r} has norm {series.norm!r}, which needs a source")
        if series.finetune and config.finetune is None:
            raise InputError(f"{where}: the series {series.name!r} is fine-tuned, but there is no [finetune]")
    for model in config.models.values():
        known("source", None if model.train is None else model.train.source, config.sources)
    if config.finetune is not None:
        known("source", config.finetune.source, config.sources)
        known("source", config.finetune.validation, config.sources)


def _read(kind: type[T], table: Any, where: str) -> T:
    if not isinstance(table, Mapping):
        raise InputError(f"{where}: expected a table, got {table!r}")
    hints = typing.get_type_hints(kind)
    own = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in own:
            close = difflib.get_close_matches(key, own, n=1)
            guess = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(own))}"
            raise InputError(f"{where}: {key!r} is not known{guess}")
    for key, each in own.items():
        if key not in table and each.default is MISSING and each.default_factory is MISSING:
            raise InputError(f"{where}: {key!r} is missing")
    return kind(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in table.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``hint``; TOML's lists become tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if is_dataclass(hint) and isinstance(hint, type):
        return _read(hint, value, where)
    if origin is Literal:
        if value not in arguments:
            raise InputError(f"{where}: got {value!r}; choose one of {', '.join(map(repr, arguments))}")
        return value
    if origin in (typing.Union, types.UnionType):
        choices = [each for each in arguments if each is not type(None)]
        if len(choices) == 1:
            return None if value is None else _value(choices[0], value, where)
        if isinstance(value, tuple(choices)) and not isinstance(value, bool):
            return value
        raise InputError(f"{where}: expected a number or text, got {value!r}")
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InputError(f"{where}: expected a list, got {value!r}")
        return tuple(_value(arguments[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: expected a table, got {value!r}")
        return {key: _value(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise InputError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value

"""The experiments there are, and their configs: files of this package, or a file of the user's own."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tensigma.errors import InputError
from tensigma.experiments.settings import Config, Printed, parse_config

#: The paper's tables and figures, by their labels, in its order.
PAPER = (
    "greedy_table",
    "acc_greedy_table",
    "t2sigma-pardata",
    "t2sigma-tl",
    "fisher",
    "Activation",
    "cpsigma-pardata",
    "cpsigma-c10",
    "t2sigma-c100",
    "cpsigma-c100",
    "alexnet",
    "gnetInet-randomseeds",
    "gnetc10-randomseeds",
    "gnetc100-randomseeds",
    "r18-c10",
    "gnet-c10",
    "r18or-interpol",
    "r18or-divdata",
    "r18or-divcat",
    "r18-samplesize",
    "googlenet-samplesize",
    "quantization_results",
    "resnet18_layer0_reconstruction",
)
#: Experiments that are not in the paper. Each has a config in ``configs/substitute`` and, where it needs one, a kind of
#: its own in :data:`tensigma.experiments.reproduction.KINDS`.
OWN = ("beyond", "norms")
NAMES = PAPER + OWN
CONFIGS = ("substitute", "paper")
_FOLDER = resources.files("tensigma.experiments") / "configs"


def check_name(name: str) -> None:
    """Refuse a name that no experiment has."""
    if name not in NAMES:
        raise InputError(f"there is no experiment {name!r}; there are {', '.join(NAMES)}, and all")


def configs_of(name: str) -> list[str]:
    """The configs that come with an experiment.

    >>> configs_of("fisher")
    ['substitute', 'paper']
    """
    return [config for config in CONFIGS if (_FOLDER / config / f"{name}.toml").is_file()]


def printed_of(name: str) -> Printed:
    """The numbers that the paper itself prints; none for experiments that are not in it.

    >>> printed_of("mine")
    Printed(columns=(), rows=(), note='')
    """
    return load_config(name, "paper").printed if "paper" in configs_of(name) else Printed()


def load_config(name: str, config: str = "substitute") -> Config:
    """The config of an experiment: ``"substitute"``, ``"paper"``, or a TOML file.

    >>> load_config("fisher", "paper").models["googlenet"].spec
    'torchvision:googlenet'
    """
    if config in CONFIGS:
        check_name(name)
        if config not in configs_of(name):
            raise InputError(f"{name} has no config {config!r}; it has {', '.join(configs_of(name))}")
        text = (_FOLDER / config / f"{name}.toml").read_text(encoding="utf-8")
        return parse_config(_toml(text, f"{name} ({config})"), name=name, config=config)
    file = Path(config)
    if not file.is_file():
        raise InputError(f"config {config!r} is unknown; give substitute, paper, or a TOML file")
    # The config of a user may have any name, which becomes that of the results.
    if not re.fullmatch(r"[\w-]+", name):
        raise InputError(f"an experiment cannot be called {name!r}; a name has letters, digits, - and _")
    return parse_config(_toml(file.read_text(encoding="utf-8"), config), name=name, config=file.stem)


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where}: not readable as TOML ({error})") from error


def plain(value: Any) -> Any:
    """Settings as JSON takes them, without what is left at its default.

    >>> plain(load_config("fisher", "paper").series[0])
    {'name': 'Tucker2-ALS', 'method': 'tucker2', 'norm': 'frobenius'}
    """
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: getattr(value, each.name) for each in fields(value)}
        defaults = {each.name: each.default for each in fields(value)}
        return {key: plain(item) for key, item in own.items() if item != defaults[key] and item not in ({}, ())}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value

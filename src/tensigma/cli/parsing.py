"""Words of a command line turned into types. An error says what was typed and what is accepted."""

from __future__ import annotations

import difflib
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

import tensigma as ts
from tensigma.errors import InputError, TensigmaError

#: What --method and --norm accept. The library's own tables come with torch; a test compares them with these.
METHODS = ("auto", "tucker2", "cp", "cp-joint", "deflation", "svd", "spatial-svd", "tensor-train", "dense")
NORMS = ("centred", "sigma", "frobenius", "fisher", "activation")


def _share_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


#: Settings that may follow the number of a budget, separated by commas.
_SETTINGS: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    "params": {"at-most": _share_or_none},
    "latency": {"runtime": str, "batch": int},
    "drop": {"measure": str, "trials": int},
}


#: Parameters of the library, some with the value to pass, whose options have other names.
_OPTIONS = {
    "check": "--force",
    "dynamic_batch=False": "--fixed-batch",
    "recipe": "--budget or --ranks",
    "sequential=False": "--no-sequential",
}


def in_options(error: TensigmaError) -> str:
    """The message of an error, with options in place of the library's parameters.

    >>> in_options(InputError("{norm} needs {stats}, or {check}", parameters=("norm='fisher'", "stats", "check=False")))
    '--norm fisher needs --stats, or --force'
    """
    parameters = {parameter.partition("=")[0]: parameter for parameter in error.parameters}

    def option(name: str) -> str:
        for known in (parameters[name], name):
            if known in _OPTIONS:
                return _OPTIONS[known]
        value = parameters[name].partition("=")[2].strip("'\"")
        flag = f"--{name.replace('_', '-')}"
        return flag if value in ("", "True") else f"{flag} {value}"

    return error.worded(option)


def _without_completion(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse``, except while the shell completes a line: the types that words are turned into would import torch."""

    @functools.wraps(parse)
    def parser(text: str) -> Any:
        return text if "_TENSIGMA_COMPLETE" in os.environ else parse(text)

    return parser


@_without_completion
def parse_budget(text: str) -> ts.planning.Budget:
    """``params=0.5``, ``params=0.5,at-most=none``, ``macs=40%``, ``bytes=0.125``,
    ``latency=0.6,runtime=eager,batch=8``, several of these as in ``bytes=0.125,macs=0.5``, or ``drop=1%``.

    >>> parse_budget("params=0.5"), parse_budget("macs=40%")
    (Params(share=0.5), Macs(share=0.4))
    >>> parse_budget("drop=1%,measure=agreement")
    Drop(share=0.01, measure='agreement', trials=8)
    >>> parse_budget("bytes=0.125,macs=0.5")
    AllOf(parts=(Bytes(share=0.125, bits=(3, 4, 5, 6, 8, 16)), Macs(share=0.5)))
    """
    budgets = {"params": ts.Params, "macs": ts.Macs, "bytes": ts.Bytes, "latency": ts.Latency, "drop": ts.Drop}
    accepted = (
        "params=0.5, macs=0.5, bytes=0.125 or latency=0.5 (the share of the original that may remain), several of them"
        " as in bytes=0.125,macs=0.5, or drop=0.01 (the share of its answers that may be lost)"
    )
    parts: list[str] = []
    for item in text.split(","):
        if parts and item.partition("=")[0].strip().lower() not in budgets:
            parts[-1] += f",{item}"
        else:
            parts.append(item)
    first, *others = (_built(part, budgets, accepted) for part in parts)
    try:
        return functools.reduce(operator.and_, others, first)
    except InputError as error:
        raise typer.BadParameter(in_options(error)) from None


@_without_completion
def parse_bits(text: str) -> tuple[int, ...]:
    """Bits that weights may take.

    >>> parse_bits("4,8")
    (4, 8)
    """
    try:
        return ts.Bytes(1.0, bits=tuple(int(part) for part in text.split(","))).bits
    except ValueError as error:
        reason = f"{in_options(error)}; " if isinstance(error, InputError) else f"got {text!r}; "
        raise typer.BadParameter(f"{reason}write such as --bits 4,8") from None


@_without_completion
def parse_ranks(text: str) -> ts.planning.RankRule:
    """``vbmf=0.5``, ``sigma-vbmf=0.5`` or ``energy=0.99``.

    >>> parse_ranks("vbmf=0.5"), parse_ranks("sigma-vbmf=0.5"), parse_ranks("energy=99%")
    (VBMF(alpha=0.5), SigmaVBMF(alpha=0.5), Energy(share=0.99))
    """
    rules = {"vbmf": ts.VBMF, "sigma-vbmf": ts.SigmaVBMF, "energy": ts.Energy}
    accepted = "vbmf=ALPHA or sigma-vbmf=ALPHA, such as vbmf=0.5, or energy=SHARE, such as energy=0.99"
    return _built(text, rules, accepted)


@_without_completion
def parse_answers(text: str) -> ts.running.Kind:
    """``scores``, ``scores=-1``, ``numbers``, ``boxes`` or ``boxes=0.75``.

    >>> parse_answers("scores=-1"), parse_answers("numbers"), parse_answers("boxes").thresholds
    (Scores(axis=-1, least=0.95), Numbers(), (0.5,))
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    accepted = "scores, scores=AXIS, numbers, boxes or boxes=OVERLAP, such as boxes=0.75"
    try:
        if name == "scores":
            return ts.Scores(int(value)) if equals else ts.Scores()
        if name == "boxes":
            return ts.Boxes(float(value)) if equals else ts.Boxes()
    except ValueError as error:
        reason = in_options(error) if isinstance(error, InputError) else f"{value!r} is not a number"
        raise typer.BadParameter(f"{reason}; write {accepted}") from None
    if name != "numbers" or equals:
        raise typer.BadParameter(f"got {text!r}; write {accepted}")
    return ts.Numbers()


def _built(text: str, types: Mapping[str, Callable[..., Any]], accepted: str) -> Any:
    """The object that ``NAME=NUMBER,SETTING=…`` describes."""
    first, *rest = text.split(",")
    name, equals, number = (part.strip() for part in first.partition("="))
    if name.lower() not in types or not equals:
        raise typer.BadParameter(f"got {text!r}; write {accepted}")
    try:
        share = float(number.removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"{number!r} is not a number; write {accepted}") from None
    settings = _settings(rest, name.lower())
    try:
        return types[name.lower()](share / 100 if number.endswith("%") else share, **settings)
    except InputError as error:
        raise typer.BadParameter(in_options(error)) from None


def _settings(items: Sequence[str], name: str) -> dict[str, Any]:
    """Settings that follow the number, such as ``batch=8``."""
    known = _SETTINGS.get(name, {})
    settings: dict[str, Any] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in known or not equals:
            accepted = " and ".join(f"{setting}=…" for setting in known) or "nothing more"
            raise typer.BadParameter(f"got {item.strip()!r} after {name}=…, which takes {accepted}")
        try:
            settings[key.replace("-", "_")] = known[key](value)
        except ValueError:
            kind = "a share of the multiply-adds, or none" if key == "at-most" else "a whole number"
            raise typer.BadParameter(f"got {key}={value!r}; write {kind}") from None
    return settings


def parse_method(text: str) -> str:
    """One of the methods by name."""
    return _choice(text, METHODS)


def parse_norm(text: str) -> str:
    """One of the norms by name."""
    return _choice(text, NORMS)


def _choice(text: str, names: Sequence[str]) -> str:
    if text in names:
        return text
    close = difflib.get_close_matches(text, names, n=1)
    guess = f" (did you mean {close[0]!r}?)" if close else ""
    raise typer.BadParameter(f"got {text!r}{guess}; choose one of {', '.join(names)}")


@_without_completion
def parse_device(text: str) -> Any:
    """A torch device that exists on this machine."""
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(f"{text!r} is not a device; write cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"got {text!r}, but torch finds no CUDA device; write cpu")
    return device


@_without_completion
def parse_memory(text: str) -> int:
    """``4GB`` as bytes."""
    try:
        return ts.calibration.parse_bytes(text)
    except InputError as error:
        raise typer.BadParameter(in_options(error)) from None


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape of one sample.

    >>> parse_shape("3x224x224")
    (3, 224, 224)
    """
    sizes = text.lower().replace("×", "x").split("x")
    if not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        raise typer.BadParameter(f"got {text!r}; write the shape of one sample, such as 3x224x224")
    return tuple(map(int, sizes))


def parse_rates(values: Sequence[str] | None) -> tuple[float, ...] | None:
    """Learning rates.

    >>> parse_rates(["1e-3,1e-4", "1e-5"])
    (0.001, 0.0001, 1e-05)
    """
    rates = []
    for text in split_names(values):
        try:
            rates.append(float(text))
        except ValueError:
            raise typer.BadParameter(f"{text!r} is not a number; write --learning-rates 1e-3,1e-4") from None
    return tuple(rates) or None


def split_names(values: Sequence[str] | None) -> list[str]:
    """Names from an option that may be repeated, and may hold several names separated by commas.

    >>> split_names(["conv1,conv2", "layer1.*"])
    ['conv1', 'conv2', 'layer1.*']
    """
    return [name.strip() for value in values or () for name in value.split(",") if name.strip()]


def which_layers(values: Sequence[str] | None) -> str | list[str]:
    """``all``, ``spatial``, or names and patterns."""
    names = split_names(values)
    return names[0] if names in (["all"], ["spatial"]) else names or "all"


def which_skipped(values: Sequence[str] | None) -> list[str] | None:
    """Names and patterns; ``none`` for no layer at all, None for the library's default."""
    names = split_names(values)
    return [] if names == ["none"] else names or None

"""Strings from a person, made into types; each refusal says what came and what is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import typer

from tensigma.errors import InputError
from tensigma.planning import METHODS, NORMS, VBMF, Budget, Energy, Macs, Params, RankRule

_BUDGETS: Mapping[str, Callable[[float], Budget]] = {"params": Params, "macs": Macs}
_RULES: Mapping[str, Callable[[float], RankRule]] = {"vbmf": VBMF, "energy": Energy}

METHOD_NAMES = ("auto", *METHODS)
NORM_NAMES = tuple(NORMS)


def parse_budget(text: str) -> Budget:
    """``params=0.5`` or ``macs=40%``.

    >>> parse_budget("params=0.5"), parse_budget("macs=40%")
    (Params(share=0.5), Macs(share=0.4))
    """
    return _named(text, _BUDGETS, "params=0.5 or macs=0.5, the share of the original that may remain")


def parse_ranks(text: str) -> RankRule:
    """``vbmf=0.5`` or ``energy=0.99``.

    >>> parse_ranks("vbmf=0.5"), parse_ranks("energy=99%")
    (VBMF(alpha=0.5), Energy(share=0.99))
    """
    return _named(text, _RULES, "vbmf=ALPHA, such as vbmf=0.5, or energy=SHARE, such as energy=0.99")


def _named(text: str, makers: Mapping[str, Callable[[float], Any]], accepted: str) -> Any:
    name, equals, value = text.partition("=")
    maker = makers.get(name.strip().lower())
    if maker is None or not equals:
        raise typer.BadParameter(f"{text!r} came; write {accepted}")
    try:
        share = float(value.strip().removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"{value.strip()!r} is no number; write {accepted}") from None
    try:
        return maker(share / 100 if value.strip().endswith("%") else share)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None


def parse_method(text: str) -> str:
    """One of the methods by name."""
    return _choice(text, METHOD_NAMES)


def parse_norm(text: str) -> str:
    """One of the norms by name."""
    return _choice(text, NORM_NAMES)


def _choice(text: str, names: Iterable[str]) -> str:
    known = list(names)
    if text in known:
        return text
    close = difflib.get_close_matches(text, known, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise typer.BadParameter(f"{text!r} came; {guess}choose one of {', '.join(known)}")


def parse_device(text: str) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(f"{text!r} is no device; write cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter(f"{text!r} came, but torch finds no CUDA device; write cpu")
    return device


@dataclass(frozen=True)
class Shape:
    """The shape of one sample. A type of its own: typer would take a tuple for several arguments."""

    sizes: tuple[int, ...]


def parse_shape(text: str) -> Shape:
    """``3x224x224``.

    >>> parse_shape("3x224x224")
    Shape(sizes=(3, 224, 224))
    """
    sizes = text.lower().replace("×", "x").split("x")
    if not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        raise typer.BadParameter(f"{text!r} came; write the shape of one sample, such as 3x224x224")
    return Shape(tuple(map(int, sizes)))


def listed(values: Sequence[str] | None) -> list[str]:
    """Names given one by one, or several with commas between.

    >>> listed(["conv1,conv2", "layer1.*"])
    ['conv1', 'conv2', 'layer1.*']
    """
    return [name.strip() for value in values or () for name in value.split(",") if name.strip()]


def which_layers(values: Sequence[str] | None) -> str | list[str]:
    """``all``, ``spatial``, or names and patterns."""
    names = listed(values)
    return names[0] if names in (["all"], ["spatial"]) else names or "all"


def which_skipped(values: Sequence[str] | None) -> list[str] | None:
    """Names and patterns; ``none`` for no layer at all, None for the usual choice."""
    names = listed(values)
    return [] if names == ["none"] else names or None

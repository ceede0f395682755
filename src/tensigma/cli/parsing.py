"""Strings from a person, made into types; each refusal says what came and what is accepted."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import typer

from tensigma.errors import InputError
from tensigma.planning import VBMF, Budget, Drop, Energy, Latency, Macs, Params, RankRule, SigmaVBMF
from tensigma.solving import METHODS, NORMS

_BUDGETS: Mapping[str, Callable[..., Budget]] = {"params": Params, "macs": Macs, "latency": Latency, "drop": Drop}
_RULES: Mapping[str, Callable[..., RankRule]] = {"vbmf": VBMF, "sigma-vbmf": SigmaVBMF, "energy": Energy}
#: What may follow the number, with commas between.
_SETTINGS: Mapping[str, Mapping[str, Callable[[str], Any]]] = {
    "latency": {"runtime": str, "batch": int},
    "drop": {"measure": str, "trials": int},
}

METHOD_NAMES = ("auto", *METHODS)
NORM_NAMES = tuple(NORMS)


def parse_budget(text: str) -> Budget:
    """``params=0.5``, ``macs=40%``, ``latency=0.6,runtime=eager,batch=8`` or ``drop=1%``.

    >>> parse_budget("params=0.5"), parse_budget("macs=40%")
    (Params(share=0.5), Macs(share=0.4))
    >>> parse_budget("drop=1%,measure=agreement")
    Drop(share=0.01, measure='agreement', trials=8)
    """
    accepted = "params=0.5, macs=0.5 or latency=0.5, the share of the original that may remain, or drop=0.01, the share"
    return _named(text, _BUDGETS, f"{accepted} of its answers that may be lost")


def parse_ranks(text: str) -> RankRule:
    """``vbmf=0.5``, ``sigma-vbmf=0.5`` or ``energy=0.99``.

    >>> parse_ranks("vbmf=0.5"), parse_ranks("sigma-vbmf=0.5"), parse_ranks("energy=99%")
    (VBMF(alpha=0.5), SigmaVBMF(alpha=0.5), Energy(share=0.99))
    """
    accepted = "vbmf=ALPHA or sigma-vbmf=ALPHA, such as vbmf=0.5, or energy=SHARE, such as energy=0.99"
    return _named(text, _RULES, accepted)


def _named(text: str, makers: Mapping[str, Callable[[float], Any]], accepted: str) -> Any:
    first, *rest = text.split(",")
    name, equals, value = first.partition("=")
    maker = makers.get(name.strip().lower())
    if maker is None or not equals:
        raise typer.BadParameter(f"{text!r} came; write {accepted}")
    settings = _settings(rest, name.strip().lower())
    try:
        share = float(value.strip().removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"{value.strip()!r} is no number; write {accepted}") from None
    try:
        return maker(share / 100 if value.strip().endswith("%") else share, **settings)
    except InputError as error:
        raise typer.BadParameter(str(error)) from None


def _settings(items: Sequence[str], name: str) -> dict[str, Any]:
    """What follows the number, such as ``batch=8``."""
    known = _SETTINGS.get(name, {})
    found: dict[str, Any] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in known or not equals:
            takes = f"takes {' and '.join(f'{each}=…' for each in known)}" if known else "takes nothing more"
            raise typer.BadParameter(f"{item.strip()!r} came after {name}=; it {takes}")
        try:
            found[key] = known[key](value)
        except ValueError:
            raise typer.BadParameter(f"{key}={value!r} came; write a whole number") from None
    return found


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

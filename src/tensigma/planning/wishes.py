"""What a caller asks of each layer: the common wish and the exceptions from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensigma.errors import InputError
from tensigma.planning.methods import METHODS, Method, method_of
from tensigma.planning.norms import Norm, norm_of
from tensigma.planning.patterns import matches, select
from tensigma.planning.ranks import RankRule, Ranks, check_given

_OVERRIDES = ("method", "ranks", "norm", "options")


@dataclass(frozen=True)
class Wish:
    """What the caller asked for, for one layer."""

    #: A name, because "auto" means several methods.
    method: str | Method
    norm: Norm
    ranks: RankRule | None
    options: Mapping[str, Any] = field(default_factory=dict)


class Wishes:
    """The common wish and the overrides of it."""

    def __init__(self, common: Wish, overrides: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> None:
        self.common = common
        self.overrides: list[tuple[str, dict[str, Any]]] = []
        select(list(overrides), names, what="overrides")
        for pattern, given in overrides.items():
            unknown = [key for key in given if key not in _OVERRIDES]
            if unknown:
                raise InputError(f"overrides[{pattern!r}] has {unknown[0]!r}; it takes {', '.join(_OVERRIDES)}")
            wish: dict[str, Any] = {}
            if "method" in given:
                wish["method"] = known_method(given["method"])
            if "norm" in given:
                wish["norm"] = norm_of(given["norm"])
            if "options" in given:
                wish["options"] = known_options(given["options"])
            if "ranks" in given:
                wish["ranks"] = _rule(given["ranks"], pattern)
            self.overrides.append((pattern, wish))

    @property
    def norms(self) -> list[Norm]:
        return [self.common.norm, *(wish["norm"] for _, wish in self.overrides if "norm" in wish)]

    def of(self, name: str) -> Wish:
        merged = dict(vars(self.common))
        for pattern, wish in self.overrides:
            if matches(name, pattern):
                merged.update(wish)
        return Wish(**merged)


def known_method(method: str | Method) -> str | Method:
    """The same, after checking that there is such a method."""
    method_of(method)
    return method


def _rule(ranks: Any, pattern: str) -> RankRule:
    if isinstance(ranks, RankRule):
        return ranks
    check_given(ranks, f"overrides[{pattern!r}]")
    return Ranks({pattern: ranks if isinstance(ranks, int) else tuple(ranks)})


def known_options(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    known = {option for method in METHODS.values() for option in method.options}
    for option in options or {}:
        if option not in known:
            raise InputError(f"no solver has an option {option!r}; known are {', '.join(sorted(known))}")
    return dict(options or {})

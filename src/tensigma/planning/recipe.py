"""What a caller asks for: how small, by which method, under which norm, and the exceptions for some layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tensigma.errors import InputError
from tensigma.layers import Layer, matches, select
from tensigma.planning.budgets import Budget
from tensigma.planning.ranks import RankRule, Ranks, check_ranks_value
from tensigma.running import Wish
from tensigma.solving import METHODS, Method, Norm, method_of, norm_of

#: In which unit a layer must get smaller to be worth compressing.
Saving = Literal["params", "macs", "none"]
_SAVINGS = ("params", "macs", "none")
_OVERRIDES = ("method", "ranks", "norm", "options")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a plan, apart from the model and the data.

    Args:
        budget: One number for the whole model: ``Params(share)``, ``Macs(share)``, ``Bytes(share)`` or
            ``Latency(share)`` may remain, several of them joined by ``&``, or ``Drop(share)`` of its answers may be
            lost.
        ranks: Instead of a budget, a rule: ``VBMF(alpha)``, ``SigmaVBMF(alpha)``, ``Energy(share)`` or
            ``Ranks({pattern: rank})``.
        method: ``"auto"`` or the name of a decomposition, such as ``"tucker2"``, ``"cp"``, ``"cp-joint"``, ``"svd"``,
            ``"spatial-svd"``, ``"tensor-train"`` or ``"deflation"``. ``"auto"`` is the best format for each layer under
            a budget, and Tucker-2 for kernels larger than one tap with ranks by a rule. Pointwise and Linear layers
            always take SVD. ``"dense"`` leaves layers whole, for fewer bits alone under ``Bytes``. A
            :class:`~tensigma.solving.Method` that is not registered is accepted too.
        norm: ``"centred"``, ``"sigma"``, ``"frobenius"``, ``"fisher"`` or ``"activation"``.
        layers: ``"all"``, ``"spatial"`` (kernels larger than one tap), or names and patterns.
        skip: Names and patterns of layers to leave dense. None means the first convolution, ``()`` means none.
        overrides: Pattern → dict with any of ``method``, ``ranks``, ``norm`` and ``options``, for some layers; if
            several patterns match, the last one decides.
        options: Options of the solvers, such as ``max_sweeps``; each method takes those that it has.
        saving: A layer that a rule would not make smaller in ``"params"`` or ``"macs"`` stays dense; ``"none"`` lets it
            grow. Parameters by default.
        weights: How much the loss of each layer counts when a budget is shared out. ``"auto"``, given data that can be
            read again, measures on up to 256 samples the effect of an error in each layer on the answers, tries plans
            with different powers of it as weights on up to 1,024, and takes the one whose model answers most like the
            original; a search by ``Drop`` always takes the power ½. Class scores are compared as probabilities, numbers
            by their squared error. None counts all layers alike, and a dict
            gives weights by name, 1 for those that are not named.
        answers: What the model answers, for weighing, for ``Drop`` and for refinement: :class:`~tensigma.Scores`,
            :class:`~tensigma.Numbers`, :class:`~tensigma.Boxes`, a dict of these by name of the part, or a function of
            two outputs that returns their likeness in [0, 1]. By default it is guessed.

    >>> from tensigma.planning import Params
    >>> Recipe(budget=Params(0.5), overrides={"fc": {"norm": "fisher"}}).fisher
    'model'
    """

    budget: Budget | None = None
    ranks: RankRule | None = None
    method: str | Method = "auto"
    norm: str | Norm = "centred"
    layers: str | Sequence[str] = "all"
    skip: str | Sequence[str] | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    saving: Saving | None = None
    weights: Mapping[str, float] | Literal["auto"] | None = "auto"
    answers: Wish = None

    def __post_init__(self) -> None:
        self._check_goal()
        if self.saving not in (None, *_SAVINGS):
            raise InputError(f"saving={self.saving!r} is unknown; choose 'params', 'macs' or 'none'")
        ruled = self.ranks is not None or any("ranks" in exception for exception in self.overrides.values())
        if self.saving is not None and not ruled:
            raise InputError(f"saving={self.saving!r} has no effect: a budget alone decides what is worth compressing")
        if isinstance(self.weights, Mapping) and self.budget is None:
            raise InputError("weights= has no effect: it says how a budget is shared out, but ranks were given")
        method_of(self.method)
        norm_of(self.norm)
        _check_options(self.options)
        _check_weights(self.weights)
        for pattern, exception in self.overrides.items():
            _check_override(pattern, exception)

    def _check_goal(self) -> None:
        if (self.budget is None) == (self.ranks is None):
            which = "both were given" if self.budget is not None else "neither was"
            raise InputError(
                f"give either {{budget}} (such as Params(0.5)) or {{ranks}} (such as VBMF(0.5)); {which}",
                parameters=("budget", "ranks"),
            )
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise InputError(
                "{budget} takes Params(share), Macs(share), Bytes(share) or Latency(share), several of these joined by "
                f"&, or Drop(share); got {self.budget!r}",
                parameters=("budget",),
            )
        if self.ranks is not None and not isinstance(self.ranks, RankRule):
            raise InputError(
                "{ranks} takes VBMF(alpha), SigmaVBMF(alpha), Energy(share) or Ranks({pattern: rank}), got "
                f"{self.ranks!r}",
                parameters=("ranks",),
            )

    @property
    def norms(self) -> list[Norm]:
        """Every norm that some layer may take."""
        others = [exception["norm"] for exception in self.overrides.values() if "norm" in exception]
        return [norm_of(norm) for norm in (self.norm, *others)]

    @property
    def needs_stats(self) -> Norm | None:
        """The first norm that needs statistics of the layers; None if none does."""
        return next((norm for norm in self.norms if norm.needs_stats), None)

    @property
    def fisher(self) -> Literal["model"] | None:
        """What calibration must gather besides moments."""
        return next((norm.fisher for norm in self.norms if norm.fisher), None)

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse names and patterns that match none of ``names``, the layers of the model."""
        if self.layers not in ("all", "spatial"):
            select(self.layers, names, what="layers")
        if self.skip is not None:
            select(self.skip, names, what="skip")
        select(list(self.overrides), names, what="overrides")
        if self.ranks is not None:
            self.ranks.check_names(names)
        for name in self.weights if isinstance(self.weights, Mapping) else ():
            if name not in names:
                raise InputError(f"weights= names {name!r}, which is no layer of the model: {', '.join(names)}")

    def wish_for(self, name: str) -> LayerWish:
        """The settings of one layer: the common ones, changed by the overrides that match."""
        wish = LayerWish(self.method, norm_of(self.norm), self.ranks, self.options)
        for pattern, exception in self.overrides.items():
            if matches(name, pattern):
                wish = replace(wish, **_parsed(pattern, exception))
        return wish


@dataclass(frozen=True)
class LayerWish:
    """The settings of one layer."""

    #: Kept as a name, because "auto" means several methods; or a method without a registered name.
    method: str | Method
    norm: Norm
    ranks: RankRule | None
    options: Mapping[str, Any]


class Selection:
    """Which layers of a model a recipe compresses."""

    def __init__(self, recipe: Recipe, layers: Sequence[Layer], reached: Mapping[str, Any] | None) -> None:
        names = [layer.name for layer in layers]
        self._layers, self._skips_by_default = recipe.layers, recipe.skip is None
        everything = recipe.layers in ("all", "spatial")
        self._selected = set(names) if everything else select(recipe.layers, names, what="layers")
        self._skipped = (
            first_convolution(layers, reached) if recipe.skip is None else select(recipe.skip, names, what="skip")
        )

    def by_default(self, layer: Layer) -> bool:
        """Whether a layer is left dense because it is the first convolution, and nobody has said anything else."""
        return self._skips_by_default and layer.name in self._skipped

    def why_not(self, layer: Layer) -> str | None:
        """Why the recipe leaves a layer dense; None if it does not."""
        if layer.name in self._skipped:
            return "the first convolution is left dense" if self._skips_by_default else "left out by skip"
        pointwise = layer.geometry is not None and layer.geometry.is_pointwise
        if layer.name not in self._selected or (self._layers == "spatial" and pointwise):
            return f"left out by layers={self._layers!r}"
        return None


def first_convolution(layers: Sequence[Layer], reached: Mapping[str, Any] | None = None) -> set[str]:
    """The layer left dense by default: the first in order of definition, among those that data reaches."""
    for layer in layers:
        if (
            layer.geometry is not None
            and layer.geometry.kind != "linear"
            and (reached is None or layer.name in reached)
        ):
            return {layer.name}
    return set()


def _parsed(pattern: str, exception: Mapping[str, Any]) -> dict[str, Any]:
    parsed = dict(exception)
    if "norm" in exception:
        parsed["norm"] = norm_of(exception["norm"])
    if "ranks" in exception and not isinstance(exception["ranks"], RankRule):
        ranks = exception["ranks"]
        parsed["ranks"] = Ranks({pattern: ranks if isinstance(ranks, int) else tuple(ranks)})
    return parsed


def _check_override(pattern: str, exception: Mapping[str, Any]) -> None:
    unknown = [key for key in exception if key not in _OVERRIDES]
    if unknown:
        raise InputError(f"overrides[{pattern!r}] has {unknown[0]!r}; it takes {', '.join(_OVERRIDES)}")
    if "method" in exception:
        method_of(exception["method"])
    if "norm" in exception:
        norm_of(exception["norm"])
    if "options" in exception:
        _check_options(exception["options"])
    if "ranks" in exception and not isinstance(exception["ranks"], RankRule):
        check_ranks_value(exception["ranks"], f"overrides[{pattern!r}]")


def _check_options(options: Mapping[str, Any]) -> None:
    accepted = {option for method in METHODS.values() for option in method.options}
    for option in options:
        if option not in accepted:
            raise InputError(f"no solver has an option {option!r}; choose from {', '.join(sorted(accepted))}")


def _check_weights(weights: Any) -> None:
    if weights is None or weights == "auto":
        return
    if not isinstance(weights, Mapping):
        raise InputError(f"weights= takes 'auto', None, or a dict from layer names to numbers, got {weights!r}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise InputError(f"weights[{name!r}] is a number above 0, got {weight!r}")

"""What a format is, and the registry of all formats.

A format is a decomposition and its ranks: which small layers replace a layer, which layers it cannot replace, how
factors become the kernels of those small layers and how they are read back. A plan writes down formats. They need no
factors, so costs can be computed before anything is solved.

A new format is one subclass of :class:`Format` and one call of :func:`register_format`, in this package or in another.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import Tensor

from tensigma.errors import InputError, RankError, StoreError, UnsupportedLayer
from tensigma.layers.geometry import Geometry
from tensigma.linalg import Factors

FactorsT = TypeVar("FactorsT", bound=Factors)
FormatT = TypeVar("FormatT", bound="type[Format[Any]]")

#: Keys of an archive's entry that are not variants of the format.
_ENTRY_KEYS = ("format", "ranks", "bias")


@dataclass(frozen=True)
class Format(ABC, Generic[FactorsT]):
    """A decomposition and its ranks; for a grouped layer the ranks are those of each group.

    Subclasses are frozen dataclasses. Fields whose name starts with ``rank`` are the ranks. Other fields are variants
    of the format, such as CP's ``joint``; each has a default of type bool, int, float or str.
    """

    #: The name in plans and archives.
    name: ClassVar[str]
    #: The class of the factors that this format turns into layers.
    factors_type: ClassVar[type]
    #: Whether a network may well have such layers of its own. Layers of the format are then recognised only by a note
    #: that building them leaves on their container, not by names and shapes alone.
    is_noted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.startswith("rank"):
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise RankError(f"{type(self).__name__}: got {field.name}={value!r}; give an integer of at least 1")
            elif field.default is not MISSING and type(value) is not type(field.default):
                expected = type(field.default).__name__
                raise InputError(f"{type(self).__name__}: got {field.name}={value!r}; give a {expected}")

    @classmethod
    def rank_names(cls) -> tuple[str, ...]:
        """The names of the ranks in the order of the constructor."""
        return tuple(field.name for field in fields(cls) if field.name.startswith("rank"))

    @classmethod
    def variant_names(cls) -> tuple[str, ...]:
        """The names of the fields that are not ranks."""
        return tuple(field.name for field in fields(cls) if not field.name.startswith("rank"))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the order of the constructor."""
        return tuple(getattr(self, name) for name in self.rank_names())

    @property
    def variant(self) -> dict[str, Any]:
        """The fields that are not ranks, by name."""
        return {name: getattr(self, name) for name in self.variant_names()}

    @classmethod
    def of(cls, factors: FactorsT) -> Self:
        """The format of ``factors``, ranks included.

        By default each field is read from the attribute of the same name. Override it if the factors use other
        names.
        """
        return cls(**{field.name: getattr(factors, field.name) for field in fields(cls)})

    @classmethod
    @abstractmethod
    def why_not(cls, geometry: Geometry) -> str | None:
        """Why this format cannot replace a layer of this geometry, or None if it can.

        A good reason names a way out, for example ``"…; use method='tucker2' for it"``.
        """

    @abstractmethod
    def stages(self, geometry: Geometry) -> dict[str, Geometry]:
        """The layers that replace a layer of this geometry, by name and in the order of execution.

        Costs are counted from these. The last stage takes the bias. Start with ``check(self, geometry)``.
        """

    @classmethod
    @abstractmethod
    def kernels(cls, factors: FactorsT) -> list[Tensor]:
        """The kernels of each stage for the factors of one group, (groups of the stage, t', s', *taps)."""

    @abstractmethod
    def factors(self, kernels: Sequence[Tensor], geometry: Geometry) -> tuple[FactorsT, ...]:
        """The inverse of :meth:`kernels` for a whole layer: one set of factors for each of its groups."""

    @classmethod
    @abstractmethod
    def guesses(cls, names: Sequence[str], stages: Sequence[Geometry]) -> Iterator[Compressed]:
        """What layers with these names and geometries would be, if they are of this format.

        Yield nothing if the names are not those of the stages. The caller checks each guess by computing its stages,
        and ignores UnsupportedLayer and ValueError raised here.
        """


@dataclass(frozen=True)
class Compressed:
    """A format and the layer that it replaces."""

    format: Format
    #: The geometry of the original layer, except for the bias, which is that of the compressed layer.
    geometry: Geometry


def check(format: Format, geometry: Geometry) -> None:
    """Raise :class:`UnsupportedLayer` if ``format`` cannot replace a layer of this geometry."""
    reason = format.why_not(geometry)
    if reason is not None:
        raise UnsupportedLayer(reason)


_registered: dict[str, type[Format]] = {}

#: All registered formats by name, in the order of registration; read-only.
FORMATS: Mapping[str, type[Format]] = MappingProxyType(_registered)


def register_format(format_type: FormatT) -> FormatT:
    """Add a format to :data:`FORMATS`; usable as a class decorator, above ``@dataclass(frozen=True)``.

    Raises :class:`InputError` if the class is not a complete format, or if its name or its class of factors is taken by
    another format.
    """
    _check_definition(format_type)
    for other in FORMATS.values():
        if other is format_type:
            continue
        if other.name == format_type.name:
            raise InputError(f"{_path(format_type)}: the name {other.name!r} belongs to {_path(other)}; choose another")
        if other.factors_type is format_type.factors_type:
            factors = other.factors_type.__name__
            raise InputError(f"{_path(format_type)}: {factors} belong to {_path(other)}; define other factors")
    _registered[format_type.name] = format_type
    return format_type


def _check_definition(format_type: type) -> None:
    if not (isinstance(format_type, type) and issubclass(format_type, Format)):
        raise InputError(f"got {format_type!r}; register_format takes a subclass of tensigma.layers.Format")
    path = _path(format_type)
    if "__dataclass_fields__" not in vars(format_type):
        raise InputError(f"{path} is not a dataclass; put @dataclass(frozen=True) below @register_format")
    if inspect.isabstract(format_type):
        missing = ", ".join(sorted(format_type.__abstractmethods__))
        raise InputError(f"{path} does not define {missing}")
    if not isinstance(getattr(format_type, "name", None), str) or not format_type.name:
        raise InputError(f"{path} needs a class variable 'name', a string")
    if not isinstance(getattr(format_type, "factors_type", None), type):
        raise InputError(f"{path} needs a class variable 'factors_type', a class")
    for field in fields(format_type):
        if field.name in _ENTRY_KEYS:
            raise InputError(f"{path}: a field cannot be named {field.name!r}, which archives use; rename it")
        if not field.name.startswith("rank") and type(field.default) not in (bool, int, float, str):
            raise InputError(f"{path}: the variant {field.name!r} needs a default of type bool, int, float or str")


def _path(format_type: type) -> str:
    return f"{format_type.__module__}.{format_type.__qualname__}"


@contextmanager
def temporary_formats() -> Iterator[None]:
    """Undo, at the end of the ``with`` block, all registrations made inside it. Meant for tests and examples."""
    saved = dict(_registered)
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(saved)


def format_of(factors: Factors) -> Format:
    """The format of ``factors``, ranks included.

    >>> import torch
    >>> from tensigma.linalg import SVDFactors
    >>> format_of(SVDFactors(torch.ones(4, 2), torch.ones(2, 3, 3, 3)))
    SVDFormat(rank=2)
    """
    by_factors = {format_type.factors_type: format_type for format_type in FORMATS.values()}
    for factors_type in type(factors).__mro__:
        if factors_type in by_factors:
            return by_factors[factors_type].of(factors)
    registered = ", ".join(factors_type.__name__ for factors_type in by_factors)
    raise InputError(f"got {type(factors).__name__}; formats are registered for {registered}")


def format_to_json(format: Format) -> dict[str, Any]:
    """A format as an entry of a JSON file, read back by :func:`format_from_json`.

    >>> from tensigma.layers import CPFormat
    >>> format_to_json(CPFormat(7, joint=True))
    {'format': 'cp', 'ranks': [7], 'joint': True}
    """
    return {"format": format.name, "ranks": list(format.ranks), **format.variant}


def format_from_json(entry: Any) -> Format:
    """The format that :func:`format_to_json` wrote; a key ``"bias"``, which archives add, is ignored.

    Raises :class:`StoreError` for anything else. Variants that are absent take their defaults.

    >>> format_from_json({"format": "tucker2", "ranks": [4, 3], "joint": False, "bias": True})
    Tucker2Format(rank_out=4, rank_in=3)
    """
    if not isinstance(entry, dict):
        raise StoreError(f"got {entry!r} for a format; expected an object with 'format' and 'ranks'")
    name, ranks = entry.get("format"), entry.get("ranks")
    format_type = FORMATS.get(name) if isinstance(name, str) else None
    if format_type is None:
        raise StoreError(f"format {name!r} is unknown; known formats are {', '.join(FORMATS)}")
    rank_names, variant_names = format_type.rank_names(), format_type.variant_names()
    if not isinstance(ranks, list) or len(ranks) != len(rank_names):
        raise StoreError(f"got ranks {ranks!r} for format {name!r}; expected a list of {', '.join(rank_names)}")
    variant = {key: value for key, value in entry.items() if key not in _ENTRY_KEYS}
    if "joint" not in variant_names and variant.get("joint") is False:
        del variant["joint"]  # version 0.1 wrote it for every format
    for key, value in variant.items():
        if key not in variant_names:
            accepted = ", ".join(variant_names) or "none"
            raise StoreError(f"variant {key}={value!r} is unknown to format {name!r}; known variants: {accepted}")
    try:
        return format_type(**dict(zip(rank_names, ranks, strict=True)), **variant)
    except InputError as error:
        raise StoreError(f"the entry of format {name!r} cannot be read: {error}") from error

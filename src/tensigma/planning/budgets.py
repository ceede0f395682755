"""One number for the whole model, or several, shared out among its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, ClassVar

from tensigma.errors import InputError
from tensigma.planning.curves import Measure
from tensigma.planning.entry import CompressedEntry, DenseEntry
from tensigma.solving import DENSE_METHOD, Candidate, Folding, check_bits


@dataclass(frozen=True)
class Budget:
    """What the whole model must keep to; subclasses define its meaning.

    Budgets of cost are combined by ``&``: a plan then keeps to all of them.

    >>> Params(0.5) & Macs(0.4)
    AllOf(parts=(Params(share=0.5), Macs(share=0.4)))
    """

    def __and__(self, other: object) -> AllOf:
        if not isinstance(other, Budget):
            return NotImplemented
        return AllOf((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class CostBudget(Budget):
    """The share of the original's cost that may remain, by one measure of cost."""

    unit: ClassVar[str]
    #: The cost of an option that counts.
    field: ClassVar[Measure]
    share: float

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise InputError(
                f"{type(self).__name__}: the share of the original that may remain lies in (0, 1], got {self.share!r}"
            )

    @property
    def parts(self) -> tuple[CostBudget, ...]:
        """The budgets of one measure each that this one is made of."""
        return (self,)

    def show(self, amount: float) -> str:
        """An amount with its unit, as text."""
        return f"{amount:,} {self.unit}"


@dataclass(frozen=True)
class Params(CostBudget):
    """At most ``share`` of the whole model's parameters: 0.5 means half.

    Fewer parameters can mean more multiply-adds: a strided layer's first factor runs before the stride. ``at_most`` is
    the share of the original's multiply-adds that the plan may need, 1 by default, so that none are added; None allows
    any number. It applies where input sizes are known.

    >>> Params(0.5), Params(0.5, at_most=0.8).at_most
    (Params(share=0.5), 0.8)
    """

    unit: ClassVar[str] = "parameters"
    field: ClassVar[Measure] = "params"
    at_most: float | None = dataclass_field(default=1.0, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = self.at_most
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise InputError(
                f"at_most is the share of the original's multiply-adds that a plan may need, or None; got {limit!r}"
            )


@dataclass(frozen=True)
class Macs(CostBudget):
    """At most ``share`` of the multiply-adds that the convolutions and Linear layers need for one sample.

    >>> Macs(0.3).show(1_200_000)
    '1,200,000 MACs'
    """

    unit: ClassVar[str] = "MACs"
    field: ClassVar[Measure] = "macs"


@dataclass(frozen=True)
class Bytes(CostBudget):
    """At most ``share`` of the bytes of the whole model's parameters and buffers: 0.125 means an eighth.

    Layers may be decomposed, or have weights of fewer bits, or both: what each option loses is known under one norm.
    ``bits`` are those that weights may take beside the 32 of float32: 2 to 8 for integers with a scale for each output,
    16 for half precision. Biases of such layers take half precision, everything else stays in float32, and no layer
    takes more multiply-adds than it does now. BatchNorms go into the layers before them, where calibration has seen
    that nothing else reads what is between. The first convolution, which is not decomposed by default, takes no fewer
    than 8 bits.

    >>> Bytes(0.125), Bytes(0.25, bits=8).bits
    (Bytes(share=0.125, bits=(3, 4, 5, 6, 8, 16)), (8,))
    """

    unit: ClassVar[str] = "bytes"
    field: ClassVar[Measure] = "bytes"
    bits: tuple[int, ...] = dataclass_field(default=(3, 4, 5, 6, 8, 16), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bits", _bits(self.bits))


def _bits(bits: Any) -> tuple[int, ...]:
    chosen = tuple(bits) if isinstance(bits, Iterable) and not isinstance(bits, str) else (bits,)
    if not chosen or None in chosen:
        raise InputError(f"bits are those that weights may take, such as (4, 8), got {bits!r}")
    for number in chosen:
        check_bits(number)
    return tuple(sorted(set(chosen)))


@dataclass(frozen=True)
class AllOf(Budget):
    """Several budgets of cost, all of which a plan keeps to; ``Bytes(0.125) & Macs(0.5)`` makes one.

    >>> [part.unit for part in (Bytes(0.125) & Macs(0.5)).parts]
    ['bytes', 'MACs']
    """

    parts: tuple[CostBudget, ...]

    def __post_init__(self) -> None:
        fields = [part.field for part in self.parts]
        twice = next((field for field in fields if fields.count(field) > 1), None)
        if twice is not None:
            raise InputError(f"got two budgets of {twice}, {self.parts!r}; give one of each kind")


def _parts(budget: Budget) -> tuple[CostBudget, ...]:
    if isinstance(budget, CostBudget | AllOf):
        return budget.parts
    raise InputError(f"{budget!r} cannot be combined with others by &; Params, Macs, Bytes and Latency can")


def bits_allowed(budget: Budget | None) -> tuple[int, ...]:
    """The bits that a budget lets weights take beside those of float32; none without a budget of bytes.

    >>> bits_allowed(Bytes(0.2, bits=(8, 4)) & Macs(0.5)), bits_allowed(Macs(0.5))
    ((4, 8), ())
    """
    parts = budget.parts if isinstance(budget, CostBudget | AllOf) else ()
    return next((part.bits for part in parts if isinstance(part, Bytes)), ())


def check_reachable(
    drafts: Sequence[DenseEntry | CompressedEntry | Candidate],
    n_params: int,
    n_bytes: int,
    folding: Folding,
    budget: CostBudget | AllOf,
) -> None:
    """Refuse a budget that not even ranks of 1 would keep, which follows from shapes, before any curve is computed."""
    entries = [draft for draft in drafts if not isinstance(draft, Candidate)]
    candidates = [draft for draft in drafts if isinstance(draft, Candidate)]
    bits = bits_allowed(budget)
    for part in budget.parts:
        field = part.field
        if field == "seconds" or (field == "macs" and any(layer.input_size is None for layer in candidates)):
            continue
        dense = sum(getattr(layer.cost(None), field) for layer in candidates)
        before, after = (sum(getattr(getattr(entry, at), field) for entry in entries) for at in ("before", "after"))
        total = {"params": n_params, "bytes": n_bytes}.get(field, dense + before)
        rest = total - getattr(folding, field, 0) - dense - (before - after)
        smallest = rest + sum(_least(layer, field, bits) for layer in candidates)
        if smallest > part.share * total:
            raise unreachable(part, total, smallest)


def _least(layer: Candidate, field: str, bits: Sequence[int]) -> int:
    formats = [None, *(method.format((1,) * len(method.rank_names)) for method in layer.choices)]
    costs = [layer.cost_in(format) for format in formats]
    allowed = [number for number in bits if number >= layer.least_bits]
    if allowed:
        costs += [layer.cost_in(format or DENSE_METHOD.format(()), min(allowed)) for format in formats]
    return min(getattr(cost, field) for cost in costs)


def unreachable(budget: CostBudget, total: float, smallest: float) -> InputError:
    """The error for a budget below what the lowest ranks leave."""
    return InputError(
        f"no plan leaves {budget.share:.4g} of the {budget.show(total)}: with the lowest ranks the "
        f"layers that may be compressed still leave {budget.show(smallest)}, a share of "
        f"{smallest / (total or 1):.4g}; ask for more, or let more layers be compressed "
        "({layers}, {skip})",
        parameters=("layers", "skip"),
    )

"""Results that others have published, for the page, and ours beside them. Theirs are not measured here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peers.subjects import SUBJECTS


@dataclass(frozen=True)
class Quoted:
    model: str
    method: str
    saving: str
    before: str
    after: str


QUOTED = (
    Quoted("ResNet-56, CIFAR-10", "DepGraph (Torch-Pruning)", "2.57 times fewer MACs", "93.53", "93.64"),
    Quoted("ResNet-56, CIFAR-10", "NORTON", "75 % fewer parameters", "93.26", "93.81"),
    Quoted("ResNet-56, CIFAR-10", "NORTON", "91 % fewer parameters", "93.26", "91.62"),
    Quoted("ResNet-50, ImageNet", "NORTON", "50 % fewer MACs", "76.15", "76.58"),
    Quoted("ResNet-20, CIFAR-10", "HALOC", "72 % fewer MACs", "–", "0.07 above the original"),
)


def table(ours: Iterable[dict[str, Any]] = ()) -> str:
    """Markdown; ``ours`` are cells of ``benchmarks/finetuned.py``, each above what it stands beside."""
    lines = ["| network | method | saving | top-1 before | top-1 after |", "|---|---|---|---|---|"]
    cells = list(ours)
    for q in QUOTED:
        lines += [
            line(cell) for cell in cells if (SUBJECTS[cell["network"]].title, cell["saving"]) == (q.model, q.saving)
        ]
        lines.append(f"| {q.model} | {q.method} (quoted) | {q.saving} | {q.before} | {q.after} |")
    return "\n".join(lines)


def line(cell: dict[str, Any]) -> str:
    how = (
        f"Tensigma, here: {cell['closed']:.2f} in closed form, {cell['refined']:.2f} refined without labels, "
        f"then {cell['labels']:,} labels"
    )
    title = SUBJECTS[cell["network"]].title
    return f"| {title} | {how} | {cell['saving']} | {cell['before']:.2f} | {cell['finetuned']:.2f} |"

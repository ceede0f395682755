"""Results that others have published, for the page. Not measured here: other weights, other training."""

from __future__ import annotations

from dataclasses import dataclass


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


def table() -> str:
    lines = ["| network | method | saving | top-1 before | top-1 after |", "|---|---|---|---|---|"]
    lines += [f"| {q.model} | {q.method} | {q.saving} | {q.before} | {q.after} |" for q in QUOTED]
    return "\n".join(lines)

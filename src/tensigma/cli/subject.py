"""A network to work on: a model by name, or a compressed one in its folder, with its original."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from tensigma.cli.inspect import usual_input
from tensigma.cli.loading import compressed_of, is_untrained, model_of
from tensigma.cli.outputs import MODEL, is_output
from tensigma.cli.parsing import Shape, parse_shape
from tensigma.cli.report import read_report
from tensigma.cli.screen import Screen
from tensigma.errors import InputError, StoreError
from tensigma.zoo import Spec

SubjectName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|DIR",
        show_default=False,
        help="A folder that 'tensigma compress' wrote, or a model: torchvision:NAME, timm:NAME, zoo:NAME or"
        " path/to/file.py:function.",
    ),
]
OriginalName = Annotated[
    str | None,
    typer.Option(
        "--original",
        metavar="MODEL",
        help="The original of a folder; by default what its report says.",
        rich_help_panel="Model",
    ),
]
SubjectWeights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="Trained weights of MODEL, or of the original of DIR.",
        rich_help_panel="Model",
    ),
]
SampleShape = Annotated[
    Shape | None,
    typer.Option(
        "--input",
        parser=parse_shape,
        metavar="CxHxW",
        help="Shape of one sample; 3x224x224 for torchvision and timm, known for zoo models.",
        rich_help_panel="Model",
    ),
]


@dataclass(frozen=True)
class Subject:
    """The network, and the one it was made from where there is one."""

    #: What the original, or the model itself, is called.
    name: str
    network: nn.Module
    original: nn.Module | None
    #: Whether the original has its trained weights; its answers mean nothing without.
    trained: bool

    def example(self, shape: Shape | None, batch: int = 1) -> Tensor:
        """Random inputs of the shape that was asked for, or that is usual for this model."""
        sizes = shape.sizes if shape else usual_input(self.name)
        if sizes is None:
            raise InputError(f"the shape of an input of {self.name} is not known; give --input, such as 3x224x224")
        return torch.randn(batch, *sizes, generator=torch.Generator().manual_seed(0))


def subject_of(screen: Screen, name: str, original: str | None, weights: Path | None) -> Subject:
    """The network of this name, or in this folder."""
    folder = Path(name)
    if not folder.is_dir():
        if ":" not in name and folder.suffix != ".py":
            raise InputError(
                f"{name}: no such folder; give one that 'tensigma compress' wrote, or a model such as "
                "torchvision:resnet18"
            )
        if original is not None:
            raise InputError(f"--original belongs to a folder that 'tensigma compress' wrote; {name} is none")
        return Subject(name, model_of(screen, name, weights, None), None, False)
    if not is_output(folder, MODEL):
        raise StoreError(f"{folder} holds no compressed model; give a folder that 'tensigma compress' wrote")
    notes = read_report(folder / "report.json")[0].notes if (folder / "report.json").is_file() else {}
    first = original or notes.get("model")
    if not first:
        raise InputError(f"{folder} does not tell its original; give --original, such as torchvision:resnet18")
    # A name in a folder from elsewhere must not make us execute a file.
    if original is None and Spec.parse(first).scheme == "file":
        raise InputError(f"the original is {first}, a file that would be executed; say so with --original {first}")
    if weights is None and notes.get("weights") and Path(notes["weights"]).is_file():
        weights = Path(notes["weights"])
    whole = model_of(screen, first, weights, None, warn=False)
    return Subject(first, compressed_of(screen, folder, whole), whole, not is_untrained(first, weights))

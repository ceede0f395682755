"""The network that a command works on: a model by name, or a compressed one in its folder, with its original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import tensigma as ts
from tensigma.cli.inspect import usual_input
from tensigma.cli.loading import Network, compressed_of, is_untrained, model_of
from tensigma.cli.outputs import MODEL, is_output
from tensigma.cli.parsing import parse_shape
from tensigma.cli.report import read_report
from tensigma.cli.screen import Screen
from tensigma.errors import InputError, StoreError
from tensigma.files import recover

SubjectName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|DIR",
        show_default=False,
        help="A folder from 'tensigma compress', or a model: torchvision:NAME, timm:NAME, zoo:NAME,"
        " path/to/file.py:function or path/to/model.onnx.",
    ),
]
OriginalName = Annotated[
    str | None,
    typer.Option(
        "--original",
        metavar="MODEL",
        help="The model that DIR was compressed from; by default the one that DIR/report.json names.",
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
    Any,
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
    """A network, and the one it was compressed from if there is one."""

    #: The name of the original, or of the model itself.
    name: str
    network: Network
    original: Network | None
    #: Whether the original has trained weights; without them its answers mean nothing.
    trained: bool

    def example(self, shape: tuple[int, ...] | None, batch: int = 1) -> Any:
        """Random inputs of ``shape``, or of the usual shape for this model."""
        if shape is None and isinstance(self.network, ts.graphs.OnnxNetwork):
            inputs = self.network.example()
            if inputs is not None:
                return inputs
        sizes = shape or usual_input(self.name)
        if sizes is None:
            raise InputError(f"the input shape of {self.name} is not known; give --input, such as --input 3x224x224")
        return random_inputs(sizes, batch)


def random_inputs(sizes: tuple[int, ...], batch: int) -> Any:
    """The same numbers every time."""
    import torch

    return torch.randn(batch, *sizes, generator=torch.Generator().manual_seed(0))


def subject_of(screen: Screen, name: str, original: str | None, weights: Path | None) -> Subject:
    """The model of this name, or in this folder."""
    folder = Path(name)
    recover(folder)
    if not folder.is_dir():
        if ":" not in name and folder.suffix != ".py" and not name.partition("?")[0].endswith(".onnx"):
            raise InputError(
                f"{name}: no such folder; give a folder from 'tensigma compress', or a model such as "
                "torchvision:resnet18"
            )
        if original is not None:
            raise InputError(f"--original goes with a folder from 'tensigma compress', and {name} is not one")
        network = model_of(screen, name, weights, None)
        return Subject(name, network, None, False)
    check_archive(folder)
    report = folder / "report.json"
    notes = read_report(report)[0].notes if report.is_file() else {}
    original_name = original_of(folder, notes, original)
    weights = weights or weights_in(notes)
    network = model_of(screen, original_name, weights, None, warn=False)
    compressed = compressed_of(screen, folder, network)
    return Subject(original_name, compressed, network, not is_untrained(original_name, weights))


def check_archive(folder: Path) -> None:
    """Refuse a folder that holds no compressed model."""
    recover(folder)
    if not is_output(folder, MODEL):
        raise StoreError(f"{folder} holds no compressed model; give a folder from 'tensigma compress'")


def original_of(folder: Path, notes: Mapping[str, Any], name: str | None) -> str:
    """The name of the model that a folder was compressed from: ``name``, or what the notes of its report say."""
    if name is not None:
        return name
    noted = notes.get("model")
    if not noted:
        raise InputError(f"{folder} does not name its original; give --original, such as torchvision:resnet18")
    # A folder that somebody else made must not decide which file is executed here.
    if ts.zoo.Spec.parse(noted).scheme == "file":
        raise InputError(
            f"the original is {noted}, a file that would be executed; to allow that, add --original {noted}"
        )
    return str(noted)


def weights_in(notes: Mapping[str, Any]) -> Path | None:
    """The original's file of weights, if the notes of a report name one that still exists."""
    noted = notes.get("weights")
    return Path(noted) if noted and Path(noted).is_file() else None

"""``tensigma inspect``: the layers of a model, what they cost, and which can be compressed."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from tensigma.cli.command import command
from tensigma.cli.loading import model_of
from tensigma.cli.options import ModelName, Weights
from tensigma.cli.parsing import Shape, parse_shape
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import InputError
from tensigma.layers import Geometry, Layer, find_layers
from tensigma.planning import first_convolution
from tensigma.report import number, short
from tensigma.running import borrowed
from tensigma.solving import METHODS

InputShape = Annotated[
    Shape | None,
    typer.Option(
        "--input",
        parser=parse_shape,
        metavar="CxHxW",
        help="Shape of one sample, to count MACs; 3x224x224 for torchvision and timm, known for zoo models.",
    ),
]


@command
def inspect(screen: Screen, model: ModelName, weights: Weights = None, input: InputShape = None) -> None:
    """List the layers of a model: shapes, parameters, MACs, and which can be compressed.

    [bold]Examples[/bold]

      tensigma inspect torchvision:resnet18
      tensigma inspect models/mine.py:build --input 3x96x96
      tensigma inspect zoo:digits-cnn --json
    """
    network = model_of(screen, model, weights, None, warn=False)
    layers = find_layers(network)
    if not layers:
        raise InputError(f"{model} has no convolution or Linear layer, so there is nothing to compress")
    shape = input.sizes if input else usual_input(model)
    macs: Counter[str] | None = None
    if shape is None:
        screen.note("MACs are not counted: give the shape of one sample with --input, such as --input 3x224x224")
    else:
        try:
            macs = macs_by_layer(network, layers, torch.zeros(1, *shape))
        except Exception as error:
            if input is not None:
                raise InputError(f"the model rejects an input of shape {shape}: {error}") from error
            screen.note(f"MACs are not counted: the model rejects an input of shape {shape}; give another with --input")
    facts = [_facts(layer, None if macs is None else macs[layer.name]) for layer in layers]
    n_params = sum(parameter.numel() for parameter in network.parameters())
    n_open = sum(fact["params"] for fact in facts if fact["compressible"])
    total = None if macs is None else sum(macs.values())
    for fact in facts:
        fact["skipped_by_default"] = fact["compressible"] and fact["name"] in first_convolution(layers)
    rows = [_row(fact) for fact in facts]
    open_share = f"{n_open / max(n_params, 1):.0%} of the parameters can be compressed"
    rows.append(["whole model", "", "", number(n_params), short(total), open_share])
    data = {
        "model": model,
        "input": None if shape is None else list(shape),
        "params": n_params,
        "compressible_params": n_open,
        "macs": total,
        "layers": facts,
    }
    header = ["layer", "kind", "shape", ">parameters", ">MACs", "formats, or why it stays dense"]
    screen.result("inspect", data, Columns(header, rows, n_totals=1, remarks=5))


def macs_by_layer(model: nn.Module, layers: list[Layer], sample: Tensor) -> Counter[str]:
    """Multiply-adds of each layer for one ``sample`` (1, …), as often as it is called."""
    found: Counter[str] = Counter()

    def count(name: str, geometry: Geometry) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], Tensor):
                shape = args[0].shape
                found[name] += geometry.macs_from(shape[1:-1] if geometry.kind == "linear" else shape[2:])

        return hook

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(borrowed(model))
        for layer in layers:
            if layer.geometry is not None:
                stack.callback(layer.module.register_forward_hook(count(layer.name, layer.geometry)).remove)
        model(sample)
    return found


def usual_input(model: str) -> tuple[int, ...] | None:
    """The shape of one sample that models of this name are made for."""
    scheme, _, rest = model.partition(":")
    name = rest.partition("?")[0]
    if scheme == "zoo" and name == "digits-cnn":
        return 1, 8, 8
    if scheme == "zoo" and name.endswith("-cifar"):
        return 3, 32, 32
    if scheme in ("zoo", "torchvision", "timm"):
        return 3, 224, 224
    return None


def _facts(layer: Layer, macs: int | None) -> dict[str, Any]:
    formats, reasons = [], []
    for name, method in METHODS.items():
        reason = layer.why_not(method.format_type)
        pointwise = layer.geometry is not None and layer.geometry.is_pointwise
        if reason is None and not (pointwise and name != "svd"):
            formats.append(name)
        elif reason is not None:
            reasons.append(reason)
    geometry = layer.geometry
    return {
        "name": layer.name,
        "kind": type(layer.module).__name__,
        "shape": None if geometry is None else _shape(geometry),
        "params": sum(parameter.numel() for parameter in layer.module.parameters(recurse=False)),
        "macs": macs,
        "compressible": bool(formats),
        "formats": formats,
        "reason": None if formats else reasons[0],
    }


def _shape(geometry: Geometry) -> str:
    text = f"{geometry.in_channels} → {geometry.out_channels}"
    if geometry.kernel_size:
        text += ", " + "×".join(map(str, geometry.kernel_size))
    if any(step > 1 for step in geometry.stride):
        text += f", stride {'×'.join(map(str, dict.fromkeys(geometry.stride)))}"
    if any(step > 1 for step in geometry.dilation):
        text += f", dilation {'×'.join(map(str, dict.fromkeys(geometry.dilation)))}"
    return text + (f", {geometry.groups} groups" if geometry.groups > 1 else "")


def _row(fact: dict[str, Any]) -> list[str]:
    last = ", ".join(fact["formats"]) or fact["reason"]
    if fact["skipped_by_default"]:
        last += " (but left dense unless --skip says otherwise)"
    return [fact["name"], fact["kind"], fact["shape"] or "", number(fact["params"]), short(fact["macs"]), last]

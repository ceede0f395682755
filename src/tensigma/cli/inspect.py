"""``tensigma inspect``: the layers of a model, what they cost, and which can be compressed."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Annotated, Any

import typer

import tensigma as ts
from tensigma.cli.command import command
from tensigma.cli.loading import Network, model_of
from tensigma.cli.options import ModelName, Weights
from tensigma.cli.parsing import parse_shape
from tensigma.cli.screen import Screen
from tensigma.cli.tables import Columns
from tensigma.errors import InputError

InputShape = Annotated[
    Any,
    typer.Option(
        "--input",
        parser=parse_shape,
        metavar="CxHxW",
        help="Shape of one sample, for counting MACs; 3x224x224 for torchvision and timm, known for zoo models.",
    ),
]


@command
def inspect(screen: Screen, model: ModelName, weights: Weights = None, input: InputShape = None) -> None:
    """List the layers of a model: shapes, parameters, MACs, and which can be compressed.

    [bold]Examples[/bold]

      tensigma inspect torchvision:resnet18
      tensigma inspect models/mine.py:build --input 3x96x96
      tensigma inspect zoo:digits-cnn --json
      tensigma inspect model.onnx --input 3x640x640
    """
    network = model_of(screen, model, weights, None, warn=False)
    graph = network if isinstance(network, ts.graphs.OnnxNetwork) else None
    layers = ts.layers.find_layers(network)
    if not layers:
        raise InputError(f"{model} has no convolution or Linear layer, so there is nothing to compress")
    shape = input or (usual_input(model) if graph is None else graph.fixed_shape)
    macs = _counted(screen, network, layers, shape, asked=input is not None)
    facts = [_facts(layer, None if macs is None else macs[layer.name]) for layer in layers]
    left_dense = ts.planning.first_convolution(layers)
    for fact in facts:
        fact["skipped_by_default"] = fact["compressible"] and fact["name"] in left_dense
    n_params = sum(parameter.numel() for parameter in network.parameters())
    n_compressible = sum(fact["params"] for fact in facts if fact["compressible"])
    total_macs = None if macs is None else sum(macs.values())
    data = {
        "model": model,
        "input": None if shape is None else list(shape),
        "params": n_params,
        "compressible_params": n_compressible,
        "macs": total_macs,
        "layers": facts,
    }
    if graph is not None:
        data |= {"inputs": graph.input_facts, "outputs": graph.output_names, "left_alone": graph.left_alone}
        for name, reason in graph.left_alone.items():
            screen.note(f"{name} is no layer to compress: {reason}")
    rows = [_row(fact) for fact in facts]
    share = f"{n_compressible / max(n_params, 1):.0%} of the parameters can be compressed"
    rows.append(["whole model", "", "", ts.report.number(n_params), ts.report.short(total_macs), share])
    header = ["layer", "kind", "shape", ">parameters", ">MACs", "formats, or why it stays dense"]
    screen.result("inspect", data, Columns(header, rows, n_totals=1, remarks=5))


def usual_input(model: str) -> tuple[int, ...] | None:
    """The usual shape of one sample for the model of this name; None for a model of the user's own."""
    scheme, _, rest = model.partition(":")
    name = rest.partition("?")[0]
    if scheme == "zoo" and name == "digits-cnn":
        return 1, 8, 8
    if scheme == "zoo" and name.endswith("-cifar"):
        return 3, 32, 32
    if scheme in ("zoo", "torchvision", "timm"):
        return 3, 224, 224
    return None


def _counted(
    screen: Screen, network: Network, layers: list[ts.layers.Layer], shape: tuple[int, ...] | None, *, asked: bool
) -> Counter[str] | None:
    """Layer → MACs for one sample of ``shape``; None if they cannot be counted."""
    if shape is None:
        screen.note("MACs are not counted; give the shape of one sample with --input, such as --input 3x224x224")
        return None
    try:
        return _macs_by_layer(network, layers, shape)
    except Exception as error:
        if asked:
            raise InputError(f"the model rejects an input of shape {shape}: {error}") from error
        screen.note(f"MACs are not counted: the model rejects an input of shape {shape}; give another one with --input")
        return None


def _macs_by_layer(network: Network, layers: list[ts.layers.Layer], shape: tuple[int, ...]) -> Counter[str]:
    """Multiply-adds of each layer for one sample; a layer that is called twice counts twice."""
    import torch

    macs: Counter[str] = Counter()

    def counting(name: str, geometry: ts.layers.Geometry) -> Any:
        def hook(module: Network, args: tuple[Any, ...], output: Any) -> None:
            if args and isinstance(args[0], torch.Tensor):
                sizes = args[0].shape
                macs[name] += geometry.macs_from(sizes[1:-1] if geometry.kind == "linear" else sizes[2:])

        return hook

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(ts.running.borrowed(network))
        for layer in layers:
            if layer.geometry is not None:
                stack.callback(layer.module.register_forward_hook(counting(layer.name, layer.geometry)).remove)
        network(torch.zeros(1, *shape))
    return macs


def _facts(layer: ts.layers.Layer, macs: int | None) -> dict[str, Any]:
    geometry = layer.geometry
    pointwise = geometry is not None and geometry.is_pointwise
    formats, reasons = [], []
    for name, method in ts.solving.METHODS.items():
        if method is ts.solving.DENSE_METHOD:  # any layer can be rounded; this is about decompositions
            continue
        reason = layer.why_not(method.format_type)
        if reason is not None:
            reasons.append(reason)
        elif name == "svd" or not pointwise:
            formats.append(name)
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


def _shape(geometry: ts.layers.Geometry) -> str:
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
        last += " (left dense unless --skip says otherwise)"
    params, macs = ts.report.number(fact["params"]), ts.report.short(fact["macs"])
    return [fact["name"], fact["kind"], fact["shape"] or "", params, macs, last]

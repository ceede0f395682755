"""Export of a network that came as an ONNX file: into its own graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tensigma.deployment.parity import parity, sizes_to_check
from tensigma.errors import InputError
from tensigma.graphs import OnnxModel, OnnxNetwork, write_graph
from tensigma.running import borrowed, device_of


@dataclass(frozen=True)
class WrittenGraph:
    """How far a written graph is from the network: the largest difference and the largest output, on these batches."""

    batches: tuple[int, ...]
    max_difference: float | None
    largest_output: float | None


def write_back(
    network: OnnxNetwork, target: Path, inputs: Tensor | None, *, share: float, most: float, check: bool, pack: bool
) -> WrittenGraph:
    """Write ``network`` into the graph it came from; without ``check`` the file is only seen to be valid ONNX.

    Without ``inputs``, it is compared with the network on a sample that the network has seen.
    """
    x = network.example() if inputs is None else inputs.detach().cpu()
    if not check:
        write_graph(network, target, pack=pack)
        return WrittenGraph((), None, None)
    if x is None:
        raise InputError(
            f"{network.source.path} takes inputs of several sizes and has not been run yet; pass {{example}}, a batch "
            "of inputs to compare the file with the network on",
            parameters=("example",),
        )
    batch = network.batch_size
    if batch is not None:
        x = x[:batch]
    sizes = sizes_to_check(len(x), batch is None)
    home = device_of(network)

    def compare(file: Path) -> tuple[float, float]:
        written = OnnxModel(file, fixed=network.fixed_inputs)
        with borrowed(network, None if home is None or home.type == "cpu" else "cpu"), torch.no_grad():
            return parity(network, written, x, sizes, share, most)

    return WrittenGraph(sizes, *write_graph(network, target, compare, pack=pack))

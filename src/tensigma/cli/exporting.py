"""``tensigma compress --export``: the result as an ONNX file beside its archive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

import tensigma as ts
from tensigma.cli.command import message_of
from tensigma.cli.inspect import usual_input
from tensigma.cli.loading import Network
from tensigma.cli.outputs import GRAPH
from tensigma.cli.screen import Screen
from tensigma.cli.subject import random_inputs


@dataclass(frozen=True)
class Exporting:
    """A copy of the result as an ONNX file."""

    #: Inputs that it is traced and checked with.
    example: Any

    @classmethod
    def of(cls, network: Network, name: str, images: Any) -> Exporting | None:
        """None for a network that is written as an ONNX file anyway; refuses what could not be exported later."""
        if isinstance(network, ts.graphs.OnnxNetwork):
            return None
        ts.deployment.check_exporter()
        if images is not None:
            return cls(next(iter(ts.running.Batches(images, max_samples=2))).inputs)
        sizes = usual_input(name)
        if sizes is None:
            raise typer.BadParameter("--export needs an image to try the file on; name some with --data or --eval-data")
        return cls(random_inputs(sizes, 2))

    def write(self, screen: Screen, small: Network, out: Path) -> bool:
        """Whether it went well: the compressed model stays in any case."""
        try:
            exported = ts.export(small, out / GRAPH, self.example)
        except Exception as error:
            screen.error(f"the compressed model is in {out}, but it could not be exported: {message_of(screen, error)}")
            return False
        size = ts.report.short(exported.bytes, "B")
        screen.note(
            f"exported to {exported.path}, {size}, compared on batches of {', '.join(map(str, exported.batches))}"
        )
        return True

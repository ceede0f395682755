"""The order of work in a graph: layers one by one, and between them as many other nodes at once as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensigma.errors import InputError
from tensigma.graphs.layer_nodes import LayerNode
from tensigma.graphs.source import Source, reads


@dataclass(frozen=True, eq=False)
class Segment:
    """Nodes that are run together, and the values that go in and come out."""

    nodes: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    #: Values that nothing later reads.
    last_uses: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class LayerStep:
    """A layer, by its name in the module."""

    layer: str
    inputs: tuple[str]
    output: str
    last_uses: tuple[str, ...] = ()


Step = Segment | LayerStep


def steps_of(source: Source, layers: Mapping[str, LayerNode]) -> list[Step]:
    """What to do, in order. Every segment has all nodes that can be run at its turn."""
    constants = source.constants
    names = {id(layer.node): name for name, layer in layers.items()}
    known = {*source.inputs}
    # Nodes whose results are constant go into the segments that read them.
    pending = [node for node in source.graph.node if not all(name in constants for name in node.output if name)]
    groups: list[list[Any]] = []
    while pending:
        segment = [node for node in pending if id(node) not in names and _is_ready(node, known, constants)]
        ready = [node for node in pending if id(node) in names and _is_ready(node, known, constants)]
        done = {id(node) for node in (*segment, *ready)}
        if not done:
            raise InputError(f"{source.path}: nothing computes what node {pending[0].name!r} reads")
        groups += [segment] if segment else []
        groups += [[node] for node in ready]
        pending = [node for node in pending if id(node) not in done]
    wanted = {output.name for output in source.graph.output}
    steps: list[Step] = []
    for group in reversed(groups):
        step = _step(group, names, wanted, constants)
        steps.append(step)
        wanted.update(step.inputs)
    return steps[::-1]


def _is_ready(node: Any, known: set[str], constants: set[str]) -> bool:
    """Whether everything that ``node`` reads is known; its results then are, too."""
    if not all(name in known or name in constants for name in reads(node)):
        return False
    known.update(node.output)
    return True


def _step(group: Sequence[Any], names: Mapping[int, str], wanted: set[str], constants: set[str]) -> Step:
    """Some nodes as a step, where ``wanted`` is what all later steps read."""
    first = group[0]
    if id(first) in names:
        x = first.input[0]
        return LayerStep(names[id(first)], (x,), first.output[0], () if x in wanted else (x,))
    computed = {name for node in group for name in node.output if name}
    values = dict.fromkeys(name for node in group for name in reads(node))
    inputs = tuple(name for name in values if name not in computed and name not in constants)
    outputs = tuple(name for node in group for name in node.output if name in wanted)
    return Segment(tuple(group), inputs, outputs, tuple(name for name in inputs if name not in wanted))

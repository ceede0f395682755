"""Names of layers: those of weights or nodes, made valid for modules."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: What exporters add to the name of a layer to name its weight.
_WEIGHT_ENDINGS = (".weight", ".kernel", "/kernel", ".w_0", "_weights", "_weight", "/ReadVariableOp")


def layer_name(node_name: str, weight_name: str, operator: str) -> str:
    """The name of a layer with dots between its levels: that of its weight, of its node, or its operator.

    >>> layer_name("node_conv2d_3", "layer1.0.conv1.weight", "Conv"), layer_name("p2o.Conv.0", "conv2d_0.w_0", "Conv")
    ('layer1.0.conv1', 'conv2d_0')
    >>> layer_name("/layer1/layer1.0/conv1/Conv", "onnx::Conv_193", "Conv"), layer_name("", "", "Gemm")
    ('layer1.0.conv1', 'gemm')
    """
    for ending in _WEIGHT_ENDINGS:
        if weight_name.endswith(ending) and weight_name != ending:
            return _valid(_levels(weight_name.removesuffix(ending)))
    if node_name:
        levels = _levels(node_name)
        # PyTorch's older exporter ends paths with the operator.
        return _valid(levels[:-1] if len(levels) > 1 and levels[-1] == operator else levels)
    return _valid(_levels(weight_name)) if weight_name else operator.lower()


def _levels(path: str) -> list[str]:
    """The parts of a name. Exporters may repeat the levels above in each part: /layer1/layer1.0/conv1."""
    parts: list[str] = []
    for part in filter(None, path.split("/")):
        if parts and part.startswith(f"{parts[-1]}."):
            parts[-1] = part
        else:
            parts.append(part)
    return [level for part in parts for level in part.split(".") if level]


def _valid(levels: Iterable[str]) -> str:
    return ".".join(re.sub(r"\W", "_", level) for level in levels) or "layer"


def unique_name(name: str, taken: Iterable[str]) -> str:
    """``name``, changed if it is taken or if a layer would have to lie inside another one.

    >>> unique_name("a.b", ["a"]), unique_name("a", ["a.b", "c"]), unique_name("a.c", ["a.b"])
    ('a_b', 'a_1', 'a.c')
    """
    names = [*taken]

    def is_free(candidate: str) -> bool:
        return not any(
            candidate == other or candidate.startswith(f"{other}.") or other.startswith(f"{candidate}.")
            for other in names
        )

    if is_free(name):
        return name
    flat = name.replace(".", "_")
    candidates = (flat if number == 0 else f"{flat}_{number}" for number in range(len(names) + 2))
    return next(candidate for candidate in candidates if is_free(candidate))

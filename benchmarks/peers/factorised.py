"""Convolutions and Linear layers replaced by chains of plain ones, for tools that give factors and no modules."""

from __future__ import annotations

from torch import Tensor, nn


def layers_of(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """All layers that a weight decomposition may replace, by name: not the first one, which sees three channels."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    }
    return dict(list(found.items())[1:])


def conv(weight: Tensor, like: nn.Conv2d, *, axes: str = "", groups: int = 1, bias: Tensor | None = None) -> nn.Conv2d:
    """A convolution with this weight that takes the stride and the padding of ``like`` along ``axes``: "h", "w"."""

    def along(values: tuple[int, ...], otherwise: int) -> tuple[int, int]:
        return tuple(value if axis in axes else otherwise for axis, value in zip("hw", values, strict=True))  # type: ignore[return-value]

    assert not isinstance(like.padding, str)
    layer = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),  # type: ignore[arg-type]
        stride=along(like.stride, 1),
        padding=along(like.padding, 0),
        dilation=along(like.dilation, 1),
        groups=groups,
        bias=bias is not None,
    )
    layer.weight.data = weight.contiguous().clone()
    if bias is not None:
        assert layer.bias is not None
        layer.bias.data = bias.detach().clone()
    return layer


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight.data = weight.contiguous().clone()
    if bias is not None:
        layer.bias.data = bias.detach().clone()
    return layer


def replace_(model: nn.Module, name: str, chain: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, chain)

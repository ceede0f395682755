"""Training weights that lie on grids of few bits, so that they lie on grids of as many bits afterwards.

Behind every such weight stands a latent one that training moves. Layers compute with the latent weight rounded to the
grid, and the gradient passes through the rounding as if it were not there (straight-through estimation); that of the
scales follows from the same rule (learned step sizes). Scales and biases in half precision stay in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tensigma.layers import HALF, Grid, grid_of, has_half_bias, in_half, set_grid_


@contextmanager
def trained_on_grids(model: nn.Module) -> Iterator[None]:
    """Inside, the weights of ``model`` that lie on grids may be trained, and so may the scales of these grids.

    Where nothing was trained, nothing has changed afterwards.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> layer.weight.data = torch.tensor([[1.0, -0.5]])
    >>> set_grid_(layer, Grid(4, torch.tensor([[0.5]])))
    >>> with trained_on_grids(layer):
    ...     sorted(name for name, _ in layer.named_parameters())
    ['parametrizations.weight.0.stretch', 'parametrizations.weight.original']
    >>> layer.weight.tolist(), grid_of(layer).bits
    ([[1.0, -0.5]], 4)
    """
    grids = {(layer, "weight"): grid for layer in model.modules() if (grid := grid_of(layer)) is not None}
    biases = {(layer, "bias"): Grid(HALF) for layer, _ in grids if has_half_bias(layer)}
    orders = {layer: [name for name, _ in layer.named_parameters(recurse=False)] for layer, _ in grids}
    for (layer, name), grid in (grids | biases).items():
        # The unsafe form does not call the rounding to check shapes.
        parametrize.register_parametrization(layer, name, _OnGrid(grid, getattr(layer, name)), unsafe=True)
    try:
        yield
    finally:
        for layer, name in grids | biases:
            rounding = layer.get_submodule(f"parametrizations.{name}.0")
            parametrize.remove_parametrizations(layer, name)
            if name == "weight":
                assert isinstance(rounding, _OnGrid)
                grid = rounding.grid()
                # Steps far too large leave weights that are no numbers, which lie on no grid.
                if grid.holds(layer.weight):  # type: ignore[arg-type]
                    set_grid_(layer, grid)
        for layer, order in orders.items():
            _reorder_(layer, order)


class _OnGrid(nn.Module):
    """The nearest point of a grid whose scales can be trained."""

    def __init__(self, grid: Grid, weight: Tensor) -> None:
        super().__init__()
        self.bits, self._scales = grid.bits, grid.scales
        if grid.scales is not None:
            self._in_half = torch.equal(in_half(grid.scales), grid.scales)
            # Logarithms, so that a step changes scales of any size by the same share, and none changes its sign.
            stretch = torch.zeros_like(grid.scales, device=weight.device)
            self.stretch = nn.Parameter(stretch, requires_grad=weight.requires_grad)

    def forward(self, latent: Tensor) -> Tensor:
        scales = self._trained_scales()
        if scales is None:
            return _through(latent, in_half(latent))
        largest = 2.0 ** (self.bits - 1)
        steps = (latent.reshape(*scales.shape, -1) / scales[..., None]).clamp(-largest, largest - 1)
        return (_through(steps, steps.round()) * scales[..., None]).reshape(latent.shape)

    @torch.no_grad()
    def grid(self) -> Grid:
        scales = self._trained_scales()
        return Grid(self.bits, None if scales is None else scales.clone())

    def _trained_scales(self) -> Tensor | None:
        if self._scales is None:
            return None
        scales = self._scales.to(self.stretch) * self.stretch.exp()
        return _through(scales, in_half(scales)) if self._in_half else scales


def _reorder_(layer: nn.Module, order: list[str]) -> None:
    """Register parameters anew in this order, which decides that of a state dict."""
    for name in order:
        parameter = getattr(layer, name)
        delattr(layer, name)
        layer.register_parameter(name, parameter)


def _through(exact: Tensor, rounded: Tensor) -> Tensor:
    """``rounded``, to the last bit as both are near each other, with the gradient of ``exact``."""
    return exact + (rounded - exact).detach()

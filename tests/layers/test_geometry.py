from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from cases import GEOMETRIES, LayerCase
from tensigma.layers import Geometry, kernels_of, to_kernels, to_layer, to_weight

# The dense layer itself warns about this, once per process.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.mark.parametrize("case", GEOMETRIES)
def test_geometry_knows_its_layer(case: LayerCase) -> None:
    layer = case.layer()
    geometry = Geometry.of(layer)
    assert repr(geometry.to_module()) == repr(layer)
    assert Geometry.of(geometry.to_module()) == geometry
    output = layer(case.inputs())
    spatial = output.shape[1:-1] if geometry.kind == "linear" else output.shape[2:]
    assert geometry.output_size(case.size) == spatial
    assert geometry.n_params == sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("case", GEOMETRIES)
def test_kernels_and_weights_are_the_same_numbers(case: LayerCase) -> None:
    layer = case.layer()
    geometry = Geometry.of(layer)
    kernels = torch.stack(kernels_of(layer))
    assert kernels.shape == (geometry.groups, *geometry.kernel_shape)
    weight = layer.get_parameter("weight").detach()
    assert torch.equal(to_kernels(weight, geometry), kernels)
    assert torch.equal(to_weight(kernels, geometry), weight)
    again = to_layer(kernels, geometry, layer.bias)  # type: ignore[arg-type]
    assert_close(again.state_dict(), layer.state_dict(), rtol=0, atol=0)

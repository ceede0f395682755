"""Layouts of weights in training: the same numbers, the same memory afterwards, and nothing where it would not work."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tensigma.running import channels_last, safe_backward

X = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(1))


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
    return nn.Sequential(nn.Conv2d(2, 6, 3), depthwise, nn.ConvTranspose2d(6, 4, 2), nn.Flatten(), nn.Linear(196, 3))


class Viewing(nn.Module):
    """Flattens its maps by a view, which only the contiguous layout allows."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        return y.view(len(y), -1)


def lies_last(weight: Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def test_weights_lie_so_inside_and_in_their_own_memory_afterwards() -> None:
    model = small_net()
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    strides = [parameter.stride() for parameter in model.parameters()]
    with channels_last(model, example=X):
        assert lies_last(model.get_parameter("0.weight"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert all(torch.equal(a, 2 * b) for a, b in zip(model.parameters(), small_net().parameters(), strict=True))


def test_answers_and_gradients_are_the_same_to_rounding() -> None:
    model, twin = small_net(), small_net()
    with channels_last(model, example=X), safe_backward(model):
        model(X).square().sum().backward()
    twin(X).square().sum().backward()
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-4)


def test_a_model_that_needs_the_contiguous_layout_keeps_it() -> None:
    model, other = Viewing(), small_net()
    with channels_last(model, other, example=X):
        assert model.convolution.weight.is_contiguous()
        assert lies_last(other.get_parameter("0.weight"))
        model(X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_left_alone(dtype: torch.dtype) -> None:
    model = small_net().to(dtype)
    with channels_last(model, example=X.to(dtype)):
        assert model.get_parameter("0.weight").is_contiguous()


def test_memory_comes_back_after_an_error() -> None:
    model = small_net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), channels_last(model, example=X):
        raise KeyError
    for name, value in model.state_dict().items():
        assert value.is_contiguous()
        assert torch.equal(value, before[name])

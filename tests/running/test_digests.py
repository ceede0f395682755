"""Digests: the same for what computes the same, another one for a single bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from support_nets import small_net
from tensigma.running import Digest, tensors_of, weights_digest


@pytest.fixture
def model() -> nn.Module:
    return small_net()


def test_a_copy_has_the_same(model: nn.Module) -> None:
    assert weights_digest(copy.deepcopy(model)) == weights_digest(model)
    again = small_net(seed=1)
    assert weights_digest(again) != weights_digest(model)
    again.load_state_dict(model.state_dict())
    assert weights_digest(again) == weights_digest(model)


def test_mode_gradients_and_memory_format_do_not_matter(model: nn.Module) -> None:
    expected = weights_digest(model)
    assert weights_digest(copy.deepcopy(model).train()) == expected
    assert weights_digest(copy.deepcopy(model).requires_grad_(False)) == expected
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stem = last.get_parameter("stem.weight")
    assert not stem.is_contiguous()
    assert weights_digest(last) == expected


def test_the_count_of_training_steps_does_not_matter(model: nn.Module) -> None:
    expected = weights_digest(model)
    model.get_buffer("block.1.num_batches_tracked").add_(1)
    assert weights_digest(model) == expected


def _flip_last_bit_(tensor: torch.Tensor) -> None:
    """The smallest change that a tensor of single-precision numbers can have."""
    tensor.detach().view(-1).view(torch.int32)[-1] ^= 1


@pytest.mark.parametrize("name", ["stem.weight", "head.bias", "block.1.running_mean", "block.1.running_var"])
def test_one_bit_matters(model: nn.Module, name: str) -> None:
    expected = weights_digest(model)
    tensor = tensors_of(model)[name]
    before = tensor.clone()
    _flip_last_bit_(tensor)
    assert int((tensor != before).sum()) == 1
    assert weights_digest(model) != expected
    _flip_last_bit_(tensor)
    assert weights_digest(model) == expected


def test_names_types_and_shapes_matter() -> None:
    def digest(**parameters: torch.Tensor) -> str:
        return weights_digest(nn.ParameterDict({name: nn.Parameter(value) for name, value in parameters.items()}))

    one = torch.ones(2, 3)
    others = [digest(b=one), digest(a=one.double()), digest(a=one.T), digest(a=one, b=one), digest()]
    assert len({digest(a=one), *others}) == 1 + len(others)
    assert digest(a=one) == digest(a=one.clone())


def test_tied_weights_are_one_set() -> None:
    def net(*, tied: bool) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if tied:
            layers[1].weight = layers[0].weight
        return layers

    assert weights_digest(net(tied=True)) == weights_digest(net(tied=True)) != weights_digest(net(tied=False))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_of_any_kind_are_read(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    assert Digest().add(tensor).text == Digest().add(tensor.T.contiguous().T).text
    assert Digest().add(tensor).text != Digest().add(tensor[:, :1]).text
    assert Digest().add(torch.zeros(0, dtype=dtype)).text != Digest().add(torch.zeros(0, 2, dtype=dtype)).text


def test_plain_data_is_read_without_regard_to_the_order_of_keys() -> None:
    assert Digest().add({"a": 1, "b": None}).text == Digest().add({"b": None, "a": 1}).text
    assert Digest().add([1, 2]).text != Digest().add([2, 1]).text
    assert Digest(8).add("a").text != Digest(8).add("b").text
    assert len(Digest(8).text) == 16

"""Passes that halt at layers: what they hand over, what may change meanwhile, and that nothing is left of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from support_nets import batches, small_net
from tensigma.errors import InputError
from tensigma.running import Batch, OutOfOrder, halted_passes, live_bytes, run

LAYERS = ["stem", "block.0", "grouped", "depthwise", "pointwise", "up", "hidden", "head"]


def numbered(inputs: list[Tensor]) -> list[Batch]:
    return [Batch(index, x, None) for index, x in enumerate(inputs)]


def met(model: nn.Module, name: str, x: Tensor, *, after: bool) -> Tensor:
    """The twin: what a layer meets in a pass of its own, by a hook."""
    found: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(
        lambda module, args, output: found.append((output if after else args[0]).clone())
    )
    with torch.no_grad():
        model(x)
    hook.remove()
    (value,) = found
    return value


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Any:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "tensigma-pass"]


@pytest.mark.parametrize("after", [True, False], ids=["outputs", "inputs"])
def test_every_layer_hands_over_what_it_meets(after: bool) -> None:
    model, data = small_net(), batches(3)
    expected = {name: [met(model, name, x, after=after) for x in data] for name in LAYERS}
    with halted_passes(model, numbered(data), LAYERS, after=after) as passes:
        for name in LAYERS:
            for value, wanted in zip(passes.advance(name), expected[name], strict=True):
                assert torch.equal(value, wanted)
                assert not value.requires_grad


def test_a_layer_may_be_exchanged_while_passes_stand_before_it() -> None:
    model, other, data = small_net(), small_net(seed=1), batches(2)
    mixed = small_net()
    mixed.grouped, mixed.pointwise = other.grouped, other.pointwise
    expected = [met(mixed, "head", x, after=False) for x in data]
    with halted_passes(model, numbered(data), LAYERS, after=False) as passes:
        for name in LAYERS:
            values = passes.advance(name)
            if name in ("grouped", "pointwise"):
                passes.substitute(name, other.get_submodule(name))
    assert all(torch.equal(value, wanted) for value, wanted in zip(values, expected, strict=True))
    # The model itself has its own layers still.
    torch.testing.assert_close(model(data[0]), small_net()(data[0]), rtol=0, atol=0)


def test_others_may_call_the_model_meanwhile() -> None:
    model, data = small_net(), batches(2)
    with torch.no_grad():
        expected = model(data[1])
        with halted_passes(model, numbered(data), LAYERS, after=False) as passes:
            passes.advance("stem")
            assert torch.equal(run(model, Batch(9, data[1], None)), expected)
            passes.advance("block.0")


@pytest.mark.parametrize("at", ["stem", "up", "head"])
def test_layers_compute_by_themselves_again_wherever_it_ends(at: str) -> None:
    model, data = small_net(), batches(2)
    own = model.stem.forward

    def replaced(input: Tensor) -> Tensor:
        return own(input)

    model.stem.forward = replaced  # type: ignore[method-assign]

    def go() -> None:
        with halted_passes(model, numbered(data), LAYERS, after=True) as passes:
            for name in LAYERS:
                passes.advance(name)
                if name == at:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go()
    assert model.stem.forward is replaced
    assert not any("forward" in vars(model.get_submodule(name)) for name in LAYERS[1:])


class Ways(nn.Module):
    """The sign of the first number decides which layers are called, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) if x[0, 0] > 0 else self.two(x)


def test_batches_that_take_another_way_are_noticed() -> None:
    model, ones = Ways(), torch.ones(2, 4)
    with halted_passes(model, numbered([ones, -ones]), ["one", "two"], after=False) as passes:
        with pytest.raises(OutOfOrder, match="a batch reached layer 'two', another one layer 'one'"):
            passes.advance("one")
    with halted_passes(model, numbered([ones]), ["one", "two"], after=False) as passes:
        passes.advance("one")
        passes.advance("two")
        with pytest.raises(OutOfOrder, match="a batch reached its end"):
            passes.advance("one")


def test_an_error_of_the_model_reaches_the_caller_once() -> None:
    model, data = small_net(), [batches(1)[0], torch.zeros(2, 4, 10, 10)]
    with (
        pytest.raises(InputError, match="rejected batch 1"),
        halted_passes(model, numbered(data), LAYERS, after=True) as passes,
    ):
        passes.advance("stem")
    assert not any("forward" in vars(model.get_submodule(name)) for name in LAYERS)


class Catching(nn.Module):
    """A model that catches every error of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.two(self.one(x))
        except Exception:
            return x


def test_a_model_that_catches_errors_does_not_catch_the_end() -> None:
    with halted_passes(Catching(), numbered([torch.ones(2, 4)]), ["one", "two"], after=False) as passes:
        passes.advance("one")


def test_live_bytes_are_those_of_the_maps_that_later_layers_need() -> None:
    class Residual(nn.Module):
        """What enters the second layer lives together with what is added behind it."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 100), nn.Linear(10, 100)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.first(x)
            return functional.relu(wide) + self.second(wide[:, :10].clone())

    batch = Batch(0, torch.ones(5, 8), None)
    # 5 samples with 100 numbers of the first layer and of its rectified copy, and 10 that enter the second.
    live = live_bytes(Residual(), batch, ["first", "second"])
    assert live == {"first": 0, "second": 5 * (100 + 100 + 10) * 4}
    model, data = small_net(), batches(1)
    whole, part = (live_bytes(model, Batch(0, x, None), LAYERS) for x in (data[0], data[0][:4]))
    assert whole == {name: 2 * n_bytes for name, n_bytes in part.items()}
    assert max(whole.values()) > 0


def test_samples_that_wait_in_the_same_tensor_do_not_count_as_live() -> None:
    # Flattening gives a view, of a tensor with many more samples.
    model, samples = nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.Linear(5, 2)), torch.ones(1000, 2, 4)
    for x in (samples[:3], samples[:3].clone()):
        assert live_bytes(model, Batch(0, x, None), ["1", "2"]) == {"1": 0, "2": 3 * 5 * 4}


@pytest.mark.parametrize("after", [True, False], ids=["outputs", "inputs"])
def test_batches_that_join_later_meet_what_they_would_have_met(after: bool) -> None:
    model, other, data = small_net(), small_net(seed=1), batches(3)
    mixed = small_net()
    mixed.grouped = other.grouped
    with halted_passes(model, numbered(data[:1]), LAYERS, after=after) as passes:
        for name in LAYERS[:4]:
            passes.advance(name)
            if name == "grouped" and not after:
                passes.substitute(name, other.grouped)
        passes.join(numbered(data[1:]))
        for name in LAYERS[4:]:
            expected = [met(model if after else mixed, name, x, after=after) for x in data]
            values = passes.advance(name)
            assert all(torch.equal(value, wanted) for value, wanted in zip(values, expected, strict=True))


def test_a_batch_that_joins_by_another_way_is_noticed() -> None:
    model, ones = Ways(), torch.ones(2, 4)
    with halted_passes(model, numbered([ones]), ["one", "two"], after=False) as passes:
        passes.advance("one")
        passes.join(numbered([-ones]))
        with pytest.raises(OutOfOrder, match="a batch reached layer 'two' before layer 'one'"):
            passes.advance("two")

"""Copies of models, and how much they copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensigma as ts
from support_nets import batches, small_net
from tensigma.running import copied

PLANNED = ts.Ranks({"*": 3})


def test_shared_modules_are_those_of_the_model() -> None:
    net = small_net()
    copy = copied(net, shared=["block.0", "absent"])
    assert copy.get_submodule("block.0") is net.get_submodule("block.0")
    assert copy.get_submodule("block.1") is not net.get_submodule("block.1")
    assert all(torch.equal(copy.state_dict()[key], value) for key, value in net.state_dict().items())


def compress(net: nn.Module, place: Path) -> nn.Module:
    return ts.compress(net, ts.plan(net, ranks=PLANNED, norm="frobenius"))[0]


def load(net: nn.Module, place: Path) -> nn.Module:
    ts.save(compress(net, place), place / "small")
    return ts.load(place / "small", net)


def search(net: nn.Module, place: Path) -> nn.Module:
    plan = ts.plan(net, budget=ts.Drop(0.9, trials=1), data=batches(), weights=None)
    return ts.compress(net, plan, data=batches())[0]


@pytest.mark.parametrize("make", [compress, load, search])
def test_weights_of_layers_that_are_replaced_are_never_copied(
    make: Callable[..., nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = small_net()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    copies: list[Any] = []
    deep_copy = nn.Parameter.__deepcopy__

    def listed(parameter: nn.Parameter, memo: Any) -> Any:
        copies.append(parameter)
        return deep_copy(parameter, memo)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", listed)
    small = make(net, tmp_path)
    kept = dict(small.named_parameters())
    replaced = {id(value): key for key, value in net.named_parameters() if key not in kept}
    assert replaced
    assert not [replaced[id(parameter)] for parameter in copies if id(parameter) in replaced]
    # Nothing is shared in the end, and the original is as it was.
    assert not {id(value) for value in net.parameters()} & {id(value) for value in small.parameters()}
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())

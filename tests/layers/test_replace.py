from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrizations

from tensigma.errors import InputError, UnsupportedLayer
from tensigma.layers import (
    CPFormat,
    Geometry,
    SVDFormat,
    Tucker2Format,
    find_layers,
    fingerprint,
    replace_,
    why_not,
)


def reasons(model: nn.Module) -> dict[str, str | None]:
    return {layer.name: layer.reason for layer in find_layers(model)}


def test_layers_are_listed_in_order_of_definition() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3)
            self.blocks = nn.ModuleList([nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)) for _ in range(2)])
            self.head = nn.Linear(8, 4)

    layers = find_layers(Net())
    assert [layer.name for layer in layers] == ["stem", "blocks.0.1", "blocks.1.1", "head"]
    assert [layer.reason for layer in layers] == [None] * 4
    assert layers[0].geometry == Geometry.of(nn.Conv2d(3, 8, 3))
    assert layers[0].why_not(CPFormat) is None
    assert "method='svd'" in (layers[3].why_not(Tucker2Format) or "")
    assert layers[3].why_not(SVDFormat(2)) is None


def test_shared_modules_and_blocks_are_reported() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert reasons(nn.Sequential(block, nn.Linear(4, 4), block)) == {
        "0.0": "the same module is also reachable as 2.0",
        "1": None,
    }


def test_tied_weights_are_reported() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(10, 4), "head": nn.Linear(4, 10), "body": nn.Linear(4, 4)})
    model["head"].weight = model["embedding"].weight
    assert reasons(model) == {"head": "weight is tied to embedding.weight", "body": None}
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    two[1].bias = two[0].bias
    assert reasons(two) == {"0": "bias is tied to 1.bias", "1": "bias is tied to 0.bias"}


def test_computed_weights_are_reported() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    reason_of = reasons(model)
    assert reason_of["1"] is None
    assert "remove_parametrizations" in (reason_of["0"] or "")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_recomputed_by_hooks_are_reported() -> None:
    hooked = [nn.utils.weight_norm(nn.Conv1d(4, 4, 3)), nn.utils.spectral_norm(nn.Linear(4, 4))]
    assert all("recomputed by a hook" in (reason or "") for reason in reasons(nn.Sequential(*hooked)).values())


def test_attention_that_reads_weights_says_what_to_switch_off() -> None:
    reason_of = reasons(nn.TransformerEncoderLayer(8, 2, dim_feedforward=16))
    assert set(reason_of) == {"self_attn.out_proj", "linear1", "linear2"}
    assert (reason_of["self_attn.out_proj"] or "").startswith("nn.MultiheadAttention reads the weight")
    assert "torch.backends.mha.set_fastpath_enabled(False)" in (reason_of["linear1"] or "")


class Cube(nn.Conv3d):
    """As in torchvision's networks for video: built in another way, computed in the same."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__(n_in, n_out, 3, stride=stride, padding=1, bias=False)

    @staticmethod
    def strides(stride: int) -> tuple[int, int, int]:
        return stride, stride, stride


def test_subclasses_that_only_build_their_base_are_layers_like_others() -> None:
    plain = nn.Conv3d(4, 6, 3, stride=2, padding=1, bias=False)
    (layer,) = find_layers(nn.Sequential(Cube(4, 6, stride=2)))
    assert (layer.geometry, layer.reason) == (Geometry.of(plain), None)
    assert fingerprint(nn.Sequential(Cube(4, 6, stride=2))) == fingerprint(nn.Sequential(plain))


class Standardised(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight - self.weight.mean(), self.bias)


class Deeper(Standardised):
    """Has no forward of its own, but not that of nn.Linear."""


class Computed(nn.Linear):
    @property
    def in_features(self) -> int:
        return 3

    @in_features.setter
    def in_features(self, value: int) -> None: ...

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None: ...


class Masked(nn.Linear):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.register_buffer("mask", torch.ones(1))


@pytest.mark.parametrize("kind", [Standardised, Deeper, Computed, Masked, NonDynamicallyQuantizableLinear])
def test_subclasses_that_may_compute_or_keep_something_else_are_left_alone(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(kind(3, 3))
    (layer,) = find_layers(model)
    assert layer.geometry is None
    assert "is a subclass of nn.Linear and may compute something else" in (layer.reason or "")
    assert fingerprint(model) == {}


def test_subclasses_are_left_alone() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    (layer,) = find_layers(nn.Sequential(Scaled(3, 3, 3)))
    assert layer.geometry is None
    assert layer.reason is not None
    assert layer.reason.endswith("Scaled is a subclass of nn.Conv2d and may compute something else; it is left alone")
    with pytest.raises(UnsupportedLayer, match="Scaled is not a layer Tensigma can read"):
        Geometry.of(Scaled(3, 3, 3))


def test_other_reasons() -> None:
    assert "no name to replace it by" in (reasons(nn.Linear(2, 2))[""] or "")
    assert "complex" in (why_not(nn.Linear(2, 2, dtype=torch.complex64)) or "")
    assert "ReLU is not a layer" in (why_not(nn.ReLU()) or "")
    with pytest.warns(UserWarning, match="zero-element"):
        empty = nn.Linear(0, 2)
    assert "empty" in (why_not(empty) or "")


def small_stack() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 2, 3, bias=False), nn.Conv2d(2, 6, 1))


def test_replacement_takes_over_state() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(4, 6, 3, dtype=torch.float64)), nn.Dropout())
    model = model.to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    model[0][0].weight.requires_grad_(False)
    replace_(model, {"0.0": small_stack()})
    new = model[0][0]
    assert isinstance(new, nn.Sequential)
    assert not any(module.training for module in new.modules())
    assert {parameter.dtype for parameter in new.parameters()} == {torch.float64}
    flags = {name: parameter.requires_grad for name, parameter in new.named_parameters()}
    assert flags == {"0.weight": False, "1.weight": False, "1.bias": True}
    assert new.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    assert model(torch.randn(1, 4, 5, 5, dtype=torch.float64)).shape == (1, 6, 3, 3)


def test_replacement_without_bias_before_follows_the_weight() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False).requires_grad_(False))
    replace_(model, {"0": small_stack()})
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_replacement_checks_all_names_first() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU())
    first = model[0]
    with pytest.raises(InputError, match=r"no module 'layer1.conv'; similar names: "):
        replace_(model, {"0": small_stack(), "layer1.conv": small_stack()})
    with pytest.raises(InputError, match=r"wrap it in nn.Sequential"):
        replace_(model, {"": small_stack()})
    assert model[0] is first

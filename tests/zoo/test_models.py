from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tensigma.errors import InputError, MissingExtra, StoreError
from tensigma.zoo import load_model, load_weights_, read_weights, spec


@pytest.mark.parametrize(
    ("name", "shape", "n_params"),
    [
        ("zoo:resnet20-cifar", (2, 3, 32, 32), 269_722),
        ("zoo:resnet56-cifar", (2, 3, 32, 32), 853_018),
        ("zoo:resnet18w32-cifar", (2, 3, 32, 32), 2_797_610),
        ("zoo:squeezenet1_1", (1, 3, 64, 64), 1_235_496),
        pytest.param("zoo:resnet50-v1", (1, 3, 64, 64), 25_557_032, marks=pytest.mark.slow),
        ("zoo:digits-cnn", (2, 1, 8, 8), 241_898),
    ],
)
def test_own_networks(name: str, shape: tuple[int, ...], n_params: int) -> None:
    model = load_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == n_params
    n_classes = 10 if "cifar" in name or "digits" in name else 1000
    assert model(torch.zeros(shape)).shape == (shape[0], n_classes)
    assert not model.training
    assert load_model(name, num_classes=3)(torch.zeros(shape)).shape == (shape[0], 3)


def test_the_first_resnet50_strides_in_the_first_convolution_of_a_stage() -> None:
    model = load_model("zoo:resnet50-v1?width=4", num_classes=3)
    state = model.state_dict()
    assert len(state) == 320
    for key in ("conv1.weight", "bn1.running_var", "layer1.0.downsample.0.weight", "layer4.2.bn3.bias", "fc.bias"):
        assert key in state
    assert model.get_parameter("layer3.0.conv1.weight").shape == (16, 32, 1, 1)
    assert model.get_parameter("layer3.5.conv2.weight").shape == (16, 16, 3, 3)
    for stage in (2, 3, 4):
        strides = [model.get_submodule(f"layer{stage}.0.{name}").stride for name in ("conv1", "conv2", "downsample.0")]
        assert strides == [(2, 2), (1, 1), (2, 2)]
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)


def test_options_reach_the_constructor() -> None:
    assert load_model("zoo:digits-cnn?width=4&in_chans=3")(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    with pytest.raises(InputError, match=r"cannot be built with these options.*wide"):
        load_model("zoo:digits-cnn?wide=4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zoo:resnet20", "'resnet20' is not known; did you mean 'resnet20-cifar'"),
        ("torchvison:resnet18", "names no model; did you mean torchvision:…"),
        ("resnet18", "write SCHEME:NAME"),
        ("zoo:digits-cnn?width", "write options as"),
        ("zoo:digits-cnn?width=1&width=2", "'width' is given twice"),
        ("nowhere.py:make", r"nowhere.py: no such file"),
    ],
)
def test_names_nobody_knows(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(name)


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> None:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(spec.importlib, "import_module", absent)
    wanted = r"torchvision:resnet18 needs torchvision.*pip install -c constraints\.txt 'tensigma\[vision\]'"
    with pytest.raises(MissingExtra, match=wanted):
        load_model("torchvision:resnet18")

    def broken(package: str) -> None:
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr(spec.importlib, "import_module", broken)
    with pytest.raises(MissingExtra, match=r"cannot be imported.*undefined symbol"):
        load_model("timm:resnet18")


def write_factory(folder: Path) -> Path:
    (folder / "sibling_of_mine.py").write_text("WIDTH = 3\n")
    file = folder / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from sibling_of_mine import WIDTH\n"
        "from torch import nn\n"
        "@dataclass\n"
        "class Config:\n"
        "    n: int = WIDTH\n"
        "def tiny(n=Config().n, num_classes=2):\n"
        "    return nn.Linear(n, num_classes)\n"
        "def wrong():\n"
        "    return 5\n"
        "def failing():\n"
        "    raise KeyError('gone')\n"
    )
    return file


def test_a_factory_in_a_file(tmp_path: Path) -> None:
    file = write_factory(tmp_path)
    assert repr(load_model(f"{file}:tiny")) == repr(nn.Linear(3, 2))
    assert repr(load_model(f"{file}:tiny?n=5", num_classes=7)) == repr(nn.Linear(5, 7))
    with pytest.raises(InputError, match="'tinny' is not known; did you mean 'tiny'"):
        load_model(f"{file}:tinny")
    with pytest.raises(InputError, match=r"returned a int; it must return an nn.Module"):
        load_model(f"{file}:wrong")
    with pytest.raises(InputError, match="failing raised KeyError: 'gone'"):
        load_model(f"{file}:failing")


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def fill(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, 7) for key, value in model.state_dict().items()}


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_from_pth(tmp_path: Path, model: nn.Module, wrapper: str | None, prefix: str) -> None:
    state = {prefix + key: value for key, value in fill(model).items()}
    torch.save(state if wrapper is None else {wrapper: state, "epoch": 3}, tmp_path / "w.pth")
    load_weights_(model, tmp_path / "w.pth")
    assert all(bool((value == 7).all()) for value in model.state_dict().values())


def test_weights_from_safetensors_without_counters(tmp_path: Path, model: nn.Module) -> None:
    state = {key: value for key, value in fill(model).items() if not key.endswith("num_batches_tracked")}
    save_file(state, tmp_path / "w.safetensors")
    load_weights_(model, tmp_path / "w.safetensors")
    assert bool((model.get_parameter("0.weight") == 7).all())


def test_weights_that_do_not_fit(tmp_path: Path, model: nn.Module) -> None:
    state = fill(model)
    del state["0.bias"]
    state["0.weight"] = torch.zeros(4, 3)
    state["head.weight"] = torch.zeros(1)
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(
        InputError,
        match=r"1 missing: 0.bias; 1 unexpected: head.weight; 1 of another shape: 0.weight \(4, 3\) for \(2, 3\)",
    ):
        load_weights_(model, tmp_path / "w.safetensors")
    assert not bool((model.get_buffer("1.running_mean") == 7).any())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2)
    save_file({"weight": torch.ones(2, 3, dtype=dtype), "bias": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=f"1 of another type: weight {dtype} for torch.float32"):
        load_weights_(model, tmp_path / "w.safetensors")


class Unsafe:
    """Something that only unpickling, and so executing, could bring back."""


def test_files_that_hold_no_weights(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "epoch.pth")
    torch.save({"model": Unsafe()}, tmp_path / "object.pth")
    for name in ("junk.pth", "junk.safetensors", "junk.h5"):
        (tmp_path / name).write_bytes(b"not weights at all")
    for name, message in {
        "absent.pth": "no such file",
        "list.pth": "holds a list, not a state dict; save model.state_dict",
        "epoch.pth": "holds a dict with keys epoch, not a state dict",
        "object.pth": "holds more than tensors.*could execute code",
        "junk.safetensors": "not a readable safetensors file",
        "junk.h5": "weights are read from .safetensors",
    }.items():
        with pytest.raises(StoreError, match=message):
            read_weights(tmp_path / name)
    with pytest.raises(StoreError, match=r"junk.pth"):
        read_weights(tmp_path / "junk.pth")

"""Load weights from a file into a model without executing code from the file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tensigma.errors import InputError, StoreError

_PICKLED = (".pth", ".pt", ".bin", ".ckpt")
#: Where training scripts put the state dict inside a checkpoint.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")


def read_weights(file: str | Path) -> dict[str, Tensor]:
    """The state dict in a ``.safetensors`` or ``.pth`` file.

    Checkpoints that keep the state dict under ``state_dict`` or ``model`` are unwrapped, and the ``module.`` that
    ``DataParallel`` puts before every key is removed.
    """
    path = Path(file)
    if not path.is_file():
        raise StoreError(f"{path}: no such file; give the weights as .safetensors or .pth")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise StoreError(f"{path}: not a readable safetensors file ({error})") from error
    if path.suffix not in _PICKLED:
        accepted = ", ".join((".safetensors", *_PICKLED))
        raise StoreError(f"{path}: weights are read from {accepted}; rename or convert the file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StoreError(
            f"{path}: holds more than tensors, and loading that could execute code; "
            "save model.state_dict() alone and give that file"
        ) from error
    except Exception as error:
        # Reading a damaged file, torch fails in many ways, most of which explain nothing to who gave the file.
        explains = isinstance(error, RuntimeError | EOFError | OSError | ValueError) and str(error)
        detail = str(error) if explains else "it is damaged or of another kind"
        raise StoreError(f"{path}: not a readable PyTorch file ({detail})") from error
    state = _unwrap(content)
    if state is None:
        raise StoreError(f"{path}: holds {_describe(content)}, not a state dict; save model.state_dict()")
    return state


def load_weights_(model: nn.Module, file: str | Path, *, ignore: Sequence[str] = ()) -> None:
    """Load the weights in ``file`` into ``model``; every key must fit.

    ``ignore`` names prefixes of keys in the file to leave out.

    Raises:
        StoreError: The file is absent, unreadable or not a state dict.
        InputError: Keys are missing, unexpected, of another shape or no floating-point numbers; a few are named.
    """
    state = {
        key: value for key, value in read_weights(file).items() if not any(key.startswith(prefix) for prefix in ignore)
    }
    expected = model.state_dict()
    # Old checkpoints lack the step counter of BatchNorm, which inference does not use.
    missing = [key for key in expected if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in expected]
    shapes = [
        f"{key} {tuple(value.shape)} for {tuple(expected[key].shape)}"
        for key, value in state.items()
        if key in expected and value.shape != expected[key].shape
    ]
    # Copying would turn them into numbers that nobody trained, such as those of a quantised checkpoint without scales.
    kinds = [
        f"{key} {value.dtype} for {expected[key].dtype}"
        for key, value in state.items()
        if key in expected and expected[key].is_floating_point() and not value.is_floating_point()
    ]
    problems = [
        f"{len(keys)} {what}: {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}"
        for what, keys in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
            ("of another type", kinds),
        )
        if keys
    ]
    if problems:
        advice = (
            "give num_classes, or weights with as many classes"
            if shapes and not missing
            else "give weights that were saved from this architecture"
        )
        raise InputError(f"{file} does not fit {type(model).__name__}; {'; '.join(problems)}; {advice}")
    model.load_state_dict(state, strict=False)


def _unwrap(content: object) -> dict[str, Tensor] | None:
    if not isinstance(content, Mapping):
        return None
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return _unwrap(content[key])
    if not content or not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
        return None
    prefix = "module."
    wrapped = all(key.startswith(prefix) for key in content)
    return {key.removeprefix(prefix) if wrapped else key: value for key, value in content.items()}


def _describe(content: object) -> str:
    if isinstance(content, Mapping):
        keys = ", ".join(map(str, list(content)[:5]))
        return f"a dict with keys {keys}" if content else "an empty dict"
    return f"a {type(content).__name__}"

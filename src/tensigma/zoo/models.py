"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from tensigma.errors import InputError
from tensigma.graphs import load_onnx
from tensigma.zoo.networks import NETWORKS
from tensigma.zoo.spec import Spec, call_factory, literal, require, unknown, unknown_scheme
from tensigma.zoo.weights import load_weights_

#: Keys of heads that only training uses; such models are built without them.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


def load_model(spec: str, weights: str | Path | None = None, *, num_classes: int | None = None) -> nn.Module:
    """The model of this name, in evaluation mode, with weights from a file if one is given.

    Nothing is ever downloaded: without ``weights`` the parameters are random.

    | name | model |
    |---|---|
    | ``zoo:resnet20-cifar`` | one of our own small networks |
    | ``torchvision:resnet18`` | torchvision's; auxiliary heads are left out |
    | ``timm:resnet50`` | timm's |
    | ``path/to/file.py:factory`` | what that function returns; the file is executed |
    | ``path/to/model.onnx`` | the network in that file, by :func:`tensigma.load_onnx` |

    Options of the constructor may follow: ``timm:resnet50?in_chans=1&drop_rate=0.1``. Those of an ONNX file are
    ``input``, the name of the input that images go to, and the values of its other inputs:
    ``model.onnx?input=image&scale=[[1,1]]``.

    Args:
        spec: The name.
        weights: A ``.safetensors`` file, or a ``.pth`` file that holds tensors only.
        num_classes: Number of classes, if not the model's default.

    >>> model = load_model("zoo:digits-cnn", num_classes=4)
    >>> model.training, model.fc.out_features
    (False, 4)
    """
    parsed = Spec.parse(spec, "model", _SCHEMES)
    if parsed.scheme not in _SCHEMES:
        raise unknown_scheme("model", spec, parsed.scheme, _SCHEMES)
    options = {key: literal(value) for key, value in parsed.options.items()}
    if num_classes is not None:
        options["num_classes"] = num_classes
    model = _SCHEMES[parsed.scheme](parsed, options, weights is not None)
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec} returned a {type(model).__name__}; it must return an nn.Module")
    if weights is not None:
        load_weights_(model, weights, ignore=_AUXILIARY if parsed.scheme == "torchvision" else ())
    return model.eval()


def _from_zoo(spec: Spec, options: dict[str, Any], trained: bool) -> Any:
    if spec.target not in NETWORKS:
        raise unknown("zoo: the model", spec.target, NETWORKS)
    return _call(spec, NETWORKS[spec.target], options)


def _from_torchvision(spec: Spec, options: dict[str, Any], trained: bool) -> Any:
    models = require("torchvision", "vision", str(spec)).models
    if spec.target not in models.list_models():
        raise unknown("torchvision: the model", spec.target, models.list_models())
    builder = models.get_model_builder(spec.target)
    # The defaults would download a backbone, add heads that only training uses, and spend seconds on initial values.
    overrides: dict[str, Any] = {"weights": None, "weights_backbone": None}
    if spec.target in ("googlenet", "inception_v3"):
        # The published weights of these two expect another normalisation, which the model itself applies.
        overrides |= {"aux_logits": False, "init_weights": False, "transform_input": trained}
    parameters = inspect.signature(builder).parameters
    accepted = {key: value for key, value in overrides.items() if key in parameters or not key.startswith("weights")}
    return _call(spec, builder, accepted | options)


def _from_timm(spec: Spec, options: dict[str, Any], trained: bool) -> Any:
    timm = require("timm", "vision", str(spec))
    if not timm.is_model(spec.target):
        raise unknown("timm: the model", spec.target, timm.list_models())
    return _call(spec, timm.create_model, {"model_name": spec.target, "pretrained": False} | options)


def _from_file(spec: Spec, options: dict[str, Any], trained: bool) -> Any:
    return call_factory(spec, **options)


def _from_onnx(spec: Spec, options: dict[str, Any], trained: bool) -> Any:
    if trained:
        raise InputError(f"{spec} has its weights inside; leave out {{weights}}", parameters=("weights",))
    input = options.pop("input", None)
    options.pop("num_classes", None)
    return load_onnx(spec.target, input=input, fixed=options)


def _call(spec: Spec, builder: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        return builder(**options)
    except (TypeError, ValueError) as error:
        raise InputError(f"{spec} cannot be built with these options ({error}); correct what follows '?'") from error


_SCHEMES: dict[str, Callable[[Spec, dict[str, Any], bool], Any]] = {
    "zoo": _from_zoo,
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "file": _from_file,
    "onnx": _from_onnx,
}

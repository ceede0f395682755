"""Short strings that change when weights, samples or settings do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

#: Counts training steps, which evaluation never reads.
_IDLE = "num_batches_tracked"


def content_digest(tensor: Tensor) -> str:
    """A digest of type, shape and values, kept beside a stored tensor and compared when it is read.

    SHA-256, which most CPUs compute about as fast as files are read.

    >>> content_digest(torch.ones(2)) == content_digest(torch.ones(2)) != content_digest(torch.ones(2, 1))
    True
    """
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def content_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digests of many tensors, on several threads."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(tensors, pool.map(content_digest, tensors.values()), strict=True))


class Digest:
    """A hash of tensors and plain data, added piece by piece.

    >>> Digest().add(torch.ones(2)).text == Digest().add(torch.ones(2)).text != Digest().add(torch.zeros(2)).text
    True
    >>> Digest().add({"rank": 3}).text == Digest().add({"rank": 4}).text
    False
    """

    def __init__(self, size: int = 16) -> None:
        self._hash = hashlib.blake2b(digest_size=size)

    def add(self, item: Any) -> Digest:
        """Add a tensor by dtype, shape and values, a nesting of tensors part by part, or anything else as JSON."""
        if _holds_tensors(item):
            parts = item.items() if isinstance(item, Mapping) else enumerate(item)
            for key, value in parts:
                self.add(key).add(value)
        elif isinstance(item, Tensor):
            # Not every memory layout can be read byte by byte, and the layout changes no value.
            plain = item.detach().cpu().contiguous()
            self._hash.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
            self._hash.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        else:
            self._hash.update(json.dumps(item, sort_keys=True, default=repr).encode())
        return self

    @property
    def text(self) -> str:
        """The digest of everything added so far."""
        return self._hash.hexdigest()


def _holds_tensors(item: Any) -> bool:
    """Whether tensors are among the parts of a dict, list or tuple, at any depth."""
    if not isinstance(item, Mapping | list | tuple):
        return False
    parts = item.values() if isinstance(item, Mapping) else item
    return any(isinstance(part, Tensor) or _holds_tensors(part) for part in parts)


def weights_digest(model: nn.Module) -> str:
    """A digest of all that decides what ``model`` computes in evaluation mode: parameters and buffers, by name.

    Device, mode and memory format do not matter.

    >>> model = nn.Linear(3, 2)
    >>> before = weights_digest(model)
    >>> with torch.no_grad():
    ...     _ = model.bias.add_(1)
    >>> weights_digest(model) == before
    False
    """
    digest = Digest()
    for name, tensor in tensors_of(model).items():
        if not name.endswith(_IDLE):
            digest.add(name).add(tensor)
    return digest.text


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model, each once, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

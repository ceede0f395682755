"""Encoded images to network inputs, one at a time: what cannot be read is told, not raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from tensigma.errors import InputError
from tensigma.zoo.images import View
from tensigma.zoo.spec import require

#: Index of an image → its file, or its content as a stream.
Opener = Callable[[int], Path | BinaryIO]


def decode(
    indices: Sequence[int], view: View, opener: Opener, name: Callable[[int], str]
) -> tuple[Tensor, dict[int, str]]:
    """Images ready for a network, (n, c, h, w), and why some of ``indices`` could not be read."""
    image_module = require("PIL.Image", "vision", "reading image files")
    images, failures = [], {}
    for index in indices:
        try:
            with image_module.open(opener(index)) as opened:
                # A palette with transparency loses it with a warning unless it is made explicit first.
                image = opened.convert("RGBA") if "transparency" in opened.info else opened
                pixels = np.array(image.convert("RGB"))  # (h, w, 3)
        # Broken files raise all of these, a damaged PNG even SyntaxError.
        except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
            failures[index] = f"{name(index)}: not a readable image ({error})"
            continue
        images.append(view.apply(torch.from_numpy(pixels).permute(2, 0, 1)[None]))
    if not images:
        return torch.empty(0), failures
    if len({image.shape for image in images}) > 1:
        raise InputError("images of several sizes cannot form a batch; give size=…, such as size=224")
    return torch.cat(images), failures


def first_size(opener: Opener) -> tuple[int, int] | None:
    """Width and height of the first image, from its header; None if it cannot be read."""
    image_module = require("PIL.Image", "vision", "reading image files")
    try:
        with image_module.open(opener(0)) as opened:
            wide, high = opened.size
            return int(wide), int(high)
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError):
        return None

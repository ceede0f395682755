"""Import this before torchvision where its compiled operators may not fit a CPU-only build of torch.

The import then fails for want of ``torchvision::nms``, which no classification model uses: the operator is declared
here without an implementation, and the import is tried again. Where the two builds belong together nothing is done.
"""

from __future__ import annotations

import importlib
import sys

import torch

# Operators stay declared for as long as this object lives.
_LIBRARIES: list[torch.library.Library] = []


def _import() -> None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
        importlib.import_module("torchvision")


_import()

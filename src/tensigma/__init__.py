"""Tensigma shrinks trained CNNs by tensor decomposition that knows the data.

Rooms, and torch with them, are imported when one of their names is first used: ``tensigma --help`` needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensigma import calibration as calibration
    from tensigma import compression as compression
    from tensigma import deployment as deployment
    from tensigma import errors as errors
    from tensigma import evaluation as evaluation
    from tensigma import experiments as experiments
    from tensigma import files as files
    from tensigma import finetuning as finetuning
    from tensigma import graphs as graphs
    from tensigma import hub as hub
    from tensigma import layers as layers
    from tensigma import linalg as linalg
    from tensigma import planning as planning
    from tensigma import report as report
    from tensigma import running as running
    from tensigma import solving as solving
    from tensigma import zoo as zoo
    from tensigma.calibration import Calibration, LayerStats, calibrate
    from tensigma.compression import Refine, Report, Views, compress, compress_
    from tensigma.deployment import Exported, Quantized, export, load, quantize, save
    from tensigma.evaluation import Certificate, Evaluation, evaluate
    from tensigma.finetuning import FineTuning, finetune
    from tensigma.graphs import load_onnx
    from tensigma.hub import from_pretrained, push_to_hub, save_pretrained
    from tensigma.planning import (
        VBMF,
        Bytes,
        Drop,
        Energy,
        Latency,
        Macs,
        Params,
        Plan,
        Ranks,
        Recipe,
        SigmaVBMF,
        plan,
    )
    from tensigma.report import write_report
    from tensigma.running import Boxes, Numbers, Scores

    __version__: str

__all__ = [
    "VBMF",
    "Boxes",
    "Bytes",
    "Calibration",
    "Certificate",
    "Drop",
    "Energy",
    "Evaluation",
    "Exported",
    "FineTuning",
    "Latency",
    "LayerStats",
    "Macs",
    "Numbers",
    "Params",
    "Plan",
    "Quantized",
    "Ranks",
    "Recipe",
    "Refine",
    "Report",
    "Scores",
    "SigmaVBMF",
    "Views",
    "__version__",
    "calibrate",
    "compress",
    "compress_",
    "evaluate",
    "export",
    "finetune",
    "from_pretrained",
    "linalg",
    "load",
    "load_onnx",
    "plan",
    "push_to_hub",
    "quantize",
    "save",
    "save_pretrained",
    "write_report",
]

#: Room → the names of it that are also names of the package.
_NAMES = {
    "calibration": ("Calibration", "LayerStats", "calibrate"),
    "compression": ("Refine", "Report", "Views", "compress", "compress_"),
    "deployment": ("Exported", "Quantized", "export", "load", "quantize", "save"),
    "errors": (),
    "evaluation": ("Certificate", "Evaluation", "evaluate"),
    "experiments": (),
    "files": (),
    "finetuning": ("FineTuning", "finetune"),
    "graphs": ("load_onnx",),
    "hub": ("from_pretrained", "push_to_hub", "save_pretrained"),
    "layers": (),
    "linalg": (),
    "planning": tuple("VBMF Bytes Drop Energy Latency Macs Params Plan Ranks Recipe SigmaVBMF plan".split()),
    "report": ("write_report",),
    "running": ("Boxes", "Numbers", "Scores"),
    "solving": (),
    "zoo": (),
}
_ROOMS = {name: room for room, names in _NAMES.items() for name in names}


# Hidden from type checkers, to which it would mean that the package has every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _NAMES:
            return import_module(f"{__name__}.{name}")
        if name in _ROOMS:
            value = getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
        elif name == "__version__":
            value = import_module("importlib.metadata").version(__name__)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_NAMES, *(name for name in globals() if name.startswith("__"))})

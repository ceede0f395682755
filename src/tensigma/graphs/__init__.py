"""Networks that come as ONNX files: the graph read, run as a module with layers to compress, and written back."""

from tensigma.graphs.few_bits import INT4_OPSET, FewBits, few_bits_in, runs_int4, takes_int4
from tensigma.graphs.network import OnnxNetwork, load_onnx
from tensigma.graphs.onnx_model import OnnxModel
from tensigma.graphs.output_names import rename_outputs, usual_names
from tensigma.graphs.packages import first_line, onnx_module, session_of
from tensigma.graphs.profile import is_layer, times_by_operator
from tensigma.graphs.saving import write_graph
from tensigma.graphs.value_types import TYPES
from tensigma.graphs.whole import deployed
from tensigma.graphs.writing import to_proto

__all__ = [
    "INT4_OPSET",
    "TYPES",
    "FewBits",
    "OnnxModel",
    "OnnxNetwork",
    "deployed",
    "few_bits_in",
    "first_line",
    "is_layer",
    "load_onnx",
    "onnx_module",
    "rename_outputs",
    "runs_int4",
    "session_of",
    "takes_int4",
    "times_by_operator",
    "to_proto",
    "usual_names",
    "write_graph",
]

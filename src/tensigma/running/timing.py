"""How long layers take on this machine: one shape at a time, on one thread, in the runtime that will run them."""

from __future__ import annotations

import math
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tensigma.errors import InputError, MissingExtra
from tensigma.layers import Format, Geometry
from tensigma.running.borrowing import kept_rng
from tensigma.running.thread_count import threads

RUNTIMES = ("auto", "onnxruntime", "eager")
_WARM_UP = 2
# The fewest rounds for a group of chains, the most, and the seconds after which no more are added.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 10, 60, 0.25


@dataclass(frozen=True)
class Chain:
    """Plain layers in a row and the size of their input: a dense layer, or the layers that replace it.

    >>> chain = Chain.of(Geometry.of(nn.Conv2d(8, 16, 3, padding=1, bias=False)), None, (14, 14))
    >>> chain.key, chain.macs
    ('1×14×14 conv 8>16 k3x3 s1x1 p1x1 d1x1 g1', 225792)
    """

    stages: tuple[Geometry, ...]
    #: Spatial size of one input; for Linear, its leading shape.
    size: tuple[int, ...]
    batch: int = 1

    @classmethod
    def of(
        cls, geometry: Geometry, format: Format | None, size: Sequence[int], *, batch: int = 1, bias: bool | None = None
    ) -> Chain:
        """The chain of a layer in ``format`` (None: dense)."""
        layer = geometry if bias is None else replace(geometry, bias=bias)
        stages = (layer,) if format is None else tuple(format.stages(layer).values())
        return cls(stages, tuple(size), batch)

    @property
    def macs(self) -> int:
        """Multiply-adds for one sample."""
        total, size = 0, self.size
        for stage in self.stages:
            total += stage.macs_from(size)
            size = stage.output_size(size)
        return total

    @property
    def input_shape(self) -> tuple[int, ...]:
        first = self.stages[0]
        if first.kind == "linear":
            return (self.batch, *self.size, first.in_channels)
        return (self.batch, first.in_channels, *self.size)

    @property
    def key(self) -> str:
        """All that its time depends on, as text."""
        return f"{'×'.join(map(str, (self.batch, *self.size)))} " + "; ".join(map(_words, self.stages))


def _words(stage: Geometry) -> str:
    text = f"{stage.kind} {stage.in_channels}>{stage.out_channels}"
    if stage.kind != "linear":
        pads = "x".join(str(a) if a == b else f"{a}+{b}" for a, b in stage.pads)
        axes = (("k", stage.kernel_size), ("s", stage.stride), ("d", stage.dilation))
        kernel, stride, dilation = (letter + "x".join(map(str, values)) for letter, values in axes)
        text += f" {kernel} {stride} p{pads} {dilation} g{stage.groups}"
    return text + " bias" * stage.bias


class Runtime(ABC):
    """What runs the layers."""

    name: ClassVar[str]

    @property
    def clock(self) -> Callable[[], float]:
        """The clock to measure with."""
        return processor_clock()

    @abstractmethod
    def about(self) -> dict[str, str]:
        """Everything but the layers that a time depends on."""

    @abstractmethod
    def runner(self, chain: Chain) -> Callable[[], object]:
        """A function that runs the chain once, with random weights and inputs."""

    def overhead(self) -> Callable[[], object] | None:
        """A call that does next to nothing, whose time is subtracted from all others; None if calls cost nothing."""
        return None


class Eager(Runtime):
    """PyTorch itself, on the device of the model."""

    name: ClassVar[str] = "eager"

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    @property
    def clock(self) -> Callable[[], float]:
        # Work on another device takes no processor time.
        return processor_clock() if self.device.type == "cpu" else time.perf_counter

    def about(self) -> dict[str, str]:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return {"runtime": self.name, "torch": torch.__version__, "device": device, **machine()}

    def runner(self, chain: Chain) -> Callable[[], object]:
        layers = nn.Sequential(*(stage.to_module() for stage in chain.stages)).to_empty(device=self.device).eval()
        for parameter in layers.parameters():
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 1.0)
        x = torch.randn(chain.input_shape).to(self.device)

        def run() -> Tensor:
            y = layers(x)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return y

        return run


class OnnxRuntime(Runtime):
    """ONNX Runtime on the CPU, with all of its optimisations."""

    name: ClassVar[str] = "onnxruntime"

    def __init__(self) -> None:
        for package in ("onnx", "onnxruntime"):
            if find_spec(package) is None:
                raise MissingExtra(
                    f"runtime='onnxruntime' needs {package}, which is not installed; run: pip install 'tensigma[onnx]'"
                )

    def about(self) -> dict[str, str]:
        import onnxruntime

        return {"runtime": self.name, "onnxruntime": onnxruntime.__version__, **machine()}

    def runner(self, chain: Chain) -> Callable[[], object]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(onnx_graph(chain), options, providers=["CPUExecutionProvider"])
        feed = {"x": torch.randn(chain.input_shape).numpy()}
        return lambda: session.run(None, feed)

    def overhead(self) -> Callable[[], object]:
        return self.runner(Chain((Geometry.of(nn.Linear(1, 1, bias=False)),), ()))


def runtime_of(name: str, device: torch.device | None = None) -> Runtime:
    """The runtime of this name; ``"auto"`` is ONNX Runtime where it is installed and the model is on the CPU."""
    if name not in RUNTIMES:
        raise InputError(f"runtime {name!r} is unknown; choose one of {', '.join(map(repr, RUNTIMES))}")
    installed = find_spec("onnx") is not None and find_spec("onnxruntime") is not None
    on_cpu = device is None or device.type == "cpu"
    return OnnxRuntime() if name == "onnxruntime" or (name == "auto" and installed and on_cpu) else Eager(device)


def measure(chains: Sequence[Chain], runtime: Runtime) -> list[float]:
    """Seconds for one batch of each chain: the minimum over rounds in which all take turns, so that other load on the
    machine affects all alike.

    >>> few, many = (Chain.of(Geometry.of(nn.Linear(n, n)), None, ()) for n in (8, 512))
    >>> fast, slow = measure([few, many], Eager())
    >>> 0 < fast < slow
    True
    """
    with kept_rng(), torch.inference_mode(), threads(1):
        runners = [runtime.runner(chain) for chain in chains]
        empty_call = runtime.overhead()
        turns = runners if empty_call is None else [*runners, empty_call]
        best = [math.inf] * len(turns)
        clock = runtime.clock
        begin = time.perf_counter()
        for round_index in range(_WARM_UP + _MOST_ROUNDS):
            for index, run in enumerate(turns):
                start = clock()
                run()
                if round_index >= _WARM_UP:
                    best[index] = min(best[index], clock() - start)
            if round_index + 1 >= _WARM_UP + _ROUNDS and time.perf_counter() - begin > _SECONDS:
                break
    if empty_call is None:
        return best
    *totals, overhead = best
    # The difference may be no more than noise for the shortest chains, but a time must be above 0.
    return [max(seconds - overhead, 0.05 * seconds) for seconds in totals]


def processor_clock() -> Callable[[], float]:
    """A clock of the processor time of this thread, or of wall time if that one is too coarse.

    On a busy machine, a thread that runs longer than a time slice is always interrupted; processor time does not count
    the interruptions.
    """
    fine = time.get_clock_info("thread_time").resolution < 1e-6
    return time.thread_time if fine else time.perf_counter


def machine() -> dict[str, str]:
    """This machine, as far as times depend on it."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {"system": platform.system(), "machine": platform.machine(), "cpu": cpu, "threads": "1"}


def runtime_facts(runtime: Runtime) -> dict[str, Any]:
    """What a plan records about the runtime that was timed."""
    return {key: value for key, value in runtime.about().items() if key not in ("system", "machine")}


# Old enough for every ONNX Runtime that the extra allows, and new enough for every node below.
_OPSET, _IR = 17, 8


def onnx_graph(chain: Chain) -> bytes:
    """A chain of layers with random weights as a serialised ONNX graph with one input ``x``: enough to be timed."""
    from onnx import TensorProto, helper

    nodes: list[Any] = []
    weights: list[Any] = []
    tensor = "x"
    for index, stage in enumerate(chain.stages):
        tensor = _append(stage, index, tensor, nodes, weights)
    into = helper.make_tensor_value_info("x", TensorProto.FLOAT, chain.input_shape)
    out = helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "chain", [into], [out], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR)
    return bytes(model.SerializeToString())


def _append(stage: Geometry, index: int, tensor: str, nodes: list[Any], weights: list[Any]) -> str:
    """Append the nodes of one layer; returns the name of its output. Padding is with zeros, whatever its mode."""
    from onnx import helper, numpy_helper

    def weight(name: str, *shape: int) -> str:
        values = torch.randn(shape) * (shape[-1] ** -0.5)
        weights.append(numpy_helper.from_array(values.numpy(), f"{name}{index}"))
        return f"{name}{index}"

    out = f"y{index}"
    if stage.kind == "linear":
        product = out if not stage.bias else f"product{index}"
        nodes.append(
            helper.make_node("MatMul", [tensor, weight("w", stage.in_channels, stage.out_channels)], [product])
        )
        if stage.bias:
            nodes.append(helper.make_node("Add", [product, weight("b", stage.out_channels)], [out]))
        return out
    transposed = stage.kind == "conv_transpose"
    channels = (stage.in_channels, stage.out_channels) if transposed else (stage.out_channels, stage.in_channels)
    inputs = [tensor, weight("w", channels[0], channels[1] // stage.groups, *stage.kernel_size)]
    if stage.bias:
        inputs.append(weight("b", stage.out_channels))
    befores, afters = zip(*stage.pads, strict=True)
    attributes: dict[str, Any] = {
        "kernel_shape": stage.kernel_size,
        "strides": stage.stride,
        "dilations": stage.dilation,
        "group": stage.groups,
        "pads": [*befores, *afters],
    }
    if transposed:
        attributes["output_padding"] = stage.output_padding
    nodes.append(helper.make_node("ConvTranspose" if transposed else "Conv", inputs, [out], **attributes))
    return out

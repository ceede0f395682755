"""How long layers take on this machine: one shape at a time, on one thread, in the runtime that will run them."""

from __future__ import annotations

import io
import math
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tensigma.errors import InputError, MissingExtra
from tensigma.layers import Geometry
from tensigma.running.borrowing import kept_rng
from tensigma.running.chains import Chain, onnx_graph
from tensigma.running.thread_count import threads

RUNTIMES = ("auto", "onnxruntime", "openvino", "eager")
_WARM_UP = 2
# The fewest rounds for a group of chains, the most, and the seconds after which no more are added.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 10, 60, 0.25


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
        _check_installed(self.name, ("onnx", "onnxruntime"), "onnx")

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
        return self.runner(_least_chain())


class OpenVino(Runtime):
    """OpenVINO on the CPU, in float32."""

    name: ClassVar[str] = "openvino"

    def __init__(self) -> None:
        _check_installed(self.name, ("onnx", "openvino"), "onnx,openvino")

    @property
    def clock(self) -> Callable[[], float]:
        # It may compute in a thread of its own.
        return time.process_time

    def about(self) -> dict[str, str]:
        import openvino

        return {"runtime": self.name, "openvino": openvino.get_version(), **machine()}

    def runner(self, chain: Chain) -> Callable[[], object]:
        import openvino

        core = openvino.Core()
        options = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": "f32"}
        compiled = core.compile_model(core.read_model(io.BytesIO(onnx_graph(chain))), "CPU", options)
        request = compiled.create_infer_request()
        x = torch.randn(chain.input_shape).numpy()
        return lambda: request.infer([x])

    def overhead(self) -> Callable[[], object]:
        return self.runner(_least_chain())


def _check_installed(runtime: str, packages: Sequence[str], extras: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(
                f"runtime={runtime!r} needs {package}, which is not installed; run: pip install 'tensigma[{extras}]'"
            )


def _least_chain() -> Chain:
    return Chain((Geometry.of(nn.Linear(1, 1, bias=False)),), ())


def runtime_of(name: str, device: torch.device | None = None) -> Runtime:
    """The runtime of this name; ``"auto"`` is ONNX Runtime where it is installed and the model is on the CPU."""
    if name not in RUNTIMES:
        raise InputError(f"runtime {name!r} is unknown; choose one of {', '.join(map(repr, RUNTIMES))}")
    if name == "openvino":
        return OpenVino()
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

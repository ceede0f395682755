"""Forward passes that halt at chosen layers, so that one pass over the data is enough to work on every layer in turn.

Each batch runs through the model in its own thread. Only one thread runs at a time: the controller resumes it and waits
until it halts again, so that nothing depends on timing. A layer at which passes halt has its ``forward`` replaced while
the block runs; after a halt, another module may compute in its place.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensigma.running.batches import Batch
from tensigma.running.borrowing import run
from tensigma.running.freeing import FreedMemory
from tensigma.running.inputs import tensors_in


class OutOfOrder(Exception):
    """A batch does not call the layers once each and in the same order as the others."""


class _Cancelled(BaseException):
    """Ends a pass at the layer where it halted. Not an Exception, which a model might catch."""


class HaltedPasses:
    """The passes of one model over several batches, all halted at the same layer."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], *, after: bool) -> None:
        self._model, self._after = model, after
        self._substitutes: dict[str, nn.Module] = {}
        self._passed: list[str] = []
        self._passes: list[_Pass] = []
        self._freed = FreedMemory()
        self.join(batches)

    def join(self, batches: Sequence[Batch]) -> None:
        """Let more batches start; they catch up with the others, without halting, at the next :meth:`advance`."""
        self._passes += [_Pass(self._model, batch, skip=self._passed) for batch in batches]

    def advance(self, name: str) -> list[Tensor]:
        """Run all passes on to the layer ``name``; returns its output or input in each pass, batch by batch."""
        self._passed.append(name)
        values = []
        for batch_pass in self._passes:
            batch_pass.resume()
            place = "its end" if batch_pass.place is None else f"layer {batch_pass.place!r}"
            if batch_pass.skip:
                raise OutOfOrder(f"a batch reached {place} before layer {batch_pass.skip[0]!r}")
            if batch_pass.place != name:
                raise OutOfOrder(f"a batch reached {place}, another one layer {name!r}")
            assert batch_pass.value is not None
            values.append(batch_pass.value)
            self._freed.give_back_if_grown()
        return values

    def substitute(self, name: str, module: nn.Module) -> None:
        """From now on, let ``module`` compute in place of the layer ``name``."""
        self._substitutes[name] = module

    def cancel(self) -> None:
        """End all passes where they stand."""
        for batch_pass in self._passes:
            batch_pass.cancel()

    def station(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The ``forward`` of a layer at which passes halt."""

        def halting(*args: Any, **kwargs: Any) -> Any:
            current = next((batch_pass for batch_pass in self._passes if batch_pass.is_current), None)
            if current is None:  # called by other code in the meantime
                return forward(*args, **kwargs)
            if self._after:
                output = forward(*args, **kwargs)
                current.halt(name, output)
                return output
            current.halt(name, args[0] if args else kwargs["input"])
            substitute = self._substitutes.get(name)
            return (forward if substitute is None else substitute)(*args, **kwargs)

        return halting


class _Pass:
    """One forward pass in its own thread."""

    def __init__(self, model: nn.Module, batch: Batch, *, skip: Sequence[str] = ()) -> None:
        #: Layers that the other passes have left behind, which this one is to pass in the same order.
        self.skip = list(skip)
        self.place: str | None = None
        self.value: Tensor | None = None
        self._failure: BaseException | None = None
        self._cancelled = self._over = False
        self._go, self._halted = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(model, batch), daemon=True, name="tensigma-pass")
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether this is the pass that runs now."""
        return threading.current_thread() is self._thread

    def resume(self) -> None:
        """Run on to the next halt or to the end."""
        if not self._over:
            self.place = self.value = None
            self._go.release()
            self._halted.acquire()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def halt(self, name: str, value: Tensor) -> None:
        """Called by the pass itself: hand over ``value`` and wait, unless the others have passed this layer already."""
        if self.skip and self.skip[0] == name:
            del self.skip[0]
            return
        self.place, self.value = name, value
        self._halted.release()
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled

    def cancel(self) -> None:
        """End the pass where it stands."""
        self._cancelled = True
        if not self._over:
            self._go.release()
        self._thread.join()
        self.value = None

    def _run(self, model: nn.Module, batch: Batch) -> None:
        self._go.acquire()
        try:
            if not self._cancelled:
                # Gradient mode is set per thread.
                with torch.no_grad():
                    run(model, batch)
        except _Cancelled:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self.place, self._over = None, True
            self._halted.release()


@contextmanager
def halted_passes(
    model: nn.Module, batches: Sequence[Batch], names: Sequence[str], *, after: bool
) -> Iterator[HaltedPasses]:
    """Passes of ``model`` over ``batches`` that halt at the layers ``names``: after each has computed, or before.

    Memory is that of the live activations of all passes together. The model must be in evaluation mode, and its layers
    have their own ``forward`` again afterwards.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> with halted_passes(model, [Batch(0, torch.ones(3, 2), None)], ["0", "1"], after=False) as passes:
    ...     shapes = [passes.advance(name)[0].shape for name in ("0", "1")]
    >>> shapes
    [torch.Size([3, 2]), torch.Size([3, 2])]
    """
    passes = HaltedPasses(model, batches, after=after)
    layers = {name: model.get_submodule(name) for name in names}
    former: Mapping[str, Any] = {name: vars(layer).get("forward") for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.forward = passes.station(name, layer.forward)
        yield passes
    finally:
        passes.cancel()
        for name, layer in layers.items():
            if former[name] is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = former[name]


class _LiveTensors(TorchDispatchMode):
    """Keeps weak references to all tensors computed inside.

    Views of tensors that were ``there`` before take no memory of their own.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        self._tensors: list[weakref.ref[Tensor]] = []
        self._there = {tensor.untyped_storage().data_ptr() for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tensors += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

    @property
    def n_bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        alive = [tensor for reference in self._tensors if (tensor := reference()) is not None]
        self._tensors = [weakref.ref(tensor) for tensor in alive]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}
        return sum(n_bytes for pointer, n_bytes in storages.items() if pointer not in self._there)


def live_bytes(model: nn.Module, batch: Batch, names: Sequence[str]) -> dict[str, int]:
    """Bytes of activations that are alive when a pass over ``batch`` reaches each of the layers ``names``.

    The batch itself does not count: it may be a view of a tensor that holds all samples.

    >>> model = nn.Sequential(nn.Linear(2, 100), nn.ReLU(), nn.Linear(100, 1))
    >>> live_bytes(model, Batch(0, torch.ones(3, 2), None), ["0", "2"])
    {'0': 0, '2': 1200}
    """
    live = _LiveTensors([*tensors_in(batch.inputs), *model.parameters(), *model.buffers()])
    at: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            at[name] = max(at.get(name, 0), live.n_bytes)

        return note

    handles = [model.get_submodule(name).register_forward_pre_hook(hook(name)) for name in names]
    try:
        with torch.no_grad(), live:
            run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return at

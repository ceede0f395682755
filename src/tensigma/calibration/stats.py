"""The result of a calibration: the moments of every layer's input, which can be merged, saved and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from tensigma.calibration.layer_stats import LayerStats
from tensigma.calibration.store import read_manifest, write_store
from tensigma.errors import StoreError
from tensigma.layers import Geometry, describe, fingerprint, first_difference, measurable
from tensigma.running import weights_digest


class StoredLayers(Mapping[str, LayerStats]):
    """Layers of a store on disk. A layer still in use is shared; one no longer referenced is freed."""

    def __init__(self, folder: Path, entries: Mapping[str, Any]) -> None:
        self.folder = folder
        self.entries = entries
        self._in_use: WeakValueDictionary[str, LayerStats] = WeakValueDictionary()

    def __getitem__(self, name: str) -> LayerStats:
        stats = self._in_use.get(name)
        if stats is None:
            entry = self.entries[name]
            self._in_use[name] = stats = LayerStats._stored(self.folder / entry["file"], entry)
        return stats

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Calibration(Mapping[str, LayerStats]):
    """Moments by layer name, with what is needed to check that they fit a model.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    >>> u = torch.ones(10, 27)
    >>> stats = Calibration({"0": LayerStats.from_rows(u)}, fingerprint=fingerprint(model), data="ones")
    >>> list(stats), stats["0"].d, stats.samples
    (['0'], 27, 10)
    >>> stats.check_model(model)
    """

    def __init__(
        self,
        layers: Mapping[str, LayerStats],
        *,
        fingerprint: Mapping[str, str] | None = None,
        weights: str | None = None,
        data: str | None = None,
        unreached: tuple[str, ...] = (),
        read_elsewhere: tuple[str, ...] = (),
        normalised_by: Mapping[str, str] | None = None,
        inputs: str | None = None,
    ) -> None:
        self._layers = layers if not isinstance(layers, dict) else dict(layers)
        #: Name and geometry of every layer of the calibrated model that Tensigma can compress.
        self.fingerprint = dict(fingerprint or {})
        #: Digest of the model's weights; None if unknown.
        self.weights = weights
        #: Name of the data, or None.
        self.data = data
        #: Requested layers that no batch reached.
        self.unreached = tuple(unreached)
        #: Layers whose weight or bias the model reads besides calling them, so that they cannot be replaced.
        self.read_elsewhere = tuple(read_elsewhere)
        #: Layer → the BatchNorm that alone reads its output, and reads nothing else.
        self.normalised_by = dict(normalised_by or {})
        #: Digest of the batches; None unless the statistics are those of a cache.
        self.inputs = inputs

    def __getitem__(self, name: str) -> LayerStats:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def samples(self) -> int:
        """Number of model inputs seen (the maximum over layers)."""
        if isinstance(self._layers, StoredLayers):
            return max((entry["samples"] for entry in self._layers.entries.values()), default=0)
        return max((stats.samples for stats in self.values()), default=0)

    def __repr__(self) -> str:
        return f"Calibration({len(self)} layers, {self.samples} samples, data={self.data!r})"

    def merge(self, other: Calibration) -> Calibration:
        """Statistics as if both sets had been seen in one run; layers that only one side has are kept as they are.

        Exact and associative to rounding, also between resolutions: every row weighs the same.
        """
        if self.fingerprint and other.fingerprint:
            difference = first_difference(self.fingerprint, other.fingerprint)
            if difference:
                raise StoreError(f"cannot merge statistics of two architectures: {difference}")
        if self.weights and other.weights and self.weights != other.weights:
            raise StoreError(
                "cannot merge statistics of one architecture with two sets of weights: what reaches its layers differs"
            )
        layers = {name: stats.merge(other[name]) if name in other else stats for name, stats in self.items()}
        layers.update({name: stats for name, stats in other.items() if name not in layers})
        names = [name for name in (self.data, other.data) if name]
        return Calibration(
            layers,
            fingerprint=self.fingerprint or other.fingerprint,
            weights=self.weights or other.weights,
            data=" + ".join(names) or None,
            unreached=tuple(name for name in dict.fromkeys(self.unreached + other.unreached) if name not in layers),
            read_elsewhere=tuple(dict.fromkeys(self.read_elsewhere + other.read_elsewhere)),
            normalised_by={**_undisputed(self, other), **_undisputed(other, self)},
        )

    def save(self, path: str | PathLike[str], *, force: bool = False) -> None:
        """Write to the new folder ``path``: one safetensors file per layer and a manifest, all of it or nothing.

        ``force`` allows replacing an older store; a folder that is not a store is never replaced.
        """
        write_store(path, self._manifest(), self._parts(), force=force)

    def _manifest(self) -> dict[str, Any]:
        return {
            "kind": "statistics",
            "library": f"tensigma {version('tensigma')}",
            "data": self.data,
            "samples": self.samples,
            "unreached": list(self.unreached),
            "read_elsewhere": list(self.read_elsewhere),
            "normalised_by": self.normalised_by,
            "fingerprint": self.fingerprint,
            "weights": self.weights,
            **({} if self.inputs is None else {"inputs": self.inputs}),
        }

    def _parts(self) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
        for name, stats in self.items():
            yield name, stats._tensors(), stats._fields()

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """Open a store written by :meth:`save`. Layers are read on demand and freed when no longer used.

        >>> import tempfile
        >>> import torch
        >>> stats = Calibration({"fc": LayerStats.from_rows(torch.eye(3))}, data="identity")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stats.save(f"{folder}/stats")
        ...     Calibration.load(f"{folder}/stats")["fc"].count
        3
        """
        manifest = read_manifest(path)
        if manifest.get("kind") != "statistics":
            raise StoreError(f"{path} holds a checkpoint of an unfinished calibration; resume it instead of loading it")
        return cls(
            StoredLayers(Path(path), manifest["layers"]),
            fingerprint=manifest["fingerprint"],
            weights=manifest.get("weights"),
            data=manifest["data"],
            unreached=tuple(manifest["unreached"]),
            read_elsewhere=tuple(manifest.get("read_elsewhere", ())),
            normalised_by=manifest.get("normalised_by"),
            inputs=manifest.get("inputs"),
        )

    def check_model(self, model: nn.Module, *, weights: bool = True) -> None:
        """Raise :class:`~tensigma.errors.StoreError` if ``model`` has another architecture or other weights.

        Other weights change what reaches each layer; with ``weights=False`` only the architecture is compared.
        Statistics without a digest of the weights pass.
        """
        if self.fingerprint:
            difference = first_difference(
                self.fingerprint, fingerprint(model), mine="the statistics", yours="the model"
            )
            if difference:
                raise StoreError(f"these statistics belong to another architecture: {difference}")
        for name, module in measurable(model):
            if name in self:
                _check_shape(name, self[name].input_shape, Geometry.of(module))
        if weights and self.weights is not None and self.weights != weights_digest(model):
            raise StoreError(
                "these statistics were gathered with other weights of this architecture, so they do not say what "
                "reaches its layers now; calibrate again with these weights, or pass {check} to use them anyway",
                parameters=("check=False",),
            )


def _check_shape(name: str, shape: tuple[int, ...], geometry: Geometry) -> None:
    """Refuse a shape that no input of the layer has, whose multiply-adds would be nonsense; () stands for unknown."""
    if not shape or geometry.takes(shape):
        return
    raise StoreError(
        f"the statistics are damaged: layer {name!r} ({describe(geometry)}) cannot have met an input of shape {shape}; "
        "calibrate again"
    )


def _undisputed(mine: Calibration, other: Calibration) -> dict[str, str]:
    """The layers followed by a BatchNorm in ``mine`` that ``other`` saw the same way, or not at all."""
    seen = {layer: norm for layer, norm in other.normalised_by.items() if layer in other}
    return {layer: norm for layer, norm in mine.normalised_by.items() if layer not in other or seen.get(layer) == norm}

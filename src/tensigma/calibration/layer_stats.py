"""Statistics of one layer: the moments of its input."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from tensigma.calibration.store import read_tensor
from tensigma.errors import InputError


class Stored:
    """A tensor in a file: read when it is called for, shared while somebody has it, and read again after that.

    A plan refers to the statistics of every layer. All of them together may be larger than the model.
    """

    def __init__(self, file: Path, key: str, entry: Mapping[str, Any]) -> None:
        self._file, self._key, self._entry = file, key, entry
        self._in_use: ReferenceType[Tensor] | None = None

    def __call__(self) -> Tensor:
        tensor = None if self._in_use is None else self._in_use()
        if tensor is None:
            tensor = read_tensor(self._file, self._key, self._entry)
            self._in_use = ref(tensor)
        return tensor

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_in_use": None}  # weak references cannot be sent to another process


class LayerStats:
    """Moments of the rows ``u`` that one layer multiplies by its weights, averaged over samples and positions.

    Rows are patches in the order of :func:`torch.nn.functional.unfold` (index = channel · taps + tap); for Linear
    layers they are the input vectors, for transposed convolutions the channel vectors of the input map. Grouped layers
    have one entry per group: ``mean`` (g, d), ``covariance`` and ``gram`` (g, d, d).

    The *centred* moment is stored, in float32 unless the model runs in float64, so that a mean far larger than the
    spread costs no precision; :attr:`gram` is computed on demand. If a very wide Linear layer has seen fewer rows than
    it is wide, :attr:`rows` holds them and both moments are computed on demand.

    >>> u = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    >>> stats = LayerStats.from_rows(u)
    >>> torch.allclose(stats.gram, u.T @ u / 100, atol=1e-6), stats.count
    (True, 100)
    """

    def __init__(
        self,
        *,
        mean: Tensor,
        covariance: Tensor | Stored | None = None,
        rows: Tensor | Stored | None = None,
        count: int,
        samples: int | None = None,
        input_shape: tuple[int, ...] = (),
        output_shape: tuple[int, ...] = (),
        output_abs_mean: Tensor | None = None,
        output_count: int | None = None,
        fisher: Tensor | Stored | None = None,
        fisher_samples: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if (covariance is None) == (rows is None):
            raise InputError("LayerStats takes exactly one of covariance and rows")
        stored = rows if covariance is None else covariance
        #: Precision of the stored moments.
        self.dtype = stored.dtype if isinstance(stored, Tensor) else dtype or torch.float32
        # Means keep float64: merging subtracts them from each other.
        self._mean = mean.double()
        self._covariance = covariance
        self._rows = rows
        self._fisher = fisher
        #: Number of rows averaged.
        self.count = int(count)
        #: Number of model inputs they come from.
        self.samples = int(count if samples is None else samples)
        #: Shape of one sample at the layer's input and output, as first seen.
        self.input_shape = tuple(input_shape)
        self.output_shape = tuple(output_shape)
        #: Mean of |y| per output channel, or None.
        self.output_abs_mean = output_abs_mean
        #: Number of output positions averaged in ``output_abs_mean``.
        self.output_count = int(self.count if output_count is None else output_count)
        #: Number of samples averaged in ``fisher``.
        self.fisher_samples = 0 if fisher is None else int(self.samples if fisher_samples is None else fisher_samples)

    @classmethod
    def from_rows(cls, rows: Tensor, **fields: Any) -> LayerStats:
        """Moments of ``rows``, (n, d) or (g, n, d)."""
        shift = rows.double().mean(-2, keepdim=True)
        centred = rows.double() - shift
        covariance = centred.mT @ centred / rows.shape[-2]
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return cls(mean=shift.squeeze(-2), covariance=covariance.to(dtype), count=rows.shape[-2], **fields)

    @classmethod
    def from_gram(cls, gram: Tensor, mean: Tensor | None = None, *, count: int, **fields: Any) -> LayerStats:
        """Moments from an uncentred gram E[u uᵀ] and a mean (zero if None)."""
        mean = gram.new_zeros(gram.shape[:-1]) if mean is None else mean
        centred = gram.double() - mean.double()[..., :, None] * mean.double()[..., None, :]
        return cls(mean=mean, covariance=centred.to(gram.dtype), count=count, **fields)

    @property
    def d(self) -> int:
        """Width of a row."""
        return self._mean.shape[-1]

    @property
    def groups(self) -> int:
        return self._mean.shape[0] if self._mean.dim() == 2 else 1

    @property
    def n_bytes(self) -> int:
        """What the centred moment takes."""
        return self.groups * self.d**2 * self.dtype.itemsize

    @property
    def is_stored(self) -> bool:
        """Whether the centred moment lies in a file and is read when it is asked for."""
        return isinstance(self._covariance, Stored)

    @property
    def mean(self) -> Tensor:
        """E[u], shape (d,) or (g, d), in the precision of the covariance."""
        return self._mean.to(self.dtype)

    @property
    def rows(self) -> Tensor | None:
        """The rows themselves, (n, d), if a very wide layer has seen fewer of them than ``d``; otherwise None."""
        return self._rows() if isinstance(self._rows, Stored) else self._rows

    @property
    def covariance(self) -> Tensor:
        """E[(u − E u)(u − E u)ᵀ], shape (d, d) or (g, d, d)."""
        if self._covariance is not None:
            return self._covariance() if isinstance(self._covariance, Stored) else self._covariance
        rows = self.rows
        assert rows is not None
        centred = (rows - self._mean).to(rows.dtype)  # centred before it is rounded
        return centred.T @ centred / len(rows)

    @property
    def gram(self) -> Tensor:
        """E[u uᵀ], shape (d, d) or (g, d, d)."""
        mean = self.mean
        return torch.addcmul(self.covariance, mean[..., :, None], mean[..., None, :])

    @property
    def fisher(self) -> Tensor | None:
        """Mean over samples of the squared gradient of each weight, shaped like the weight; None if not gathered."""
        return self._fisher() if isinstance(self._fisher, Stored) else self._fisher

    def replace(self, **fields: Any) -> LayerStats:
        """The same moments with other fields replaced."""
        kept: dict[str, Any] = {
            "count": self.count,
            "samples": self.samples,
            "input_shape": self.input_shape,
            "output_shape": self.output_shape,
            "output_abs_mean": self.output_abs_mean,
            "output_count": self.output_count,
            "fisher": self._fisher,
            "fisher_samples": self.fisher_samples,
        }
        kept.update(fields)
        return LayerStats(mean=self._mean, covariance=self._covariance, rows=self._rows, dtype=self.dtype, **kept)

    def in_memory(self) -> LayerStats:
        """The same without the file that it was read from."""
        held = copy.copy(self)
        stored = (self._covariance, self._rows, self._fisher)
        held._covariance, held._rows, held._fisher = (each() if isinstance(each, Stored) else each for each in stored)
        return held

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors of this layer that a store keeps."""
        keeps_rows = self._covariance is None
        tensors = {
            "mean": self._mean,
            "rows" if keeps_rows else "covariance": self.rows if keeps_rows else self.covariance,
            "output_abs_mean": self.output_abs_mean,
            "fisher": self.fisher,
        }
        return {key: tensor for key, tensor in tensors.items() if tensor is not None}

    def _fields(self) -> dict[str, Any]:
        """The fields of this layer that a store keeps in its manifest."""
        return {
            "d": self.d,
            "groups": self.groups,
            "count": self.count,
            "samples": self.samples,
            "input_shape": list(self.input_shape),
            "output_shape": list(self.output_shape),
            "output_count": self.output_count,
            "fisher_samples": self.fisher_samples,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensors": list(self._tensors_present()),
        }

    def _tensors_present(self) -> Iterator[str]:
        yield "mean"
        yield "rows" if self._covariance is None else "covariance"
        if self.output_abs_mean is not None:
            yield "output_abs_mean"
        if self._fisher is not None:
            yield "fisher"

    @classmethod
    def _stored(cls, file: Path, entry: Mapping[str, Any]) -> LayerStats:
        """A layer of a store; its large tensors are read on demand."""
        present = set(entry["tensors"])

        def later(key: str) -> Stored | None:
            return Stored(file, key, entry) if key in present else None

        return cls(
            mean=read_tensor(file, "mean", entry),
            covariance=later("covariance"),
            rows=later("rows"),
            count=entry["count"],
            samples=entry["samples"],
            input_shape=tuple(entry["input_shape"]),
            output_shape=tuple(entry["output_shape"]),
            output_abs_mean=read_tensor(file, "output_abs_mean", entry) if "output_abs_mean" in present else None,
            output_count=entry["output_count"],
            fisher=later("fisher"),
            fisher_samples=entry["fisher_samples"],
            dtype=getattr(torch, entry["dtype"]),
        )

    def __repr__(self) -> str:
        shape = f"{self.groups}×{self.d}" if self._mean.dim() == 2 else str(self.d)
        kept = "rows" if self._covariance is None else "covariance"
        return f"LayerStats(d={shape}, count={self.count}, samples={self.samples}, {kept})"

    def merge(self, other: LayerStats) -> LayerStats:
        """Moments of all rows of both, as if gathered together; exact and associative to rounding.

        >>> u = torch.randn(30, 3, generator=torch.Generator().manual_seed(0)) + 5
        >>> both = LayerStats.from_rows(u[:10]).merge(LayerStats.from_rows(u[10:]))
        >>> torch.allclose(both.gram, LayerStats.from_rows(u).gram), both.count
        (True, 30)
        """
        if self._mean.shape != other._mean.shape:
            raise InputError(f"cannot merge rows of shape {tuple(self._mean.shape)} with {tuple(other._mean.shape)}")
        count = self.count + other.count
        share = other.count / count if count else 0.0
        step = other._mean.to(self._mean.device) - self._mean
        moments: dict[str, Any] = {}
        own_rows, other_rows = self.rows, other.rows
        if own_rows is not None and other_rows is not None and count < self.d:
            moments["rows"] = torch.cat([own_rows, other_rows.to(own_rows)])
        else:
            first, second = self.covariance, other.covariance
            dtype = torch.promote_types(first.dtype, second.dtype)
            # Cov = (1−w) Cov₁ + w Cov₂ + w(1−w) δδᵀ with w the share of the second and δ the difference of means.
            total = first.double().mul_(1 - share).add_(second.to(first.device), alpha=share)
            total.addcmul_(step[..., :, None], step[..., None, :], value=share * (1 - share))
            moments["covariance"] = total.to(dtype)
        return LayerStats(
            mean=self._mean + share * step,
            count=count,
            samples=self.samples + other.samples,
            input_shape=self.input_shape or other.input_shape,
            output_shape=self.output_shape or other.output_shape,
            output_abs_mean=_average(
                self.output_abs_mean, other.output_abs_mean, self.output_count, other.output_count
            ),
            output_count=self.output_count + other.output_count,
            fisher=_average(self.fisher, other.fisher, self.fisher_samples, other.fisher_samples),
            fisher_samples=self.fisher_samples + other.fisher_samples,
            **moments,
        )


def _average(first: Tensor | None, second: Tensor | None, n_first: int, n_second: int) -> Tensor | None:
    # A mean that only one side gathered would not describe both.
    if first is None or second is None:
        return None
    total = first.double() * n_first + second.to(first.device).double() * n_second
    return (total / max(n_first + n_second, 1)).to(first.dtype)

"""What calibration leaves behind: the moments of every layer's input, which can be merged, saved and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from tensigma.errors import InputError, StoreError
from tensigma.layers import TARGETS, Geometry


class LayerStats:
    """Moments of the rows ``u`` that one layer multiplies by its weights, averaged over samples and positions.

    Rows are patches in the order of :func:`torch.nn.functional.unfold` (index = channel · taps + tap); for Linear layers
    they are the input vectors, for transposed convolutions the channel vectors of the input map. Grouped layers have one
    entry per group: ``mean`` (g, d), ``covariance`` and ``gram`` (g, d, d).

    The *centred* moment is what is stored, in float32 unless the model runs in float64, so that a mean far larger than
    the spread costs nothing; :attr:`gram` is put together on demand. Where a very wide Linear layer has met fewer rows
    than it is wide, :attr:`rows` holds them and both moments are computed on demand.

    >>> u = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    >>> stats = LayerStats.from_rows(u)
    >>> torch.allclose(stats.gram, u.T @ u / 100, atol=1e-6), stats.count
    (True, 100)
    """

    def __init__(
        self,
        *,
        mean: Tensor,
        covariance: Tensor | Callable[[], Tensor] | None = None,
        rows: Tensor | Callable[[], Tensor] | None = None,
        count: int,
        samples: int | None = None,
        input_shape: tuple[int, ...] = (),
        output_shape: tuple[int, ...] = (),
        output_abs_mean: Tensor | None = None,
        output_count: int | None = None,
        fisher: Tensor | Callable[[], Tensor] | None = None,
        fisher_samples: int | None = None,
    ) -> None:
        if (covariance is None) == (rows is None):
            raise InputError("LayerStats takes either a covariance or rows, and exactly one of them")
        # Means keep float64: merging subtracts them from each other.
        self._mean = mean.double()
        self._covariance = covariance
        self._rows = rows
        self._fisher = fisher
        #: Number of rows averaged.
        self.count = int(count)
        #: Number of model inputs that led to them.
        self.samples = int(count if samples is None else samples)
        #: Shape of one sample at the layer's input and output, as first met.
        self.input_shape = tuple(input_shape)
        self.output_shape = tuple(output_shape)
        #: Mean of |y| per output channel, or None.
        self.output_abs_mean = output_abs_mean
        #: Number of output positions averaged in ``output_abs_mean``.
        self.output_count = int(self.count if output_count is None else output_count)
        #: Number of samples averaged in ``fisher``.
        self.fisher_samples = 0 if fisher is None else int(self.samples if fisher_samples is None else fisher_samples)

    @classmethod
    def from_rows(cls, rows: Tensor, **fields: object) -> LayerStats:
        """Moments of given rows, (n, d) or (g, n, d)."""
        shift = rows.double().mean(-2, keepdim=True)
        centred = rows.double() - shift
        covariance = centred.mT @ centred / rows.shape[-2]
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return cls(mean=shift.squeeze(-2), covariance=covariance.to(dtype), count=rows.shape[-2], **fields)  # type: ignore[arg-type]

    @classmethod
    def from_gram(cls, gram: Tensor, mean: Tensor | None = None, *, count: int, **fields: object) -> LayerStats:
        """Moments from an uncentred gram E[u uᵀ] and a mean (zero where not given)."""
        mean = gram.new_zeros(gram.shape[:-1]) if mean is None else mean
        centred = gram.double() - mean.double()[..., :, None] * mean.double()[..., None, :]
        return cls(mean=mean, covariance=centred.to(gram.dtype), count=count, **fields)  # type: ignore[arg-type]

    @property
    def d(self) -> int:
        """Width of a row."""
        return self._mean.shape[-1]

    @property
    def groups(self) -> int:
        return self._mean.shape[0] if self._mean.dim() == 2 else 1

    @property
    def mean(self) -> Tensor:
        """E[u], shape (d,) or (g, d), in the precision of the covariance."""
        return self._mean.to(torch.float32 if self.dtype == torch.float32 else torch.float64)

    @property
    def dtype(self) -> torch.dtype:
        stored = self.rows if self._covariance is None else self.covariance
        assert stored is not None
        return stored.dtype

    @property
    def rows(self) -> Tensor | None:
        """The rows themselves, (n, d), where fewer of them than ``d`` were met by a very wide layer; otherwise None."""
        if callable(self._rows):
            self._rows = self._rows()
        return self._rows

    @property
    def covariance(self) -> Tensor:
        """E[(u − E u)(u − E u)ᵀ], shape (d, d) or (g, d, d)."""
        if callable(self._covariance):
            self._covariance = self._covariance()
        if self._covariance is not None:
            return self._covariance
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
        """Mean over samples of the squared gradient of each weight, in the shape of the weight; None if not gathered."""
        if callable(self._fisher):
            self._fisher = self._fisher()
        return self._fisher

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
        moments: dict[str, Tensor] = {}
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
            **moments,  # type: ignore[arg-type]
        )


def _average(first: Tensor | None, second: Tensor | None, n_first: int, n_second: int) -> Tensor | None:
    # A mean that only one side gathered would not describe both.
    if first is None or second is None:
        return None
    total = first.double() * n_first + second.to(first.device).double() * n_second
    return (total / max(n_first + n_second, 1)).to(first.dtype)


class Calibration(Mapping[str, LayerStats]):
    """Moments by layer name, with what is needed to know whether they fit a model.

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
        data: str | None = None,
        unreached: tuple[str, ...] = (),
    ) -> None:
        self._layers = layers if not isinstance(layers, dict) else dict(layers)
        #: Name and geometry of every layer of the calibrated model that Tensigma can compress.
        self.fingerprint = dict(fingerprint or {})
        #: What the data was called, or None.
        self.data = data
        #: Layers that were asked for and that no batch reached.
        self.unreached = tuple(unreached)

    def __getitem__(self, name: str) -> LayerStats:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def samples(self) -> int:
        """Number of model inputs seen (the most that any layer met)."""
        return max((stats.samples for stats in self.values()), default=0)

    def __repr__(self) -> str:
        return f"Calibration({len(self)} layers, {self.samples} samples, data={self.data!r})"

    def merge(self, other: Calibration) -> Calibration:
        """Statistics as if both sets had been seen in one run; layers that only one side holds are kept as they are.

        Exact and associative to rounding, also between resolutions: every row weighs the same.
        """
        if self.fingerprint and other.fingerprint:
            difference = first_difference(self.fingerprint, other.fingerprint)
            if difference:
                raise StoreError(f"cannot merge statistics of two architectures: {difference}")
        layers = {name: stats.merge(other[name]) if name in other else stats for name, stats in self.items()}
        layers.update({name: stats for name, stats in other.items() if name not in layers})
        names = [name for name in (self.data, other.data) if name]
        return Calibration(
            layers,
            fingerprint=self.fingerprint or other.fingerprint,
            data=" + ".join(names) or None,
            unreached=tuple(name for name in dict.fromkeys(self.unreached + other.unreached) if name not in layers),
        )

    def check_model(self, model: nn.Module) -> None:
        """Raise :class:`~tensigma.errors.StoreError` naming the first difference if ``model`` is built otherwise.

        Weights are not compared: statistics of another training run or of other data are welcome.
        """
        if not self.fingerprint:
            return
        difference = first_difference(self.fingerprint, fingerprint(model), mine="the statistics", yours="the model")
        if difference:
            raise StoreError(f"these statistics belong to another architecture: {difference}")


def fingerprint(model: nn.Module) -> dict[str, str]:
    """Name → geometry in words, for every layer of ``model`` that Tensigma can compress.

    >>> fingerprint(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Linear(4, 2)))
    {'0': 'conv 3→4 kernel 3×3 stride 1×1 padding 1×1 dilation 1×1 groups 1 zeros', '2': 'linear 4→2'}
    """
    return {name: describe(Geometry.of(module)) for name, module in compressible(model)}


def compressible(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the layers Tensigma can read, in the order of the model."""
    for name, module in model.named_modules():
        if type(module) in TARGETS:
            yield name, module


def describe(geometry: Geometry) -> str:
    text = f"{geometry.kind} {geometry.in_channels}→{geometry.out_channels}"
    if not geometry.n_spatial:
        return text
    padding = geometry.padding if isinstance(geometry.padding, str) else _times(geometry.padding)
    return (
        f"{text} kernel {_times(geometry.kernel_size)} stride {_times(geometry.stride)} padding {padding}"
        f" dilation {_times(geometry.dilation)} groups {geometry.groups} {geometry.padding_mode}"
    )


def first_difference(
    first: Mapping[str, str], second: Mapping[str, str], mine: str = "the first", yours: str = "the second"
) -> str | None:
    """The first layer in which two fingerprints differ, in words, or None."""
    for name in first:
        if name not in second:
            return f"layer {name!r} ({first[name]}) of {mine} is missing in {yours}"
        if first[name] != second[name]:
            return f"layer {name!r} is {first[name]} in {mine} and {second[name]} in {yours}"
    for name in second:
        if name not in first:
            return f"layer {name!r} ({second[name]}) of {yours} is missing in {mine}"
    return None


def _times(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes))

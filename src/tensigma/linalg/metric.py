"""The norm under which a kernel is approximated. Notation: M (t, d) unfolded kernel, Σ (d, d) gram of the inputs.

‖M‖²_Σ = tr(M Σ Mᵀ) is the mean squared output of the layer on the data that made Σ. Σ may be singular; solvers work
with Σ + εI, where ε is far below the accuracy of Σ, and every error is reported under Σ itself.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from torch import Tensor

from tensigma.errors import InputError, NotPSDError, NumericalWarning

# ε ÷ λ_max(Σ). In float32 a gram is only known to about 1e-7 λ_max, so anything smaller would be noise; and in any
# precision it keeps weights that hardly any input excites from growing without bound.
_DAMPING = 1e-6
# Beyond this a negative eigenvalue is not rounding: the matrix is not a gram.
_LARGEST_DAMPING = 1e-4
_SYMMETRY = {torch.float32: 1e-4, torch.float64: 1e-8}
_BLOCK = 512  # rows handled at once where a d × d temporary would otherwise be made


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else, half precision included, is worked on in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Metric:
    """A positive semi-definite Σ over the inputs of a kernel, in the order of ``torch.nn.functional.unfold``.

    Make one with :meth:`from_gram`, :meth:`from_rows` or :meth:`identity`.

    >>> metric = Metric.from_gram(torch.diag(torch.tensor([4.0, 1.0])))
    >>> metric.norm(torch.tensor([[1.0, 0.0]])).item()
    2.0
    >>> round(metric.relative_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]])), 4)
    0.7071
    """

    def __init__(
        self, size: int, gram: Tensor | None, rows: Tensor | None, damping: float, epsilon: float, share: float = 0.0
    ) -> None:
        self.size = size
        self._gram = gram  # (d, d), or None
        self._rows = rows  # (n, d), already divided by √n, or None; neither means the identity
        #: ε ÷ λ_max: the relative damping with which solvers see Σ.
        self.damping = damping
        #: ε itself.
        self.epsilon = epsilon
        #: How much of what Σ has off its diagonal is left out, from 0 to 1.
        self.share = share

    @classmethod
    def identity(cls, size: int) -> Metric:
        """The classical problem: the Frobenius norm of the weights.

        >>> Metric.identity(4).norm(torch.ones(1, 4)).item()
        2.0
        """
        if size < 1:
            raise InputError(f"a metric needs at least one dimension, got {size}")
        return cls(size, None, None, 0.0, 0.0)

    @classmethod
    def from_gram(cls, gram: Tensor, mean: Tensor | None = None, *, damping: float | None = None) -> Metric:
        """Σ = ``gram``, or the centred Σ − μμᵀ if ``mean`` is given.

        ``damping`` is relative to the largest eigenvalue; by default 1e-6. It is raised, with a
        :class:`NumericalWarning`, if rounding has made Σ slightly indefinite.

        >>> Metric.from_gram(torch.diag(torch.tensor([4.0, 1.0]))).damping
        1e-06
        """
        if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or gram.shape[0] == 0:
            raise InputError(f"a gram is a square matrix (d, d), got shape {tuple(gram.shape)}")
        gram = gram.to(working_dtype(gram.dtype))
        if not _all_finite(gram):
            raise InputError("the gram contains NaN or infinite entries; check the activations it was gathered from")
        if mean is not None:
            if mean.shape != gram.shape[:1]:
                raise InputError(
                    f"the mean of a {tuple(gram.shape)} gram has shape ({gram.shape[0]},), got {tuple(mean.shape)}"
                )
            if not torch.isfinite(mean).all():
                raise InputError("the mean contains NaN or infinite entries")
            # In float64, because this is a difference of close numbers.
            centre = mean.double()
            gram = torch.addr(gram.double(), centre, centre, alpha=-1).to(gram.dtype)
        _check_symmetric(gram)
        relative, epsilon = _choose_damping(gram, damping)
        return cls(gram.shape[0], gram, None, relative, epsilon)

    @classmethod
    def from_rows(cls, rows: Tensor, mean: Tensor | None = None, *, damping: float | None = None) -> Metric:
        """Σ = rowsᵀ·rows ÷ n without forming it: for n input rows that are fewer than their width d.

        >>> rows = torch.tensor([[1.0, 0.0, 2.0]])
        >>> Metric.from_rows(rows).norm(torch.tensor([[1.0, 5.0, 1.0]])).item()
        3.0
        """
        if rows.ndim != 2 or 0 in rows.shape:
            raise InputError(f"rows form a matrix (n, d), got shape {tuple(rows.shape)}")
        rows = rows.to(working_dtype(rows.dtype))
        if not _all_finite(rows):
            raise InputError("the rows contain NaN or infinite entries; check the activations they were gathered from")
        if mean is not None:
            rows = rows - mean.to(rows)
        scaled = rows / rows.shape[0] ** 0.5
        relative = _DAMPING if damping is None else damping
        largest = torch.linalg.matrix_norm(scaled, 2).square().item() if scaled.any() else 0.0
        return cls(rows.shape[1], None, scaled, relative, relative * largest if largest > 0 else 1.0)

    def drawn(self, share: float) -> Metric:
        """Σ drawn towards its diagonal: (1 − share) Σ + share · diag(Σ), which holds no second matrix.

        >>> metric = Metric.from_gram(torch.tensor([[2.0, 1.0], [1.0, 2.0]])).drawn(0.25)
        >>> metric.dense().tolist()
        [[2.0, 0.75], [0.75, 2.0]]
        >>> metric.observed.dense().tolist()
        [[2.0, 1.0], [1.0, 2.0]]
        """
        if not 0 <= share <= 1:
            raise InputError(f"the share of the diagonal lies in [0, 1], got {share}")
        return self if self.is_identity else self._with_share(share)

    @property
    def observed(self) -> Metric:
        """Σ as it was gathered, not drawn towards anything."""
        return self._with_share(0.0) if self.share else self

    def _with_share(self, share: float) -> Metric:
        return Metric(self.size, self._gram, self._rows, self.damping, self.epsilon, share)

    @property
    def diagonal(self) -> Tensor:
        """The diagonal of Σ, (d)."""
        if self._gram is not None:
            return self._gram.diagonal()
        return torch.ones(self.size) if self._rows is None else self._rows.square().sum(0)

    def correlations(self) -> tuple[int, float]:
        """How many inputs vary, and the sum of the squares of all correlations between them, with themselves included.

        >>> Metric.from_gram(torch.tensor([[4.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])).correlations()
        (2, 2.5)
        """
        variances = self.diagonal.double().clamp_min(0)
        inverses = torch.where(variances > 0, variances.rsqrt(), 0.0)
        alive = int((variances > 0).sum())
        if self._rows is not None:
            scaled = self._rows * inverses.to(self._rows)
            return alive, (scaled @ scaled.T).double().square().sum().item()
        # Blocks of rows, because a copy of the whole in double precision would be large.
        blocks = zip(self.dense().split(_BLOCK), inverses.split(_BLOCK), strict=True)
        return alive, sum((block * inverses * scale[:, None]).square().sum().item() for block, scale in blocks)

    @property
    def is_identity(self) -> bool:
        return self._gram is None and self._rows is None

    @property
    def n_rows(self) -> int | None:
        """How many input rows Σ is; None if it is more than these or held otherwise."""
        return None if self._rows is None or self.share else len(self._rows)

    def seen(self, matrix: Tensor) -> Tensor:
        """The outputs for the rows, (t, n), divided by √n."""
        assert self._rows is not None
        return matrix @ self._rows.T

    @property
    def dtype(self) -> torch.dtype | None:
        """Precision of Σ; None for the identity, which takes that of the kernel."""
        held = self._gram if self._gram is not None else self._rows
        return None if held is None else held.dtype

    def to(self, like: Tensor) -> Metric:
        """The same metric in the dtype and on the device of ``like``. Damping is not lowered."""
        if self._gram is not None:
            return Metric(self.size, self._gram.to(like), None, self.damping, self.epsilon, self.share)
        if self._rows is not None:
            return Metric(self.size, None, self._rows.to(like), self.damping, self.epsilon, self.share)
        return self

    def times(self, matrix: Tensor, *, damped: bool = False) -> Tensor:
        """M Σ, or M (Σ + εI) if ``damped``; (t, d) in, (t, d) out."""
        self._check_width(matrix)
        if self._gram is not None:
            product = matrix @ self._gram
        elif self._rows is not None:
            product = (matrix @ self._rows.T) @ self._rows
        else:
            return matrix
        if self.share:
            product.mul_(1 - self.share).addcmul_(matrix, self.diagonal, value=self.share)
        return product.add_(matrix, alpha=self.epsilon) if damped else product

    def outputs(self, matrix: Tensor) -> Tensor:
        """M Σ Mᵀ, the (t, t) second moment of the layer's outputs, exactly symmetric."""
        if self.n_rows is not None:
            seen = self.seen(matrix)
            return seen @ seen.T
        moment = self.times(matrix) @ matrix.T
        return (moment + moment.T) / 2

    def dense(self) -> Tensor:
        """Σ as a matrix; the identity in float64."""
        if self.is_identity:
            return torch.eye(self.size, dtype=torch.float64)
        gram = self._gram
        if gram is None:
            assert self._rows is not None
            gram = self._rows.T @ self._rows
        if self.share:
            gram = (1 - self.share) * gram
            gram.diagonal().copy_(self.diagonal)
        return gram

    def norm(self, matrix: Tensor) -> Tensor:
        """‖M‖_Σ of a kernel of shape (t, d) or (t, s, *taps), as a float64 scalar."""
        if self.n_rows is not None:
            self._check_width(matrix.flatten(1))
            return self.seen(matrix.flatten(1)).double().norm()
        return _sum_of_products(matrix.flatten(1), self.times(matrix.flatten(1))).clamp_min(0).sqrt()

    def relative_error(self, kernel: Tensor, approximation: Tensor) -> float:
        """‖M − M̃‖_Σ ÷ ‖M‖_Σ; 0 if the kernel itself has no effect under Σ."""
        reference = self.norm(kernel).item()
        return self.norm(kernel - approximation).item() / reference if reference > 0 else 0.0

    def root(self, kind: Literal["cholesky", "eigen"] = "eigen") -> Tensor:
        """S with S Sᵀ = Σ. The ``"cholesky"`` root is that of Σ + εI; the ``"eigen"`` root is exact and symmetric.

        Roots are for reports and tests: no solver needs one.
        """
        gram = self.dense()
        if kind == "cholesky":
            return torch.linalg.cholesky(
                gram + self.epsilon * torch.eye(self.size, dtype=gram.dtype, device=gram.device)
            )
        if kind == "eigen":
            values, vectors = torch.linalg.eigh(gram.double())
            return ((vectors * values.clamp_min(0).sqrt()) @ vectors.T).to(gram.dtype)
        raise InputError(f"root {kind!r} is unknown; choose 'cholesky' or 'eigen'")

    def whiten(self, matrix: Tensor) -> Tensor:
        """M Σ^½ with the symmetric root, (t, d): its plain energy is that of M under Σ.

        >>> rows = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
        >>> seen = Metric.from_rows(rows).whiten(torch.ones(1, 5))
        >>> torch.allclose(seen.norm().double(), Metric.from_rows(rows).norm(torch.ones(1, 5)))
        True
        """
        self._check_width(matrix)
        if self.n_rows is not None:
            assert self._rows is not None
            # Σ^½ = V S Vᵀ from the few rows; Σ itself is never formed.
            _, values, basis = torch.linalg.svd(self._rows.double(), full_matrices=False)
            return ((matrix.to(basis) @ basis.T * values) @ basis).to(matrix.dtype)
        return matrix if self.is_identity else matrix @ self.root().to(matrix)

    def tap_major(self, n_channels: int) -> Tensor:
        """Σ with features ordered (tap, channel) instead of (channel, tap), so that contractions are plain GEMMs."""
        n_taps = self.size // n_channels
        gram = self.dense()
        if n_taps == 1 or self.is_identity:
            return gram
        split = gram.view(n_channels, n_taps, n_channels, n_taps)
        return split.permute(1, 0, 3, 2).reshape(self.size, self.size)

    def _check_width(self, matrix: Tensor) -> None:
        if matrix.ndim != 2 or matrix.shape[1] != self.size:
            raise InputError(f"the metric has {self.size} input features, the kernel unfolds to {tuple(matrix.shape)}")

    def __repr__(self) -> str:
        kind = "identity" if self.is_identity else "gram" if self._gram is not None else "rows"
        return f"Metric({kind}, size={self.size}, damping={self.damping:.0e})"


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Σ left∘right, summed in float64 without a float64 copy of the whole."""
    total = torch.zeros((), dtype=torch.float64, device=left.device)
    for a, b in zip(left.split(_BLOCK), right.split(_BLOCK), strict=True):
        total += (a.double() * b.double()).sum()
    return total


def _blocks(size: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK)]


def _all_finite(tensor: Tensor) -> bool:
    # A sum is one pass without a temporary; the slow test is needed only if it overflows.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _check_symmetric(gram: Tensor) -> None:
    scale = gram.diagonal().abs().max().item()
    # Block against mirrored block: a transposed read of whole columns would miss the cache at every entry.
    blocks = _blocks(gram.shape[0])
    worst = max((gram[a, b] - gram[b, a].T).abs().max().item() for i, a in enumerate(blocks) for b in blocks[: i + 1])
    if worst > _SYMMETRY[gram.dtype] * max(scale, torch.finfo(gram.dtype).tiny):
        raise NotPSDError(
            f"the gram is not symmetric: entries differ from their mirror by up to {worst:.3g} "
            f"where the largest diagonal entry is {scale:.3g}; symmetrise it or check how it was made"
        )


def _largest_eigenvalue(gram: Tensor, steps: int = 12) -> float:
    """λ_max to a few per cent, by power iteration from the heaviest column; enough for a damping."""
    vector = gram[:, gram.diagonal().argmax()].clone()
    value = 0.0
    for _ in range(steps):
        largest = vector.abs().max()
        if largest == 0:
            return value
        vector = vector / largest  # otherwise the squares of a very small vector underflow in its length
        vector = vector / vector.norm()
        image = gram @ vector
        value = torch.dot(vector, image).item()
        vector = image
    return value


def _choose_damping(gram: Tensor, requested: float | None) -> tuple[float, float]:
    """The smallest relative damping, from ``requested`` up, with which Σ + εI has a Cholesky factor; and its ε."""
    if requested is not None and not 0 <= requested < 1:
        raise InputError(f"damping is relative to the largest eigenvalue and lies in [0, 1), got {requested}")
    diagonal = gram.diagonal()
    # A channel that never varies has a variance of zero, up to the rounding of the others.
    if (diagonal < -_DAMPING * diagonal.abs().max()).any():
        raise NotPSDError("the gram has a negative diagonal entry, so it is not a second moment")
    if _DAMPING * diagonal.abs().max() < torch.finfo(gram.dtype).tiny:
        # Nothing reaches this layer, or so little that a share of it is no number any more: every approximation is
        # perfect. Solvers then see the identity.
        return 1.0, 1.0
    default = _DAMPING if requested is None else requested
    largest = _largest_eigenvalue(gram)
    relative = default
    while True:
        trial = gram.clone()
        trial.diagonal().add_(relative * largest)
        _, info = torch.linalg.cholesky_ex(trial, out=(trial, torch.empty((), dtype=torch.int32, device=gram.device)))
        if info == 0:
            break
        relative = max(10 * relative, _DAMPING)
        if relative > max(_LARGEST_DAMPING, default):
            raise NotPSDError(
                f"the gram is indefinite: it stays so with {relative / 10:.0e} of its largest eigenvalue "
                f"({largest:.3g}) added to the diagonal; a second moment is positive semi-definite"
            )
    if relative > default:
        warnings.warn(
            f"damping of a {gram.shape[0]}-wide gram raised from {default:.0e} to {relative:.0e} of its "
            "largest eigenvalue",
            NumericalWarning,
            stacklevel=3,
        )
    return relative, relative * largest

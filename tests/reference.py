"""Slow, obvious twins of the fast solvers: the paper's algorithms as printed, in numpy and scipy.

Every block of an alternating algorithm solves min_u ‖Vec(K Σ^½) − P Vec(u)‖ for one factor u. Two ways are kept:
``explicit`` makes the matrix P column by column and applies its pseudo-inverse; ``minres`` solves PᵀP u = Pᵀ b without
forming P, by MINRES with the paper's tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.sparse.linalg import LinearOperator, minres

Array = np.ndarray
Solve = Literal["explicit", "minres"]
TOLERANCE = 1e-10


def psd_root(sigma: Array) -> Array:
    """Σ^½, symmetric, by eigendecomposition."""
    values, vectors = np.linalg.eigh(sigma)
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T


def naive_error(kernel: Array, approximation: Array, sigma: Array) -> float:
    """‖(K − K̃)₍₁₎ Σ^½‖ ÷ ‖K₍₁₎ Σ^½‖."""
    root = psd_root(sigma)
    unfolded = kernel.reshape(len(kernel), -1)
    return float(
        np.linalg.norm((unfolded - approximation.reshape(unfolded.shape)) @ root) / np.linalg.norm(unfolded @ root)
    )


def solve_block(
    forward: Callable[[Array], Array], adjoint: Callable[[Array], Array], start: Array, target: Array, how: Solve
) -> Array:
    """The factor u with forward(u) closest to ``target``; ``forward`` is linear and ``adjoint`` its transpose."""
    if how == "explicit":
        units = np.eye(start.size).reshape(start.size, *start.shape)
        matrix = np.stack([forward(unit).ravel() for unit in units], axis=1)  # P
        return (np.linalg.pinv(matrix, rcond=1e-12) @ target.ravel()).reshape(start.shape)
    shape = (start.size, start.size)
    normal = LinearOperator(shape, matvec=lambda v: adjoint(forward(v.reshape(start.shape))).ravel(), dtype=float)
    solution, _ = minres(normal, adjoint(target).ravel(), x0=start.ravel(), rtol=TOLERANCE, maxiter=5 * start.size)
    return solution.reshape(start.shape)


def cp_dense(factors: Sequence[Array]) -> Array:
    letters = "abcdefg"[: len(factors)]
    return np.einsum(",".join(f"{letter}r" for letter in letters) + "->" + letters, *factors, optimize=True)


def tucker2_dense(outs: Array, core: Array, ins: Array) -> Array:
    return np.einsum("ta,ab...,sb->ts...", outs, core, ins, optimize=True)


def cp_als_sigma(kernel: Array, sigma: Array, start: Sequence[Array], sweeps: int, how: Solve = "minres"):
    """CP-ALS-Sigma as printed: T, S, H, W in turn. Returns the factors and the error after every sweep."""
    root = psd_root(sigma)
    target = kernel.reshape(len(kernel), -1) @ root
    factors = [np.array(factor) for factor in start]
    letters = "abcdefg"[: len(factors)]
    errors = [naive_error(kernel, cp_dense(factors), sigma)]
    for _ in range(sweeps):
        for mode in range(len(factors)):

            def forward(u: Array, mode: int = mode) -> Array:
                trial = [*factors[:mode], u, *factors[mode + 1 :]]
                return cp_dense(trial).reshape(len(kernel), -1) @ root

            def adjoint(y: Array, mode: int = mode) -> Array:
                dense = (y @ root.T).reshape(kernel.shape)
                others = [(letters[i] + "r", factor) for i, factor in enumerate(factors) if i != mode]
                equation = ",".join([letters, *(names for names, _ in others)]) + "->" + letters[mode] + "r"
                return np.einsum(equation, dense, *(factor for _, factor in others), optimize=True)

            factors[mode] = solve_block(forward, adjoint, factors[mode], target, how)
        errors.append(naive_error(kernel, cp_dense(factors), sigma))
    return factors, errors


def tucker2_als_sigma(kernel: Array, sigma: Array, start: Sequence[Array], sweeps: int, how: Solve = "minres"):
    """Tucker2-ALS-Sigma as printed: U_T, U_S, G in turn. Returns (U_T, G, U_S) and the error after every sweep."""
    root = psd_root(sigma)
    target = kernel.reshape(len(kernel), -1) @ root
    outs, core, ins = (np.array(factor) for factor in start)
    errors = [naive_error(kernel, tucker2_dense(outs, core, ins), sigma)]

    def weighted(dense: Array) -> Array:
        return dense.reshape(len(kernel), -1) @ root

    def unweighted(y: Array) -> Array:
        return (y @ root.T).reshape(kernel.shape)

    def sweep(outs: Array, core: Array, ins: Array) -> tuple[Array, Array, Array]:
        new_outs = solve_block(
            lambda u: weighted(tucker2_dense(u, core, ins)),
            lambda y: np.einsum("ts...,ab...,sb->ta", unweighted(y), core, ins, optimize=True),
            outs,
            target,
            how,
        )
        new_ins = solve_block(
            lambda u: weighted(tucker2_dense(new_outs, core, u)),
            lambda y: np.einsum("ts...,ta,ab...->sb", unweighted(y), new_outs, core, optimize=True),
            ins,
            target,
            how,
        )
        new_core = solve_block(
            lambda u: weighted(tucker2_dense(new_outs, u, new_ins)),
            lambda y: np.einsum("ts...,ta,sb->ab...", unweighted(y), new_outs, new_ins, optimize=True),
            core,
            target,
            how,
        )
        return new_outs, new_core, new_ins

    for _ in range(sweeps):
        outs, core, ins = sweep(outs, core, ins)
        errors.append(naive_error(kernel, tucker2_dense(outs, core, ins), sigma))
    return (outs, core, ins), errors


#: Decompositions of a kernel (t, s, h, w) as einsum equations over their factors.
SPATIAL_SVD = "rsh,trw->tshw"
TENSOR_TRAIN = "ta,amw,mbh,sb->tshw"


def multilinear_als_sigma(kernel: Array, sigma: Array, equation: str, start: Sequence[Array], sweeps: int, how: Solve):
    """Any decomposition that is linear in each factor, one factor in turn. Returns factors and errors by sweep."""
    inputs, output = equation.split("->")
    letters = inputs.split(",")
    root = psd_root(sigma)
    target = kernel.reshape(len(kernel), -1) @ root
    factors = [np.array(factor) for factor in start]
    errors = [naive_error(kernel, np.einsum(equation, *factors, optimize=True), sigma)]
    for _ in range(sweeps):
        for index in reversed(range(len(factors))):
            others = [factor for other, factor in enumerate(factors) if other != index]
            names = [name for other, name in enumerate(letters) if other != index]

            def forward(u: Array, index: int = index) -> Array:
                trial = [*factors[:index], u, *factors[index + 1 :]]
                return np.einsum(equation, *trial, optimize=True).reshape(len(kernel), -1) @ root

            def adjoint(y: Array, index: int = index, others: list[Array] = others, names: list[str] = names) -> Array:
                dense = (y @ root.T).reshape(kernel.shape)
                return np.einsum(",".join([output, *names]) + "->" + letters[index], dense, *others, optimize=True)

            factors[index] = solve_block(forward, adjoint, factors[index], target, how)
        errors.append(naive_error(kernel, np.einsum(equation, *factors, optimize=True), sigma))
    return factors, errors


def spatial_svd(kernel: Array, rank: int) -> tuple[Array, Array]:
    """Truncated SVD of the kernel unfolded to (s·h, t·w), as (vertical, horizontal)."""
    t, s, h, w = kernel.shape
    left, values, right = np.linalg.svd(kernel.transpose(1, 2, 0, 3).reshape(s * h, t * w), full_matrices=False)
    vertical = left[:, :rank].T.reshape(rank, s, h)
    horizontal = (values[:rank, None] * right[:rank]).reshape(rank, t, w).transpose(1, 0, 2)
    return vertical, horizontal


def tt_svd(kernel: Array, rank_out: int, rank_mid: int, rank_in: int) -> tuple[Array, Array, Array, Array]:
    """TT-SVD in the order input, rows, columns, output, as (out_basis, horizontal, vertical, in_basis)."""
    s, h, w = kernel.shape[1:]
    rest = kernel.transpose(1, 2, 3, 0).reshape(1, -1)
    factors = []
    for size, rank in ((s, rank_in), (h, rank_mid), (w, rank_out)):
        left, values, right = np.linalg.svd(rest.reshape(len(rest) * size, -1), full_matrices=False)
        factors.append(left[:, :rank])
        rest = values[:rank, None] * right[:rank]
    in_basis, vertical, horizontal = factors
    by_row = vertical.reshape(rank_in, h, rank_mid).transpose(2, 0, 1)
    by_column = horizontal.reshape(rank_mid, w, rank_out).transpose(2, 0, 1)
    return rest.T, by_column, by_row, in_basis


def svd_sigma(matrix: Array, sigma: Array, rank: int) -> Array:
    """Truncated SVD of M Σ^½, taken back by the pseudo-inverse of the root; for a regular Σ."""
    root = psd_root(sigma)
    left, values, right = np.linalg.svd(matrix @ root, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank] @ np.linalg.pinv(root)


def hosvd(kernel: Array, rank_out: int, rank_in: int) -> tuple[Array, Array, Array]:
    """Leading singular vectors of the two channel unfoldings, and the core they imply."""
    outs = np.linalg.svd(kernel.reshape(len(kernel), -1), full_matrices=False)[0][:, :rank_out]
    ins = np.linalg.svd(kernel.swapaxes(0, 1).reshape(kernel.shape[1], -1), full_matrices=False)[0][:, :rank_in]
    return outs, np.einsum("ts...,ta,sb->ab...", kernel, outs, ins), ins


def weighted_tucker2_sweep(kernel: Array, importance: Array, outs: Array, core: Array, ins: Array):
    """One exact sweep of weighted ALS, each factor by dense least squares over all entries."""
    h = importance.reshape(-1)

    def solve(build: Callable[[Array], Array], start: Array) -> Array:
        units = np.eye(start.size).reshape(start.size, *start.shape)
        matrix = np.stack([build(unit).ravel() * h for unit in units], axis=1)
        return np.linalg.lstsq(matrix, kernel.ravel() * h, rcond=None)[0].reshape(start.shape)

    outs = solve(lambda u: tucker2_dense(u, core, ins), outs)
    ins = solve(lambda u: tucker2_dense(outs, core, u), ins)
    core = solve(lambda u: tucker2_dense(outs, u, ins), core)
    return outs, core, ins


def weighted_error(kernel: Array, approximation: Array, importance: Array) -> float:
    return float(np.linalg.norm(importance * (kernel - approximation)) / np.linalg.norm(importance * kernel))


def vbmf_rank(matrix: Array) -> int:
    """The analytic empirical-VBMF rank with σ² found by a bounded scalar minimiser."""
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.T
    n, m = matrix.shape
    alpha = n / m
    tau_bar = 2.5129 * math.sqrt(alpha)
    x_bar = (1 + tau_bar) * (1 + alpha / tau_bar)
    gamma = np.linalg.svd(matrix, compute_uv=False)

    def objective(variance: float) -> float:
        x = gamma**2 / (m * variance)
        noise, signal = x[x <= x_bar], x[x > x_bar]
        tau = (signal - (1 + alpha) + np.sqrt((signal - (1 + alpha)) ** 2 - 4 * alpha)) / 2
        return float(
            np.sum(noise - np.log(noise))
            + np.sum(signal - tau + np.log((tau + 1) / signal) + alpha * np.log(tau / alpha + 1))
        )

    upper = float(np.sum(gamma**2)) / (n * m)
    most = min(math.ceil(n / (1 + alpha)) - 1, n - 1)
    lower = max(gamma[most] ** 2 / (m * x_bar), float(np.mean(gamma[most:] ** 2)) / m)
    # Several brackets, because the minimiser is local.
    edges = np.geomspace(lower, upper, 41)
    trials = [
        minimize_scalar(objective, bounds=pair, method="bounded", options={"xatol": 1e-12 * upper})
        for pair in itertools.pairwise(edges)
    ]
    variance = min(trials, key=lambda trial: trial.fun).x
    return int(np.sum(gamma**2 > m * variance * x_bar))


def binomial_bound(samples: int, agreed: int, confidence: float) -> float:
    """The share at which ``agreed`` or more of ``samples`` have the probability 1 − confidence: summed and bisected."""

    def at_least(share: float) -> float:
        return sum(math.comb(samples, k) * share**k * (1 - share) ** (samples - k) for k in range(agreed, samples + 1))

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_least(middle) < 1 - confidence else (low, middle)
    return low if agreed else 0.0


def nearest_rounding(weight: Array, bits: int, *, symmetric: bool = True, group: int | None = None) -> Array:
    """Every weight at the nearest point of the grid that covers its row, or its row and group of inputs."""
    rows = weight.reshape(len(weight), -1)
    rounded = np.empty_like(rows)
    size = group or rows.shape[1]
    for row in range(rows.shape[0]):
        for start in range(0, rows.shape[1], size):
            part = rows[row, start : start + size]
            low, high = min(part.min(), 0.0), max(part.max(), 0.0)
            least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
            scale = max(low / least, high / most) if symmetric else (high - low) / most
            zero = 0 if symmetric else round(-low / scale)
            integers = np.clip(np.round(part / scale) + zero, least, most)
            rounded[row, start : start + size] = scale * (integers - zero)
    return rounded.reshape(weight.shape)


def rounding_with_feedback(weight: Array, sigma: Array, scales: Array, bits: int, order: Sequence[int]) -> Array:
    """Integers, column by column in ``order``: each rounded, and what it loses passed on by the inverse of Σ (OBQ)."""
    left, integers = weight.copy(), np.zeros_like(weight)
    remaining = list(order)
    while remaining:
        column, *others = remaining
        inverse = np.linalg.inv(sigma[np.ix_(remaining, remaining)])
        wanted = left[:, column] / scales
        integers[:, column] = np.clip(np.round(wanted), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        error = left[:, column] - integers[:, column] * scales
        left[:, others] -= np.outer(error, inverse[0, 1:] / inverse[0, 0])
        remaining = others
    return integers


def exhaustive_rounding(weight: Array, sigma: Array, scales: Array, levels: Sequence[int]) -> float:
    """The lowest tr(E Σ Eᵀ) over all integers of ``levels``, with one scale per row."""
    lost = 0.0
    for row, scale in zip(weight, scales, strict=True):
        errors = [row - scale * np.array(choice) for choice in itertools.product(levels, repeat=len(row))]
        lost += min(float(error @ sigma @ error) for error in errors)
    return lost


def naive_front(rows: Sequence[Sequence[float]]) -> list[int]:
    """Places of the rows that no other beats: another is no higher anywhere and lower somewhere, or equal and first."""

    def beats(other: int, row: int) -> bool:
        one, two = rows[other], rows[row]
        no_higher = all(a <= b for a, b in zip(one, two, strict=True))
        return no_higher and (list(one) != list(two) or other < row)

    return [row for row in range(len(rows)) if not any(beats(other, row) for other in range(len(rows)) if other != row)]


def naive_average_precision(
    detections: list[list[tuple[list[float], float, int]]], truths: list[list[tuple[list[float], int]]], iou: float
) -> float | None:
    """Average precision, box by box: (corners, score, class) of each image against (corners, class) of each image."""

    def overlap(one: list[float], other: list[float]) -> float:
        width = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
        height = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
        areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
        union = sum(areas) - width * height
        return width * height / union if union > 0 else 0.0

    classes = sorted({label for image in truths for _, label in image})
    values = []
    for wanted in classes:
        boxes = [(index, box) for index, image in enumerate(truths) for box, label in image if label == wanted]
        ranked = sorted(
            (
                (score, index, box)
                for index, image in enumerate(detections)
                for box, score, label in image
                if label == wanted
            ),
            key=lambda entry: -entry[0],
        )
        free = set(range(len(boxes)))
        points = []  # recall and precision after each detection
        for count, (_, index, box) in enumerate(ranked, start=1):
            candidates = [(overlap(box, boxes[k][1]), -k) for k in free if boxes[k][0] == index]
            if candidates and max(candidates)[0] >= iou:
                free.remove(-max(candidates)[1])
            n_found = len(boxes) - len(free)
            points.append((n_found / len(boxes), n_found / count))
        area, reached = 0.0, 0.0
        for recall in sorted({recall for recall, _ in points if recall > 0}):
            area += (recall - reached) * max(precision for other, precision in points if other >= recall)
            reached = recall
        values.append(area)
    return sum(values) / len(values) if values else None

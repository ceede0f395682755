"""Which images a model got right, in few characters, so that two models can be compared image by image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def pack_hits(right: Sequence[bool]) -> str:
    """One bit an image.

    >>> pack_hits([True, False, True, True]), unpack_hits("4:b0").tolist()
    ('4:b0', [True, False, True, True])
    """
    return f"{len(right)}:{np.packbits(np.array(right, dtype=bool)).tobytes().hex()}"


def unpack_hits(packed: str) -> np.ndarray:
    """What :func:`pack_hits` was given."""
    count, bits = packed.split(":")
    return np.unpackbits(np.frombuffer(bytes.fromhex(bits), dtype=np.uint8))[: int(count)].astype(bool)


def advantage(better: str, worse: str, seed: int = 0) -> tuple[float, float, float]:
    """Points by which one model beats another on the same images, with a paired bootstrap interval of 95 %.

    >>> same = pack_hits([True, False, True, True])
    >>> advantage(same, same)
    (0.0, 0.0, 0.0)
    """
    difference = unpack_hits(better).astype(float) - unpack_hits(worse)
    # A resample of n values out of {−1, 0, 1} is a multinomial draw of how often each comes.
    shares = np.array([np.mean(difference == value) for value in (-1, 0, 1)])
    draws = np.random.default_rng(seed).multinomial(len(difference), shares, size=RESAMPLES)
    means = (draws[:, 2] - draws[:, 0]) / len(difference)
    low, high = np.quantile(means, (0.025, 0.975))
    return 100 * float(difference.mean()), 100 * float(low), 100 * float(high)

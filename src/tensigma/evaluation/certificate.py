"""What agreement on some inputs proves about other inputs like them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensigma.errors import InputError, StoreError


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A lower bound on agreement with the original for unseen inputs.

    It holds if the samples are independent draws of the inputs that the model will see, and if none of them was used to
    make the model: not for calibration, not for a search (:class:`tensigma.Drop`), not for the choice among several
    results. The best of several needs fresh samples for its certificate.

    >>> certificate = Certificate(samples=5000, agreed=4886)
    >>> print(certificate)
    agrees with the original on at least 97.3 % of inputs like these (95 % confidence, exact binomial, n = 5,000)
    """

    samples: int
    agreed: int
    #: The least share of repeated draws of the samples for which the bound holds.
    confidence: float = 0.95
    #: What agreeing means, if it is not the same class for a whole input.
    meaning: str = ""

    def __post_init__(self) -> None:
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (self.samples, self.agreed))
        if not whole or not 0 <= self.agreed <= self.samples or self.samples < 1:
            raise InputError(
                f"got agreement on {self.agreed!r} of {self.samples!r} samples; give whole numbers, "
                "at least one sample and at most as many agreements"
            )
        check_confidence(self.confidence)

    @property
    def bound(self) -> float:
        """The least share of inputs on which the models agree: the exact one-sided bound of Clopper and Pearson.

        It is the share at which as many agreements or more have the probability 1 − confidence.
        """
        from scipy.stats import beta

        if self.agreed == 0:
            return 0.0
        return float(beta.ppf(1 - self.confidence, self.agreed, self.samples - self.agreed + 1))

    def to_json(self) -> dict[str, Any]:
        """Plain data, the bound included."""
        return {
            "samples": self.samples,
            "agreed": self.agreed,
            "confidence": self.confidence,
            "bound": self.bound,
            "meaning": self.meaning,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Certificate:
        """The inverse of :meth:`to_json`; the bound is computed again."""
        try:
            counts = {key: data[key] for key in ("samples", "agreed", "confidence")}
            return cls(**counts, meaning=data.get("meaning", ""))
        except (KeyError, TypeError, InputError) as error:
            raise StoreError(f"the certificate is damaged: {error}") from None

    def __str__(self) -> str:
        # Rounded down, so that the text never claims more than the bound.
        share = int(1000 * self.bound) / 10
        meaning = f" ({self.meaning})" if self.meaning else ""
        return (
            f"agrees with the original{meaning} on at least {share:.1f} % of inputs like these "
            f"({100 * self.confidence:g} % confidence, exact binomial, n = {self.samples:,})"
        )


def check_confidence(confidence: Any) -> None:
    """Raise :class:`InputError` unless ``confidence`` is a number strictly between 0 and 1."""
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 < confidence < 1:
        raise InputError(f"got confidence={confidence!r}; give a number between 0 and 1, such as 0.95")

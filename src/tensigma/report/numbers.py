"""Numbers as people read them."""

from __future__ import annotations

from tensigma.evaluation import Timing


def number(value: int | None) -> str:
    """A whole number with thousands separators; a dash if unknown."""
    return "–" if value is None else f"{value:,}"


def short(value: float | None, unit: str = "") -> str:
    """A large number in three digits.

    >>> short(4738304), short(970440, "B"), short(312), short(None)
    ('4.74 M', '970 kB', '312', '–')
    """
    if value is None:
        return "–"
    scaled = float(value)
    for prefix in ("", "k", "M", "G", "T"):
        if abs(scaled) < 999.5 or prefix == "T":
            break
        scaled /= 1000
    text = f"{scaled:.0f}" if not prefix or scaled >= 99.95 else f"{scaled:.3g}"
    return f"{text} {prefix}{unit}".strip()


def percent(value: float | None, places: int = 2) -> str:
    """A share as a percentage; a dash if unknown."""
    return "–" if value is None else f"{100 * value:.{places}f} %"


def error(value: float | None) -> str:
    """A relative error."""
    return "–" if value is None else f"{value:.4f}"


def milliseconds(latency: Timing | None) -> str:
    """The shortest time of one batch."""
    return "–" if latency is None else f"{1000 * latency.minimum:.2f} ms"


def speed(ratio: float | None) -> str:
    """How many times faster, or slower.

    >>> speed(2.0), speed(0.5), speed(None)
    ('2.00× faster', '2.00× slower', '')
    """
    if not ratio:
        return ""
    return f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"


def times(before: float | None, after: float | None, word: str = "less") -> str:
    """How many times less, or more; empty if either is unknown.

    >>> times(10, 4), times(97, 100), times(97, 100, "smaller")
    ('2.50× less', '1.03× more', '1.03× larger')
    """
    if not before or not after:
        return ""
    if after > before:
        return f"{after / before:.2f}× {'larger' if word == 'smaller' else 'more'}"
    return f"{before / after:.2f}× {word}"

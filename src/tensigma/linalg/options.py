"""Checks shared by the options of iterative solvers."""

from __future__ import annotations

from typing import Any

from tensigma.errors import InputError


def check_options(options: Any, *, solvers: tuple[str, ...], inits: tuple[str, ...], factors: type) -> None:
    """Raise :class:`InputError` for an unknown solver or start, or an invalid count or tolerance."""
    if options.solver not in solvers:
        raise InputError(f"solver {options.solver!r} is unknown; choose one of {', '.join(map(repr, solvers))}")
    if options.init not in inits if isinstance(options.init, str) else not isinstance(options.init, factors):
        accepted = ", ".join(map(repr, inits))
        raise InputError(f"init {options.init!r} is unknown; choose {accepted} or a {factors.__name__} to start from")
    if isinstance(options.max_sweeps, bool) or not isinstance(options.max_sweeps, int) or options.max_sweeps < 0:
        raise InputError(f"max_sweeps is a whole number, 0 or more, got {options.max_sweeps!r}")
    if not options.tol >= 0:
        raise InputError(f"tol is 0 or more, got {options.tol!r}")

"""All errors and warnings of Tensigma, in one hierarchy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self


class TensigmaError(Exception):
    """Root of all errors raised by Tensigma.

    A message that names arguments of the called function puts them in braces and lists them in ``parameters``. The code
    that shows the error decides how to spell them: ``stats=`` in Python, ``--stats`` on the command line. A parameter
    may include the value to pass.

    >>> error = TensigmaError("give {stats}, or pass {check}", parameters=("stats", "check=False"))
    >>> str(error), error.worded(lambda parameter: f"--{parameter}")
    ('give stats=, or pass check=False', 'give --stats, or pass --check')
    """

    def __init__(self, message: str = "", *, parameters: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message, self.parameters = message, tuple(parameters)

    def worded(self, spelt: Callable[[str], str]) -> str:
        """The message with each parameter name as ``spelt`` writes it."""
        text = self.message
        for parameter in self.parameters:
            name = parameter.partition("=")[0]
            text = text.replace(f"{{{name}}}", spelt(name))
        return text

    def prefixed(self, prefix: str) -> Self:
        """The same error with ``prefix`` in front, such as the name of the layer it is about."""
        return type(self)(prefix + self.message, parameters=self.parameters)

    def __str__(self) -> str:
        values = {parameter.partition("=")[0]: parameter for parameter in self.parameters}
        return self.worded(lambda name: values[name] if "=" in values[name] else f"{name}=")


class InputError(TensigmaError, ValueError):
    """An argument has a shape, value or type that cannot be used."""


class RankError(InputError):
    """A rank is out of the range that the weight allows."""


class NotPSDError(InputError):
    """A gram matrix is not symmetric positive semi-definite."""


class UnsupportedLayer(TensigmaError):
    """The requested format cannot represent a layer."""


class StoreError(TensigmaError):
    """A file or folder on disk is missing, incomplete, or belongs to something else."""


class ExportError(TensigmaError):
    """A model cannot be turned into another form, or the other form does not compute the same."""


class MissingExtra(TensigmaError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""


class NumericalWarning(UserWarning):
    """A result is correct but needed more regularisation than usual."""


class PlanWarning(UserWarning):
    """A plan does what was asked for, but has a side effect that may not be wanted."""


class CalibrationWarning(UserWarning):
    """Statistics were gathered, but something about them should be checked."""


class AnswersWarning(UserWarning):
    """What a model answers was assumed and nothing but its last layer says so, or there is nothing to compare."""

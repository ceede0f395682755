"""Everything Tensigma raises or warns about, in one tree."""


class TensigmaError(Exception):
    """Root of all errors raised by Tensigma."""


class InputError(TensigmaError, ValueError):
    """An argument has a shape, value or type that cannot be used."""


class RankError(InputError):
    """A rank is out of the range that the weight allows."""


class NotPSDError(InputError):
    """A gram matrix is not symmetric positive semi-definite."""


class UnsupportedLayer(TensigmaError):
    """A layer that the requested format cannot carry."""


class StoreError(TensigmaError):
    """A file or folder on disk is missing, incomplete, or belongs to something else."""


class ExportError(TensigmaError):
    """A model cannot be turned into another form, or the other form does not compute the same."""


class MissingExtra(TensigmaError, ImportError):
    """An optional dependency is needed; the message names the extra that brings it."""


class NumericalWarning(UserWarning):
    """A result is right but was reached with more regularisation than usual."""


class CalibrationWarning(UserWarning):
    """Statistics were gathered, but something about them deserves a look."""

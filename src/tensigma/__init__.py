"""Tensigma shrinks trained CNNs by tensor decomposition that knows the data."""

from importlib.metadata import version

from tensigma import linalg

__all__ = ["__version__", "linalg"]
__version__ = version("tensigma")

"""The old place of :func:`check`, for pipeline/recognise.py; to be deleted together with it."""

from tensigma.layers.format import check as check

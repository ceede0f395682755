"""Layers as geometry, factors as modules, and surgery by name."""

from tensigma.layers.geometry import TARGETS, Geometry

__all__ = ["TARGETS", "Geometry"]

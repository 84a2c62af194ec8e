"""Presses: what compresses a cache while a model reads a context."""

from ..lazy import loader

_HOME = {
    "ContourKVPress": "contour",
    "enforce": "enforced",
    "Budget": "budget",
}

__all__ = sorted(_HOME)

__getattr__ = loader(__name__, _HOME)

"""Rules that choose a kept set of one row."""

from ..lazy import loader

_HOME = {"max_mass": "mass", "balance": "swap"}
__all__ = list(_HOME)

__getattr__ = loader(__name__, _HOME)

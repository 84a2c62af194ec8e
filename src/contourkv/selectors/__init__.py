"""Rules that choose a kept set of one row."""

from importlib import import_module

_HOME = {"max_mass": "mass", "balance": "swap"}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'contourkv.selectors' has no attribute {name!r}")
    return getattr(import_module(f"contourkv.selectors.{_HOME[name]}"), name)

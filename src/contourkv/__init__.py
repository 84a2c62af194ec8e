"""contourkv: exact best kept sets of attention rows, from model weights to figures.

Names load on first use, so that `import contourkv` costs next to nothing.
"""

from importlib import import_module

from .provenance import VERSION as __version__

_HOME = {
    "Instance": "operator",
    "forced_error": "operator",
    "dropped_mass": "operator",
    "phi": "operator",
    "spread": "operator",
    "mass_bound": "operator",
    "max_mass": "selectors",
    "balance": "selectors",
    "best_in_pool": "enumeration",
    "certify": "enumeration",
    "ContourKVError": "errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'contourkv' has no attribute {name!r}")
    value = getattr(import_module(f"contourkv.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

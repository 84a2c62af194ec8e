"""contourkv: exact best kept sets of attention rows, and a KV cache that spends its bytes by their masses.

Names load on first use, so that `import contourkv` costs next to nothing.
"""

from .lazy import loader
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
    "best_of_all": "enumeration",
    "certify": "enumeration",
    "RaggedCache": "ragged",
    "ContourKVPress": "press",
    "enforce": "press",
    "held_bytes": "held",
    "ContourKVError": "errors",
}

__all__ = ["__version__", *_HOME]

__getattr__ = loader(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted(__all__)

"""Rules that choose a kept set of one row."""

from ..lazy import loader

_HOME = {
    "max_mass": "mass",
    "balance": "swap",
    "geometric": "hull",
    "snapkv": "deployed",
    "h2o": "deployed",
    "quest": "deployed",
    "streaming_llm": "deployed",
    "tova": "deployed",
    "observation_window": "deployed",
    "page_size": "deployed",
}
__all__ = list(_HOME)

__getattr__ = loader(__name__, _HOME)

"""A KV cache that holds a different number of keys in every KV head, and attention over it."""

from ..lazy import loader

_HOME = {
    "RaggedCache": "cache",
    "RaggedLayer": "layer",
    "Steps": "steps",
    "attend": "attention",
}

__all__ = sorted(_HOME)

__getattr__ = loader(__name__, _HOME)

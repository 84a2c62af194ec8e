"""The texts that models read: windows of real text, cut to an exact number of tokens, each with its origin."""

from ..lazy import loader
from .storage import Context, read_contexts, write_contexts

_HOME = {"build_contexts": "windows"}

__all__ = ["Context", "build_contexts", "read_contexts", "write_contexts"]

__getattr__ = loader(__name__, _HOME)

"""Attention rows out of a model's forward pass, and the shards that hold them.

`LayerRows`, `Shard` and `write_shard` need numpy alone; `capture_rows` and `capture_contexts` load torch and
transformers when they are first asked for.
"""

from ..lazy import loader
from .rows import LayerRows, Row
from .shard import Shard, write_shard

_HOME = {"capture_rows": "recording", "capture_contexts": "job"}

__all__ = ["LayerRows", "Row", "Shard", "capture_contexts", "capture_rows", "write_shard"]

__getattr__ = loader(__name__, _HOME)

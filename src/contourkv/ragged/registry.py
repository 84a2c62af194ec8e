"""How attention finds a ragged layer: through the key that the layer's `update` hands to the model.

transformers lets a model attend by calling one function of a registry with the query, key and value. The key that a
ragged layer returns is a `RaggedKey`: it knows its layer. `attach` makes every function of the registry recognise
it; on any other key they do what they did. No model is touched, so none can be left changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ContourKVError
from ..models.eager import eager_attention

if TYPE_CHECKING:
    from .layer import RaggedLayer

_AWARE = "__contourkv_ragged__"
# What may be asked of a key without reading its numbers: integrations look at shapes before they attend.
_HARMLESS = {"__get__", "size", "dim", "numel", "stride", "is_contiguous", "data_ptr", "__repr__", "__len__"}


class RaggedKey(torch.Tensor):
    """The new keys of one forward pass, (B, H, Q, d), and the layer that holds them and all earlier ones.

    An attention function that does not know ragged layers would take these for all the keys there are; hence any
    arithmetic on them raises ContourKVError.

    Attributes
    ----------
    layer : RaggedLayer
    plain : the same keys as an ordinary tensor
    """

    layer: RaggedLayer
    plain: torch.Tensor

    @classmethod
    def of(cls, key: torch.Tensor, layer: RaggedLayer) -> RaggedKey:
        marked = key.as_subclass(cls)
        marked.layer, marked.plain = layer, key
        return marked

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> object:
        if getattr(func, "__name__", "") in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ContourKVError(
            "RaggedCache: this model reads its keys outside transformers' attention registry, or through an attention "
            f"function registered after the cache was made (it called {getattr(func, '__name__', func)}); make a new "
            "RaggedCache, or use an architecture whose attention goes through the registry"
        )


def attach() -> None:
    """Make every attention function that is registered now recognise ragged keys; harmless to repeat."""
    for name in [*ALL_ATTENTION_FUNCTIONS, "eager"]:
        attend = ALL_ATTENTION_FUNCTIONS.get(name, _eager)
        if name.startswith("paged|") or hasattr(attend, _AWARE):
            continue
        if name in ALL_ATTENTION_FUNCTIONS._local_mapping:
            ALL_ATTENTION_FUNCTIONS[name] = _aware(attend)
        else:  # a local entry would hide what is registered under this name later
            ALL_ATTENTION_FUNCTIONS.register(name, _aware(attend))


def _aware(attend: Callable) -> Callable:
    @functools.wraps(attend)
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(key, RaggedKey):
            return key.layer.attention(attend, module, query, key.plain, value, attention_mask, args, kwargs)
        return attend(module, query, key, value, attention_mask, *args, **kwargs)

    setattr(attention, _AWARE, True)
    return attention


def _eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # dropout by name: registered functions have it sixth, an architecture's own eager function has scaling there
    return eager_attention(module)(module, query, key, value, attention_mask, dropout=dropout, **kwargs)

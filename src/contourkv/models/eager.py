"""An architecture's own eager attention function, which transformers keeps beside the attention module's class."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from ..errors import InvalidInput


def eager_attention(module: torch.nn.Module) -> Callable:
    """The function that `module` itself calls when its attention implementation is "eager".

    Raises
    ------
    InvalidInput
        No module that defines a class of `module` has an `eager_attention_forward`.
    """
    for kind in type(module).__mro__:
        attend = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if attend is not None:
            return attend
    raise InvalidInput(
        f"{type(module).__name__}: its architecture keeps no eager attention function of its own; "
        'load the model with attn_implementation="sdpa"'
    )

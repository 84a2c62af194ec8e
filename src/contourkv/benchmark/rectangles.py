"""Rectangles of several lengths, asked in one forward pass.

A cache of a batch holds one length. Kept sets of different budgets have different lengths, and a pass for each reads
the model's weights anew. Here each length is a pair of tensors of its own, and the model's own attention function is
called for each, on the sequences that hold it; everything between two attentions is one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ..ragged.cache import layer_windows
from ..ragged.layer import refuse_other_model
from ..ragged.registry import RaggedKey, attach


@dataclass
class Rectangle:
    """Sequences of one length in one layer.

    Attributes
    ----------
    rows : list of k int
        Which sequences of the batch.
    keys, values : tensor (k, H, n, d), (k, H, n, dv)
        In the order in which they were kept, then what was appended.
    kept : int
        Entries before anything was appended.
    """

    rows: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    kept: int

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add the new keys and values (K, H, Q, d) of its sequences."""
        self.keys = torch.cat([self.keys, keys[self.rows]], dim=2)
        self.values = torch.cat([self.values, values[self.rows]], dim=2)

    def forget(self) -> None:
        """Drop what was appended."""
        # Copied: a view would hold what was appended.
        self.keys, self.values = (part[:, :, : self.kept].clone() for part in (self.keys, self.values))

    def mask(self, tokens: int, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """What the newest `tokens` see, additive (1, 1, tokens, n); None if everything.

        By place in the cache, as transformers makes it for a cache that holds n entries.
        """
        length = self.keys.shape[2]
        if tokens == 1 and (window is None or length <= window):
            return None
        key = torch.arange(length, device=self.keys.device)
        query = key[-tokens:, None]
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        bias = torch.zeros(tokens, length, dtype=dtype, device=key.device)
        return bias.masked_fill_(hidden, torch.finfo(dtype).min)[None, None]


class RectangleCache(Cache):
    """A transformers cache of K sequences whose lengths differ, none of which is padded.

    Parameters
    ----------
    config : a transformers config
        Of the model, `model.config`.
    kept : for each layer, for each sequence its keys and values (H, n, d), (H, n, dv)
        Copied.

    Raises
    ------
    InvalidInput
        An architecture that `contourkv.RaggedCache` cannot serve either.
    """

    def __init__(self, config: PreTrainedConfig, kept: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> None:
        windows, model_type = layer_windows(config), config.get_text_config(decoder=True).model_type
        layers = [
            RectangleLayer(several, window, model_type, len(windows))
            for several, window in zip(kept, windows, strict=True)
        ]
        super().__init__(layers=layers)
        attach()

    def entries(self) -> list[int]:
        """Entries that each sequence holds over all layers and KV heads."""
        return self._sums(lambda rectangle: rectangle.keys[0, ..., 0].numel())

    def payloads(self) -> list[int]:
        """Bytes of keys and values that each sequence holds."""
        return self._sums(lambda held: sum(part[0].numel() * part.element_size() for part in (held.keys, held.values)))

    def forget(self) -> None:
        """Drop what was appended."""
        for layer in self.layers:
            for rectangle in layer.rectangles:
                rectangle.forget()

    def _sums(self, one: Callable[[Rectangle], int]) -> list[int]:
        found: dict[int, int] = {}
        for layer in self.layers:
            for rectangle in layer.rectangles:
                for row in rectangle.rows:
                    found[row] = found.get(row, 0) + one(rectangle)
        return [found[row] for row in sorted(found)]


class RectangleLayer(CacheLayerMixin):
    """One layer of a `RectangleCache`: a `Rectangle` for each length."""

    is_compileable = False
    is_croppable = False
    is_sliding = False  # what is kept is one run of entries, whatever their positions

    def __init__(
        self, kept: Sequence[tuple[torch.Tensor, torch.Tensor]], window: int | None, model_type: str, layers: int
    ) -> None:
        super().__init__()
        self.window, self.model_type, self.layers = window, model_type, layers
        self.is_initialized = True
        lengths = [keys.shape[1] for keys, _ in kept]
        self.rectangles = []
        for length in sorted(set(lengths)):
            rows = [row for row, n in enumerate(lengths) if n == length]
            keys, values = (torch.stack([kept[row][part] for row in rows]) for part in (0, 1))
            self.rectangles.append(Rectangle(rows, keys, values, length))

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: it is made of what it holds."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys (K, H, Q, d) and values; return what attention needs to find this layer."""
        for rectangle in self.rectangles:
            rectangle.append(key_states.detach(), value_states.detach())
        return RaggedKey.of(key_states, self), value_states

    def get_seq_length(self) -> int:
        return max(rectangle.keys.shape[2] for rectangle in self.rectangles)

    def get_mask_sizes(self, query: torch.Tensor | int) -> tuple[int, int]:
        """(keys, offset) of the mask that the model makes: of the new keys alone, and it is not used."""
        return (query if isinstance(query, int) else query.shape[0]), self.get_seq_length()

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def held_parts(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(kind, tensor, bytes in use) of everything that the layer owns."""
        for rectangle in self.rectangles:
            for tensor in (rectangle.keys, rectangle.values):
                yield "payload", tensor, tensor.numel() * tensor.element_size()

    def attention(
        self,
        own: Callable,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        args: tuple,
        kwargs: dict,
    ) -> tuple[torch.Tensor, None]:
        """Attention of new queries (K, heads, Q, d), by the model's own function `own` for each rectangle."""
        refuse_other_model("RectangleCache", self.model_type, self.layers, module.config)
        output = None
        for each in self.rectangles:
            seen = each.mask(query.shape[2], self.window, query.dtype)
            found, _ = own(module, query[each.rows], each.keys, each.values, seen, *args, **kwargs)
            if output is None:
                output = found.new_empty(query.shape[0], *found.shape[1:])
            output[each.rows] = found
        return output, None

"""A context that was read once and can be scored by every method afterwards.

The model reads the context with its own attention; of each layer the attention module's input, its queries, keys and
values are kept. So a score is computed when it is asked for, from what the model itself computed, and one prefill
serves every method and budget. A question read behind the context extends it, which is what a method sees whose
ranking knows the question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..errors import InvalidInput
from ..models.eager import eager_attention
from ..press.contour import Seen, entry_bytes
from ..press.observation import WindowMasses, value_distances, window_masses
from ..press.scores import attention_modules
from ..ragged.cache import RaggedCache
from ..ragged.layer import RaggedLayer


@dataclass
class LayerReading:
    """What one layer computed of a context of N tokens.

    Attributes
    ----------
    module : its attention module
    hidden : tensor (1, N, hidden), the module's input
    query : tensor (1, heads, N, d), rotary embedding applied
    keys, values : tensor (1, H, N, d), (1, H, N, dv)
        All of them, those that a sliding window has passed included.
    embeddings : cos and sin (1, N, d) of the rotary embedding
    how : scaling, window, softcap and sinks of its rows
    """

    module: torch.nn.Module
    hidden: torch.Tensor
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    embeddings: tuple[torch.Tensor, torch.Tensor] | None
    how: dict[str, object]
    _observed: dict[int, tuple[WindowMasses, torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def window(self) -> int | None:
        """Positions that a row of a sliding layer sees, its own included."""
        return self.how["window"]

    @property
    def first(self) -> int:
        """First position that the next token can still see."""
        return 0 if self.window is None else max(self.keys.shape[2] - self.window + 1, 0)

    @property
    def given(self) -> dict[str, object]:
        """Keyword arguments of the module's forward pass, as kvpress's scores read them."""
        return {} if self.embeddings is None else {"position_embeddings": self.embeddings}

    def attentions(self) -> torch.Tensor:
        """The layer's weights (1, heads, N, N), by its architecture's own eager attention."""
        tokens = self.keys.shape[2]
        at = torch.arange(tokens, device=self.keys.device)
        hidden = at > at[:, None]
        if self.window is not None:
            hidden |= at <= at[:, None] - self.window
        mask = torch.zeros(1, 1, tokens, tokens, dtype=self.keys.dtype, device=self.keys.device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        more = {} if self.how["softcap"] is None else {"softcap": self.how["softcap"]}
        attend = eager_attention(self.module)
        return attend(
            self.module, self.query, self.keys, self.values, mask, scaling=self.how["scaling"], dropout=0.0, **more
        )[1]

    def seen(self, rows: int, scores: torch.Tensor | None = None) -> Seen:
        """What ContourKV sees of the layer; `scores` (1, H, N) rank its keys, by default the observed mass."""
        if rows not in self._observed:
            masses = window_masses(self.query[:, :, -rows:], self.keys, rows=rows, **self.how)
            self._observed[rows] = masses, value_distances(masses.mean, self.values)
        masses, distances = self._observed[rows]
        first = self.first
        scores = masses.mean if scores is None else scores
        return Seen(
            scores=scores[:, :, first:],
            mean=masses.mean[:, :, first:],
            peak=masses.peak[:, :, first:],
            distances=distances[:, :, first:],
            positions=torch.arange(first, self.keys.shape[2], device=self.keys.device),
            present=None,
            cost=entry_bytes(self.keys, self.values),
            window=self.window,
        )


class Reading:
    """A context that `model` has read, and what each layer computed of it; see `LayerReading`.

    Attributes
    ----------
    model : the model
    ids : int64 tensor (1, N)
    layers : list of LayerReading
    """

    def __init__(
        self, model: PreTrainedModel, ids: torch.Tensor, layers: list[LayerReading], cache: RaggedCache
    ) -> None:
        self.model, self.ids, self.layers, self._cache = model, ids, layers, cache

    @classmethod
    def of(cls, model: PreTrainedModel, ids: torch.Tensor) -> Reading:
        """Read `ids` (1, N), N >= 1."""
        if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
            raise InvalidInput(f"ids: expected one context of at least one token, (1, N), got {tuple(ids.shape)}")
        return _read(model, ids, RaggedCache(model.config), None)

    def extended(self, ids: torch.Tensor) -> Reading:
        """The context with `ids` (1, M) behind it; this reading stays as it is."""
        return _read(self.model, ids, self._cache.copy(), self)

    @property
    def tokens(self) -> int:
        """N, tokens of the context."""
        return self.ids.shape[1]

    def full_cache(self) -> DynamicCache:
        """The full cache as transformers itself holds it: sliding layers hold their window."""
        cache = DynamicCache(config=self.model.config)
        for index, layer in enumerate(self.layers):
            cache.update(layer.keys, layer.values, index)  # which copies them
        return cache

    def plain_cache(self) -> DynamicCache:
        """Every key of every layer over this reading's own storage, as kvpress's scores ask for it."""
        cache = DynamicCache()
        for index, layer in enumerate(self.layers):
            cache.update(layer.keys[:, :, :0], layer.values[:, :, :0], index)
            cache.layers[index].keys, cache.layers[index].values = layer.keys, layer.values
        return cache


class _Recorder:
    """Watches the layers of one forward pass; a `contourkv.ragged.cache.Watcher`."""

    def __init__(self, before: Reading | None) -> None:
        self.before = before
        self.inputs: dict[int, tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]] = {}
        self.layers: list[LayerReading] = []

    def input(self, module: torch.nn.Module, args: tuple, kwargs: Mapping[str, object]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self.inputs[module.layer_idx] = (hidden, kwargs.get("position_embeddings"))

    def first_block(
        self,
        layer: RaggedLayer,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        weights: torch.Tensor | None,
        visible: torch.Tensor | None,
        kwargs: Mapping[str, object],
    ) -> None:
        hidden, embeddings = self.inputs.pop(layer.index)
        how = layer.how(query, kwargs)
        self.layers.append(LayerReading(module, hidden, query, key, value, embeddings, how))

    def later_block(
        self,
        layer: RaggedLayer,
        module: torch.nn.Module,
        query: torch.Tensor,
        visible: torch.Tensor | None,
        kwargs: Mapping[str, object],
    ) -> None:
        hidden, embeddings = self.inputs.pop(layer.index)
        before, new = self.before.layers[layer.index], slice(layer.tail_length - query.shape[2], layer.tail_length)
        if embeddings is not None:
            embeddings = tuple(
                torch.cat([old, late], dim=1) for old, late in zip(before.embeddings, embeddings, strict=True)
            )
        self.layers.append(
            LayerReading(
                module,
                torch.cat([before.hidden, hidden], dim=1),
                torch.cat([before.query, query], dim=2),
                torch.cat([before.keys, layer.tail_keys[:, :, new]], dim=2),
                torch.cat([before.values, layer.tail_values[:, :, new]], dim=2),
                embeddings,
                before.how,
            )
        )


def _read(model: PreTrainedModel, ids: torch.Tensor, cache: RaggedCache, before: Reading | None) -> Reading:
    recorder = _Recorder(before)
    with torch.no_grad(), _inputs_noted(model, recorder.input):
        for layer in cache.layers:
            layer.watcher = recorder
        try:
            model(ids, past_key_values=cache, logits_to_keep=1)
        finally:
            for layer in cache.layers:
                layer.watcher = None
    whole = ids if before is None else torch.cat([before.ids, ids], dim=1)
    return Reading(model, whole, recorder.layers, cache)


@contextmanager
def _inputs_noted(model: PreTrainedModel, note: Callable) -> Iterator[None]:
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in attention_modules(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

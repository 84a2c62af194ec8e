"""The caches that kept sets leave, one class a storage; several kept sets of one context share a batch.

A batch holds K sequences that read the same context and differ in what is kept of it, so one forward pass asks all of
them. Bytes are read from the storages of the cache that answers, before anything is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.cache_utils import Cache, DynamicCache

from ..errors import InvariantBroken
from ..held import Held, held_bytes
from ..press.budget import Budget
from ..press.contour import POSITION_BYTES, TABLE_BYTES
from ..press.scores import attention_modules, untouched
from ..ragged.cache import RaggedCache
from .choosing import Chosen
from .quest import QuestCache
from .reading import Reading
from .rectangles import RectangleCache


class Storage:
    """K kept sets of one context, held.

    Attributes
    ----------
    cache : what the model is called with
    """

    def __init__(self, reading: Reading, chosen: Sequence[Chosen]) -> None:
        self.reading, self.count = reading, len(chosen)
        self.cache = self._fill(chosen)

    def _fill(self, chosen: Sequence[Chosen]) -> Cache:
        raise NotImplementedError(f"{type(self).__name__} does not say how it holds a kept set")

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The model may be called with the cache inside; afterwards nothing is left on it."""
        yield

    def held(self) -> list[Held]:
        """Bytes of each sequence, which add up to what the cache's storages hold."""
        total = held_bytes(self.cache, self.reading.model)
        shares = self._shares(total)
        if [sum(getattr(share, part) for share in shares) for part in ("payload", "slack", "metadata")] != [
            total.payload, total.slack, total.metadata,
        ]:  # fmt: skip
            raise InvariantBroken(
                f"{type(self).__name__}: the sequences are booked with {sum(share.total for share in shares):,} bytes, "
                f"the cache holds {total.total:,}"
            )
        self._first_held = shares
        return shares

    def _shares(self, total: Held) -> list[Held]:
        return [Held(*(part // self.count for part in (total.payload, total.slack, total.metadata)))] * self.count

    def entries(self) -> list[int]:
        """Entries that each sequence holds over all layers and KV heads."""
        return [sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in self.cache.layers)] * self.count

    def read_bytes(self) -> list[int]:
        """Bytes of the context's keys and values that a decode step attends to: all that are held, unless said."""
        return [share.payload for share in self._first_held]

    def forget(self) -> None:
        """Drop what was appended to the context."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it forgets")


class FullStorage(Storage):
    """The full cache as transformers holds it; one sequence."""

    def _fill(self, chosen: Sequence[Chosen]) -> Cache:
        return self.reading.full_cache()

    def forget(self) -> None:
        self.cache = self._fill(())  # a sliding layer has shed what it would have to get back


class RectangularStorage(Storage):
    """What kvpress leaves of the same count in every head of a layer: smaller rectangles, in its order of keys."""

    def _fill(self, chosen: Sequence[Chosen]) -> Cache:
        layers = []
        for index, layer in enumerate(self.reading.layers):
            heads = torch.arange(layer.keys.shape[1], device=layer.keys.device)[:, None]
            kept = [(heads, each.order[index]) for each in chosen]  # (H, 1), (H, n)
            layers.append([(layer.keys[0][at], layer.values[0][at]) for at in kept])
        return RectangleCache(self.reading.model.config, layers)

    def entries(self) -> list[int]:
        return self.cache.entries()

    def _shares(self, total: Held) -> list[Held]:
        return [Held(payload) for payload in self.cache.payloads()]

    def forget(self) -> None:
        self.cache.forget()


class MaskedStorage(Storage):
    """What kvpress leaves of a head-wise selection: the full cache, and index tensors of what is dropped."""

    def _fill(self, chosen: Sequence[Chosen]) -> Cache:
        cache = DynamicCache()
        self.masks = []
        for index, layer in enumerate(self.reading.layers):
            # Copies: at decode kvpress writes fake keys over the dropped ones.
            cache.update(*(part.repeat(self.count, 1, 1, 1) for part in (layer.keys, layer.values)), index)
            keep = torch.stack([each.keep[index] for each in chosen])
            self.masks.append((~keep).nonzero(as_tuple=True))
        self.dropped = [sum(int((~keep).sum()) for keep in each.keep) for each in chosen]
        return cache

    def entries(self) -> list[int]:
        held = super().entries()
        return [total - dropped for total, dropped in zip(held, self.dropped, strict=True)]

    @contextmanager
    def ready(self) -> Iterator[None]:
        with untouched(self.reading.model):
            for module, mask in zip(attention_modules(self.reading.model), self.masks, strict=True):
                module.masked_key_indices = mask
            yield

    def _shares(self, total: Held) -> list[Held]:
        payload, slack = total.payload // self.count, total.slack // self.count
        return [Held(payload, slack, 3 * 8 * dropped) for dropped in self.dropped]

    def forget(self) -> None:
        for layer in self.cache.layers:
            layer.keys, layer.values = (part[:, :, : self.reading.tokens] for part in (layer.keys, layer.values))


class RaggedStorage(Storage):
    """A RaggedCache: what is not kept is not there."""

    def _fill(self, chosen: Sequence[Chosen]) -> Cache:
        cache = RaggedCache(self.reading.model.config)
        for index, layer in enumerate(self.reading.layers):
            keep = torch.stack([each.keep[index] for each in chosen])
            keep[:, :, : layer.first] = False
            cache.take(index, layer.keys, layer.values, keep, self.reading.tokens)
        cache.mark()
        return cache

    def entries(self) -> list[int]:
        return sum(layer.sum(dim=1) for layer in self.cache.entries()).tolist()

    def _shares(self, total: Held) -> list[Held]:
        payload, metadata = torch.zeros(self.count, dtype=torch.long), torch.zeros(self.count, dtype=torch.long)
        for layer, entries in zip(self.reading.layers, self.cache.entries(), strict=True):
            size = layer.keys.element_size() * (layer.keys.shape[-1] + layer.values.shape[-1])
            payload += entries.sum(dim=1).cpu() * size
            metadata += entries.sum(dim=1).cpu() * POSITION_BYTES + TABLE_BYTES * entries.shape[1]
        return [Held(*parts) for parts in zip(payload.tolist(), [0] * self.count, metadata.tolist(), strict=True)]

    def forget(self) -> None:
        self.cache.rollback()


class PagedStorage(Storage):
    """Quest: the full cache and the bounds of its pages, read at several budgets; frees nothing.

    The sequences share one context, and each is booked with all of it, as it would hold it alone.
    """

    def __init__(self, reading: Reading, budgets: Sequence[float]) -> None:
        self.budgets = list(budgets)
        super().__init__(reading, self.budgets)

    def _fill(self, chosen: Sequence[float]) -> Cache:
        reading = self.reading
        tokens = [tokens_read(budget, reading.tokens) for budget in self.budgets]
        keys, values = [layer.keys for layer in reading.layers], [layer.values for layer in reading.layers]
        return QuestCache.of(reading.model.config, keys, values, tokens)

    def held(self) -> list[Held]:
        self._first_held = [held_bytes(self.cache)] * self.count
        return self._first_held

    def read_bytes(self) -> list[int]:
        return [round(read) for read in self.cache.read_bytes()]

    def forget(self) -> None:
        self.cache.rollback()


def tokens_read(budget: float, tokens: int) -> int:
    """Of a context of so many tokens, those that a budget lets Quest read in a head."""
    return max(1, int(Budget.of(budget).amount * tokens))

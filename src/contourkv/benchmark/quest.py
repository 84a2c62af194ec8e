r"""Quest (arXiv 2406.10774): every key is held, and each query token reads the pages that may matter to it.

The keys of a context lie in pages of 16 consecutive positions. Of each page and KV head the cache also holds the least
and the largest number in each channel of its keys, as they are cached: rotated. For a query q the page's score is

    U = sum_i max(q_i min_i, q_i max_i) >= q . k for every key k of the page,

and q attends exactly to the pages of largest U, softmax over their tokens alone; the other pages are not read.
The first two layers read everything, as in the publication. So nothing is freed, and the bounds come on top.

Where this file decides what the publication leaves open:

- A cache is *sealed* when the context is in it. Pages are of the context alone; what follows, question and answer, is
  read by every later token beyond the budget. (Its kernels always read the newest page, within the budget.)
- Every token after the context selects for itself. (Its code reads all pages for tokens that are fed at once.)
- With grouped queries each query head selects its own pages, as its code does, which repeats keys and values for each
  query head. A KV head then reads the pages that any of its query heads selected; `QuestCache.read_bytes` counts these.
- A budget of n tokens buys n // 16 pages, at least one, and all of them if n covers the context. (Its code: at least
  three.)
- Of equal scores the earlier page is taken.
- A sliding layer is not Quest's: it reads all of its window, and holds no bounds.

Attention runs in PyTorch operations. Where the rows of a head need more than a quarter of the pages it passes over all
of them under a mask, so its speed is not that of a kernel which skips them; what Quest saves is in
`QuestCache.read_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import InvalidInput
from ..operator import whole_number
from ..ragged.cache import layer_windows
from ..ragged.layer import DTYPES, refuse_other_model
from ..ragged.registry import RaggedKey, attach

PAGE = 16
DENSE_LAYERS = 2
SCORES = 2**23
"""Scores held at a time; query rows go in blocks of so many, one row of every head at least."""
GATHERED = 0.25
"""Largest share of a head's pages that is gathered; copying more costs more than passing over the rest of them."""


def page_bounds(keys: torch.Tensor) -> torch.Tensor:
    """Least and largest number in each channel of each page.

    Parameters
    ----------
    keys : tensor (B, H, N, d), N > 0
        In the order of their positions; the last page may be shorter than 16.

    Returns
    -------
    tensor (B, H, ceil(N / 16), 2, d)
        In the keys' dtype, so exact: [..., 0, :] the least, [..., 1, :] the largest.
    """
    full = keys.shape[2] // PAGE * PAGE
    pages = [keys[:, :, :full].unflatten(2, (-1, PAGE))] if full else []
    if full < keys.shape[2]:
        pages.append(keys[:, :, None, full:])
    return torch.cat([torch.stack([page.amin(3), page.amax(3)], dim=3) for page in pages], dim=2)


def page_scores(query: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Upper bound U of q . k over each page, see the head of this file.

    Parameters
    ----------
    query : tensor (B, Hq, Q, d)
        Query head h belongs to KV head h // (Hq // H).
    bounds : tensor (1 or B, H, P, 2, d)
        As `page_bounds` gives them; one context may serve all sequences.

    Returns
    -------
    tensor (B, Hq, Q, P)
        In float32, of float64 in float64.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    rows = query.to(precise).unflatten(1, (bounds.shape[1], -1)).flatten(2, 3)
    # max(q min, q max) is q max where q > 0 and q min elsewhere: one product over both.
    signed = torch.cat([rows.clamp(max=0), rows.clamp(min=0)], dim=-1)
    scores = _product(signed, bounds.flatten(3).to(precise).transpose(2, 3))
    return scores.unflatten(2, (-1, query.shape[2])).flatten(1, 2)


def chosen_pages(query: torch.Tensor, bounds: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The `counts[b]` pages of largest score of each query head and token of sequence b, bool (B, Hq, Q, P).

    `query` and `bounds` as `page_scores` takes them. Of equal scores the earlier page is taken.
    """
    order = page_scores(query, bounds).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(order.shape[-1], device=order.device)
    taken = rank < torch.tensor(counts, device=order.device).view(-1, 1, 1, 1)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, taken.expand_as(order))


def page_count(budget: int, tokens: int) -> int:
    """Pages of a context of `tokens` tokens that a budget of `budget` tokens reads."""
    pages = -(-tokens // PAGE)
    return pages if budget >= tokens else max(1, budget // PAGE)


class QuestCache(Cache):
    """A transformers cache that holds everything and is read page by page.

    cache = QuestCache(model.config)
    model(context_ids, past_key_values=cache)
    cache.seal(256)  # each later token reads 256 tokens of the context in a head
    model(question_ids, past_key_values=cache)
    cache.rollback()  # the next question finds the context alone

    The model is not touched. Prompts may be fed in chunks; padding is refused, as it would stand in the pages.
    Inference only.

    Parameters
    ----------
    config : a transformers config
        Of the model, `model.config`.
    dense_layers : int
        First layers that read everything.

    Raises
    ------
    InvalidInput
        Not such a number; an architecture that `contourkv.RaggedCache` cannot serve either.
    """

    def __init__(self, config: PreTrainedConfig, *, dense_layers: int = DENSE_LAYERS) -> None:
        windows = layer_windows(config)
        whole_number("dense_layers", dense_layers, 0)
        self.model_type = config.get_text_config(decoder=True).model_type
        super().__init__(
            layers=[
                QuestLayer(index, window, index >= dense_layers and window is None, self.model_type, len(windows))
                for index, window in enumerate(windows)
            ]
        )

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        budgets: int | Sequence[int],
        *,
        length: int | None = None,
        dense_layers: int = DENSE_LAYERS,
    ) -> QuestCache:
        """A sealed cache over keys and values that are there already.

        Parameters
        ----------
        config, dense_layers : as of the class
        keys, values : tensors (1 or B, H, N, d), (1 or B, H, N, dv), one a layer
            Rotated for positions 0 .. N - 1. They are not copied, so they must not be written to afterwards; only of a
            sliding layer that is given more than its next token can see, its window - 1 last are. Such a layer may be
            given fewer than N, the last ones, but not fewer than those.
        budgets : as of `seal`
        length : int, optional
            N; by default what the longest layer holds.

        Raises
        ------
        InvalidInput
            Shapes, dtypes or numbers that do not belong together.
        """
        cache = cls(config, dense_layers=dense_layers)
        count = len(cache.layers)
        if len(keys) != count or len(values) != count:
            raise InvalidInput(
                f"keys, values: got {len(keys)} and {len(values)} layers, expected one tensor for each of {count}"
            )
        for index, (key, value) in enumerate(zip(keys, values, strict=True)):
            if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3] or len(key) != len(keys[0]):
                raise InvalidInput(
                    f"keys, values: layer {index}: got {tuple(key.shape)} and {tuple(value.shape)}, expected "
                    f"({len(keys[0])}, H, N, d) and ({len(keys[0])}, H, N, dv)"
                )
        length = whole_number("length", max(key.shape[2] for key in keys) if length is None else length, 1)
        for layer, key, value in zip(cache.layers, keys, values, strict=True):
            layer.fill(key.detach(), value.detach(), length)
        cache.seal(budgets)
        return cache

    def __repr__(self) -> str:
        held = f"{self.get_seq_length()} tokens" + (f", {self.pages} pages a token" if self.sealed else "")
        return f"QuestCache({self.model_type}, {len(self.layers)} layers, {held})"

    @property
    def is_initialized(self) -> bool:
        return all(layer.length for layer in self.layers)

    @property
    def sealed(self) -> bool:
        """Whether the context is complete and later tokens select pages of it."""
        return all(layer.context is not None for layer in self.layers)

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages that a token of each sequence selects in a head."""
        self._check_sealed("pages")
        return self.layers[0].counts

    def seal(self, budgets: int | Sequence[int]) -> None:
        """End the context here: later tokens select pages of it.

        Parameters
        ----------
        budgets : int >= 1, or one for each sequence
            Tokens of the context that a token reads in a head; see the head of this file for the pages they buy. One
            context and several budgets make as many sequences, which share its storage. A sealed cache can be sealed
            again with other budgets.

        Raises
        ------
        InvalidInput
            Nothing is held yet; tokens were appended after the seal; a budget is not such a number, or they are not as
            many as sequences.
        """
        self._check_complete()
        if not self.is_initialized:
            raise InvalidInput("seal: the cache is empty; feed it a context first")
        if any(layer.appended for layer in self.layers):
            raise InvalidInput("seal: tokens were appended to the sealed context; rollback() first")
        contexts = self.layers[0].keys.shape[0]
        single = isinstance(budgets, str | bytes) or not isinstance(budgets, Sequence)
        wanted = [budgets] * contexts if single else list(budgets)
        if not wanted or contexts not in (1, len(wanted)):
            raise InvalidInput(
                f"budgets: got {len(wanted)} for {contexts} sequence(s); give one number or one for each"
            )
        length = self.get_seq_length()
        counts = tuple(page_count(whole_number("budgets", budget, 1), length) for budget in wanted)
        attach()  # here, and not once at import: functions may be registered at any time
        for layer in self.layers:
            layer.seal(counts)

    def rollback(self) -> None:
        """Back to the sealed context: what was appended is gone, and `read_bytes` starts anew."""
        self._check_sealed("rollback")
        for layer in self.layers:
            layer.rollback()

    def read_bytes(self) -> list[float]:
        """Bytes of the context's keys and values that one token reads, all layers and KV heads together.

        A mean over the tokens since the seal or the last rollback, one number a sequence. A KV head counts the pages
        that any of its query heads selected, once; dense layers count all that the token sees of the context. The page
        bounds, read too, and the tokens after the context are not counted.

        Raises
        ------
        InvalidInput
            No token was read since.
        """
        self._check_complete()
        tokens = self.layers[0].appended
        if not tokens:
            raise InvalidInput("read_bytes: no token was read after the context; seal() it and feed one")
        return [sum(read) / tokens for read in zip(*(layer.read for layer in self.layers), strict=True)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values."""
        if layer_idx >= len(self.layers):
            raise InvalidInput(
                f"QuestCache: it has {len(self.layers)} layers, the model has more; make one from this model's config"
            )
        if layer_idx == 0:
            self._check_complete()
        return self.layers[layer_idx].update(key_states, value_states)

    def _check_complete(self) -> None:
        lengths = {layer.length for layer in self.layers}
        if len(lengths) > 1:
            raise InvalidInput(
                f"QuestCache: its layers hold {' and '.join(map(str, sorted(lengths)))} tokens, so a forward pass was "
                "interrupted; rollback() to the sealed context, or reset()"
            )

    def _check_sealed(self, what: str) -> None:
        if not self.sealed:
            raise InvalidInput(f"{what}: the cache is not sealed; feed it a context and call seal(budgets)")


class QuestLayer(CacheLayerMixin):
    """One layer: the context, the bounds of its pages, and what was appended.

    Parameters
    ----------
    index : int
        Number of the layer, for errors.
    window : int, optional
        Keys that a row of a sliding layer sees, its own included. Sealed, it holds the last window - 1 of the context.
    paged : bool
        Whether rows select pages; otherwise they read all that they see.
    model_type, layers : str, int
        Architecture and number of layers of the model that the cache is for; another model is refused.

    Attributes
    ----------
    keys, values : tensor (1 or B, H, n, d), (1 or B, H, n, dv)
        The context, or of a sealed sliding layer its end; 1 where all sequences share it. None before the first token.
    tail_keys, tail_values : tensor (B, H, m, d), (B, H, m, dv)
        What was appended after the seal; None if nothing.
    bounds : tensor (1 or B, H, P, 2, d)
        `page_bounds` of the keys; None before the seal and where `paged` is false.
    context : int
        Tokens at the seal; None before.
    length : int
        Tokens seen.
    counts : tuple of int
        Pages that a row of each sequence selects.
    read : list of int
        Bytes of the context that rows of each sequence read since the seal or the last rollback.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, index: int, window: int | None, paged: bool, model_type: str, layers: int) -> None:
        super().__init__()
        self.index, self.window, self.paged, self.model_type, self.layers = index, window, paged, model_type, layers
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        self.keys = self.values = self.bounds = self.tail_keys = self.tail_values = None
        self.context: int | None = None
        self.length = 0
        self.counts: tuple[int, ...] = ()
        self.read: list[int] = []

    # ------------------------------------------------------------------ what transformers asks

    @property
    def is_sliding(self) -> bool:
        return self.window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Check the first keys and values; raise InvalidInput for a dtype that is not a plain float."""
        if key_states.dtype not in DTYPES or value_states.dtype != key_states.dtype:
            raise InvalidInput(
                f"QuestCache, layer {self.index}: got keys of {key_states.dtype} and values of {value_states.dtype}, "
                "expected both in float32, bfloat16, float16 or float64"
            )
        attach()
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys (B, H, Q, d) and values; return what attention needs to find this layer."""
        key, value = key_states.detach(), value_states.detach()
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        else:
            self._check_like(key, value)
        self.length += key.shape[2]
        if self.context is None:
            self.keys, self.values = _grown(self.keys, key), _grown(self.values, value)
            return RaggedKey.of(self.keys, self), self.values
        self.tail_keys, self.tail_values = _grown(self.tail_keys, key), _grown(self.tail_values, value)
        return RaggedKey.of(key_states, self), value_states

    def _check_like(self, key: torch.Tensor, value: torch.Tensor) -> None:
        sequences = self.keys.shape[0] if self.context is None else len(self.counts)
        if key.shape[0] != sequences:
            raise InvalidInput(
                f"QuestCache: it holds {sequences} sequence(s), the model was given {key.shape[0]}; seal() it with one "
                "budget a sequence"
            )
        expected = [(part.shape[1], part.shape[3], part.dtype, part.device) for part in (self.keys, self.values)]
        if expected != [(part.shape[1], part.shape[3], part.dtype, part.device) for part in (key, value)]:
            raise InvalidInput(
                f"QuestCache, layer {self.index}: it holds {self.keys.shape[1]} KV heads of {self.keys.shape[3]} in "
                f"{self.keys.dtype} on {self.keys.device}, got {key.shape[1]} of {key.shape[3]} in {key.dtype} on "
                f"{key.device}; was it filled by another model?"
            )

    def get_mask_sizes(self, query: torch.Tensor | int) -> tuple[int, int]:
        """(keys, offset) of the mask that the model makes; after the seal of the new keys alone."""
        new = query if isinstance(query, int) else query.shape[0]
        return (new + self.length, 0) if self.context is None else (new, self.length)

    def get_seq_length(self) -> int:
        return self.length

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def _refuse(self, *_: object, **__: object) -> None:
        raise InvalidInput("QuestCache: beams, cropping and offloading are not supported; use seal() and rollback()")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse

    # ------------------------------------------------------------------ the context

    def fill(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Take the keys and values of a context of `length` tokens, uncopied."""
        least = length if self.window is None else min(length, self.window - 1)
        if not least <= keys.shape[2] <= length:
            expected = f"{length}" if least == length else f"{least} to {length}"
            raise InvalidInput(
                f"keys: layer {self.index} has those of {keys.shape[2]} tokens, expected {expected} of {length}"
            )
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.length = keys, values, length

    def seal(self, counts: tuple[int, ...]) -> None:
        """End the context; `counts` are the pages that a row of each sequence selects."""
        if self.context is None:
            self.context = self.length
            if self.window is not None and self.keys.shape[2] > self.window - 1:
                start = self.keys.shape[2] - self.window + 1
                # Copied: a view would hold the whole.
                self.keys, self.values = self.keys[:, :, start:].clone(), self.values[:, :, start:].clone()
            if self.paged:
                self.bounds = page_bounds(self.keys)
        self.counts = counts
        self.rollback()

    def rollback(self) -> None:
        """Drop what was appended."""
        self.tail_keys = self.tail_values = None
        self.length = self.context
        self.read = [0] * len(self.counts)

    @property
    def appended(self) -> int:
        """Tokens since the seal."""
        return 0 if self.context is None else self.length - self.context

    def held_parts(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """(kind, tensor, bytes in use) of everything that the layer owns."""
        for kind, tensor in (
            ("payload", self.keys),
            ("payload", self.values),
            ("payload", self.tail_keys),
            ("payload", self.tail_values),
            ("metadata", self.bounds),
        ):
            if tensor is not None:
                yield kind, tensor, tensor.numel() * tensor.element_size()

    # ------------------------------------------------------------------ attention

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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of new queries (B, heads, Q, d): by the model's own function `own` before the seal, here after."""
        if module.training:
            raise InvalidInput("QuestCache: the model is in training mode; call model.eval() first")
        config = getattr(module, "config", None)
        if config is not None:
            refuse_other_model("QuestCache", self.model_type, self.layers, config)
        _refuse_padding(mask, query.shape[2])
        if self.context is None:
            return own(module, query, key, value, mask, *args, **kwargs)
        scaling = kwargs.get("scaling")
        with torch.no_grad():
            output = self.attend(
                query,
                scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
                softcap=kwargs.get("softcap"),
                sinks=kwargs.get("s_aux"),
            )
        return output, None

    def attend(
        self, query: torch.Tensor, *, scaling: float, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of the newest Q tokens (B, Hq, Q, d), whose keys are in the tail already: (B, Q, Hq, dv).

        In the query's dtype, computed in float32, of float64 in float64. `softcap` c makes a score z c tanh(z / c);
        `sinks` (Hq,) are one more score a head, of value zero.
        """
        precise = torch.promote_types(query.dtype, torch.float32)
        heads, tokens = self.keys.shape[1], query.shape[2]
        keys = self.keys.shape[2] + self.appended
        block = max(1, SCORES // (query.shape[0] * query.shape[1] * keys))
        blocks = []
        for first in range(0, tokens, block):
            asked = query[:, :, first : first + block]
            at = torch.arange(asked.shape[2], device=query.device) + (self.length - tokens + first)
            parts = [self._seen_of_context(asked, at), self._seen_of_tail(at)]
            rows = asked.to(precise).unflatten(1, (heads, -1))
            blocks.append(_attention(rows * scaling, parts, softcap, sinks).flatten(1, 2).transpose(1, 2))
        return torch.cat(blocks, dim=1).to(query.dtype)

    def _seen_of_context(self, query: torch.Tensor, at: torch.Tensor) -> _Part:
        """What queries (B, Hq, q, d) at positions `at` (q,) read of the context; it is counted."""
        sequences, tokens = query.shape[0], query.shape[2]
        heads, held = self.keys.shape[1:3]
        entry = (self.keys.shape[3] + self.values.shape[3]) * self.keys.element_size()
        if self.window is not None:
            seen = torch.arange(self.context - held, self.context, device=at.device) > at[:, None] - self.window
            self._count([heads * entry * int(seen.sum())] * sequences)
            return self.keys, self.values, seen
        if self.bounds is None or min(self.counts) >= self.bounds.shape[2]:
            self._count([heads * entry * held * tokens] * sequences)
            return self.keys, self.values, None
        chosen = chosen_pages(query, self.bounds, self.counts).unflatten(1, (heads, -1))
        sizes = torch.full((chosen.shape[-1],), PAGE, device=at.device)
        sizes[-1] = held - PAGE * (len(sizes) - 1)
        read = (chosen.any(dim=2) * sizes).sum(dim=(1, 2, 3))
        self._count([entry * count for count in read.tolist()])
        return self._pages(chosen)

    def _count(self, read: list[int]) -> None:
        self.read = [before + new for before, new in zip(self.read, read, strict=True)]

    def _pages(self, chosen: torch.Tensor) -> _Part:
        """The chosen pages (B, H, G, q, P): gathered where the rows need few of them, else in place under a mask.

        A head's pages are those that any of its rows chose.
        """
        needed = chosen.any(dim=(2, 3))
        pages, held = chosen.shape[-1], self.keys.shape[2]
        most = int(needed.sum(dim=-1).max())
        if most > GATHERED * pages:
            return self.keys, self.values, chosen.repeat_interleave(PAGE, dim=-1)[..., :held]
        order = needed.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices[..., :most]
        has = needed.gather(-1, order)
        # A head that needs fewer than another takes its first page again, so that it reads none that it did not choose.
        order = torch.where(has, order, order[..., :1])
        seen = chosen.gather(-1, order[:, :, None, None].expand(*chosen.shape[:4], most)) & has[:, :, None, None]
        slots = (order.unsqueeze(-1) * PAGE + torch.arange(PAGE, device=order.device)).flatten(2)
        seen = seen.repeat_interleave(PAGE, dim=-1) & (slots < held)[:, :, None, None]
        slots = slots.clamp(max=held - 1)  # the last page may be short
        sequence = torch.arange(self.keys.shape[0], device=order.device).view(-1, 1, 1)
        head = torch.arange(self.keys.shape[1], device=order.device).view(1, -1, 1)
        return self.keys[sequence, head, slots], self.values[sequence, head, slots], seen

    def _seen_of_tail(self, at: torch.Tensor) -> _Part:
        if self.appended == 1:
            return self.tail_keys, self.tail_values, None
        position = torch.arange(self.context, self.length, device=at.device)
        seen = position <= at[:, None]
        if self.window is not None:
            seen &= position > at[:, None] - self.window
        return self.tail_keys, self.tail_values, seen


_Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Keys (1 or B, H, n, d), values (1 or B, H, n, dv), and which of them rows (B, H, G, q) see, bool, broadcast against
(B, H, G, q, n); None if all."""


def _attention(
    rows: torch.Tensor, parts: Sequence[_Part], softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One softmax of scaled rows (B, H, G, q, d) over all parts: (B, H, G, q, dv)."""
    shape = rows.shape[2:4]
    flat = rows.flatten(2, 3)
    found = []
    for keys, _, seen in parts:
        scores = _product(flat, keys.to(rows.dtype).transpose(2, 3)).unflatten(2, shape)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if seen is not None:
            scores.masked_fill_(~seen, float("-inf"))
        found.append(scores)
    if sinks is not None:
        sink = sinks.to(rows.dtype).view(1, rows.shape[1], -1, 1, 1)
        found.append(sink.expand(*rows.shape[:4], 1))
    weights = torch.cat(found, dim=-1).softmax(dim=-1).flatten(2, 3)
    output, start = 0, 0
    for keys, values, _ in parts:
        stop = start + keys.shape[2]
        output = output + _product(weights[..., start:stop], values.to(rows.dtype))
        start = stop
    return output.unflatten(2, shape)


def _product(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """rows (B, H, R, x) @ matrix (1 or B, H, x, n): (B, H, R, n)."""
    sequences, _, count, _ = rows.shape
    if matrix.shape[0] == sequences:
        return rows @ matrix
    # One context for all: their rows go over it together, for matmul would copy it for each.
    together = rows.transpose(0, 1).flatten(1, 2) @ matrix[0]
    return together.unflatten(1, (sequences, count)).transpose(0, 1)


def _grown(old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """`new` behind `old` along the tokens, contiguous in a storage of its own."""
    return new.clone(memory_format=torch.contiguous_format) if old is None else torch.cat([old, new], dim=2)


def _refuse_padding(mask: torch.Tensor | None, tokens: int) -> None:
    """Raise InvalidInput unless every one of the newest `tokens` tokens is real: it may see itself."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4) or mask.shape[-1] < tokens:
        raise InvalidInput(
            "QuestCache: the attention mask is of a kind that is not supported (a block mask?); load the model with "
            'attn_implementation="sdpa" or "eager"'
        )
    itself = mask[:, -tokens:] if mask.dim() == 2 else mask[:, 0, :, -tokens:].diagonal(dim1=1, dim2=2)
    seen = itself > torch.finfo(mask.dtype).min / 2 if mask.dtype.is_floating_point else itself.bool()
    if not bool(seen.all()):
        raise InvalidInput("QuestCache: got padding; batch contexts and questions of equal length")

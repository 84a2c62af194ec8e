"""ContourKVPress: compresses a RaggedCache while the model reads a context, within a budget of bytes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ..allocator import SPLITS, WEIGHTS, Allocation, Contour, Problem, Split, allocate, weighted
from ..errors import InvalidInput
from ..operator import whole_number
from ..ragged.cache import CACHE_ARGUMENTS, RaggedCache
from ..ragged.layer import RaggedLayer
from .budget import Budget
from .observation import value_distances, window_masses
from .scores import ContextScorer, LayerScorer, Scorer, WindowMass, attention_modules, resolve

POSITION_BYTES = 4  # of an entry, beside its key and value
CURVES = ("peak", "mean", "scores")
TABLE_BYTES = 16  # of a KV head: where its run begins and ends


@dataclass
class Compression:
    """What one `with press(model)` block did.

    Attributes
    ----------
    allocations : list of list of Allocation
        For each compression, one per sequence of the batch: entries of every head, bytes, dropped mass.
    """

    allocations: list[list[Allocation]] = field(default_factory=list)


class ContourKVPress:
    """Spends a budget of bytes where attention mass would be dropped, and frees the rest.

    While the model reads a context into an empty `RaggedCache`, each KV head's keys are scored and the mass that the
    last rows put on them is observed. Then one level is found for all heads: a key stays iff what its loss would cost
    reaches the level (see `contourkv.allocator.Contour`). First and last keys stay by rule in every head. Everything
    else is freed, one layer at a time, before the call returns. Tokens that come later, inside the block or after it,
    are appended.

    Parameters
    ----------
    budget : float, int or str
        Of each sequence: a fraction in (0, 1] of what its full ragged cache would take, positions counted on both
        sides, so that 1.0 keeps everything; or bytes of all that is held (an int, or a string such as "64MiB").
    entries : int, optional
        Instead of `budget`: entries over all layers and KV heads.
    compression_ratio : float, optional
        Instead of `budget`: the fraction to remove, as in kvpress.
    scores : str, kvpress ScorerPress or callable
        What ranks the keys of a head: "mass" (the observed mass, needs no kvpress), "snapkv", "expected_attention",
        "compactor", "kvzip", any kvpress ScorerPress, or f(module, hidden_states, keys, values, attentions, kwargs)
        that returns (1, H, N) for one sequence.
    split : str or Split
        How the budget is spread over heads: "contour"; "contour_by_span", a level for the sliding layers of a model
        and one for those that see everything; "uniform", "adakv", "pyramid" and "global" for comparison; or
        one of `contourkv.allocator`'s splits with its own arguments, such as AdaKV(safeguard=0.1).
    weight : str
        What a unit of dropped mass counts as in the contour: "plain", "spread" or "distance", see
        `contourkv.allocator.weighted`.
    curve : str, optional
        Whose dropped mass the contour counts: "peak", each key's largest mass in any observed row, which bounds what
        every one of these rows loses; "mean", their mean; "scores", where the scores are masses themselves. By
        default "scores" for those that saw the whole context again (KVzip's), else "peak".
    rows : int
        Last query positions whose mass is observed.
    sinks, recent : int
        First and last keys that every head keeps by rule.
    floor, cap : int
        Least and most entries of a head.
    two_passes : bool
        Read the context twice: once to score, letting go of each layer at once, once to fill the cache. Costs a
        second prefill; then no moment holds more than the compressed cache and one layer's keys and values.
    seed : int
        Of scores that draw random numbers (Compactor).

    Raises
    ------
    InvalidInput
        An argument outside its range; kvpress is asked for and not installed.
    """

    def __init__(
        self,
        budget: float | int | str | Budget | None = None,
        *,
        entries: int | None = None,
        compression_ratio: float | None = None,
        scores: object = "mass",
        split: Split | str = "contour",
        weight: str = "distance",
        curve: str | None = None,
        rows: int = 64,
        sinks: int = 4,
        recent: int = 16,
        floor: int = 1,
        cap: int | None = None,
        two_passes: bool = False,
        seed: int = 0,
    ) -> None:
        self.budget = Budget.of(budget, entries, compression_ratio)
        self.scores, self.seed = scores, whole_number("seed", seed, 0)
        self.scorer = resolve(scores, self.seed, self.budget)
        self.split = SPLITS[split]() if isinstance(split, str) and split in SPLITS else split
        if not isinstance(self.split, Split):
            raise InvalidInput(
                f"split: expected one of {', '.join(SPLITS)}, or such a split of contourkv.allocator, got {split!r}"
            )
        if not isinstance(weight, str) or weight not in WEIGHTS:
            raise InvalidInput(f"weight: expected one of {', '.join(WEIGHTS)}, got {weight!r}")
        if two_passes and isinstance(self.scorer, ContextScorer):
            raise InvalidInput("two_passes: scores that replay the context need the full cache; leave it off for them")
        self.weight = weight
        if curve is None:
            curve = "scores" if isinstance(self.scorer, ContextScorer) and self.scorer.is_mass else "peak"
        if not isinstance(curve, str) or curve not in CURVES:
            raise InvalidInput(f"curve: expected one of {', '.join(CURVES)}, got {curve!r}")
        if curve == "scores" and not self.scorer.is_mass:
            raise InvalidInput(f'curve: scores {self.scorer.name!r} are no masses; use "peak" or "mean"')
        self.curve = curve
        self.rows = whole_number("rows", rows, 1)
        self.sinks, self.recent = whole_number("sinks", sinks, 0), whole_number("recent", recent, 0)
        self.floor = whole_number("floor", floor, 1)
        self.cap = None if cap is None else whole_number("cap", cap, self.floor)
        if not isinstance(two_passes, bool):
            raise InvalidInput(f"two_passes: expected True or False, got {two_passes!r}")
        self.two_passes = two_passes

    def __repr__(self) -> str:
        return f"ContourKVPress({self.budget}, scores={self.scorer.name!r}, split={self.split}, weight={self.weight!r})"

    @property
    def compression_ratio(self) -> float | None:
        """Fraction removed, kvpress's word for the budget; None for a budget in bytes or entries."""
        return 1 - float(self.budget.amount) if self.budget.kind == "fraction" else None

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[Compression]:
        """Compress what `model` reads inside the block into an empty RaggedCache, once for each such cache.

        The model computes the logits of the last position alone, unless the call asks for others. No gradients are
        recorded inside. When the block ends, however it ends, the model is as it was; a cache whose compression did
        not finish is empty again.
        """
        if not isinstance(model, PreTrainedModel):
            raise InvalidInput(f"ContourKVPress: expected a transformers model, got {type(model).__name__}")
        run = _Run(self, model)
        with torch.no_grad(), run.hooked():
            yield run.record

    def prefill(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        cache: RaggedCache,
        *,
        chunk_size: int = 2048,
        attention_mask: torch.Tensor | None = None,
    ) -> Compression:
        """Read a context in chunks and compress after each, so that the full cache never exists.

        Later chunks attend to what the compressed cache holds, so the result is not that of one pass; scores must be
        "mass", which alone can rank entries that were kept before. A fraction counts the tokens read so far.

        Parameters
        ----------
        ids : int64 tensor (B, N)
        cache : an empty RaggedCache
        chunk_size : int
            Tokens read at once; also bounds the peak: the budget and a chunk.
        attention_mask : tensor (B, N), optional
            0 at padding, which must be on the left.
        """
        chunk_size = whole_number("chunk_size", chunk_size, 1)
        if not isinstance(self.scorer, WindowMass):
            raise InvalidInput(
                f'prefill: expected scores="mass", got {self.scorer.name!r}; use the press as a context manager'
            )
        if not isinstance(self.split, Contour):
            raise InvalidInput(
                f"prefill: expected the split Contour(), got {self.split}; use the press as a context manager"
            )
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.numel() == 0:
            raise InvalidInput("ids: expected token ids (B, N) with at least one token")
        vocabulary = model.get_input_embeddings().weight.shape[0]
        if ids.dtype not in (torch.int64, torch.int32) or ids.min() < 0 or ids.max() >= vocabulary:
            raise InvalidInput(f"ids: expected int64 or int32 token ids from 0 to {vocabulary - 1}")
        _check_padding(attention_mask, ids)
        run = _Run(self, model, in_chunks=True)
        with torch.no_grad(), run.hooked():
            for start in range(0, ids.shape[1], chunk_size):
                stop = min(start + chunk_size, ids.shape[1])
                given = {"past_key_values": cache, "use_cache": True}
                if attention_mask is not None:
                    given["attention_mask"] = attention_mask[:, :stop]
                model(ids[:, start:stop], **given)
        return run.record

    def observe(self, model: PreTrainedModel, ids: torch.Tensor, cache: RaggedCache, **kwargs: object) -> Observation:
        """Read a context and score it without compressing it, to compress it at several budgets afterwards.

        One prefill and one scoring then serve every budget, split and weight: `Observation.cut`. Scores that depend
        on the budget (Compactor) are those of this press's.

        Parameters
        ----------
        ids : int64 tensor (B, N)
        cache : an empty RaggedCache
        **kwargs
            For the model: attention_mask, position_ids.
        """
        run = _Run(self, model, observing=True)
        with torch.no_grad(), run.hooked():
            model(ids, past_key_values=cache, **kwargs)
        return run.observation


@dataclass
class Seen:
    """What was observed of the n places in one layer whose entries may stay.

    Attributes
    ----------
    scores : tensor (B, H, n)
        Rank a head's keys.
    mean, peak, distances : tensor (B, H, n)
        Observed masses, and how far values lie from the mean output: see `contourkv.press.observation`.
    positions : int64 tensor (n,)
        Position of each place, ascending.
    present : bool tensor (B, H, n), optional
        False where there is no entry: padding, or evicted before.
    cost : int
        Bytes of an entry.
    window : int, optional
        Positions that a row of a sliding layer sees, its own included.
    """

    scores: torch.Tensor
    mean: torch.Tensor
    peak: torch.Tensor
    distances: torch.Tensor
    positions: torch.Tensor
    present: torch.Tensor | None
    cost: int
    window: int | None = None

    def of(self, sequence: int, press: ContourKVPress) -> list[_Part]:
        """What one sequence has of it: all heads together, or head by head where they hold different places."""
        scores = self.scores[sequence]
        curve = {"peak": self.peak[sequence], "mean": self.mean[sequence], "scores": scores}[press.curve]
        worth = weighted(curve, self.distances[sequence], press.weight)
        if self.present is None:
            return [_Part(slice(None), self.positions, scores, worth, self.cost)]
        present = self.present[sequence]
        if bool((present == present[:1]).all()):
            some = present[0]
            return [_Part(slice(None), self.positions[some], scores[:, some], worth[:, some], self.cost)]
        heads = [slice(head, head + 1) for head in range(len(present))]
        return [
            _Part(head, self.positions[some], scores[head, some], worth[head, some], self.cost)
            for head, some in zip(heads, present, strict=True)
        ]


class _Part(NamedTuple):
    heads: slice
    columns: torch.Tensor  # int64 (n,): positions
    scores: torch.Tensor  # (heads, n)
    worth: torch.Tensor  # (heads, n)
    cost: int


@dataclass
class Observation:
    """A context that was read and scored, and not compressed yet: to be compressed at several budgets.

    Holds all of the context, in the memory that it shares with the cache which read it.
    """

    _full: RaggedCache
    _press: ContourKVPress
    _layers: list[Seen]
    _tokens: torch.Tensor

    def cut(self, press: ContourKVPress) -> tuple[RaggedCache, list[Allocation]]:
        """A cache of its own that holds what `press` would have kept, and the allocation of each sequence.

        Raises
        ------
        InvalidInput
            `press` ranks keys by other scores, or observes other rows, than what was observed.
        """
        if not isinstance(press, ContourKVPress):
            raise InvalidInput(f"cut: expected a ContourKVPress, got {type(press).__name__}")
        seen = self._press
        if (press.scorer.name, press.rows) != (seen.scorer.name, seen.rows):
            raise InvalidInput(
                f"cut: observed were scores {seen.scorer.name!r} and the last {seen.rows} rows, the press asks for "
                f"{press.scorer.name!r} and {press.rows}"
            )
        keeps, allocations = keep_masks(press, press.scorer, self._layers, self._full.get_seq_length(), self._tokens)
        cut = self._full.copy()
        for index, keep in enumerate(keeps):
            cut.evict(index, keep)
        cut.mark()
        return cut, allocations


class _Run:
    """One block of a press over one model: the hooks, and what they saw."""

    def __init__(
        self, press: ContourKVPress, model: PreTrainedModel, in_chunks: bool = False, observing: bool = False
    ) -> None:
        self.press, self.model, self.in_chunks, self.observing = press, model, in_chunks, observing
        self.record = Compression()
        self.cache: RaggedCache | None = None  # the one being compressed
        self.chunked: RaggedCache | None = None  # the one that has read a chunk already
        self.finished: list[RaggedCache] = []
        self.seen: dict[int, Seen] = {}
        self.tokens: torch.Tensor | None = None  # (B,) read so far, without padding
        self.inputs: dict[int, tuple[torch.Tensor, Mapping[str, object]]] = {}
        self.keeps: list[torch.Tensor | None] | None = None
        self.scouting = False  # while the model is called from here, not by the user
        self.scorer = press.scorer
        self.trims_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @contextmanager
    def hooked(self) -> Iterator[None]:
        hooks = []
        try:
            with self.scorer.on(self.model):
                # The decoder is what reads; a caller may call it without the head that makes logits.
                hooks.append(self.model.register_forward_pre_hook(self.trim_logits, with_kwargs=True))
                hooks.append(self.model.base_model.register_forward_pre_hook(self.before, with_kwargs=True))
                hooks.append(self.model.base_model.register_forward_hook(self.after, with_kwargs=True))
                if isinstance(self.scorer, LayerScorer):
                    for module in attention_modules(self.model):
                        hooks.append(module.register_forward_pre_hook(self.keep_inputs, with_kwargs=True))
                yield
        finally:
            for hook in hooks:
                hook.remove()
            if self.cache is not None:  # its compression did not finish
                self._let_go(self.cache)
                self.cache.reset()

    def keep_inputs(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        if self.cache is not None or self.scouting:
            self.inputs[module.layer_idx] = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], kwargs)

    # ------------------------------------------------------------------ around the model's forward pass

    def trim_logits(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Of a context the logits of the last position alone, unless the call says otherwise."""
        said = not self.trims_logits or kwargs.get("labels") is not None or "logits_to_keep" in kwargs
        if said or self.scouting or (_cache_of(args, kwargs).get_seq_length() and not self.in_chunks):
            return None
        return args, {**kwargs, "logits_to_keep": 1}

    def before(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.scouting:
            return None
        cache = _cache_of(args, kwargs)
        if any(cache is done for done in self.finished) and cache.get_seq_length():
            return None
        ids = _ids_of(args, kwargs)
        self._check(cache, ids.shape[1])
        if not self.in_chunks:
            _check_padding(kwargs.get("attention_mask"), ids)
        kwargs = _placed(dict(kwargs), ids.shape[1])
        self.cache, self.seen = cache, {}
        if self.press.budget.kind != "fraction":
            share = Budget.of(compression_ratio=self._removed(ids.shape[1]))
            self.scorer = resolve(self.press.scores, self.press.seed, share)
        if self.press.two_passes and not self.in_chunks and not self.observing:
            self.keeps = self._scout(model, args, kwargs)
        for layer in cache.layers:
            layer.watcher = self
        return args, kwargs

    def _check(self, cache: RaggedCache, tokens: int) -> None:
        if self.model.training:
            raise InvalidInput("ContourKVPress: the model is in training mode; call model.eval() first")
        if any(layer.watcher is not None for layer in cache.layers):
            raise InvalidInput("ContourKVPress: another press is compressing this cache; use one at a time")
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        if len(cache.layers) != layers:
            raise InvalidInput(
                f"ContourKVPress: the cache has {len(cache.layers)} layers, the model {layers}; make it from this "
                "model's config"
            )
        past = cache.get_seq_length()
        if past and not (self.in_chunks and cache is self.chunked):
            raise InvalidInput(
                f"ContourKVPress: the cache holds {past} tokens of another context; reset() it, or make a new one"
            )
        if tokens == 0:
            raise InvalidInput("ContourKVPress: the context is empty, expected at least one token")
        longest = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if longest is not None and past + tokens > longest:
            raise InvalidInput(
                f"ContourKVPress: the context has {past + tokens} tokens, the window of {self.model.config.model_type} "
                f"holds {longest}; make it shorter"
            )

    def _removed(self, tokens: int) -> float:
        """Fraction of the entries that a budget in bytes or entries removes, about: some scores blend by it."""
        budget = self.press.budget
        config = self.model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        entries = heads * tokens * config.num_hidden_layers
        each = 1 if budget.kind == "entries" else 2 * dim * self.model.dtype.itemsize + POSITION_BYTES
        return max(0.0, 1 - int(budget.amount) / (entries * each))

    def after(self, model: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        if self.scouting or self.cache is None or _cache_of(args, kwargs) is not self.cache:
            return
        cache = self.cache
        self._let_go(cache)
        if isinstance(self.scorer, ContextScorer):
            self._replay(cache, _ids_of(args, kwargs))
        if self.observing:
            self.observation = Observation(cache.copy(), self.press, self._in_order(), self.tokens)
        elif self.keeps is None:
            keeps = self._allocate(cache)
            for index in range(len(cache.layers)):
                cache.evict(index, keeps[index])
                keeps[index] = None
        cache.mark()
        self.seen, self.inputs, self.keeps = {}, {}, None
        if self.in_chunks:
            self.chunked = cache
        else:
            self.finished.append(cache)
        self.cache = None

    def _let_go(self, cache: RaggedCache) -> None:
        for layer in cache.layers:
            layer.watcher = None

    def _scout(self, model: torch.nn.Module, args: tuple, kwargs: dict) -> list[torch.Tensor | None]:
        """Masks to keep, from a first pass over a cache whose layers are emptied as soon as they are seen."""
        scratch = RaggedCache(self.model.config)
        for layer in scratch.layers:
            layer.watcher = self
        given = {name: value for name, value in kwargs.items() if name not in CACHE_ARGUMENTS}
        self.scouting = True
        try:
            model(*(scratch if isinstance(a, Cache) else a for a in args), past_key_values=scratch, **given)
            return self._allocate(scratch)
        finally:
            self.scouting = False
            self.seen = {}

    def _replay(self, cache: RaggedCache, ids: torch.Tensor) -> None:
        """Scores that need the whole context: asked of a plain cache over the same storage."""
        plain = DynamicCache()
        for index, layer in enumerate(cache.layers):
            seen = self.seen[index]
            if seen.present is not None or len(seen.positions) != layer.length:
                raise InvalidInput(
                    f"scores {self.scorer.name!r}: they need every key of every layer, without padding and "
                    "sliding windows"
                )
            shape = (*layer.begin.shape, layer.length)
            plain.update(
                layer.frozen_keys.view(*shape, -1)[:, :, :0], layer.frozen_values.view(*shape, -1)[:, :, :0], index
            )
            plain.layers[index].keys = layer.frozen_keys.view(*shape, -1)
            plain.layers[index].values = layer.frozen_values.view(*shape, -1)
        self.scouting = True
        try:
            for index, scores in enumerate(self.scorer.score_context(self.model, ids, plain)):
                self.seen[index].scores = scores
        finally:
            self.scouting = False

    # ------------------------------------------------------------------ inside a layer's attention

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
        if self.keeps is not None and not self.scouting:
            layer.evict(self.keeps[layer.index])
            self.keeps[layer.index] = None
            return
        press, scorer = self.press, self.scorer
        held = None if visible is None else visible[:, None]
        self._count(layer, query, visible)
        masses = window_masses(query, key, rows=press.rows, visible=visible, held=held, **layer.how(query, kwargs))
        distances = value_distances(masses.mean, value)
        scores = scorer.of(masses.mean) if isinstance(scorer, WindowMass) else masses.mean
        if isinstance(scorer, LayerScorer):
            hidden, given = self.inputs.pop(layer.index)
            scores = scorer.score(module, hidden, key, value, weights, given, visible)
        tokens = key.shape[2]
        first = 0 if layer.window is None else max(tokens - layer.window + 1, 0)
        self.seen[layer.index] = Seen(
            scores=scores[:, :, first:],
            mean=masses.mean[:, :, first:],
            peak=masses.peak[:, :, first:],
            distances=distances[:, :, first:],
            positions=torch.arange(first, tokens, device=key.device),
            present=None if visible is None else visible[:, None, first:].expand(scores[:, :, first:].shape),
            cost=entry_bytes(key, value),
            window=layer.window,
        )
        if self.scouting:
            layer.evict(torch.zeros(*layer.begin.shape, tokens, dtype=torch.bool, device=key.device))

    def later_block(
        self,
        layer: RaggedLayer,
        module: torch.nn.Module,
        query: torch.Tensor,
        visible: torch.Tensor | None,
        kwargs: Mapping[str, object],
    ) -> None:
        """A further chunk over a layer that is compressed already: observe all that it holds."""
        positions, key, value, held = layer.rectangle()
        self._count(layer, query, visible)
        masses = window_masses(
            query,
            key,
            rows=self.press.rows,
            visible=visible,
            positions=positions,
            held=held,
            **layer.how(query, kwargs),
        )
        first = 0
        if layer.window is not None:
            first = int(torch.searchsorted(positions, layer.length - layer.window, right=True))
        self.seen[layer.index] = Seen(
            scores=masses.mean[:, :, first:],
            mean=masses.mean[:, :, first:],
            peak=masses.peak[:, :, first:],
            distances=value_distances(masses.mean, value)[:, :, first:],
            positions=positions[first:],
            present=held[:, :, first:],
            cost=entry_bytes(key, value),
            window=layer.window,
        )

    def _count(self, layer: RaggedLayer, query: torch.Tensor, visible: torch.Tensor | None) -> None:
        if layer.index == 0:
            sequences, _, tokens, _ = query.shape
            new = torch.full((sequences,), tokens) if visible is None else visible.sum(dim=1).cpu()
            self.tokens = new if layer.tail_length == 0 and not self.chunked else self.tokens + new

    def _in_order(self) -> list[Seen]:
        return [self.seen[index] for index in range(len(self.seen))]

    def _allocate(self, cache: RaggedCache) -> list[torch.Tensor | None]:
        keeps, allocations = keep_masks(self.press, self.scorer, self._in_order(), cache.get_seq_length(), self.tokens)
        self.record.allocations.append(allocations)
        return keeps


def keep_masks(
    press: ContourKVPress, scorer: Scorer, layers: list[Seen], length: int, tokens: torch.Tensor
) -> tuple[list[torch.Tensor | None], list[Allocation]]:
    """What the budget of `press` keeps of a context that was seen.

    Parameters
    ----------
    press, scorer : the budget, split and weight; and which keys the scores protect
    layers : what was seen of each layer
    length : positions seen, padding included
    tokens : int64 tensor (B,), of them real

    Returns
    -------
    keep masks (B, H, length) of all layers, and the allocation of each sequence: it is made for each alone
    """
    keeps = [
        torch.zeros(*seen.scores.shape[:2], length, dtype=torch.bool, device=seen.scores.device) for seen in layers
    ]
    allocations = []
    for sequence, read in enumerate(tokens.tolist()):
        available = [read if seen.window is None else min(read, seen.window - 1) for seen in layers]
        heads, costs = [seen.scores.shape[1] for seen in layers], [seen.cost for seen in layers]
        first, last = scorer.protected(max(available))
        split = [seen.of(sequence, press) for seen in layers]
        parts = [part for layer in split for part in layer]
        allocation = allocate(
            Problem(
                scores=tuple(part.scores for part in parts),
                masses=tuple(part.worth for part in parts),
                costs=tuple(part.cost for part in parts),
                # A sequence of which no token has come yet, left-padded as it is, needs none.
                budget=max(1, press.budget.bytes_for(heads, available, costs, TABLE_BYTES * sum(heads))),
                sinks=max(press.sinks, first),
                recent=max(press.recent, last),
                floor=press.floor,
                cap=press.cap,
                spans=tuple(seen.window or 0 for seen, layer in zip(layers, split, strict=True) for _ in layer),
            ),
            press.split,
        )
        chosen = iter(allocation.keep)
        for keep, layer in zip(keeps, split, strict=True):
            for part in layer:
                keep[sequence, part.heads][:, part.columns] = next(chosen)
        allocations.append(allocation)
    return list(keeps), allocations


def entry_bytes(key: torch.Tensor, value: torch.Tensor) -> int:
    """Bytes of one entry of a ragged layer: its key and value (.., d), (.., dv), and its position."""
    return (key.shape[-1] + value.shape[-1]) * key.element_size() + POSITION_BYTES


def _cache_of(args: tuple, kwargs: Mapping[str, object]) -> RaggedCache:
    given = [*(kwargs.get(name) for name in CACHE_ARGUMENTS), *args]
    cache = next((value for value in given if isinstance(value, Cache)), None)
    if not isinstance(cache, RaggedCache):
        raise InvalidInput(
            "ContourKVPress: expected past_key_values=RaggedCache(model.config), got "
            f"{'no cache' if cache is None else type(cache).__name__}"
        )
    return cache


def _check_padding(mask: object, ids: torch.Tensor) -> None:
    """Raise InvalidInput unless a 2D attention mask fits a whole context, padded on the left."""
    if mask is None or (isinstance(mask, torch.Tensor) and mask.dim() != 2):
        return
    if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != tuple(ids.shape[:2]):
        got = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InvalidInput(f"attention_mask: expected a tensor of shape {tuple(ids.shape[:2])}, as the ids, got {got}")
    real = mask != 0
    if bool((real[:, :-1] & ~real[:, 1:]).any()):
        raise InvalidInput("attention_mask: expected padding on the left of a context, and nowhere else")
    if not bool(real.any(dim=1).all()):
        row = int((~real.any(dim=1)).nonzero()[0])
        raise InvalidInput(f"attention_mask: sequence {row} is all padding; leave it out of the batch")


def _placed(kwargs: dict[str, object], tokens: int) -> dict[str, object]:
    """The arguments of a call, with the positions that a padded batch needs.

    Without them the model counts padding as tokens, and a later `generate`, which does not, goes on elsewhere.
    """
    mask = kwargs.get("attention_mask")
    if kwargs.get("position_ids") is None and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        real = mask != 0
        if not bool(real.all()):
            kwargs["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)[:, -tokens:]
    return kwargs


def _ids_of(args: tuple, kwargs: Mapping[str, object]) -> torch.Tensor:
    """What the model reads: ids (B, N), or embeddings (B, N, hidden)."""
    given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
    ids = next((value for value in given if isinstance(value, torch.Tensor)), None)
    if ids is None or ids.dim() < 2:
        raise InvalidInput("ContourKVPress: expected input_ids (B, N) or inputs_embeds (B, N, hidden)")
    return ids

"""What each method keeps of a context, at each budget and in each storage.

Peers choose by kvpress's own code: its scores, and its rules for turning scores into a selection, called on scores that
were computed once. As published they remove 1 - budget of the keys. Enforced they choose in the same way, as many
entries as the nominal bytes pay for once positions and tables of a ragged cache are paid; in a sliding layer among the
positions that its window can still show. Rectangular, a head-wise method's scores choose the same count in every head,
within the same bytes. ContourKV is `contourkv.ContourKVPress` over the same scores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from ..errors import InvalidInput
from ..press.budget import Budget
from ..press.contour import TABLE_BYTES, ContourKVPress, entry_bytes, keep_masks
from ..press.scores import PressScorer, ReplayScorer, WindowMass, attention_modules, explained, kvpress, untouched
from .methods import PUBLISHED, RECTANGULAR, Method
from .reading import LayerReading, Reading

ROWS = 64
# kvpress's class that scores.
SCORES = {
    "compactor": "CompactorPress",
    "expected_attention": "ExpectedAttentionPress",
    "knorm": "KnormPress",
    "kvzip": "KVzipPress",
    "observed_attention": "ObservedAttentionPress",
    "random": "RandomPress",
    "snapkv": "SnapKVPress",
    "streaming_llm": "StreamingLLMPress",
    "tova": "TOVAPress",
}


@dataclass
class Chosen:
    """A kept set of one context.

    Attributes
    ----------
    keep : list of bool tensors (H, N), one a layer
    seconds : float
        Spent on scores and selection; scores that several methods share count for each.
    order : list of int64 tensors (H, n), optional
        Where every head of a layer keeps n keys: their positions in the order in which kvpress stores them.
    """

    keep: list[torch.Tensor]
    seconds: float
    order: list[torch.Tensor] | None = None


@dataclass
class Chooser:
    """Lets methods choose of one reading; scores that were computed are kept for the next method.

    Parameters
    ----------
    reading : Reading
    full_bytes : int
        Bytes of keys and values of the full cache, of which a budget is a share.
    seed : int
        Of random draws (Random, Compactor's sketch).
    """

    reading: Reading
    full_bytes: int
    seed: int
    _scored: dict[tuple, tuple[list[torch.Tensor], float]] = field(default_factory=dict)
    _refused: dict[tuple, str] = field(default_factory=dict)
    _parts: dict[str, dict[int, tuple[torch.Tensor, float]]] = field(default_factory=dict)

    def choose(self, method: Method, storage: str, budget: float) -> Chosen:
        """What `method` keeps in `storage` at `budget`, a share of the full cache's bytes.

        Raises
        ------
        InvalidInput
            The method, or kvpress, cannot do it: says why.
        """
        started = time.perf_counter()
        before = {name: seconds for name, (_, seconds) in self._scored.items()}
        keep, order, used = self._keep(method, storage, budget)
        spent = time.perf_counter() - started
        return Chosen(keep, spent + sum(before.get(name, 0.0) for name in used), order)

    def nominal_bytes(self, budget: float) -> int:
        """Bytes that a budget allows."""
        return int(Budget.of(budget).amount * self.full_bytes)

    def enforced_ratio(self, method: Method, budget: float) -> float:
        """Fraction that kvpress removes so that what is left of a layer without window is within the nominal bytes."""
        available = [self.reading.tokens - layer.first for layer in self.reading.layers]
        counts = self._counts(budget, available)  # which refuses a budget that pays for nothing
        if method.scores == "kvzip":
            return self._global_ratio(budget, available)
        return _ratio_for(max(counts), self.reading.tokens)

    # ------------------------------------------------------------------ kept sets

    def _keep(
        self, method: Method, storage: str, budget: float
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, set[tuple]]:
        if method.keeps in ("all", "pages"):
            raise InvalidInput(f"{method.name}: it keeps everything, there is nothing to choose")
        if method.keeps == "ragged":
            keep, used = self._contour(method, budget)
            return keep, None, used
        tokens = self.reading.tokens
        published = storage == PUBLISHED
        first = [0 if published else layer.first for layer in self.reading.layers]
        available = [tokens - start for start in first]
        counts = [_kept_by_kvpress(tokens, budget)] * len(first) if published else self._counts(budget, available)
        if method.scores == "streaming_llm":
            # Its scores say which keys a count leaves, so they are those of this count.
            scores, used = (
                [
                    self._streaming(layer, start, count)
                    for layer, start, count in zip(self.reading.layers, first, counts, strict=True)
                ],
                set(),
            )
        else:
            scores, used = self._scores(method.scores, ratio_of(budget))
            scores = [score[:, :, start:] for score, start in zip(scores, first, strict=True)]
        if method.name == "h2o":
            scores = [with_recent(score, count // 2) for score, count in zip(scores, counts, strict=True)]
        if method.scores == "kvzip" and storage == RECTANGULAR:
            scores = [with_sinks(score, self._press("kvzip").n_sink) for score in scores]
        order = None
        if method.keeps == "equal" or storage == RECTANGULAR:
            # As kvpress's ScorerPress chooses.
            best = [score.topk(count, dim=-1).indices for score, count in zip(scores, counts, strict=True)]
            kept = [
                torch.zeros(score.shape, dtype=torch.bool, device=score.device).scatter_(-1, at, True)[0]
                for score, at in zip(scores, best, strict=True)
            ]
            order = [at[0] for at in best] if published else None
        elif method.scores == "kvzip":
            ratio = ratio_of(budget) if published else self._global_ratio(budget, available)
            kept = kvzip_keeps(self.reading.model, scores, ratio)
        else:
            ratios = [
                ratio_of(budget) if published else _ratio_for(count, score.shape[2])
                for score, count in zip(scores, counts, strict=True)
            ]
            kept = [adakv_keep(score, ratio) for score, ratio in zip(scores, ratios, strict=True)]
        keep = []
        for mask, start in zip(kept, first, strict=True):
            whole = torch.zeros(mask.shape[0], tokens, dtype=torch.bool, device=mask.device)
            whole[:, start:] = mask
            keep.append(whole)
        return keep, order, used

    def _share(self, budget: float, available: Sequence[int]) -> float:
        """Share of all entries that the nominal bytes pay for in a ragged cache; a layer has `available` a head."""
        layers = self.reading.layers
        heads = [layer.keys.shape[1] for layer in layers]
        costs = [entry_bytes(layer.keys, layer.values) for layer in layers]
        allowed = self.nominal_bytes(budget) - TABLE_BYTES * sum(heads)
        return min(1.0, allowed / sum(h * n * cost for h, n, cost in zip(heads, available, costs, strict=True)))

    def _counts(self, budget: float, available: Sequence[int]) -> list[int]:
        """Entries of a head, by layer, that the nominal bytes pay for."""
        share = self._share(budget, available)
        counts = [int(share * n) for n in available]
        if min(counts) < 1:
            raise InvalidInput(
                f"budget {budget:g}: {self.nominal_bytes(budget):,} bytes do not hold one entry in each KV head"
            )
        return counts

    def _global_ratio(self, budget: float, available: Sequence[int]) -> float:
        """A ratio at which KVzip keeps as many entries, over all layers, as the nominal bytes pay for."""
        heads = [layer.keys.shape[1] for layer in self.reading.layers]
        total = sum(h * n for h, n in zip(heads, available, strict=True))
        kept = int(self._share(budget, available) * total)
        return 0.0 if kept >= total else (total - kept + 0.5) / total

    def _contour(self, method: Method, budget: float) -> tuple[list[torch.Tensor], set[tuple]]:
        used: set[tuple] = set()
        if method.scores == "mass":
            scorer, scores = WindowMass(), [None] * len(self.reading.layers)
        elif method.scores == "kvzip":
            scores, used = self._scores("kvzip")
            scorer = ReplayScorer(self._press("kvzip"), "kvzip")
        else:
            scores, used = self._scores(method.scores, ratio_of(budget))
            scorer = PressScorer(self._press(method.scores), method.scores, self.seed, ratio_of(budget))
            scores = [scorer.without_filler(score, self.reading.tokens) for score in scores]
        press = ContourKVPress(max(1, self.nominal_bytes(budget)), scores=scorer, rows=ROWS)
        used = used | self._observed()
        seen = [layer.seen(ROWS, score) for layer, score in zip(self.reading.layers, scores, strict=True)]
        tokens = torch.tensor([self.reading.tokens])
        keeps, _ = keep_masks(press, scorer, seen, self.reading.tokens, tokens)
        return [keep[0] for keep in keeps], used

    # ------------------------------------------------------------------ scores

    def _scores(self, name: str, ratio: float | None = None) -> tuple[list[torch.Tensor], set[tuple]]:
        """Scores (1, H, N) of each layer as kvpress computes them."""
        key = (name, ratio) if name == "compactor" else (name,)  # it blends by the fraction removed
        if key in self._refused:
            raise InvalidInput(self._refused[key])
        if key not in self._scored:
            started, known = time.perf_counter(), self._seconds_of_parts()
            try:
                scores = self._replayed() if name == "kvzip" else self._layerwise(name, ratio)
            except InvalidInput as error:
                self._refused[key] = str(error)
                raise
            parts = self._seconds_of_parts()
            self._scored[key] = scores, time.perf_counter() - started - (parts - known)
            self._scored[("parts",)] = [], parts
        return self._scored[key][0], {key, ("parts",)} if name == "compactor" else {key}

    def _seconds_of_parts(self) -> float:
        return sum(seconds for layers in self._parts.values() for _, seconds in layers.values())

    def _observed(self) -> set[tuple]:
        """Let each layer's reading note what ContourKV sees of its last rows; it is the same for all scores."""
        key = ("observed",)
        if key not in self._scored:
            started = time.perf_counter()
            for layer in self.reading.layers:
                layer.seen(ROWS)
            self._scored[key] = [], time.perf_counter() - started
        return {key}

    def _replayed(self) -> list[torch.Tensor]:
        scorer = ReplayScorer(self._press("kvzip"), "kvzip")
        with scorer.on(self.reading.model):
            return scorer.score_context(self.reading.model, self.reading.ids, self.reading.plain_cache())

    def _layerwise(self, name: str, ratio: float | None) -> list[torch.Tensor]:
        scorer = PressScorer(self._press(name), name, self.seed, ratio)
        found = []
        with torch.no_grad(), scorer.on(self.reading.model):
            for layer in self.reading.layers:
                weights = layer.attentions() if name == "observed_attention" else None
                arguments = layer.module, layer.hidden, layer.keys, layer.values, weights, layer.given
                found.append(scorer.published(*arguments))
        return found

    def _press(self, name: str) -> object:
        press = getattr(kvpress(), SCORES[name])()
        if name == "compactor":
            for part in ("_leverage_press", "_non_causal_press"):
                setattr(press, part, _Remembered(getattr(press, part), self._parts.setdefault(part, {})))
        return press

    def _streaming(self, layer: LayerReading, start: int, count: int) -> torch.Tensor:
        keys, values = layer.keys[:, :, start:], layer.values[:, :, start:]
        press = kvpress().StreamingLLMPress(compression_ratio=_ratio_for(count, keys.shape[2]))
        if keys.shape[2] <= press.n_sink:
            return torch.ones(keys.shape[:3], device=keys.device)
        with explained("scores 'streaming_llm'"):
            return press.score(layer.module, layer.hidden, keys, values, None, layer.given)


class _Remembered:
    """A part of Compactor's score that does not depend on the ratio: computed once a layer."""

    def __init__(self, press: object, found: dict[int, tuple[torch.Tensor, float]]) -> None:
        self._press, self._found = press, found

    def score(self, module: torch.nn.Module, **given: object) -> torch.Tensor:
        index = module.layer_idx
        if index not in self._found:
            started = time.perf_counter()
            scores = self._press.score(module=module, **given)
            self._found[index] = scores, time.perf_counter() - started
        return self._found[index][0]


def adakv_keep(scores: torch.Tensor, ratio: float) -> torch.Tensor:
    """kvpress's AdaKV selection of one layer: keep mask (H, N) from scores (1, H, N), removing `ratio`."""
    library = kvpress()

    class Given(library.ScorerPress):
        def score(self, *_: object) -> torch.Tensor:
            return scores.clone()  # AdaKV writes into what it gets

    # AdaKV asks a module for its configuration, and leaves its selection there.
    module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), masked_key_indices=None)
    with explained("AdaKVPress"):
        library.AdaKVPress(Given(ratio)).compress(module, None, scores, scores, None, {})
    return _unmasked(scores, module.masked_key_indices)


def kvzip_keeps(model: PreTrainedModel, scores: Sequence[torch.Tensor], ratio: float) -> list[torch.Tensor]:
    """kvpress's KVzip selection over all layers: keep masks (H, N) from scores (1, H, N), removing `ratio`."""
    press = kvpress().KVzipPress(compression_ratio=ratio)
    press.score_val = torch.stack(list(scores)).to(model.dtype)  # a copy: KVzip writes into it
    with untouched(model), explained("KVzipPress"):
        press.compress_post(model)
        chosen = [module.masked_key_indices for module in attention_modules(model)]
    return [_unmasked(score, indices) for score, indices in zip(scores, chosen, strict=True)]


def _unmasked(scores: torch.Tensor, indices: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
    keep = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if indices is not None:
        keep[tuple(part.to(scores.device) for part in indices)] = False
    return keep[0]


def with_recent(scores: torch.Tensor, recent: int) -> torch.Tensor:
    """H2O's second half: the last keys stand above all others (arXiv 2306.14048)."""
    if recent == 0:
        return scores
    scores = scores.clone()
    scores[..., -recent:] = scores.amax() + 1
    return scores


def with_sinks(scores: torch.Tensor, sinks: int) -> torch.Tensor:
    """KVzip's own rule, which kvpress applies where it selects: the first keys stand above all others.

    Its replay gives a chat template before the context the score 0, so without it every head would drop them.
    """
    scores = scores.clone()
    scores[..., :sinks] = scores.amax() + 1
    return scores


def ratio_of(budget: float) -> float:
    """Fraction that kvpress removes at that budget, in the decimal digits given."""
    return float(1 - Budget.of(budget).amount)


def _kept_by_kvpress(tokens: int, budget: float) -> int:
    kvpress()
    from kvpress.utils import compute_n_kept

    return compute_n_kept(tokens, ratio_of(budget))


def _ratio_for(count: int, tokens: int) -> float:
    """A ratio at which kvpress keeps `count` of `tokens` keys, whichever way it rounds."""
    return 0.0 if count >= tokens else 1 - (count + 0.5) / tokens

"""Storages: what is not kept is not seen, a batch is its sequences one by one, and bytes are what the storages hold."""

from __future__ import annotations

import functools
import importlib.util
import logging

import pytest
import torch
import transformers
from cache_models import ARCHITECTURES, TOLERANCE, built, ids
from capture.tiny_models import WINDOW
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from contourkv.benchmark.answering import answers, nats
from contourkv.benchmark.choosing import Chosen
from contourkv.benchmark.quest import PAGE
from contourkv.benchmark.reading import Reading
from contourkv.benchmark.storing import (
    FullStorage,
    MaskedStorage,
    PagedStorage,
    RaggedStorage,
    RectangularStorage,
    Storage,
    tokens_read,
)
from contourkv.errors import InvariantBroken
from contourkv.held import Held, held_bytes
from contourkv.press.contour import TABLE_BYTES
from contourkv.press.scores import attention_modules

KVPRESS = importlib.util.find_spec("kvpress") is not None
logging.getLogger("kvpress").setLevel(logging.ERROR)

TOKENS, HEADS = 45, 2  # longer than the window of the sliding layers
QUESTION, GOLD = ids(4, seed=8)[0].tolist(), ids(3, seed=9)[0].tolist()
KINDS = [
    RectangularStorage,
    RaggedStorage,
    pytest.param(MaskedStorage, marks=pytest.mark.skipif(not KVPRESS, reason="kvpress is not installed")),
]
# Rectangles and kvpress's fake keys know nothing of sliding windows; one fake key has to be far from every query of its
# head, which needs more dimensions than there are queries.
DENSE = {"llama": {"head_dim": 32}, "qwen3": {"head_dim": 32}}


@functools.cache
def model_of(architecture: str) -> transformers.PreTrainedModel:
    if KVPRESS:
        import kvpress  # noqa: F401  # it wraps the attention functions that MaskedStorage relies on

    model = built(architecture, **DENSE.get(architecture, {}))
    with torch.no_grad():  # of padding it is zero, to which no fake key is opposite
        model.get_input_embeddings().weight[0].normal_()
    return model


@functools.cache
def reading_of(architecture: str) -> Reading:
    return Reading.of(model_of(architecture), ids(TOKENS))


def drawn(reading: Reading, kind: type[Storage], seed: int, share: float) -> Chosen:
    """A random kept set: of as many keys in every head where the storage is a rectangle."""
    generator = torch.Generator().manual_seed(seed)
    keep, order = [], []
    for layer in reading.layers:
        scores = torch.rand(HEADS, reading.tokens, generator=generator)
        if kind is RectangularStorage:
            order.append(scores.topk(max(1, int(share * reading.tokens)), dim=1).indices)
            keep.append(torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[-1], True))
        else:
            mask = scores < share
            mask[:, layer.first + int(layer.first < 5) :][:, :2] = True
            keep.append(mask)
    return Chosen(keep, 0.0, order or None)


def logits_of(storage: Storage) -> torch.Tensor:
    """Logits of the question behind the context, (K, tokens, vocabulary)."""
    at, count = storage.reading.tokens, storage.count
    places = torch.arange(at, at + len(QUESTION)).expand(count, -1)
    with torch.no_grad():
        given = torch.tensor(QUESTION).expand(count, -1)
        return storage.reading.model(given, past_key_values=storage.cache, position_ids=places).logits


def hidden(reading: Reading, keep: list[torch.Tensor]) -> torch.Tensor:
    """The exact logits: every key of the context, and in each layer a mask that hides what its heads dropped."""
    model, asked = reading.model, len(QUESTION)
    query, key = torch.arange(TOKENS, TOKENS + asked)[:, None], torch.arange(TOKENS + asked)

    def mask(module, args, kwargs):
        window = reading.layers[module.layer_idx].window
        seen = (key <= query) & (key > query - (window or len(key)))
        seen = seen.expand(1, HEADS, -1, -1).clone()
        seen[0, :, :, :TOKENS] &= keep[module.layer_idx][:, None]
        seen = seen.repeat_interleave(module.num_key_value_groups, dim=1)
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        return args, {**kwargs, "attention_mask": bias}

    hooks = [module.register_forward_pre_hook(mask, with_kwargs=True) for module in attention_modules(model)]
    try:
        with torch.no_grad():
            return model(torch.tensor([QUESTION]), past_key_values=reading.plain_cache()).logits
    finally:
        for hook in hooks:
            hook.remove()


class TestWhatIsSeen:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=15)
    @given(
        architecture=st.sampled_from(ARCHITECTURES),
        seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3),
        share=st.sampled_from([0.1, 0.4, 0.9]),
    )
    def test_is_the_kept_set_and_the_question(self, kind, architecture, seeds, share):
        if kind is not RaggedStorage:
            architecture = list(DENSE)[len(seeds) % 2]
        reading = reading_of(architecture)
        chosen = [drawn(reading, kind, seed, share) for seed in seeds]
        storage = kind(reading, chosen)
        with storage.ready():
            found = logits_of(storage)
        for each, logits in zip(chosen, found, strict=True):
            torch.testing.assert_close(logits[None], hidden(reading, each.keep), atol=TOLERANCE, rtol=TOLERANCE)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_everything_kept_is_the_full_cache(self, architecture):
        reading = reading_of(architecture)
        every = [torch.ones(HEADS, TOKENS, dtype=torch.bool)] * len(reading.layers)
        full = FullStorage(reading, [Chosen([], 0.0)])
        wanted = logits_of(full)
        for storage in (RaggedStorage(reading, [Chosen(every, 0.0)] * 2), PagedStorage(reading, [1.0, 1.0])):
            torch.testing.assert_close(logits_of(storage), wanted.expand(2, -1, -1), atol=TOLERANCE, rtol=TOLERANCE)

    @settings(max_examples=20)
    @given(architecture=st.sampled_from(ARCHITECTURES), seed=st.integers(0, 999))
    def test_of_a_sliding_layer_nothing_is_held_that_its_window_cannot_show(self, architecture, seed):
        reading = reading_of(architecture)
        every = [torch.ones(HEADS, TOKENS, dtype=torch.bool)] * len(reading.layers)
        chosen = [Chosen(every, 0.0), drawn(reading, RaggedStorage, seed, 0.5)]
        storage = RaggedStorage(reading, chosen)
        for index, layer in enumerate(reading.layers):
            for sequence, each in enumerate(chosen):
                for head in range(HEADS):
                    held = storage.cache.kept_positions(index, sequence, head).tolist()
                    assert held == [at for at in each.keep[index][head].nonzero()[:, 0].tolist() if at >= layer.first]
            assert layer.window is None or layer.first == TOKENS - WINDOW + 1


class TestBatch:
    @pytest.mark.parametrize("kind", [*KINDS, PagedStorage])
    @settings(max_examples=12)
    @given(data=st.data())
    def test_of_k_is_k_single_ones(self, kind, data):
        """Logits, answers, nats, bytes and entries."""
        architecture = data.draw(st.sampled_from(list(DENSE) if kind is MaskedStorage else ARCHITECTURES))
        reading, count = reading_of(architecture), data.draw(st.integers(1, 4))
        seeds = data.draw(st.lists(st.integers(0, 999), min_size=count, max_size=count))
        if kind is PagedStorage:
            kept = [0.1 + (seed % 9) / 10 for seed in seeds]
        else:
            kept = [drawn(reading, kind, seed, 0.2 + (seed % 3) * 0.3) for seed in seeds]
        together, alone = kind(reading, kept), [kind(reading, [each]) for each in kept]

        def each_of(storage: Storage) -> tuple:
            model, tokens = reading.model, reading.tokens
            with storage.ready():
                held, entries = storage.held(), storage.entries()
                logits = logits_of(storage)
                read = storage.read_bytes()
                storage.forget()
                given = answers(model, storage.cache, QUESTION, tokens, storage.count, 4, frozenset())
                storage.forget()
                losses = nats(model, storage.cache, QUESTION, GOLD, tokens, storage.count)
                storage.forget()
            return held, entries, read, given, logits, losses

        parts = list(zip(*map(each_of, alone), strict=True))
        held, entries, read, given, logits, losses = each_of(together)
        for mine, singles in zip((held, entries, read, given), parts[:4], strict=True):
            assert mine == [part for single in singles for part in single]
        torch.testing.assert_close(logits, torch.cat(parts[4]), atol=TOLERANCE, rtol=TOLERANCE)
        assert losses == pytest.approx([loss for single in parts[5] for loss in single], abs=TOLERANCE)

    @pytest.mark.parametrize("kind", [FullStorage, *KINDS, PagedStorage])
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_a_question_is_forgotten(self, kind, architecture):
        """The next one finds the context as it was, a sliding layer's whole window too."""
        reading = reading_of("llama" if kind in (MaskedStorage, RectangularStorage) else architecture)
        if kind is FullStorage:
            kept = [Chosen([], 0.0)]
        elif kind is PagedStorage:
            kept = [0.2, 0.7]
        else:
            kept = [drawn(reading, kind, seed, 0.4) for seed in (1, 2)]
        storage = kind(reading, kept)
        with storage.ready():
            held, entries, first = storage.held(), storage.entries(), logits_of(storage)
            for most in (1, 30):
                storage.forget()
                long = answers(reading.model, storage.cache, QUESTION, TOKENS, storage.count, most, frozenset())
                assert [len(row) for row in long] == [most] * storage.count
            storage.forget()
            assert torch.equal(logits_of(storage), first)
            storage.forget()
            assert [share.payload for share in storage.held()] == [share.payload for share in held]
            assert storage.entries() == entries

    @pytest.mark.parametrize("kind", [FullStorage, *KINDS, PagedStorage])
    def test_the_reading_stays_as_it_was(self, kind):
        """kvpress writes fake keys over dropped ones; not into these."""
        reading = reading_of("llama")
        before = [(layer.keys.clone(), layer.values.clone()) for layer in reading.layers]
        kept = [0.3] if kind is PagedStorage else [drawn(reading, kind, 3, 0.4)]
        storage = kind(reading, kept)
        with storage.ready():
            for _ in range(2):
                answers(reading.model, storage.cache, QUESTION, TOKENS, 1, 5, frozenset())
                storage.forget()
        for layer, (keys, values) in zip(reading.layers, before, strict=True):
            assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


class TestBytes:
    @pytest.mark.parametrize("kind", KINDS)
    @settings(max_examples=15)
    @given(seeds=st.lists(st.integers(0, 999), min_size=1, max_size=4), share=st.floats(0.05, 1))
    def test_shares_are_counted_by_hand_and_add_up(self, kind, seeds, share):
        reading = reading_of("llama")
        chosen = [drawn(reading, kind, seed, share) for seed in seeds]
        storage = kind(reading, chosen)
        dim = reading.layers[0].keys.shape[-1]
        with storage.ready():
            shares, total = storage.held(), held_bytes(storage.cache, reading.model)
            entries = storage.entries()
        assert Held(*(sum(getattr(s, part) for s in shares) for part in ("payload", "slack", "metadata"))) == total
        layers, everything = len(reading.layers), len(reading.layers) * HEADS * TOKENS
        for each, held, count in zip(chosen, shares, entries, strict=True):
            kept = sum(int(keep.sum()) for keep in each.keep)
            assert count == kept
            if kind is MaskedStorage:  # everything, and three int64 for each key dropped
                assert held == Held(everything * 2 * dim * 4, 0, 24 * (everything - kept))
            else:
                metadata = 4 * kept + TABLE_BYTES * HEADS * layers if kind is RaggedStorage else 0
                assert held == Held(kept * 2 * dim * 4, 0, metadata)
        assert storage.read_bytes() == [held.payload for held in shares]

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_the_full_cache_holds_what_transformers_holds(self, architecture):
        model, cache = model_of(architecture), DynamicCache(config=model_of(architecture).config)
        with torch.no_grad():
            model(ids(TOKENS), past_key_values=cache)
        storage = FullStorage(reading_of(architecture), [Chosen([], 0.0)])
        assert storage.held() == [held_bytes(cache)]
        shown = sum(layer.keys.shape[2] for layer in cache.layers)
        assert storage.entries() == [HEADS * shown]
        assert shown == sum(TOKENS - layer.first for layer in reading_of(architecture).layers)

    def test_quest_holds_all_and_reads_some(self):
        """Each sequence is booked with the whole context and its bounds, as it would hold them alone."""
        reading = Reading.of(built("llama", num_hidden_layers=4), ids(TOKENS))
        storage, entry = PagedStorage(reading, [0.4, 0.8]), 2 * 8 * 4
        held = storage.held()
        pages = -(-TOKENS // PAGE)
        assert held == [Held(4 * HEADS * TOKENS * entry, 0, 2 * HEADS * pages * 2 * 8 * 4)] * 2
        assert storage.entries() == [4 * HEADS * TOKENS] * 2
        logits_of(storage)
        few, many = storage.read_bytes()
        dense = 2 * HEADS * TOKENS * entry
        assert dense + 2 * HEADS * (TOKENS % PAGE) * entry <= few < many <= held[0].payload

    @given(tokens=st.integers(1, 10**6), digits=st.integers(1, 1000))
    def test_quest_reads_a_budgets_decimal_digits(self, tokens, digits):
        """0.7 of 1,440 tokens are 1,008, which are 63 pages: in floating point they are a little less."""
        assert tokens_read(0.7, 1440) == 1008
        assert tokens_read(digits / 1000, tokens) == max(1, digits * tokens // 1000)

    def test_a_question_that_was_not_forgotten_breaks_the_account(self):
        """The bytes are those of the context: of an asked cache they would be someone else's."""
        reading = reading_of("llama")
        storage = RaggedStorage(reading, [drawn(reading, RaggedStorage, seed, 0.4) for seed in (1, 2)])
        storage.held()
        logits_of(storage)
        with pytest.raises(
            InvariantBroken,
            match=r"^RaggedStorage: the sequences are booked with [\d,]+ bytes, the cache holds [\d,]+$",
        ):
            storage.held()

    @pytest.mark.parametrize("kind", KINDS[2:])
    def test_so_do_masks_that_are_not_there(self, kind):
        reading = reading_of("llama")
        with pytest.raises(InvariantBroken, match=r"^MaskedStorage: the sequences are booked with"):
            kind(reading, [drawn(reading, kind, 1, 0.4)]).held()

    def test_so_do_bytes_that_cannot_be_shared(self):
        """A buffer that only one of three sequences brought."""
        reading = reading_of("llama")
        storage = RectangularStorage(reading, [drawn(reading, RectangularStorage, seed, 0.4) for seed in (1, 2, 3)])
        storage.cache.extra = torch.zeros(1)
        with pytest.raises(InvariantBroken, match=r"^RectangularStorage: the sequences are booked with"):
            storage.held()


class TestReady:
    def masks(self, model: torch.nn.Module) -> list:
        return [getattr(module, "masked_key_indices", None) for module in attention_modules(model)]

    @pytest.mark.parametrize("kind", KINDS[2:])
    def test_masks_are_on_the_model_inside_alone(self, kind):
        reading = reading_of("llama")
        storage = kind(reading, [drawn(reading, kind, 1, 0.4)])
        before = self.masks(reading.model)
        with storage.ready():
            assert all(mask is own for mask, own in zip(self.masks(reading.model), storage.masks, strict=True))
            logits_of(storage)
        assert self.masks(reading.model) == before
        with pytest.raises(ZeroDivisionError), storage.ready():
            raise ZeroDivisionError
        assert self.masks(reading.model) == before

    @pytest.mark.parametrize("kind", KINDS[2:])
    def test_another_storage_is_asked_without_them(self, kind):
        reading = reading_of("llama")
        chosen = drawn(reading, RaggedStorage, 2, 0.4)
        first = logits_of(RaggedStorage(reading, [chosen]))
        masked = kind(reading, [drawn(reading, kind, 1, 0.1)])
        with masked.ready():
            logits_of(masked)
        assert torch.equal(logits_of(RaggedStorage(reading, [chosen])), first)
        full = FullStorage(reading, [Chosen([], 0.0)])
        every = [torch.ones(HEADS, TOKENS, dtype=torch.bool)] * len(reading.layers)
        torch.testing.assert_close(logits_of(full), hidden(reading, every), atol=TOLERANCE, rtol=TOLERANCE)

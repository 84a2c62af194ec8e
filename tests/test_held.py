"""Held bytes: every storage once and whole, whatever the cache; the table of what kvpress really holds."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

from contourkv.errors import InvalidInput
from contourkv.held import Held, held_bytes, readable
from contourkv.models.random_source import byte_tokenizer, tiny_config
from contourkv.ragged.cache import RaggedCache

TOKENS = 600


def storages(tensors) -> int:
    """Bytes of the distinct storages behind some tensors: the definition, without any walk."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def filled(cache: Cache, layers: int = 2, tokens: int = 5, heads: int = 2, dim: int = 4) -> Cache:
    for layer in range(layers):
        cache.update(torch.randn(1, heads, tokens, dim), torch.randn(1, heads, tokens, dim), layer)
    return cache


# Properties


@st.composite
def owned(draw) -> tuple[object, list[torch.Tensor]]:
    """A nest of containers and objects over tensors that share storages, and those tensors."""
    dtypes = st.lists(st.sampled_from([torch.float32, torch.int64, torch.bool]), min_size=1, max_size=4)
    buffers = [torch.zeros(draw(st.integers(1, 40)), dtype=dtype) for dtype in draw(dtypes)]
    tensors = []
    for _ in range(draw(st.integers(1, 8))):
        buffer = draw(st.sampled_from(buffers))
        first = draw(st.integers(0, len(buffer) - 1))
        tensors.append(buffer[first : draw(st.integers(first, len(buffer)))])
    made: list[object] = list(tensors)
    for tensor in list(made):
        shape = draw(st.sampled_from(["list", "tuple", "dict", "layer", "slots", "nested"]))
        if shape == "list":
            made.append([tensor, [tensor]])
        elif shape == "tuple":
            made.append((tensor, None, 3))
        elif shape == "dict":
            made.append({"keys": tensor, 2: (tensor,)})
        elif shape == "slots":
            made.append(Slotted(tensor))
        elif shape == "layer":
            layer = DynamicCache().layer_class_to_replicate()
            layer.keys = layer.values = tensor
            made.append(layer)
        else:
            outer = Plain()
            outer.inner, outer.keys, outer.again = Slotted([tensor]), tensor, outer  # a cycle
            made.append(outer)
    return made, tensors


class Plain:
    pass


class Slotted:
    __slots__ = ("content",)

    def __init__(self, content) -> None:
        self.content = content


@given(owned())
def test_the_total_is_the_bytes_of_all_distinct_storages(case):
    cache, tensors = case
    held = held_bytes(cache)
    assert held.total == held.payload + held.slack + held.metadata == storages(tensors)
    assert min(held.payload, held.slack, held.metadata) >= 0
    assert held_bytes([cache, copy.copy(cache), cache]) == held


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_dynamic_cache_holds_its_shapes(layers, tokens, heads, dtype):
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(*(torch.zeros(1, heads, tokens, 8, dtype=dtype) for _ in "kv"), layer)
    assert held_bytes(cache) == Held(payload=layers * 2 * heads * tokens * 8 * dtype.itemsize)


@given(st.integers(0, 2**50))
def test_readable_bytes_lie_within_half_a_tenth_of_the_unit(count):
    amount, unit = readable(count).split()
    factor = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(float(amount) * factor - count) <= 0.05 * factor + 1e-9


# Caches of transformers


def test_an_empty_cache_holds_nothing():
    assert held_bytes(DynamicCache()) == Held() == held_bytes(()) == held_bytes([DynamicCache(), []])


def test_unused_rows_of_a_static_cache_are_slack():
    config = tiny_config("llama")
    cache = StaticCache(config, max_cache_len=32)
    for layer in range(3):
        cache.update(torch.ones(1, 2, 5, 16), torch.ones(1, 2, 5, 16), layer, {"cache_position": torch.arange(5)})
    row = 2 * 2 * 16 * 4
    held = held_bytes(cache)
    assert held.payload == 3 * 5 * row and held.slack == 3 * 27 * row


def test_a_sliding_layer_keeps_the_buffer_that_it_cut():
    config = tiny_config("gemma3_text")  # layers 0 and 2 slide by 32
    cache = filled(DynamicCache(config=config), layers=3, tokens=50, dim=16)
    row = 2 * 2 * 16 * 4
    assert held_bytes(cache) == Held(payload=(31 + 50 + 31) * row, slack=2 * 19 * row, metadata=2 * 8)


def test_both_caches_of_an_encoder_decoder_count():
    parts = filled(DynamicCache()), filled(DynamicCache(), tokens=9)
    assert held_bytes(EncoderDecoderCache(*parts)).payload == sum(held_bytes(part).payload for part in parts)


def test_caches_and_tensors_may_come_in_tuples_lists_and_mappings():
    first, second = filled(DynamicCache()), filled(DynamicCache())
    both = held_bytes(first).total + held_bytes(second).total
    assert held_bytes((first, second)).total == held_bytes({"a": first, "b": [second, first]}).total == both
    legacy = tuple((layer.keys, layer.values) for layer in first.layers)
    assert held_bytes(legacy) == held_bytes(first)


class Int8Layer(QuantizedLayer):
    """Codes of one byte with a scale a row: the whole contract of transformers' quantized layers."""

    def _quantize(self, tensor, axis):
        scale = tensor.abs().amax(dim=-1, keepdim=True) / 127
        return (tensor / scale).round().to(torch.int8), {"scale": scale}

    def _dequantize(self, stored):
        return stored[0] * stored[1]["scale"]


def test_codes_and_scales_of_a_quantized_cache_are_payload():
    cache = filled(Cache(layers=[Int8Layer(), Int8Layer()]), tokens=10, dim=4)
    assert held_bytes(cache) == Held(payload=2 * 2 * (2 * 10) * (4 + 4))
    cache.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), 0)  # joins at full precision
    assert held_bytes(cache).payload == 2 * 2 * (2 * 10) * (4 + 4) + 2 * 2 * 4 * 4


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_quantized_caches_of_the_backends(backend):
    pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
    from transformers import QuantizedCache

    cache = QuantizedCache(backend, tiny_config("llama"), nbits=4, q_group_size=16, axis_key=0, axis_value=0)
    filled(cache, layers=3, tokens=64, dim=16)
    held = held_bytes(cache)
    full = 3 * 2 * 2 * 64 * 16 * 4
    assert full / 8 < held.payload <= held.total < full / 2  # codes of 4 bits for 32, and their scales


def test_a_view_holds_its_whole_buffer():
    cache = filled(DynamicCache(), layers=1, tokens=10)
    cache.crop(-7)
    assert held_bytes(cache) == Held(payload=3 * 64, slack=7 * 64)


def test_keys_and_values_of_one_buffer_are_not_counted_twice():
    layer = DynamicCache().layer_class_to_replicate()
    layer.keys, layer.values = torch.zeros(2, 1, 2, 5, 4).unbind(0)
    assert held_bytes(layer) == Held(payload=2 * 40 * 4)
    layer.values = layer.keys
    assert held_bytes(layer) == Held(payload=40 * 4, slack=40 * 4)


def test_a_layers_own_account_is_believed_and_its_storages_counted_once():
    cache = RaggedCache(tiny_config("llama"))
    keys, values = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    keep = torch.rand(1, 2, 8) < 0.5
    keep[..., 0] = True
    for layer in range(3):
        cache.take(layer, keys, values, keep, 8)
    cache.mark()
    held = held_bytes(cache)
    assert held.payload == 3 * int(keep.sum()) * 2 * 16 * 4 and held.slack == 0
    assert held.metadata >= 3 * int(keep.sum()) * 4  # positions
    for layer in range(3):
        cache.update(keys[:, :, :1], values[:, :, :1], layer)
    grown = held_bytes(cache)
    assert grown.payload == held.payload + 3 * 2 * 2 * 16 * 4 and grown.slack > 0


def test_arrays_and_tensors_over_the_same_memory_count_once():
    table = np.zeros(100, np.int32)
    cache = filled(DynamicCache())
    before = held_bytes(cache)
    cache.table, cache.part, cache.tensor = table, table[10:20], torch.from_numpy(table)
    assert held_bytes(cache) == Held(before.payload, 0, 400)


def test_what_a_cache_only_points_to_is_not_its_own():
    cache = filled(DynamicCache())
    before = held_bytes(cache)
    cache.model, cache.callback = torch.nn.Linear(50, 50), torch.nn.Linear(50, 50).forward
    assert held_bytes(cache) == before


@pytest.mark.parametrize("wrong", [None, "cache", 3, torch.nn.Linear(2, 2), DynamicCache, print, object()])
def test_what_is_no_cache_is_refused(wrong):
    with pytest.raises(InvalidInput, match="cache: expected a transformers cache"):
        held_bytes(wrong)


def test_it_reads_well():
    assert str(Held(1536, 0, 12)) == "1.5 KiB held (payload 1.5 KiB, slack 0 B, metadata 12 B)"


# What kvpress holds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("kvpress")
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    folder = tmp_path_factory.mktemp("held")
    config = tiny_config("llama")
    config.num_hidden_layers, config.layer_types = 4, None
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer(adds_bos=False).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def held_after(model):
    """Held(cache), Held(cache and model) after a prefill of 600 tokens with a press."""

    def run(press) -> tuple[Held, Held]:
        cache = DynamicCache()
        ids = torch.randint(3, 250, (1, TOKENS), generator=torch.Generator().manual_seed(4))
        with torch.no_grad(), press(model):
            model(ids, past_key_values=cache)
        return held_bytes(cache), held_bytes(cache, model)

    yield run
    for module in model.modules():
        if hasattr(module, "masked_key_indices"):
            del module.masked_key_indices


FULL_BYTES = 614_400


@pytest.mark.parametrize("name", ["KnormPress", "SnapKVPress", "TOVAPress", "StreamingLLMPress", "CompactorPress"])
def test_a_press_of_equal_counts_really_cuts(held_after, name):
    import kvpress

    assert held_after(getattr(kvpress, name)(0.5)) == (Held(FULL_BYTES // 2), Held(FULL_BYTES // 2))


def test_a_head_wise_press_holds_everything_and_its_index_triples(held_after):
    import kvpress

    alone, with_model = held_after(kvpress.AdaKVPress(kvpress.KnormPress(0.5)))
    evicted = 4 * 2 * TOKENS // 2
    assert alone == Held(FULL_BYTES)
    assert with_model == Held(FULL_BYTES, 0, evicted * 3 * 8)


def test_kvzip_holds_its_replay_buffer_too(held_after, model):
    import kvpress

    alone, with_model = held_after(kvpress.KVzipPress(0.5))
    # Keys are views of context, instruction and context again; one token of the tokenizer is one byte of text.
    replay = len("\n\nRepeat the previous context exactly.") + len("\n") + TOKENS
    assert alone == Held(FULL_BYTES, replay * FULL_BYTES // TOKENS)
    assert with_model.metadata - alone.metadata == 4 * 2 * TOKENS // 2 * 3 * 8

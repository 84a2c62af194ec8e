"""Who takes the Triton way: `attend`, and a cache's layers through it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_oracle import assert_close, oracle, random_layer
from transformers import LlamaConfig, LlamaForCausalLM

from contourkv.errors import InvalidInput
from contourkv.held import held_bytes
from contourkv.ragged import RaggedCache, RaggedLayer, attention, split_k

pytestmark = pytest.mark.skipif(not split_k.INTERPRETED, reason="the CPU stands in for a GPU here")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tensors on the CPU count as on a GPU; the rows of every call that takes the Triton way."""
    calls: list[int] = []

    def counted(query: torch.Tensor, *args: object, attend=split_k.attend) -> torch.Tensor:
        calls.append(query.shape[1] * query.shape[2])
        return attend(query, *args)

    monkeypatch.setattr(attention, "takes_triton", lambda device: True)
    monkeypatch.setattr("contourkv.ragged.layer.takes_triton", lambda device: True)
    monkeypatch.setattr(split_k, "DEVICES", ("cpu",))
    monkeypatch.setattr(split_k, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(split_k, "attend", counted)
    return calls


def test_few_rows_take_it(taken: list[int]) -> None:
    layer = random_layer(1, [[30, 0]], size=16, rows=2, tail=3).to(torch.float32)
    assert_close(layer.attend(), oracle(layer), torch.float32)
    numbers = {"tail_length": torch.tensor(layer.tail_length), "tail_first": torch.tensor([layer.tail_first])}
    assert torch.equal(replace(layer, **numbers).attend(), layer.attend())
    assert len(taken) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.to(torch.float64),
        lambda layer: replace(layer, keys=layer.keys.t().contiguous().t()),
        lambda layer: replace(layer, values=layer.values.repeat(1, 2)[:, ::2]),
        lambda layer: replace(layer, tail_keys=layer.tail_keys.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda layer: replace(layer, tail_values=layer.tail_values.transpose(2, 3).contiguous().transpose(2, 3)),
    ],
)
def test_what_it_cannot_take(taken: list[int], change) -> None:
    layer = change(random_layer(1, [[30, 6]], size=16, rows=2, tail=3).to(torch.float32))
    assert_close(layer.attend(), oracle(layer), layer.query.dtype)
    assert taken == []


def test_heads_that_are_too_large_and_no_rows(taken: list[int]) -> None:
    for layer in (random_layer(1, [[9]], size=257), random_layer(1, [[9]], size=8, value_size=257)):
        assert_close(layer.to(torch.float32).attend(), oracle(layer), torch.float32)
    assert random_layer(4, [[10, 3]], rows=0, tail=2).to(torch.float32).attend().shape == (1, 4, 0, 16)
    assert taken == []


def test_many_rows_do_not(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TRITON_ROWS", 4)
    for rows, times in ((2, 1), (3, 0)):
        layer = random_layer(1, [[30, 6]], size=16, group=2, rows=rows, tail=3).to(torch.float32)
        taken.clear()
        assert_close(layer.attend(), oracle(layer), torch.float32)
        assert len(taken) == times


@pytest.mark.parametrize("change", [{"begin": -1}, {"end": 1}])
def test_runs_on_the_cpu_are_checked(taken: list[int], change: dict[str, int]) -> None:
    layer = random_layer(1, [[10, 4]], size=16).to(torch.float32)
    moved = {name: getattr(layer, name) + by for name, by in change.items()}
    with pytest.raises(InvalidInput, match="begin, end"):
        replace(layer, **moved).attend()
    assert taken == []


def test_no_gpu_no_triton() -> None:
    assert not attention.takes_triton(torch.device("cpu")) and attention.triton_way() is split_k


def test_a_gpu_with_little_shared_memory() -> None:
    large = split_k.default_config(torch.bfloat16, 128, 128, 227 * 1024)
    small = split_k.default_config(torch.bfloat16, 128, 128, 99 * 1024)
    assert large == split_k.CONFIGS[2, 128] and (small.chunk, small.stages, small.programs) == (large.chunk, 2, 1)


def test_a_triton_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    attention.triton_way.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr("triton.__version__", "3.5.1")
            assert attention.triton_way() is None
    finally:
        attention.triton_way.cache_clear()


def test_a_layer_keeps_its_runs_where_they_are_read(taken: list[int]) -> None:
    """What it gives to attention follows its runs through everything that changes them."""
    layer = RaggedLayer(0)
    generator = torch.Generator().manual_seed(1)

    def parts(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.randn(2, 2, tokens, 8, generator=generator) for _ in range(2))

    def follows() -> bool:
        begin, end = layer._runs()
        again = layer._runs()
        return torch.equal(begin, layer.begin) and torch.equal(end, layer.end) and again[0] is begin and again[1] is end

    layer.update(*parts(9))
    assert follows()
    layer.evict(torch.rand(2, 2, 9, generator=generator) < 0.5)
    assert follows()
    layer.mark()
    marked = layer._runs()[1].clone()
    layer.update(*parts(1))
    layer.reorder_cache(torch.tensor([1, 0]))
    assert follows() and not torch.equal(layer._runs()[1], marked)
    layer.rollback()
    assert follows() and torch.equal(layer._runs()[1], marked)
    before = held_bytes(layer)
    layer._copied_runs = layer.begin, layer.begin.clone(), layer.end.clone()  # as on a GPU
    copied = held_bytes(layer)
    assert (copied.payload, copied.slack, copied.metadata) == (before.payload, before.slack, before.metadata + 64)
    layer.reset()
    assert layer._copied_runs is None


def test_a_model_decodes_the_same(taken: list[int]) -> None:
    config = LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=32,
        vocab_size=50,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (1, 12))
    keep = torch.rand(1, 2, 10) < 0.6
    logits = []
    for ways in ("triton", "other"):
        cache = RaggedCache(config)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if ways == "other":
                patch.setattr(attention, "TRITON_ROWS", 0)
            model(ids[:, :10], past_key_values=cache)
            for index in range(2):
                cache.evict(index, keep)
            logits.append([model(ids[:, at : at + 1], past_key_values=cache).logits for at in (10, 11)])
    assert len(taken) == 4
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)

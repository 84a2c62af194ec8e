"""Attention over runs and a tail against a float64 loop over heads and rows, and what must not change it."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from attention_oracle import TOLERANCE, Layer, assert_close, layers, oracle, random_layer
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from contourkv.errors import InvalidInput
from contourkv.ragged import attention, decode

WAYS = ("compiled", "flash", "products")
COMPILED = (torch.float32, torch.bfloat16, torch.float64)


@contextmanager
def only(way: str):
    """Attend one way: by the compiled kernel, by PyTorch's fused kernel, or by plain products in small blocks."""
    with pytest.MonkeyPatch.context() as patch:
        if way == "compiled":
            patch.setattr(attention, "COMPILED_ROWS", 10**6)
        else:
            patch.setattr(attention, "COMPILED_ROWS", 0)
            patch.setattr(attention, "SCORES", 200)
        if way == "products":
            patch.setattr(attention, "FLASH", None)
        yield


def in_every_way(dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)):
    """Parametrize a test over the ways of computing and the dtypes."""
    return pytest.mark.parametrize(("way", "dtype"), list(product(WAYS, dtypes)))


# ---------------------------------------------------------------------- against the definition


@pytest.mark.parametrize("way", WAYS)
@given(layer=layers(), dtype=st.sampled_from(list(TOLERANCE)))
@hypothesis_settings(max_examples=80)
def test_equals_the_definition(way: str, layer: Layer, dtype: torch.dtype) -> None:
    layer = layer.to(dtype)
    with only(way):
        output = layer.attend()
    assert output.dtype == dtype and output.shape == (*layer.query.shape[:3], layer.values.shape[1])
    assert output.transpose(1, 2).is_contiguous()
    assert_close(output, oracle(layer), dtype)


@in_every_way((torch.float64, torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("options", [{}, {"window": 40}, {"padded": True, "softcap": 3.0, "sinks": True}])
def test_many_rows(way: str, dtype: torch.dtype, options: dict) -> None:
    layer = random_layer(3, [[0, 70], [130, 5]], group=3, rows=60, tail=75, **options).to(dtype)
    with only(way):
        assert_close(layer.attend(), oracle(layer), dtype)


@pytest.mark.parametrize("dtype", COMPILED)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 255, 256, 257, 258, 511, 513])
def test_lengths_around_a_unit(dtype: torch.dtype, length: int) -> None:
    layer = random_layer(length, [[length, 0, length]], group=5, size=24, tail=length).to(dtype)
    with only("compiled"):
        assert_close(layer.attend(), oracle(layer), dtype)


# ---------------------------------------------------------------------- what changes nothing


@in_every_way()
@given(layer=layers(window=None), seed=st.integers(0, 99))
@hypothesis_settings(max_examples=25)
def test_order_inside_a_run(way: str, dtype: torch.dtype, layer: Layer, seed: int) -> None:
    layer = layer.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    order = torch.arange(len(layer.keys))
    for first, last in set(zip(layer.begin.flatten().tolist(), layer.end.flatten().tolist(), strict=True)):
        order[first:last] = first + torch.randperm(last - first, generator=generator)
    names = ("keys", "values", "positions")
    other = replace(layer, **{name: getattr(layer, name)[order] for name in names})
    with only(way):
        assert_close(other.attend(), layer.attend(), dtype)


@in_every_way()
@given(layer=layers(aliased=False, padded=False), moved=st.integers(0, 40))
@hypothesis_settings(max_examples=25)
def test_frozen_or_in_the_tail(way: str, dtype: torch.dtype, layer: Layer, moved: int) -> None:
    """The first slots of the tail appended to every run instead."""
    layer = layer.to(dtype)
    moved = min(moved, layer.tail_length - layer.query.shape[2])

    def appended(flat: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
        runs = zip(layer.begin.flatten().tolist(), layer.end.flatten().tolist(), strict=True)
        added = tail[:, :, :moved].flatten(0, 1)
        return torch.cat([part for r, (b, e) in enumerate(runs) for part in (flat[b:e], added[r])])

    positions = (layer.tail_first + torch.arange(layer.tail_keys.shape[2])).int().expand(*layer.tail_keys.shape[:3])
    counts = (layer.end - layer.begin + moved).flatten()
    end = counts.cumsum(0).view_as(layer.end)
    other = replace(
        layer,
        keys=appended(layer.keys, layer.tail_keys),
        values=appended(layer.values, layer.tail_values),
        positions=appended(layer.positions, positions),
        begin=end - counts.view_as(end),
        end=end,
        tail_keys=layer.tail_keys[:, :, moved:].contiguous(),
        tail_values=layer.tail_values[:, :, moved:].contiguous(),
        tail_length=layer.tail_length - moved,
        tail_first=layer.tail_first + moved,
    )
    with only(way):
        assert_close(other.attend(), layer.attend(), dtype)


@in_every_way()
@given(layer=layers(), slack=st.integers(1, 9))
@hypothesis_settings(max_examples=20)
def test_what_lies_beyond_is_not_read(way: str, dtype: torch.dtype, layer: Layer, slack: int) -> None:
    """Slots behind the tail and entries of no run may hold anything."""
    layer = layer.to(dtype)

    def spoiled(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] = slack
        return torch.cat([tensor, torch.full(shape, float("nan"), dtype=dtype)], dim)

    grown = {name: spoiled(getattr(layer, name), 2) for name in ("tail_keys", "tail_values")}
    grown |= {name: spoiled(getattr(layer, name), 0) for name in ("keys", "values")}
    grown["positions"] = torch.cat([layer.positions, torch.zeros(slack, dtype=torch.int32)])
    if layer.tail_visible is not None:
        more = torch.ones(len(layer.tail_visible), slack, dtype=torch.bool)
        grown["tail_visible"] = torch.cat([layer.tail_visible, more], 1)
    with only(way):
        assert_close(replace(layer, **grown).attend(), layer.attend(), dtype)


@in_every_way()
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: {"query": layer.query.repeat_interleave(2, dim=3)[..., ::2]},
        lambda layer: {"query": layer.query.contiguous()},
        lambda layer: {name: getattr(layer, name).t().contiguous().t() for name in ("keys", "values")},
        lambda layer: {"tail_keys": layer.tail_keys.transpose(1, 2).contiguous().transpose(1, 2)},
        lambda layer: {"tail_values": layer.tail_values.transpose(0, 3).contiguous().transpose(0, 3)},
        lambda layer: {"begin": layer.begin.repeat_interleave(2, dim=1)[:, ::2]},
        lambda layer: {"tail_visible": torch.ones(9, 2, dtype=torch.bool).t()},
        lambda layer: {"positions": layer.positions.repeat_interleave(2)[::2], "window": 10**6},
    ],
)
def test_any_strides(way: str, dtype: torch.dtype, change) -> None:
    layer = random_layer(5, [[100, 30], [0, 9]], group=2, rows=3, tail=6).to(dtype)
    with only(way):
        assert_close(replace(layer, **change(layer)).attend(), layer.attend(), dtype)


@in_every_way((torch.float32, torch.bfloat16))
def test_shared_runs_equal_copied_ones(way: str, dtype: torch.dtype) -> None:
    layer = random_layer(7, [[90, 0, 300], [1, 2, 3]], aliased=True).to(dtype)
    with only(way):
        assert_close(layer.attend(), layer.unshared().attend(), dtype)


# ---------------------------------------------------------------------- edges


@in_every_way()
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_that_sees_nothing_gives_zeros(way: str, dtype: torch.dtype, sinks: bool) -> None:
    layer = random_layer(2, [[0, 0], [3, 0]], rows=2, tail=5, sinks=sinks).to(dtype)
    layer = replace(layer, tail_visible=torch.zeros(2, 8, dtype=torch.bool))
    with only(way):
        output = layer.attend()
    assert not output[0].any() and not output[1, 2:].any() and output[1, :2].any()
    assert_close(output, oracle(layer), dtype)


@in_every_way((torch.float64, torch.float32, torch.bfloat16))
def test_large_scores_do_not_overflow(way: str, dtype: torch.dtype) -> None:
    layer = random_layer(4, [[400, 3]], rows=2, tail=4)
    layer = replace(layer, query=layer.query * 3e4).to(dtype)
    with only(way):
        output = layer.attend()
    assert output.isfinite().all()
    if dtype == torch.float64:
        torch.testing.assert_close(output, oracle(layer), atol=1e-9, rtol=1e-9)
    # Any weights at all leave the output between the values.
    assert output.abs().max() <= layer.values.abs().max().maximum(layer.tail_values.abs().max()) * 1.01


@in_every_way()
def test_a_broken_key_is_not_passed_over(way: str, dtype: torch.dtype) -> None:
    layer = random_layer(4, [[400]], group=4).to(dtype)
    layer.keys[77, 3] = float("nan")
    with only(way):
        assert layer.attend().isnan().all()


@in_every_way()
def test_the_tails_numbers_as_tensors(way: str, dtype: torch.dtype) -> None:
    layer = random_layer(6, [[50, 0], [9, 70]], rows=3, tail=11, window=40).to(dtype)
    numbers = {"tail_length": torch.tensor(layer.tail_length), "tail_first": torch.tensor([layer.tail_first])}
    with only(way):
        expected = layer.attend()
        for names in (["tail_length"], ["tail_first"], ["tail_length", "tail_first"]):
            assert torch.equal(replace(layer, **{name: numbers[name] for name in names}).attend(), expected)


def test_without_numba() -> None:
    """The PyTorch way does it all, and nothing else is missed; any other import error is passed on."""
    script = """
import sys
sys.modules["numba"] = None
import torch
from contourkv.ragged.attention import attend
k = torch.randn(5, 8)
attend(torch.randn(1, 2, 1, 8), k, k, torch.arange(5), torch.tensor([[0]]), torch.tensor([[5]]),
       torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8), 1, 9, scaling=1.0)
sys.modules["contourkv.errors"] = None
del sys.modules["contourkv.ragged.attention"]
try:
    import contourkv.ragged.attention
except ModuleNotFoundError as error:
    print(error.name)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["contourkv.errors"], done.stderr


@in_every_way()
def test_no_rows(way: str, dtype: torch.dtype) -> None:
    layer = random_layer(4, [[10, 3]], rows=0, tail=2).to(dtype)
    with only(way):
        assert layer.attend().shape == (1, 4, 0, 16)


def test_bfloat16_is_rounded_to_nearest() -> None:
    layer = random_layer(8, [[300, 40]], group=4).to(torch.bfloat16)
    with only("compiled"):
        exact = layer.to(torch.float32).attend()
        error = (layer.attend().float() - exact).abs() / exact.abs()
    assert error.max() <= 2**-8 * 1.01


@pytest.mark.parametrize("way", ["flash", "products"])
def test_scores_held_at_a_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr(attention, "_weights", lambda *a, f=attention._weights: held.append(f(*a)) or held[-1])
    layer = random_layer(1, [[200, 40]], rows=90, tail=100, window=150).to(torch.float32)
    with only(way):
        monkeypatch.setattr(attention, "SCORES", 2000)
        layer.attend()
    assert all(weights.numel() <= 2000 for weights, _ in held) and bool(held) == (way == "products")


# ---------------------------------------------------------------------- threads


def heavy_layer(dtype: torch.dtype = torch.float32) -> Layer:
    """Enough to wake helpers for."""
    return random_layer(9, [[900, 4000, 30]], group=4, size=64, tail=300).to(dtype)


@pytest.fixture
def threads():
    """Sets the number of threads; puts the old one back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", COMPILED)
def test_any_number_of_threads(threads, dtype: torch.dtype) -> None:
    layer = heavy_layer(dtype)
    threads(1)
    alone = layer.attend()
    assert_close(alone, oracle(layer), dtype)
    for number in (2, 5, 3):
        threads(number)
        for _ in range(20):
            assert torch.equal(layer.attend(), alone)


def test_callers_at_the_same_time(threads) -> None:
    threads(3)
    several = [random_layer(seed, [[900, 4000, 30]], group=4, size=64).to(torch.float32) for seed in range(4)]
    expected = [layer.attend() for layer in several]

    def call(which: int) -> bool:
        return all(torch.equal(several[which].attend(), expected[which]) for _ in range(30))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


def test_after_an_interrupted_call(threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller is interrupted while it waits for a helper; the scratch that the helper is at is not used again."""
    threads(2)
    layer = heavy_layer()
    expected = layer.attend()
    scratch = decode._THREAD.scratch(torch.float32)

    def interrupted(*_: object) -> None:
        scratch.integers[decode.GATE] = 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decode._Team, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            layer.attend()
    assert scratch.borrowed is not None
    assert torch.equal(layer.attend(), expected)
    assert decode._THREAD.scratch(torch.float32) is not scratch


def test_nothing_is_kept_of_a_call() -> None:
    layer = random_layer(9, [[9, 40]]).to(torch.float32)
    kept = weakref.ref(layer.keys)
    layer.attend()
    del layer
    assert kept() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_in_a_forked_process(threads) -> None:
    threads(2)
    layer = heavy_layer()
    expected = layer.attend()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if torch.equal(layer.attend(), expected) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("query", lambda layer: {"query": layer.query[0]}),
        ("query", lambda layer: {"query": layer.query[:, :3]}),
        ("query", lambda layer: {"query": layer.query.half()}),
        ("keys", lambda layer: {"keys": layer.keys[:, :8]}),
        ("keys", lambda layer: {"values": layer.values[1:]}),
        ("tail_keys", lambda layer: {"tail_keys": layer.tail_keys[:, :1]}),
        ("tail_keys", lambda layer: {"tail_values": layer.tail_values[:, :, 1:]}),
        ("tail_length", lambda layer: {"tail_length": 1}),
        ("tail_length", lambda layer: {"tail_length": 50}),
        ("tail_length", lambda layer: {"tail_length": torch.tensor(50)}),
        ("tail_length", lambda layer: {"tail_length": torch.tensor([5, 5])}),
        ("tail_first", lambda layer: {"tail_first": torch.tensor(21.0)}),
        ("tail_first", lambda layer: {"tail_first": torch.tensor(21, device="meta")}),
        ("tail_visible", lambda layer: {"tail_visible": torch.ones(1, 3, dtype=torch.bool)}),
        ("positions", lambda layer: {"positions": layer.positions[1:]}),
        ("sinks", lambda layer: {"sinks": torch.zeros(3)}),
        ("begin", lambda layer: {"begin": layer.begin - 1}),
        ("begin", lambda layer: {"end": layer.end + 1}),
        ("begin", lambda layer: {"begin": layer.end, "end": layer.begin}),
    ],
)
def test_bad_input_is_named(way: str, named: str, change) -> None:
    layer = random_layer(1, [[10, 4]], rows=2, tail=5).to(torch.float32)
    with only(way), pytest.raises(InvalidInput, match=rf"\b{named}\b"):
        replace(layer, **change(layer)).attend()

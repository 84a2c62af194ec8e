"""The Triton kernels against the float64 loop over heads and rows, and what must not change what they give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from attention_oracle import Layer, assert_close, layers, oracle, random_layer
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from contourkv.ragged import split_k

DEVICE = "cpu" if split_k.INTERPRETED else "cuda"
DTYPES = split_k.DTYPES


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three multiprocessors: enough for shares that begin and end inside runs, and quick to interpret."""
    monkeypatch.setattr(split_k, "multiprocessors", lambda device: 3)


def on_device(layer: Layer) -> Layer:
    tensors = {name: value.to(DEVICE) for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    return replace(layer, **tensors)


def attend(layer: Layer, config: split_k.Config | None = None) -> torch.Tensor:
    """The kernels' output, on the CPU."""
    layer = on_device(layer)
    return split_k.attend(layer.query, layer.contents(), layer.scaling, layer.softcap, layer.sinks, config).cpu()


# ---------------------------------------------------------------------- against the definition


@given(layer=layers(most_rows=3, most_heads=2), dtype=st.sampled_from(DTYPES))
@hypothesis_settings(max_examples=30)
def test_equals_the_definition(layer: Layer, dtype: torch.dtype) -> None:
    layer = layer.to(dtype)
    output = attend(layer)
    assert output.dtype == dtype and output.shape == (*layer.query.shape[:3], layer.values.shape[1])
    assert output.transpose(1, 2).is_contiguous()
    assert_close(output, oracle(layer), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128)])
def test_head_sizes(size: int, value_size: int, dtype: torch.dtype) -> None:
    layer = random_layer(size, [[150, 0, 20]], group=4, size=size, value_size=value_size, tail=9).to(dtype)
    assert_close(attend(layer), oracle(layer), dtype)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("rows", [1, 3])
def test_groups(group: int, rows: int) -> None:
    layer = random_layer(group, [[70, 130]], group=group, rows=rows, size=64).to(torch.bfloat16)
    assert_close(attend(layer), oracle(layer), torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13, 16])
@pytest.mark.parametrize("options", [{}, {"window": 9, "padded": True}])
def test_rows_at_once(rows: int, options: dict) -> None:
    """Causal among themselves, the first of them in the middle of the tail."""
    layer = random_layer(rows, [[40]], group=2, rows=rows, tail=rows + 70, size=16, **options).to(torch.float32)
    assert_close(attend(layer), oracle(layer), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_a_program_takes(dtype: torch.dtype) -> None:
    layer = random_layer(3, [[75]], group=3, rows=25, tail=30, size=16).to(dtype)
    assert 3 * 25 > split_k.default_config(dtype, 16, 16).rows
    assert_close(attend(layer), oracle(layer), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 60},
        {"window": 10**6},
        {"softcap": 2.0},
        {"softcap": 50.0},
        {"sinks": True},
        {"padded": True},
        {"window": 30, "softcap": 5.0, "sinks": True, "padded": True, "rows": 2, "aliased": True},
    ],
)
def test_options(dtype: torch.dtype, options: dict) -> None:
    layer = random_layer(11, [[90, 3], [0, 140]], size=64, tail=40, **options).to(dtype)
    assert_close(attend(layer), oracle(layer), dtype)


def test_lengths_around_a_unit() -> None:
    for length in (1, 63, 64, 65, 128, 129):
        layer = random_layer(length, [[length, 0, length]], size=64, tail=length).to(torch.float32)
        assert_close(attend(layer), oracle(layer), torch.float32)


# ---------------------------------------------------------------------- what changes nothing


def test_shared_runs_equal_copied_ones() -> None:
    layer = random_layer(7, [[90, 0, 300], [1, 2, 3]], aliased=True, size=64).to(torch.float32)
    assert torch.equal(attend(layer), attend(layer.unshared()))
    assert_close(attend(layer), oracle(layer), torch.float32)


def test_how_the_work_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any chunk and any number of programs give the same up to rounding; the same ones give the same bits."""
    layer = random_layer(9, [[500, 0, 33], [7, 100, 260]], size=64, tail=20, sinks=True).to(torch.float32)
    expected = oracle(layer)
    for multiprocessors, chunk, programs in ((1, 64, 1), (1, 16, 2), (5, 32, 3), (40, 128, 1), (1000, 128, 4)):
        monkeypatch.setattr(split_k, "multiprocessors", lambda device, number=multiprocessors: number)
        output = attend(layer, split_k.Config(chunk=chunk, programs=programs))
        assert_close(output, expected, torch.float32)
    assert torch.equal(output, attend(layer, split_k.Config(chunk=chunk, programs=programs)))


def test_what_lies_beyond_is_not_read() -> None:
    layer = random_layer(5, [[70, 9], [0, 130]], size=16, rows=2, tail=20, padded=True, slack=0).to(torch.bfloat16)
    nan = float("nan")
    spoiled = {
        name: torch.nn.functional.pad(getattr(layer, name), (0, 0, 0, 7), value=nan) for name in ("keys", "values")
    }
    spoiled |= {
        name: torch.nn.functional.pad(getattr(layer, name), (0, 0, 0, 7), value=nan)
        for name in ("tail_keys", "tail_values")
    }
    spoiled["positions"] = torch.nn.functional.pad(layer.positions, (0, 7))
    spoiled["tail_visible"] = torch.nn.functional.pad(layer.tail_visible, (0, 7), value=True)
    assert torch.equal(attend(replace(layer, **spoiled)), attend(layer))


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: {"query": layer.query.repeat_interleave(2, dim=3)[..., ::2]},
        lambda layer: {"query": layer.query.contiguous()},
        lambda layer: {"begin": layer.begin.repeat_interleave(2, dim=1)[:, ::2], "end": layer.end.int()},
        lambda layer: {"tail_visible": layer.tail_visible.t().contiguous().t()},
        lambda layer: {"positions": layer.positions.repeat_interleave(2)[::2]},
        lambda layer: {"tail_keys": torch.nn.functional.pad(layer.tail_keys, (0, 0, 0, 5))[:, :, :-5]},
    ],
)
def test_strides(change) -> None:
    layer = random_layer(5, [[100, 30], [0, 9]], rows=3, tail=6, padded=True, window=80).to(torch.float32)
    assert torch.equal(attend(replace(layer, **change(layer))), attend(layer))


# ---------------------------------------------------------------------- other numbers in the same tensors


def grids_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What the kernels are launched with from here on: grids, and every argument that is not a tensor."""
    seen: list[tuple] = []
    for name in ("_split", "_join"):
        kernel = getattr(split_k, name)

        class Launcher:
            def __init__(self, kernel: object) -> None:
                self.kernel = kernel

            def __getitem__(self, grid: tuple) -> object:
                def launch(*args: object, **named: object) -> None:
                    plain = [a for a in (*args, *named.values()) if not isinstance(a, torch.Tensor)]
                    seen.append((grid, *plain))
                    self.kernel[grid](*args, **named)

                return launch

        monkeypatch.setattr(split_k, name, Launcher(kernel))
    return seen


@pytest.mark.parametrize("options", [{}, {"window": 150, "padded": True, "sinks": True}])
def test_lengths_change_under_the_same_launch(monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    """As a captured graph replays it: same buffers, same grids, same numbers passed; what the tensors hold differs."""
    rows, capacity = 2, 90
    layer = random_layer(1, [[120, 40], [60, 100]], rows=rows, tail=capacity, slack=0, size=16, **options)
    layer = on_device(layer.to(torch.float32))
    begin, end, length, first = (
        layer.begin.clone(),
        layer.end.clone(),
        torch.zeros((), dtype=torch.int64, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    fixed = replace(layer, begin=begin, end=end, tail_length=length, tail_first=first)
    launches = grids_of(monkeypatch)
    steps = [
        ([[0, 120], [160, 220]], [[120, 160], [220, 320]], 2, 400),
        ([[0, 120], [160, 220]], [[120, 160], [220, 320]], 3, 400),
        ([[0, 0], [0, 0]], [[0, 0], [0, 0]], 64, 410),
        ([[0, 0], [100, 100]], [[320, 0], [101, 165]], 65, 420),  # nearly all in one head
        ([[5, 5], [5, 5]], [[300, 300], [300, 300]], 90, 430),  # shared by all
    ]
    for begins, ends, tail_length, tail_first in steps:
        for tensor, numbers in ((begin, begins), (end, ends), (length, tail_length), (first, [tail_first])):
            tensor.copy_(torch.tensor(numbers))
        output = split_k.attend(fixed.query, fixed.contents(), fixed.scaling, None, fixed.sinks).cpu()
        now = replace(fixed, tail_length=tail_length, tail_first=tail_first)
        cpu = {name: value.cpu() for name, value in vars(now).items() if isinstance(value, torch.Tensor)}
        assert_close(output, oracle(replace(now, **cpu)), torch.float32)
    assert len(launches) == 2 * len(steps) and len(set(launches)) == 2


def test_numbers_beyond_the_buffers_are_cut_off() -> None:
    layer = random_layer(4, [[50, 30]], tail=12, slack=0, size=16).to(torch.float32)
    wild = replace(
        layer,
        begin=torch.tensor([[-7, 50]]),
        end=torch.tensor([[50, 10**12]]),
        tail_length=torch.tensor(10**12, device=DEVICE),
        tail_first=torch.tensor(layer.tail_first, device=DEVICE),
    )
    assert torch.equal(attend(wild), attend(layer))
    backwards = replace(layer, begin=layer.end, end=layer.begin)
    assert torch.equal(attend(backwards), attend(replace(layer, begin=layer.begin, end=layer.begin)))


# ---------------------------------------------------------------------- how the work is shared


share, parts = split_k._share, split_k._parts


@triton.jit
def _shares(begin, end, runs, entries, tail_units, found, RUN_BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    program = tl.program_id(0)
    start, stop, first_run, last_run, before = share(
        begin, end, runs, entries, tail_units, program, tl.num_programs(0), RUN_BLOCK, CHUNK
    )
    tl.store(found + program * 5, start)
    tl.store(found + program * 5 + 1, stop)
    tl.store(found + program * 5 + 2, first_run)
    tl.store(found + program * 5 + 3, last_run)
    tl.store(found + program * 5 + 4, before)


@triton.jit
def _owners(begin, end, runs, entries, tail_units, found, programs, RUN_BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    run = tl.program_id(0)
    first, last = parts(begin, end, runs, entries, tail_units, run, programs, RUN_BLOCK, CHUNK)
    tl.store(found + run * 2, first)
    tl.store(found + run * 2 + 1, last)


def shares(
    lengths: list[int], tail_units: int, programs: int, run_block: int, chunk: int = 16
) -> tuple[list[list[int]], list[list[int]]]:
    """(start, stop, first run, last run, units before it) of every program; (first, last) program of every run."""
    end = torch.tensor(lengths, device=DEVICE).cumsum(0)
    begin = end - torch.tensor(lengths, device=DEVICE)
    found = torch.zeros(programs, 5, dtype=torch.int64, device=DEVICE)
    owners = torch.zeros(len(lengths), 2, dtype=torch.int64, device=DEVICE)
    given = begin, end, len(lengths), sum(lengths), tail_units
    _shares[(programs,)](*given, found, RUN_BLOCK=run_block, CHUNK=chunk)
    _owners[(len(lengths),)](*given, owners, programs, RUN_BLOCK=run_block, CHUNK=chunk)
    return found.tolist(), owners.tolist()


@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(0, 100)), min_size=1, max_size=9),
    tail_units=st.integers(0, 2),
    programs=st.integers(1, 7),
    run_block=st.sampled_from([2, 4, 16]),
)
@hypothesis_settings(max_examples=25)
def test_shares(lengths: list[int], tail_units: int, programs: int, run_block: int) -> None:
    """Every unit is in one share, shares differ by one unit at most; a share knows its runs, and a run its shares."""
    runs = [run for run, length in enumerate(lengths) for _ in range(-(-length // 16) + tail_units)]
    found, owners = shares(lengths, tail_units, programs, run_block)
    assert [unit for start, stop, *_ in found for unit in range(start, stop)] == list(range(len(runs)))
    sizes = [stop - start for start, stop, *_ in found]
    assert max(sizes) - min(sizes) <= 1
    for start, stop, first_run, last_run, before in found:
        if start == stop:
            assert first_run > last_run
        else:
            assert (first_run, last_run) == (runs[start], runs[stop - 1])
            assert before == runs.index(runs[start])
    for run, (first, last) in enumerate(owners):
        holding = [p for p, (start, stop, *_) in enumerate(found) if run in runs[start:stop]]
        assert list(range(first, last + 1)) == holding


def test_one_long_head_costs_nothing_extra() -> None:
    """The longest share is that of equal heads: the time follows the entries, not the longest head."""

    def longest(lengths: list[int]) -> int:
        return max(stop - start for start, stop, *_ in shares(lengths, 1, programs=6, run_block=8, chunk=64)[0])

    mean = 1024
    assert longest([8 * mean - 7 * 64, *[64] * 7]) == longest([mean] * 8)


# ---------------------------------------------------------------------- edges


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_nothing_gives_zeros(dtype: torch.dtype, sinks: bool) -> None:
    layer = random_layer(2, [[0, 0], [3, 0]], rows=2, tail=5, sinks=sinks).to(dtype)
    layer = replace(layer, tail_visible=torch.zeros(2, 8, dtype=torch.bool))
    output = attend(layer)
    assert not output[0].any() and not output[1, 2:].any() and output[1, :2].any()
    assert_close(output, oracle(layer), dtype)


def test_no_entries_at_all() -> None:
    layer = random_layer(2, [[0, 0]], tail=5, sinks=True).to(torch.float32)
    assert_close(attend(layer), oracle(layer), torch.float32)
    empty = replace(layer, tail_length=torch.tensor(0, device=DEVICE))
    assert not attend(empty).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    layer = random_layer(4, [[400, 3]], rows=2, tail=4)
    layer = replace(layer, query=layer.query * 3e4).to(dtype)
    output = attend(layer)
    assert output.isfinite().all()
    # Any weights at all leave the output between the values.
    assert output.abs().max() <= layer.values.abs().max().maximum(layer.tail_values.abs().max()) * 1.01


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_key_is_not_passed_over(dtype: torch.dtype, softcap: float | None) -> None:
    layer = random_layer(4, [[400]], group=4, softcap=softcap).to(dtype)
    layer.keys[77, 3] = float("nan")
    assert attend(layer).isnan().all()


def test_many_runs() -> None:
    """More runs than are looked at in one go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_k, "RUN_BLOCK", 4)
        layer = random_layer(6, [[3, 40], [0, 0], [90, 0], [17, 16], [0, 5]], size=16, group=1).to(torch.float32)
        assert_close(attend(layer), oracle(layer), torch.float32)

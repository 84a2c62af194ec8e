r"""Attention of few query rows over a ragged layer on a GPU, in Triton: every key and value is read once.

The entries of all runs and tails are cut into units of at most `chunk` consecutive entries of one KV head: first those
of a run, then those of its tail, run after run. A fixed number of programs, as many as the GPU holds at a time, share
the units evenly: program p takes units p U / P to (p + 1) U / P of all U. So the time follows the number of entries,
and how they are spread over heads and sequences does not matter.

Where a program passes from one run to the next it writes what it has: for every row the largest score m, the sum S of
exp(z - m) and the sum A of exp(z - m) v. Programs and runs both only ever go up along the units, so that p + run names
a place of its own for each of these parts, and P + runs places are enough whatever the lengths are. A second kernel
joins the parts of a run in their order,

    out = sum_u exp(m_u - m) A_u / (sum_u exp(m_u - m) S_u + exp(sink - m)),   m = max_u m_u,

hence with the same result at every call. Sums are in float32; exponents to base 2, with log2(e) in the factor.

What a captured CUDA graph replays: both grids follow from shapes alone, runs and lengths are read by the kernels, every
program works its own share out from them, and nothing waits for the host. So `begin`, `end`, and `tail_length` and
`tail_first` given as tensors may hold other numbers at each replay.

The kernels read `TRITON_INTERPRET` when this file is imported: with it set to 1 they run on the CPU, slowly.
"""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from .attention import Contents

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEVICES = ("cuda",)
LARGEST_SIZE = 256
"""Of a key or a value."""
NARROW = 16
"""Rows of a KV head, its query heads times Q, up to which a program is small: the least that tensor cores take."""
RUN_BLOCK = 1024
"""Runs whose lengths a program looks at in one go."""
PART_BLOCK = 64
"""Parts that are joined in one go."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LOG2_E = math.log2(math.e)
# Triton would compile once more for 1 and for multiples of 16 of these, in the middle of decoding.
CHANGING = ("tail_length", "tail_first", "visible_sequence", "entries", "capacity", "runs", "window", "programs")
CHANGING += ("heads", "group", "rows")


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernels are cut and compiled; every choice gives the same numbers up to rounding.

    Attributes
    ----------
    chunk : int
        Entries of a unit, a power of two of at least 16.
    warps : int
        Of a program with up to NARROW rows; twice as many with more.
    stages : int
        Units under way at a time in a program, the one computed included.
    programs : int
        On each multiprocessor at a time, with up to NARROW rows; else 1. Their stages must fit into its shared memory.
    rows : int
        Most rows of a program, a power of two of at least NARROW; keys and values are read once for each so many.
    precision : str
        Of products of float32: "tf32x3" (on the tensor cores, three products, error about 2^-21) or "ieee".
    overlap : bool
        Whether the second kernel is launched while the first still runs (programmatic dependent launch: Hopper).
    """

    chunk: int
    warps: int = 4
    stages: int = 3
    programs: int = 2
    rows: int = 64
    precision: str = "tf32x3"
    overlap: bool = False


# By bytes of an element and padded head size. A unit is 32 KiB of keys and values; two programs with two units each on
# their way are 128 KiB a multiprocessor, several times what the memory's latency asks for. Compiled for sm_90 the two
# fit into registers and shared memory side by side, and nothing is spilled but for float32 of 256; float32 takes fewer
# rows because it would be with more.
CONFIGS: dict[tuple[int, int], Config] = {
    (2, 64): Config(chunk=128),
    (2, 128): Config(chunk=64),
    (2, 256): Config(chunk=32),
    (4, 64): Config(chunk=64, rows=32),
    (4, 128): Config(chunk=32, rows=32),
    (4, 256): Config(chunk=16, rows=16),
}


SMALL = 160 * 1024
"""Bytes of shared memory of a program under which, as on a consumer's GPU, less is under way at a time."""


def default_config(dtype: torch.dtype, size: int, value_size: int, shared: int = SMALL) -> Config:
    """The entry of CONFIGS for a dtype and the sizes of a key and a value, made to fit into `shared` bytes."""
    config = CONFIGS[dtype.itemsize, max(64, triton.next_power_of_2(max(size, value_size)))]
    return config if shared >= SMALL else replace(config, stages=2, programs=1, rows=min(config.rows, 32))


def fits(query: torch.Tensor, held: Contents) -> bool:
    """Whether `attend` can take this: dtype, device, head sizes and strides; not whether it is the faster way."""
    size, value_size = query.shape[3], held.values.shape[1]
    return (
        query.dtype in DTYPES
        and query.device.type in DEVICES
        and query.device == held.keys.device
        and capable(query.device)
        and 0 < size <= LARGEST_SIZE
        and 0 < value_size <= LARGEST_SIZE
        and query.numel() > 0
        and held.keys.is_contiguous()
        and held.values.is_contiguous()
        and held.tail_keys.stride()[2:] == (size, 1)
        and held.tail_values.stride()[2:] == (value_size, 1)
    )


def attend(
    query: torch.Tensor,
    held: Contents,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    config: Config | None = None,
) -> torch.Tensor:
    """What `contourkv.ragged.attend` says, of arguments that it has checked and that `fits` has accepted.

    Parameters
    ----------
    config : Config, optional
        By default `default_config`; `benchmarks/device.py` times others.

    Returns
    -------
    tensor (B, Hq, Q, dv)
        Laid out as (B, Q, Hq, dv).

    Notes
    -----
    Runs, `tail_length` and `tail_first` that lie on the GPU are never read by the host: where they reach outside the
    buffers they are cut off there, and no error is raised. The memory for parts is at most
    (programs + B H) * rows * (dv + 2) float32.
    """
    sequences, query_heads, rows, size = query.shape
    heads, value_size = held.begin.shape[1], held.values.shape[1]
    group, runs = query_heads // heads, held.begin.numel()
    asked = group * rows
    device = query.device
    config = config or default_config(query.dtype, size, value_size, shared_memory(device))
    begin, end, positions = (table.to(device).contiguous() for table in (held.begin, held.end, held.positions))
    visible = None if held.tail_visible is None else held.tail_visible.view(torch.uint8)
    row_block = min(config.rows, max(NARROW, triton.next_power_of_2(asked)))
    row_blocks = triton.cdiv(asked, row_block)
    narrow = row_block <= NARROW
    capacity = held.tail_keys.shape[2]
    most_units = runs * (triton.cdiv(held.keys.shape[0], config.chunk) + triton.cdiv(capacity, config.chunk))
    at_a_time = multiprocessors(device) * (config.programs if narrow else 1)
    programs = max(1, min(at_a_time // row_blocks, most_units))
    places = programs + runs
    sums = torch.empty(places * asked * value_size, dtype=torch.float32, device=device)
    levels = torch.empty(places * asked * 2, dtype=torch.float32, device=device)
    output = torch.empty((sequences, rows, query_heads, value_size), dtype=query.dtype, device=device)
    common = {
        "VALUE_SIZE": value_size,
        "VALUE_BLOCK": max(16, triton.next_power_of_2(value_size)),
        "RUN_BLOCK": min(RUN_BLOCK, triton.next_power_of_2(runs)),
        "CHUNK": config.chunk,
        "LENGTH_ON_DEVICE": isinstance(held.tail_length, torch.Tensor),
        "OVERLAP": config.overlap,
    }
    with torch.cuda.device_of(query):
        _split[(row_blocks, programs)](
            query,
            *query.stride(),
            held.keys,
            held.values,
            positions,
            begin,
            end,
            held.tail_keys,
            *held.tail_keys.stride()[:2],
            held.tail_values,
            *held.tail_values.stride()[:2],
            held.tail_length,
            held.tail_first,
            visible,
            *((0, 0) if visible is None else visible.stride()),
            sums,
            levels,
            held.keys.shape[0],
            capacity,
            runs,
            held.window or 0,
            heads,
            group,
            rows,
            scaling * LOG2_E if softcap is None else scaling / softcap,
            0.0 if softcap is None else softcap * LOG2_E,
            ONE_ROW=rows == 1,
            SIZE=size,
            ROW_BLOCK=row_block,
            SIZE_BLOCK=max(16, triton.next_power_of_2(size)),
            FIRST_ON_DEVICE=isinstance(held.tail_first, torch.Tensor),
            WINDOW=held.window is not None,
            SOFTCAP=softcap is not None,
            PADDED=visible is not None,
            UPCAST=INTERPRETED,
            PRECISION=config.precision,
            num_warps=config.warps if narrow else 2 * config.warps,
            num_stages=config.stages,
            **common,
        )
        _join[(runs, asked)](
            sums,
            levels,
            begin,
            end,
            held.tail_length,
            sinks,
            output,
            held.keys.shape[0],
            capacity,
            runs,
            programs,
            heads,
            group,
            rows,
            PART_BLOCK=PART_BLOCK,
            SINKS=sinks is not None,
            num_warps=4,
            launch_pdl=config.overlap,
            **common,
        )
    return output.transpose(1, 2)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; the interpreter passes for 4."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else SMALL


@functools.cache
def capable(device: torch.device) -> bool:
    """Whether its tensor cores take bfloat16."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


# ---------------------------------------------------------------------- compiled


@triton.jit
def _number(given, ON_DEVICE: tl.constexpr):
    """A number that is passed as it is, or as the place where it lies."""
    if ON_DEVICE:
        return tl.load(given)
    else:
        return given


@triton.jit
def _bounds(begin, end, run, inside, entries):
    """First entry and length of runs, int64 and int32, inside the buffer whatever the tables say."""
    first = tl.load(begin + run, mask=inside, other=0).to(tl.int64)
    last = tl.load(end + run, mask=inside, other=0).to(tl.int64)
    last = tl.minimum(last, entries)
    first = tl.maximum(tl.minimum(first, last), 0)
    return first, tl.maximum(last - first, 0).to(tl.int32)


@triton.jit
def _units(begin, end, run, runs, entries, tail_units, CHUNK: tl.constexpr):
    """Units of each of several runs, 0 of those that there are not."""
    inside = run < runs
    _, length = _bounds(begin, end, run, inside, entries)
    return tl.where(inside, (length + CHUNK - 1) // CHUNK + tail_units, 0)


@triton.jit
def _share(
    begin, end, runs, entries, tail_units, program, programs, RUN_BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """What a program takes: its first unit and one behind its last, their runs, and the units before the first run."""
    total = 0
    for base in range(0, runs, RUN_BLOCK):
        run = base + tl.arange(0, RUN_BLOCK)
        total += tl.sum(_units(begin, end, run, runs, entries, tail_units, CHUNK))
    active = tl.maximum(tl.minimum(programs, total), 1)
    start = (tl.minimum(program, active).to(tl.int64) * total // active).to(tl.int32)
    stop = (tl.minimum(program + 1, active).to(tl.int64) * total // active).to(tl.int32)
    first_run = 0
    last_run = 0
    before = 0
    seen = 0
    for base in range(0, runs, RUN_BLOCK):
        run = base + tl.arange(0, RUN_BLOCK)
        through = seen + tl.cumsum(_units(begin, end, run, runs, entries, tail_units, CHUNK))
        earlier = (through <= start) & (run < runs)
        first_run += tl.sum(earlier.to(tl.int32))
        last_run += tl.sum(((through < stop) & (run < runs)).to(tl.int32))
        before = tl.maximum(before, tl.max(tl.where(earlier, through, 0)))
        seen = tl.max(through)
    return start, stop, first_run, last_run, before


@triton.jit(do_not_specialize=CHANGING)
def _split(
    query,
    query_sequence,
    query_head,
    query_row,
    query_column,
    keys,
    values,
    positions,
    begin,
    end,
    tail_keys,
    tail_keys_sequence,
    tail_keys_head,
    tail_values,
    tail_values_sequence,
    tail_values_head,
    tail_length,
    tail_first,
    visible,
    visible_sequence,
    visible_slot,
    sums,
    levels,
    entries,
    capacity,
    runs,
    window,
    heads,
    group,
    rows,
    factor,
    cap,
    ONE_ROW: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    RUN_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LENGTH_ON_DEVICE: tl.constexpr,
    FIRST_ON_DEVICE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PADDED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend to this program's units; write a part for every run that they touch.

    Scores are in base 2 once `factor` and `cap` are applied: q . k * factor, or cap * tanh(q . k * factor).
    """
    if OVERLAP:
        gdc_launch_dependents()
    program, programs = tl.program_id(1), tl.num_programs(1)
    length = tl.minimum(tl.maximum(_number(tail_length, LENGTH_ON_DEVICE), 0), capacity).to(tl.int32)
    tail_units = (length + CHUNK - 1) // CHUNK
    start, stop, first_run, last_run, before = _share(
        begin, end, runs, entries, tail_units, program, programs, RUN_BLOCK, CHUNK
    )
    if WINDOW:
        tail_start = _number(tail_first, FIRST_ON_DEVICE).to(tl.int32)
    row = tl.program_id(0) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    asked = row < group * rows
    if ONE_ROW:
        token = row * 0
        asking_head = row
    else:
        token = row % rows
        asking_head = row // rows
    own = length - rows + token  # tail slot of the row's own key
    column = tl.arange(0, SIZE_BLOCK)
    value_column = tl.arange(0, VALUE_BLOCK)
    near = tl.arange(0, CHUNK)
    # Where a unit's entries lie from its first.
    key_places = near[:, None] * SIZE + column[None, :]
    value_places = near[:, None] * VALUE_SIZE + value_column[None, :]
    for run in range(first_run, last_run + 1):
        sequence = run // heads
        sequence = sequence.to(tl.int64)
        head = run % heads
        head = head.to(tl.int64)
        first, count = _bounds(begin, end, run, True, entries)
        frozen_units = (count + CHUNK - 1) // CHUNK
        query_place = (
            sequence * query_sequence
            + (head * group + asking_head)[:, None] * query_head
            + token[:, None] * query_row
            + column[None, :] * query_column
        )
        asking = tl.load(query + query_place, mask=asked[:, None] & (column < SIZE)[None, :], other=0.0)
        if UPCAST:  # the interpreter multiplies the bits of bfloat16 as if they were integers
            asking = asking.to(tl.float32)
        run_keys, run_values = keys + first * SIZE, values + first * VALUE_SIZE
        run_tail_keys = tail_keys + sequence * tail_keys_sequence + head * tail_keys_head
        run_tail_values = tail_values + sequence * tail_values_sequence + head * tail_values_head
        top = tl.full([ROW_BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([ROW_BLOCK], tl.float32)
        mixed = tl.zeros([ROW_BLOCK, VALUE_BLOCK], tl.float32)
        for unit in range(tl.maximum(start - before, 0), tl.minimum(stop - before, frozen_units + tail_units)):
            in_tail = unit >= frozen_units
            offset = tl.where(in_tail, unit - frozen_units, unit) * CHUNK
            left = tl.where(in_tail, length, count) - offset
            entry = offset + near
            held = near < left
            key_base = tl.where(in_tail, run_tail_keys, run_keys) + offset.to(tl.int64) * SIZE
            value_base = tl.where(in_tail, run_tail_values, run_values) + offset.to(tl.int64) * VALUE_SIZE
            key = tl.load(key_base + key_places, mask=held[:, None] & (column < SIZE)[None, :], other=0.0)
            value = tl.load(
                value_base + value_places, mask=held[:, None] & (value_column < VALUE_SIZE)[None, :], other=0.0
            )
            if UPCAST:
                key = key.to(tl.float32)
            score = tl.dot(asking, tl.trans(key), input_precision=PRECISION) * factor
            if SOFTCAP:
                shrunk = tl.exp2(tl.abs(score) * -2.8853900817779268)  # exp(-2 |x|)
                score = tl.where(score < 0, -cap, cap) * (1 - shrunk) / (1 + shrunk)
            seen = held[None, :]
            if not ONE_ROW:
                seen = seen & (tl.where(in_tail, entry, -1)[None, :] <= own[:, None])
            if PADDED:
                slots = near < tl.where(in_tail, left, 0)
                shown = tl.load(visible + sequence * visible_sequence + entry * visible_slot, mask=slots, other=1)
                seen = seen & (shown != 0)[None, :]
            if WINDOW:
                position = tl.load(positions + first + entry, mask=near < tl.where(in_tail, 0, left), other=0)
                position = tl.where(in_tail, entry, position - tail_start)
                seen = seen & (position[None, :] > (own - window)[:, None])
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(score - base[:, None])
            lowered = tl.exp2(top - base)
            total = total * lowered + tl.sum(weight, 1)
            weight = weight.to(value.dtype)
            if UPCAST:
                weight, value = weight.to(tl.float32), value.to(tl.float32)
            mixed = tl.dot(weight, value, mixed * lowered[:, None], input_precision=PRECISION)
            top = higher
        place = program + run
        place = place.to(tl.int64) * (group * rows) + row
        tl.store(
            sums + place[:, None] * VALUE_SIZE + value_column[None, :],
            mixed,
            mask=asked[:, None] & (value_column < VALUE_SIZE)[None, :],
        )
        tl.store(levels + 2 * place, top, mask=asked)
        tl.store(levels + 2 * place + 1, total, mask=asked)
        before += frozen_units + tail_units


@triton.jit(do_not_specialize=CHANGING)
def _join(
    sums,
    levels,
    begin,
    end,
    tail_length,
    sinks,
    output,
    entries,
    capacity,
    runs,
    programs,
    heads,
    group,
    rows,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    RUN_BLOCK: tl.constexpr,
    PART_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LENGTH_ON_DEVICE: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Join the parts of one row of one run."""
    run, row = tl.program_id(0), tl.program_id(1)
    length = tl.minimum(tl.maximum(_number(tail_length, LENGTH_ON_DEVICE), 0), capacity).to(tl.int32)
    first_part, last_part = _parts(
        begin, end, runs, entries, (length + CHUNK - 1) // CHUNK, run, programs, RUN_BLOCK, CHUNK
    )
    query_head = (run % heads) * group + row // rows
    column = tl.arange(0, VALUE_BLOCK)
    near = tl.arange(0, PART_BLOCK)
    mixed = tl.zeros([VALUE_BLOCK], tl.float32)
    if SINKS:
        top = tl.load(sinks + query_head).to(tl.float32) * 1.4426950408889634
        total = 1.0
    else:
        top = float("-inf")
        total = 0.0
    if OVERLAP:
        gdc_wait()  # up to here nothing was read that the first kernel writes
    for base in range(first_part, last_part + 1, PART_BLOCK):
        part = base + near
        there = part <= last_part
        place = (part + run).to(tl.int64) * (group * rows) + row
        level = tl.load(levels + 2 * place, mask=there, other=float("-inf"))
        weights = tl.load(levels + 2 * place + 1, mask=there, other=0.0)
        outputs = tl.load(
            sums + place[:, None] * VALUE_SIZE + column[None, :],
            mask=there[:, None] & (column < VALUE_SIZE)[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(level, 0))
        lowest = tl.where(higher == float("-inf"), 0.0, higher)
        lowered = tl.exp2(top - lowest)
        factor = tl.exp2(level - lowest)
        total = total * lowered + tl.sum(weights * factor, 0)
        mixed = mixed * lowered + tl.sum(outputs * factor[:, None], 0)
        top = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)  # a row that sees nothing
    place = ((run // heads).to(tl.int64) * rows + row % rows) * (heads * group) + query_head
    tl.store(output + place * VALUE_SIZE + column, mixed.to(output.dtype.element_ty), mask=column < VALUE_SIZE)


@triton.jit
def _parts(
    begin, end, runs, entries, tail_units, asked, programs, RUN_BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """First and last program that has units of run `asked`; none where it has no units."""
    total = 0
    before = 0
    within = 0
    for base in range(0, runs, RUN_BLOCK):
        run = base + tl.arange(0, RUN_BLOCK)
        units = _units(begin, end, run, runs, entries, tail_units, CHUNK)
        total += tl.sum(units)
        before += tl.sum(tl.where(run < asked, units, 0))
        within += tl.sum(tl.where(run == asked, units, 0))
    active = tl.maximum(tl.minimum(programs, total), 1).to(tl.int64)
    # The greatest p whose start p * total // active is not behind the unit.
    some = tl.maximum(total, 1)
    first = ((before + 1) * active - 1) // some
    last = ((before + within) * active - 1) // some
    return first.to(tl.int32), tl.where(within > 0, last, first - 1).to(tl.int32)

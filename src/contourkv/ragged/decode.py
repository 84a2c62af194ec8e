r"""Attention of few query rows over a ragged layer on the CPU, compiled: every key and value is read once.

The entries of all runs and tails are cut into units of at most CHUNK consecutive entries of one KV head. Threads take
the next unit until none is left, so that they finish together however uneven the runs are. A unit computes, for all
rows of all query heads of its KV head at once, the largest score m, the sum S of exp(z - m) and the sum A of
exp(z - m) v; whoever finishes the last unit of a KV head joins its units in their order, hence with the same result
whatever the threads did:

    out = sum_u exp(m_u - m) A_u / (sum_u exp(m_u - m) S_u + exp(sink - m)),   m = max_u m_u.

Sums are in float32, of float64 in float64. bfloat16 is read as pairs in 32 bits: the upper half of a float32 is a
bfloat16, so one shift gives the odd elements and one mask the even ones; queries and outputs are taken apart likewise.

The calling thread works; helpers, `torch.get_num_threads()` - 1 of them, are woken and join if they get a processor in
time, and nobody waits for a helper that has not taken a unit. A parallel loop of OpenMP, PyTorch's own or numba's, has
all its threads meet at the end instead: where others use the processors too, each call then costs a time slice (4 to
14 ms were measured, for 1.2 ms of work), and a second pool of OpenMP threads spins beside PyTorch's.

Everything is passed in one block of 64-bit numbers, named by the constants below; what would be ten array arguments
costs more to pass than a short context takes to attend to.
"""

from __future__ import annotations

import functools
import math
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic, overload

from ..errors import InvalidInput

if TYPE_CHECKING:
    from .attention import Contents

CHUNK = 256
"""Entries of a unit, at most; a multiple of 4."""
CACHE_LINE = 64
AHEAD = 2**14
"""Bytes that memory is asked for in advance. The processor's own prefetching falls behind: without, a step over keys
that are in no cache takes 2.5 times as long in float32, 1.2 times in bfloat16."""
WORTH_HELP = 2**21
"""Multiplications of a call from which on helpers are woken: 100 microseconds of one thread; to wake one costs 20."""
HELP, LEAD, WAIT = range(3)
"""What a thread comes to `_take_part` for."""
OPEN = 2**32
"""The gate holds this while a call is open for helpers, plus one for each of them that is inside."""
NEVER = -3e38
"""Score of an entry that is not seen."""
LEAST = -87.0
"""exp of less is 0 in float32."""
# The sums may be reordered, which is what lets them run in vector lanes; NaN and infinity keep their meaning.
_SUMS = {"reassoc", "contract", "nsz"}

(
    QUERY, QUERY_SEQUENCE, QUERY_HEAD, QUERY_ROW, QUERY_COLUMN,
    KEYS, VALUES, POSITIONS, BEGIN, END, ENTRIES,
    TAIL_KEYS, TAIL_KEYS_SEQUENCE, TAIL_KEYS_HEAD, TAIL_VALUES, TAIL_VALUES_SEQUENCE, TAIL_VALUES_HEAD,
    TAIL_LENGTH, TAIL_FIRST, VISIBLE, VISIBLE_SEQUENCE, WINDOW, SINKS, OUTPUT,
    SEQUENCES, HEADS, GROUP, ROWS, SIZE, VALUE_SIZE, THREADS,
    SCRATCH, SCRATCH_BYTES,
    UNITS, UNIT_COUNT, FIRST_UNIT, LEFT, TICKETS, ASKED, SCORES, TOPS, TOTALS, MIXED,
    WORK, GATE, SCALING, SOFTCAP, SLOTS,
) = range(48)  # fmt: skip


def fits(query: torch.Tensor, held: Contents) -> bool:
    """Whether `attend` can take this: dtype, device and strides; not whether it is the faster way."""
    return (
        query.dtype in _KINDS
        and query.is_cpu
        and not (query.dtype == torch.bfloat16 and (query.shape[3] % 2 or held.values.shape[1] % 2))
        and held.keys.is_contiguous()
        and held.values.is_contiguous()
        and held.tail_keys.stride()[2:] == (query.shape[3], 1)
        and held.tail_values.stride()[2:] == (held.values.shape[1], 1)
        and held.keys.is_cpu
    )


def attend(
    query: torch.Tensor, held: Contents, scaling: float, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """What `contourkv.ragged.attend` says, of arguments that it has checked and that `fits` has accepted.

    Returns
    -------
    tensor (B, Hq, Q, dv)
        Laid out as (B, Q, Hq, dv).

    Raises
    ------
    InvalidInput
        A run outside the buffer.
    """
    plan, take_part = _compiled(query.dtype)
    sequences, query_heads, rows, size = query.shape
    heads, value_size = held.begin.shape[1], held.values.shape[1]
    output = torch.empty((sequences, rows, query_heads, value_size), dtype=query.dtype)
    positions, begin, end = (
        table if table.dtype == dtype and table.is_contiguous() else table.to("cpu", dtype).contiguous()
        for table, dtype in ((held.positions, torch.int32), (held.begin, torch.int64), (held.end, torch.int64))
    )
    visible = held.tail_visible
    if visible is not None and visible.stride(1) != 1:
        visible = visible.contiguous()
    if sinks is not None:
        sinks = sinks.to(torch.float64).contiguous()
    threads = max(1, torch.get_num_threads())
    scratch = _THREAD.scratch(query.dtype)
    _PARAMETERS.pack_into(
        scratch.parameters,
        0,
        query.data_ptr(),
        *query.stride(),
        held.keys.data_ptr(),
        held.values.data_ptr(),
        positions.data_ptr(),
        begin.data_ptr(),
        end.data_ptr(),
        held.keys.shape[0],
        held.tail_keys.data_ptr(),
        *held.tail_keys.stride()[:2],
        held.tail_values.data_ptr(),
        *held.tail_values.stride()[:2],
        held.tail_length,
        held.tail_first,
        0 if visible is None else visible.data_ptr(),
        0 if visible is None else visible.stride(0),
        held.window or 0,
        0 if sinks is None else sinks.data_ptr(),
        output.data_ptr(),
        sequences,
        heads,
        query_heads // heads,
        rows,
        size,
        value_size,
        threads,
    )
    scratch.numbers[SCALING], scratch.numbers[SOFTCAP] = scaling, softcap or 0.0
    needed = plan(scratch.address)
    if needed > scratch.size:
        scratch.grow(needed)
        needed = plan(scratch.address)
    if needed < 0:
        b, h = divmod(-1 - needed, heads)
        raise InvalidInput(
            f"begin, end: got a run {int(begin[b, h])}:{int(end[b, h])} over {held.keys.shape[0]} entries; expected "
            "runs inside them"
        )
    scratch.borrowed = output, query, held, positions, begin, end, visible, sinks
    try:
        _TEAM.run(take_part, scratch, threads)
    finally:
        if not scratch.inside:
            scratch.borrowed = None
    return output.transpose(1, 2)


_PARAMETERS = struct.Struct(f"={THREADS + 1}q")


class _Scratch:
    """The block of numbers that a call passes to the kernel, and memory for partial results: both reused.

    Attributes
    ----------
    borrowed : everything whose memory the kernel reads or writes; while a helper is inside, its reference to the
        scratch keeps that alive, whatever has become of the call
    """

    def __init__(self) -> None:
        self.integers = np.zeros(SLOTS, np.int64)
        self.numbers = self.integers.view(np.float64)
        self.parameters = memoryview(self.integers).cast("B")
        self.address = self.integers.ctypes.data
        self.borrowed: tuple | None = None
        self.grow(2**18)

    def grow(self, size: int) -> None:
        self.size = size
        self._memory = np.empty(size + CACHE_LINE, np.uint8)
        self.integers[SCRATCH] = -(-self._memory.ctypes.data // CACHE_LINE) * CACHE_LINE
        self.integers[SCRATCH_BYTES] = size

    @property
    def inside(self) -> bool:
        """Whether a helper is still at work on it."""
        return self.integers[GATE] != 0


class _Thread(threading.local):
    """What each calling thread has of its own: a scratch a dtype, so that a late helper finds work of its kind."""

    def __init__(self) -> None:
        self._of: dict[torch.dtype, _Scratch] = {}

    def scratch(self, dtype: torch.dtype) -> _Scratch:
        found = self._of.get(dtype)
        if found is None or found.inside:  # a call was interrupted: leave it to the helper
            found = self._of[dtype] = _Scratch()
        return found


_THREAD = _Thread()


class _Team:
    """Threads that help a caller's own; one caller at a time has them, others meanwhile work alone."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._wake: list[threading.Lock] = []
        self._job: tuple[Callable[[int, int], int], _Scratch] | None = None

    def run(self, take_part: Callable[[int, int], int], scratch: _Scratch, threads: int) -> None:
        """Do what is planned in `scratch` with at most so many threads."""
        helped = threads > 1 and scratch.integers[WORK] >= WORTH_HELP and self._free.acquire(blocking=False)
        try:
            if helped:
                self._job = take_part, scratch
                for helper in range(threads - 1):
                    self._call(helper)
        finally:
            role = LEAD
            while take_part(scratch.address, role):
                time.sleep(0)  # a helper was interrupted in its unit
                role = WAIT
            if helped:
                self._free.release()

    def _call(self, helper: int) -> None:
        if helper == len(self._wake):
            wake = threading.Lock()
            threading.Thread(target=self._help, args=[wake], name="contourkv decode", daemon=True).start()
            self._wake.append(wake)
        elif self._wake[helper].locked():  # otherwise it has yet to answer an earlier call
            self._wake[helper].release()

    def _help(self, wake: threading.Lock) -> None:
        while True:
            wake.acquire()
            take_part, scratch = self._job
            take_part(scratch.address, HELP)
            del scratch


_TEAM = _Team()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_TEAM.__init__)  # threads do not survive a fork


@functools.cache
def _compiled(dtype: torch.dtype) -> tuple[Callable[[int], int], Callable[[int, int], int]]:
    """Plan and work for a dtype, as C functions of the address of the block of numbers, and of a role."""
    plan, take_part = _KINDS[dtype]
    plan = cfunc(types.int64(types.voidptr), cache=True)(plan)
    take_part = cfunc(types.int64(types.voidptr, types.int64), cache=True)(take_part)
    return plan.ctypes, take_part.ctypes


# ---------------------------------------------------------------------- compiled


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def _float32(typing_context, bits):
    """The float32 of these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits(typing_context, number):
    """The 32 bits of this float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _fetch_add(typing_context, address, amount):
    """Add to the int64 at an address, at once for all threads; what it was. Orders the memory around it."""

    def generate(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _greater(typing_context, x, y):
    """The greater of two numbers that are not NaN. LLVM makes vector lanes only of a choice that is marked so."""

    def generate(context, builder, signature, arguments):
        lawful = ("nnan", "nsz")
        return builder.select(builder.fcmp_ordered(">", *arguments, flags=lawful), *arguments, flags=lawful)

    return x(x, x), generate


@intrinsic
def _prefetch(typing_context, address):
    """Ask for a cache line, up to the second level. Nothing need lie there."""

    def generate(context, builder, signature, arguments):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        read, second_level, data = 0, 2, 1
        builder.call(function, [builder.inttoptr(arguments[0], byte), number(read), number(second_level), number(data)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit
def _ask_ahead(rows, j, count):
    """Prefetch what lies AHEAD of rows j .. j + count - 1."""
    width = rows.shape[1] * rows.itemsize
    first = rows.ctypes.data + j * width + AHEAD
    for line in range(0, count * width, CACHE_LINE):
        _prefetch(first + line)


@njit
def _array(address, shape, dtype):
    return carray(_pointer(address), shape, dtype)


@njit
def _width(dtype):
    """Bytes of an element."""
    return _array(0, 0, dtype).itemsize


@njit
def _address(p, name):
    return p.ctypes.data + 8 * name


@njit
def _units_of(entries):
    return (entries + CHUNK - 1) // CHUNK


@njit
def _reserve(p, name, at, size):
    """Give `size` bytes of the scratch from `at` to `name`; where the next begins."""
    p[name] = p[SCRATCH] + at
    return at + (size + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@njit
def _cut(units, count, run, tail, first, last):
    """Append units over first:last, as equal as they can be."""
    left = _units_of(last - first)
    while left > 0:
        size = (last - first + left - 1) // left
        units[count, 0], units[count, 1], units[count, 2], units[count, 3] = run, tail, first, first + size
        first += size
        count += 1
        left -= 1
    return count


@njit
def _plan(address, element, working, pairs):
    """Cut the work into units, lay out the scratch and copy the queries into it.

    Bytes of scratch that it takes, with nothing done if there are fewer, or -1 - run for a run outside the entries.
    """
    p = carray(address, SLOTS, np.int64)
    runs, rows = p[SEQUENCES] * p[HEADS], p[GROUP] * p[ROWS]
    padded = (rows + 3) // 4 * 4
    begin, end = _array(p[BEGIN], runs, np.int64), _array(p[END], runs, np.int64)
    most = runs * _units_of(p[TAIL_LENGTH])
    for run in range(runs):
        if begin[run] < 0 or end[run] < begin[run] or end[run] > p[ENTRIES]:
            return -1 - run
        most += _units_of(end[run] - begin[run])
    width = _width(working)
    size = _reserve(p, TICKETS, 0, 2 * CACHE_LINE)
    size = _reserve(p, UNITS, size, most * 4 * 8)
    size = _reserve(p, FIRST_UNIT, size, (runs + 1) * 8)
    size = _reserve(p, LEFT, size, runs * 8)
    size = _reserve(p, ASKED, size, runs * padded * p[SIZE] * width)
    size = _reserve(p, SCORES, size, p[THREADS] * 4 * CHUNK * width)
    size = _reserve(p, TOPS, size, most * padded * width)
    size = _reserve(p, TOTALS, size, most * padded * width)
    size = _reserve(p, MIXED, size, most * padded * p[VALUE_SIZE] * width)
    if size > p[SCRATCH_BYTES]:
        return size
    tickets = _array(p[TICKETS], 2 * CACHE_LINE // 8, np.int64)
    tickets[0] = tickets[CACHE_LINE // 8] = 0
    units = _array(p[UNITS], (most, 4), np.int64)
    first_unit, left = _array(p[FIRST_UNIT], runs + 1, np.int64), _array(p[LEFT], runs, np.int64)
    positions = _array(p[POSITIONS], p[ENTRIES], np.int32)
    # Position of the first row, and the first slot and position that it sees; later rows see less of the past.
    at = p[TAIL_FIRST] + p[TAIL_LENGTH] - p[ROWS]
    seen_from = at - p[WINDOW] + 1 if p[WINDOW] > 0 else 0
    slot = max(seen_from - p[TAIL_FIRST], 0)
    count = 0
    for run in range(runs):
        first_unit[run] = count
        first, last = begin[run], end[run]
        if p[WINDOW] > 0:
            first += np.searchsorted(positions[first:last], seen_from)
        count = _cut(units, count, run, 0, first, last)
        count = _cut(units, count, run, 1, slot, p[TAIL_LENGTH])
        left[run] = count - first_unit[run]
    first_unit[runs] = count
    p[UNIT_COUNT] = count
    p[WORK] = 0
    for unit in range(count):
        p[WORK] += (units[unit, 3] - units[unit, 2]) * padded * (p[SIZE] + p[VALUE_SIZE])
    _ask(address, element, working, pairs)
    return size


@njit
def _ask(address, element, working, pairs):
    """Copy the scaled query rows, head by head in rows of four; of pairs, first the even elements, then the odd."""
    p = carray(address, SLOTS, np.int64)
    scaling = working(carray(address, SLOTS, np.float64)[SCALING])
    rows = p[GROUP] * p[ROWS]
    padded = (rows + 3) // 4 * 4
    asked = _array(p[ASKED], (p[SEQUENCES] * p[HEADS], padded, pairs, p[SIZE] // pairs), working)
    width = _width(element)
    for run in range(p[SEQUENCES] * p[HEADS]):
        b, h = run // p[HEADS], run % p[HEADS]
        for r in range(padded):
            if r >= rows:
                asked[run, r] = 0
                continue
            head, row = h * p[GROUP] + r // p[ROWS], r % p[ROWS]
            start = b * p[QUERY_SEQUENCE] + head * p[QUERY_HEAD] + row * p[QUERY_ROW]
            query = _array(p[QUERY] + start * width, (p[SIZE] - 1) * p[QUERY_COLUMN] + 1, element)
            for part in range(pairs):
                for i in range(p[SIZE] // pairs):
                    asked[run, r, part, i] = scaling * _load(query[(pairs * i + part) * p[QUERY_COLUMN]])


@njit
def _take_part(address, role, element, stored, working, pairs):
    """Work in a role; to the lead and to a waiting one, how many helpers are still inside."""
    p = carray(address, SLOTS, np.int64)
    gate = _address(p, GATE)
    if role == HELP:
        # Once inside, nothing that the call owns goes away.
        if _fetch_add(gate, 1) >= OPEN:
            _work(address, element, stored, working, pairs)
        _fetch_add(gate, -1)
        return 0
    if role == LEAD:
        _fetch_add(gate, OPEN)
        _work(address, element, stored, working, pairs)
        _fetch_add(gate, -OPEN)
    for _ in range(2000):
        if _fetch_add(gate, 0) == 0:
            return 0
    return 1


@njit
def _work(address, element, stored, working, pairs):
    """Take units until none is left; join those of a KV head when its last one is done."""
    p = carray(address, SLOTS, np.int64)
    thread = _fetch_add(p[TICKETS], 1)
    if thread >= p[THREADS]:
        return
    runs, rows = p[SEQUENCES] * p[HEADS], p[GROUP] * p[ROWS]
    padded = (rows + 3) // 4 * 4
    size, value_size = p[SIZE] // pairs, p[VALUE_SIZE] // pairs  # in stored elements
    scores = _array(p[SCORES], (p[THREADS], 4, CHUNK), working)[thread]
    units = _array(p[UNITS], (p[UNIT_COUNT], 4), np.int64)
    asked = _array(p[ASKED], (runs, padded, pairs, size), working)
    tops = _array(p[TOPS], (p[UNIT_COUNT], padded), working)
    totals = _array(p[TOTALS], (p[UNIT_COUNT], padded), working)
    mixed = _array(p[MIXED], (p[UNIT_COUNT], padded, pairs, value_size), working)
    softcap = working(carray(address, SLOTS, np.float64)[SOFTCAP])
    width = _width(stored)
    while True:
        unit = _fetch_add(p[TICKETS] + CACHE_LINE, 1)
        if unit >= p[UNIT_COUNT]:
            return
        run, tail, first, last = units[unit, 0], units[unit, 1], units[unit, 2], units[unit, 3]
        b, h = run // p[HEADS], run % p[HEADS]
        count = last - first
        if tail:
            # PyTorch counts strides in elements.
            narrow = _width(element)
            key_at = p[TAIL_KEYS] + (b * p[TAIL_KEYS_SEQUENCE] + h * p[TAIL_KEYS_HEAD]) * narrow
            value_at = p[TAIL_VALUES] + (b * p[TAIL_VALUES_SEQUENCE] + h * p[TAIL_VALUES_HEAD]) * narrow
        else:
            key_at, value_at = p[KEYS], p[VALUES]
        keys = _array(key_at + first * size * width, (count, size), stored)
        values = _array(value_at + first * value_size * width, (count, value_size), stored)
        bounded = (p[ROWS] > 1 and (tail or p[WINDOW] > 0)) or (tail and p[VISIBLE] != 0)
        for r in range(0, padded, 4):
            _score(keys, asked[run, r : r + 4], scores)
            if softcap > 0:
                _cap(scores, count, softcap)
            if bounded:
                _hide(p, scores, r, b, tail, first, last)
            for s in range(4):
                tops[unit, r + s], totals[unit, r + s] = _weigh(scores[s], count)
            _mix(values, scores, mixed[unit, r : r + 4])
        if _fetch_add(p[LEFT] + 8 * run, -1) == 1:
            _join(address, run, element, working, pairs, tops, totals, mixed)


@njit
def _hide(p, scores, r, b, tail, first, last):
    """Set the scores of rows r .. r+3 to NEVER where the row does not see the entry."""
    if tail:
        visible = _array(p[VISIBLE] + b * p[VISIBLE_SEQUENCE], last if p[VISIBLE] else 0, np.uint8)
        positions = _array(p[POSITIONS], 0, np.int32)
    else:
        visible = _array(p[VISIBLE], 0, np.uint8)
        positions = _array(p[POSITIONS], last, np.int32)
    for s in range(4):
        at = p[TAIL_FIRST] + p[TAIL_LENGTH] - p[ROWS] + (r + s) % p[ROWS]
        seen_from = at - p[WINDOW] + 1 if p[WINDOW] > 0 else 0
        for j in range(first, last):
            position = p[TAIL_FIRST] + j if tail else np.int64(positions[j])
            if position > at or position < seen_from or (visible.size > 0 and visible[j] == 0):
                scores[s, j - first] = NEVER


@njit(fastmath=_SUMS)
def _cap(scores, count, softcap):
    """Each score z becomes softcap tanh(z / softcap)."""
    for s in range(4):
        for j in range(count):
            z = scores[s, j] / softcap
            e = _exp(-2 * abs(z))
            scores[s, j] = np.copysign(softcap * ((1 - e) / (1 + e)), z)


@njit(fastmath=_SUMS | {"nnan"})
def _largest(scores, count):
    top = scores[0]
    for j in range(1, count):
        top = _greater(scores[j], top)
    return top


@njit(fastmath=_SUMS)
def _weigh(scores, count):
    """Scores become exp(score - top), followed by zeros up to a multiple of four. The top and their sum."""
    top = _largest(scores, count)
    total = scores.dtype.type(0)
    if top <= NEVER:
        for j in range(count):
            scores[j] = 0
    else:
        for j in range(count):
            scores[j] = _exp(scores[j] - top)
            total += scores[j]
    for j in range(count, (count + 3) // 4 * 4):
        scores[j] = 0
    return top, total


@njit
def _join(address, run, element, working, pairs, tops, totals, mixed):
    """Softmax over all units of a KV head, written to the output."""
    p = carray(address, SLOTS, np.int64)
    b, h = run // p[HEADS], run % p[HEADS]
    first_unit = _array(p[FIRST_UNIT], p[SEQUENCES] * p[HEADS] + 1, np.int64)
    first, last = first_unit[run], first_unit[run + 1]
    heads = p[HEADS] * p[GROUP]
    sinks = _array(p[SINKS], heads if p[SINKS] else 0, np.float64)
    output = _array(p[OUTPUT], (p[SEQUENCES], p[ROWS], heads, p[VALUE_SIZE] // pairs, pairs), element)
    for r in range(p[GROUP] * p[ROWS]):
        head = h * p[GROUP] + r // p[ROWS]
        top = working(NEVER)
        for unit in range(first, last):
            top = max(top, tops[unit, r])
        total = working(0)
        if sinks.size > 0:
            top = max(top, working(sinks[head]))
            total = _exp(working(sinks[head]) - top)
        joined = mixed[first, r]
        for unit in range(first, last):
            weight = working(0) if tops[unit, r] <= NEVER else _exp(tops[unit, r] - top)
            total += weight * totals[unit, r]
            _gather(joined, mixed[unit, r], weight, unit == first)
        inverse = 1 / total if total != 0 else working(0)
        for part in range(pairs):
            for i in range(joined.shape[1]):
                output[b, r % p[ROWS], head, i, part] = _store(joined[part, i] * inverse, element)
    return 0


@njit(fastmath=_SUMS)
def _gather(joined, part, weight, first):
    pairs, size = part.shape
    for half in range(pairs):
        for i in range(size):
            joined[half, i] = weight * part[half, i] + (joined.dtype.type(0) if first else joined[half, i])


@njit(fastmath=_SUMS)
def _score_plain(keys, asked, scores):
    """Scores of four rows, two keys at a time; of an odd number the last one twice."""
    count, size = keys.shape
    for j in range(0, count, 2):
        _ask_ahead(keys, j, 2)
        other = min(j + 1, count - 1)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = scores.dtype.type(0)
        for i in range(size):
            x, y = keys[j, i], keys[other, i]
            a0 += asked[0, 0, i] * x
            a1 += asked[1, 0, i] * x
            a2 += asked[2, 0, i] * x
            a3 += asked[3, 0, i] * x
            b0 += asked[0, 0, i] * y
            b1 += asked[1, 0, i] * y
            b2 += asked[2, 0, i] * y
            b3 += asked[3, 0, i] * y
        scores[0, j], scores[1, j], scores[2, j], scores[3, j] = a0, a1, a2, a3
        scores[0, j + 1], scores[1, j + 1], scores[2, j + 1], scores[3, j + 1] = b0, b1, b2, b3


@njit(fastmath=_SUMS)
def _score_pairs(keys, asked, scores):
    """The same of bfloat16 pairs; the rows hold their even elements first."""
    count, size = keys.shape
    for j in range(0, count, 2):
        _ask_ahead(keys, j, 2)
        other = min(j + 1, count - 1)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
        for i in range(size):
            x, y = keys[j, i], keys[other, i]
            x0, x1, y0, y1 = _even(x), _odd(x), _even(y), _odd(y)
            a0 += asked[0, 0, i] * x0 + asked[0, 1, i] * x1
            a1 += asked[1, 0, i] * x0 + asked[1, 1, i] * x1
            a2 += asked[2, 0, i] * x0 + asked[2, 1, i] * x1
            a3 += asked[3, 0, i] * x0 + asked[3, 1, i] * x1
            b0 += asked[0, 0, i] * y0 + asked[0, 1, i] * y1
            b1 += asked[1, 0, i] * y0 + asked[1, 1, i] * y1
            b2 += asked[2, 0, i] * y0 + asked[2, 1, i] * y1
            b3 += asked[3, 0, i] * y0 + asked[3, 1, i] * y1
        scores[0, j], scores[1, j], scores[2, j], scores[3, j] = a0, a1, a2, a3
        scores[0, j + 1], scores[1, j + 1], scores[2, j + 1], scores[3, j + 1] = b0, b1, b2, b3


@njit(fastmath=_SUMS)
def _mix_plain(values, weights, mixed):
    """Weighted sums of the values for four rows, four values at a time; what is beyond the last has weight zero."""
    count, size = values.shape
    for s in range(4):
        for i in range(size):
            mixed[s, 0, i] = 0
    for j in range(0, count, 4):
        _ask_ahead(values, j, 4)
        j1, j2, j3 = min(j + 1, count - 1), min(j + 2, count - 1), min(j + 3, count - 1)
        a0, a1, a2, a3 = weights[0, j], weights[0, j + 1], weights[0, j + 2], weights[0, j + 3]
        b0, b1, b2, b3 = weights[1, j], weights[1, j + 1], weights[1, j + 2], weights[1, j + 3]
        c0, c1, c2, c3 = weights[2, j], weights[2, j + 1], weights[2, j + 2], weights[2, j + 3]
        d0, d1, d2, d3 = weights[3, j], weights[3, j + 1], weights[3, j + 2], weights[3, j + 3]
        for i in range(size):
            x0, x1, x2, x3 = values[j, i], values[j1, i], values[j2, i], values[j3, i]
            mixed[0, 0, i] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            mixed[1, 0, i] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            mixed[2, 0, i] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            mixed[3, 0, i] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


@njit(fastmath=_SUMS)
def _mix_pairs(values, weights, mixed):
    """The same of bfloat16 pairs; the sums hold their even elements first."""
    count, size = values.shape
    for s in range(4):
        for i in range(size):
            mixed[s, 0, i] = mixed[s, 1, i] = 0
    for j in range(0, count, 4):
        _ask_ahead(values, j, 4)
        j1, j2, j3 = min(j + 1, count - 1), min(j + 2, count - 1), min(j + 3, count - 1)
        a0, a1, a2, a3 = weights[0, j], weights[0, j + 1], weights[0, j + 2], weights[0, j + 3]
        b0, b1, b2, b3 = weights[1, j], weights[1, j + 1], weights[1, j + 2], weights[1, j + 3]
        c0, c1, c2, c3 = weights[2, j], weights[2, j + 1], weights[2, j + 2], weights[2, j + 3]
        d0, d1, d2, d3 = weights[3, j], weights[3, j + 1], weights[3, j + 2], weights[3, j + 3]
        for i in range(size):
            u0, u1, u2, u3 = values[j, i], values[j1, i], values[j2, i], values[j3, i]
            x0, x1, x2, x3 = _even(u0), _even(u1), _even(u2), _even(u3)
            mixed[0, 0, i] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            mixed[1, 0, i] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            mixed[2, 0, i] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            mixed[3, 0, i] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
            x0, x1, x2, x3 = _odd(u0), _odd(u1), _odd(u2), _odd(u3)
            mixed[0, 1, i] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            mixed[1, 1, i] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            mixed[2, 1, i] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            mixed[3, 1, i] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


@njit
def _even(pair):
    """The bfloat16 in the lower half of 32 bits, the earlier one in memory, as float32."""
    return _float32(np.uint32(pair << np.uint32(16)))


@njit
def _odd(pair):
    return _float32(np.uint32(pair & np.uint32(0xFFFF0000)))


@njit
def _load_bfloat16(bits):
    return _float32(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit
def _store_bfloat16(number):
    """Rounded to nearest, ties to even; NaN stays NaN."""
    if number != number:
        return np.uint16(0x7FC0)
    bits = _bits(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


# Which of these is meant follows from the types; passing functions as arguments would keep numba from caching.
def _exp(x):
    raise NotImplementedError


def _score(keys, asked, scores):
    raise NotImplementedError


def _mix(values, weights, mixed):
    raise NotImplementedError


def _load(stored):
    raise NotImplementedError


def _store(number, element):
    raise NotImplementedError


@overload(_exp)
def _choose_exp(x):
    return (lambda x: _exp32(x)) if x == types.float32 else (lambda x: math.exp(x))


@overload(_score)
def _choose_score(keys, asked, scores):
    if keys.dtype == types.uint32:
        return lambda keys, asked, scores: _score_pairs(keys, asked, scores)
    return lambda keys, asked, scores: _score_plain(keys, asked, scores)


@overload(_mix)
def _choose_mix(values, weights, mixed):
    if values.dtype == types.uint32:
        return lambda values, weights, mixed: _mix_pairs(values, weights, mixed)
    return lambda values, weights, mixed: _mix_plain(values, weights, mixed)


@overload(_load)
def _choose_load(stored):
    return (lambda stored: _load_bfloat16(stored)) if stored == types.uint16 else (lambda stored: stored)


@overload(_store)
def _choose_store(number, element):
    if element.dtype == types.uint16:
        return lambda number, element: _store_bfloat16(number)
    return lambda number, element: number


@njit(fastmath={"contract"})
def _exp32(x):
    """exp of a float32 x <= 0 to 2^-23, 0 below LEAST; as polynomial, so that it runs in vector lanes.

    exp(x) = 2^n exp(r) with n whole and |r| <= log(2) / 2, log(2) taken in two parts.
    """
    bounded = np.float32(LEAST) if x < np.float32(LEAST) else x
    n = np.int32(bounded * np.float32(1.4426950408889634) - np.float32(0.5))
    r = bounded - np.float32(n) * np.float32(0.693359375)
    r = r - np.float32(n) * np.float32(-2.1219444005469057e-4)
    e = np.float32(1 / 5040)
    e = e * r + np.float32(1 / 720)
    e = e * r + np.float32(1 / 120)
    e = e * r + np.float32(1 / 24)
    e = e * r + np.float32(1 / 6)
    e = e * r + np.float32(1 / 2)
    e = e * r + np.float32(1)
    e = e * r + np.float32(1)
    power = _float32(np.uint32((n + np.int32(127)) << np.int32(23)))
    return np.float32(0) if x < np.float32(LEAST) else e * power


def _plan_float32(address):
    return _plan(address, np.float32, np.float32, 1)


def _plan_float64(address):
    return _plan(address, np.float64, np.float64, 1)


def _plan_bfloat16(address):
    return _plan(address, np.uint16, np.float32, 2)


def _take_part_float32(address, role):
    return _take_part(address, role, np.float32, np.float32, np.float32, 1)


def _take_part_float64(address, role):
    return _take_part(address, role, np.float64, np.float64, np.float64, 1)


def _take_part_bfloat16(address, role):
    return _take_part(address, role, np.uint16, np.uint32, np.float32, 2)


_KINDS = {
    torch.float32: (_plan_float32, _take_part_float32),
    torch.float64: (_plan_float64, _take_part_float64),
    torch.bfloat16: (_plan_bfloat16, _take_part_bfloat16),
}

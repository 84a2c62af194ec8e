r"""Attention over a ragged layer: runs of any length per KV head, and the appended tokens, under one softmax.

A query row q of KV head h at position p sees entries j of its head's frozen run and slots of its tail,

    z_j = scaling * q . k_j   (c tanh(z_j / c) with a softcap c),
    out = sum_j exp(z_j) v_j / (sum_j exp(z_j) + exp(sink)),

over those that are not after p, in a sliding layer at positions > p - window, and not padding. Keys are kept rotated
for their own positions, so their order does not matter. What is attended to in parts is joined by the parts'
log-sum-exp: with L_a = log sum_{j in a} exp(z_j) and out_a the softmax over part a,

    L = log sum_a exp(L_a),   out = sum_a exp(L_a - L) out_a,

which is exact. A row that sees nothing has L = -inf and gives zeros.

Three ways to the same numbers: `decode` (compiled; CPU, few query rows), `split_k` (Triton; GPU, few query rows) and
the PyTorch operations of this file, for every dtype, device and number of rows. Inference only: no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch

from ..errors import InvalidInput

try:
    from . import decode
except ModuleNotFoundError as error:  # no numba, as may be where a GPU does the work
    if error.name not in ("numba", "llvmlite"):
        raise
    decode = None

SCORES = 2**23
"""Scores that the PyTorch way holds at a time where it holds them: 32 MiB in float32, and at most two copies. Query
rows go in blocks of so many; one row of every query head is the least block."""

COMPILED_ROWS = 32
"""Rows that read one KV head, its query heads times Q, up to which the compiled way is taken: at 4 it takes a third of
the time of the PyTorch way, at 32 as much in bfloat16 and two thirds in float32."""

TRITON_ROWS = 1024
"""Such rows up to which the Triton way is taken. It reads the keys again for each 64 of them, mostly out of the L2
cache; the PyTorch way reads them run after run and makes float32 of them."""

LEAST_TRITON = (3, 6)

# Private in PyTorch, but the one fused attention on the CPU that returns the log-sum-exp. None: plain products.
FLASH: Callable | None = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    tail_keys: torch.Tensor,
    tail_values: torch.Tensor,
    tail_length: int | torch.Tensor,
    tail_first: int | torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tail_visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the Q newest tokens, whose keys are in the tail already, over everything that a layer holds.

    Parameters
    ----------
    query : tensor (B, Hq, Q, d), any strides
        Rows of the last Q tokens: row i is at position tail_first + tail_length - Q + i. Query head h reads KV head
        h // (Hq // H).
    keys, values : tensor (T, d), (T, dv)
        Frozen entries, in the query's dtype.
    positions : int32 tensor (T,)
        Position of each, ascending inside a run and before tail_first.
    begin, end : int64 tensor (B, H), on the query's device or the CPU
        Run of a sequence and KV head: entries begin[b, h] : end[b, h]. Runs may be empty or shared.
    tail_keys, tail_values : tensor (B, H, capacity, d), (B, H, capacity, dv)
        Appended entries: slot i is at position tail_first + i; slots from tail_length on are not read.
    tail_length, tail_first : int, or integer tensor of one number on the query's device
        Tensors are for a captured CUDA graph: see the notes.
    scaling : float
        Factor of q . k.
    window : int, optional
        A row at position p sees positions > p - window only.
    softcap : float, optional
        Scores z become softcap * tanh(z / softcap).
    sinks : tensor (Hq,), optional
        One more score a query head, of value zero.
    tail_visible : bool tensor (B, capacity), optional
        False where a tail slot is padding, which no row sees.

    Returns
    -------
    tensor (B, Hq, Q, dv)
        In the query's dtype, accumulated in float32 (float64 for float64); zeros where a row sees nothing. Laid out
        as (B, Q, Hq, dv), so that a model's transpose costs no copy.

    Raises
    ------
    InvalidInput
        Shapes or dtypes that do not belong together, a run outside the buffer, as far as the CPU can see it.

    Notes
    -----
    On a GPU up to TRITON_ROWS rows of a KV head, query heads times Q, take the Triton way if triton is installed. It
    waits for nothing if `begin` and `end` lie there too, and a CUDA graph that has captured it follows every later
    change of what is in the tensors: the runs, their order and number of entries inside the buffers, and, where
    `tail_length` and `tail_first` are tensors, the length of the tail up to its capacity. Only a shape, a buffer or
    an option that changes needs another capture. Numbers that lie on the GPU cannot be checked without waiting: what
    they say beyond the buffers is cut off there.
    """
    held = Contents(
        keys, values, positions, begin, end, tail_keys, tail_values, tail_length, tail_first, tail_visible, window
    )
    held.check(query, sinks)
    rows = query.shape[1] // begin.shape[1] * query.shape[2]
    if rows <= TRITON_ROWS and takes_triton(query.device) and triton_way().fits(query, held):
        if begin.is_cpu and end.is_cpu:
            held.runs()
        return triton_way().attend(query, held, scaling, softcap, sinks)
    held = held.counted(query.shape[2])
    if decode is not None and rows <= COMPILED_ROWS and decode.fits(query, held):
        return decode.attend(query, held, scaling, softcap, sinks)
    with torch.no_grad():
        return _by_torch(query, held, scaling, softcap, sinks)


@functools.cache
def triton_way() -> ModuleType | None:
    """`split_k`, None where there is no triton or one that is too old for it."""
    try:
        import triton
    except ModuleNotFoundError:
        return None
    if tuple(map(int, triton.__version__.split(".")[:2])) < LEAST_TRITON:
        return None
    from . import split_k

    return split_k


def takes_triton(device: torch.device) -> bool:
    """Whether few rows on a device take the Triton way, so that `begin` and `end` are best kept there."""
    return device.type == "cuda" and triton_way() is not None


@dataclass(frozen=True, slots=True)
class Contents:
    """What a layer holds, as `attend` is given it."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    begin: torch.Tensor
    end: torch.Tensor
    tail_keys: torch.Tensor
    tail_values: torch.Tensor
    tail_length: int | torch.Tensor
    tail_first: int | torch.Tensor
    tail_visible: torch.Tensor | None
    window: int | None

    def check(self, query: torch.Tensor, sinks: torch.Tensor | None) -> None:
        """Raise InvalidInput unless shapes and dtypes belong together; numbers on a GPU are not looked at."""
        sequences, heads = self.begin.shape
        if query.dim() != 4 or query.shape[0] != sequences or query.shape[1] % heads:
            raise InvalidInput(
                f"query: got shape {tuple(query.shape)}, expected ({sequences}, a multiple of {heads}, Q, d): "
                "sequences, query heads, rows, head size"
            )
        rows, size = query.shape[2:]
        if self.keys.shape[1:] != (size,) or self.values.dim() != 2 or self.keys.shape[0] != self.values.shape[0]:
            raise InvalidInput(
                f"keys, values: got shapes {tuple(self.keys.shape)} and {tuple(self.values.shape)}, expected "
                f"(T, {size}) and (T, dv)"
            )
        if not query.dtype == self.keys.dtype == self.values.dtype == self.tail_keys.dtype == self.tail_values.dtype:
            raise InvalidInput(
                f"query: got {query.dtype} over keys of {self.keys.dtype} and {self.tail_keys.dtype}; convert the "
                "query to the dtype of what is held"
            )
        capacity = self.tail_keys.shape[2]
        if self.tail_keys.shape != (sequences, heads, capacity, size) or self.tail_values.shape != (
            sequences,
            heads,
            capacity,
            self.values.shape[1],
        ):
            raise InvalidInput(
                f"tail_keys, tail_values: got {tuple(self.tail_keys.shape)} and {tuple(self.tail_values.shape)}, "
                f"expected ({sequences}, {heads}, slots, {size}) and (..., {self.values.shape[1]})"
            )
        for name in ("tail_length", "tail_first"):
            number = getattr(self, name)
            if isinstance(number, torch.Tensor) and (
                number.numel() != 1 or number.is_floating_point() or number.device != query.device
            ):
                raise InvalidInput(
                    f"{name}: got {number.dtype} {tuple(number.shape)} on {number.device}, expected an int or a tensor "
                    f"of one whole number on {query.device}"
                )
        if not isinstance(self.tail_length, torch.Tensor):
            self._check_tail_length(rows)
        if self.positions.shape != self.keys.shape[:1]:
            raise InvalidInput(
                f"positions: got shape {tuple(self.positions.shape)}, expected ({self.keys.shape[0]},), one a key"
            )
        if self.tail_visible is not None and self.tail_visible.shape != (sequences, capacity):
            raise InvalidInput(
                f"tail_visible: got shape {tuple(self.tail_visible.shape)}, expected ({sequences}, {capacity}), one a "
                "tail slot"
            )
        if sinks is not None and sinks.shape != (query.shape[1],):
            raise InvalidInput(f"sinks: got shape {tuple(sinks.shape)}, expected ({query.shape[1]},), one a query head")

    def _check_tail_length(self, rows: int) -> None:
        capacity = self.tail_keys.shape[2]
        if not rows <= self.tail_length <= capacity:
            raise InvalidInput(
                f"tail_length: got {self.tail_length}, expected {rows} (the rows, whose own keys are in the tail) to "
                f"{capacity} (its slots)"
            )

    def counted(self, rows: int) -> Contents:
        """The same with `tail_length` and `tail_first` as ints; waits for the GPU if they are there."""
        if not isinstance(self.tail_length, torch.Tensor) and not isinstance(self.tail_first, torch.Tensor):
            return self
        counted = replace(self, tail_length=int(self.tail_length), tail_first=int(self.tail_first))
        counted._check_tail_length(rows)
        return counted

    def runs(self) -> list[tuple[int, int]]:
        """(first, last) of every run, in sequence * H + head; InvalidInput for one outside the entries.

        Waits for the GPU if they are there.
        """
        runs = list(zip(self.begin.flatten().tolist(), self.end.flatten().tolist(), strict=True))
        for first, last in runs:
            if not 0 <= first <= last <= self.keys.shape[0]:
                raise InvalidInput(
                    f"begin, end: got a run {first}:{last} over {self.keys.shape[0]} entries; expected runs inside them"
                )
        return runs

    def stacks(self) -> list[_Stack]:
        """The non-empty runs, those of equal length that lie one behind the other as one stack."""
        stacks: list[_Stack] = []
        for run, (first, last) in enumerate(self.runs()):
            if first == last:
                continue
            below = stacks[-1] if stacks else None
            if below and (run, first, last - first) == (below.runs.stop, below.entries.stop, below.length):
                stacks[-1] = _Stack(slice(below.runs.start, run + 1), slice(below.entries.start, last), below.length)
            else:
                stacks.append(_Stack(slice(run, run + 1), slice(first, last), last - first))
        return stacks

    def row_positions(self, rows: int) -> torch.Tensor:
        """Positions of the `rows` newest tokens, int64 (Q,)."""
        last = self.tail_first + self.tail_length
        return torch.arange(last - rows, last, device=self.keys.device)

    def seen_in(self, stack: _Stack, at: torch.Tensor) -> torch.Tensor | None:
        """Which entries of a stack the rows at positions `at` see, bool (runs, 1, Q, length); None if all."""
        if self.window is None:
            return None
        return self.positions[stack.entries].view(-1, 1, 1, stack.length) > at[:, None] - self.window

    def seen_in_tail(self, slots: int, at: torch.Tensor) -> torch.Tensor:
        """Which of the first `slots` of the tail the rows at `at` see, bool (B * H or 1, 1, Q, slots)."""
        position = torch.arange(self.tail_first, self.tail_first + slots, device=at.device)
        seen = position <= at[:, None]
        if self.window is not None:
            seen &= position > at[:, None] - self.window
        if self.tail_visible is None:
            return seen[None, None]
        seen = seen & self.tail_visible[:, None, :slots]
        return seen.repeat_interleave(self.begin.shape[1], dim=0).unsqueeze(1)


class _Stack(NamedTuple):
    """Runs of one length that lie one behind the other."""

    runs: slice  # in sequence * H + head
    entries: slice  # of the flat buffer
    length: int  # entries of each


class _Part(NamedTuple):
    """Softmax over a part of the entries."""

    output: torch.Tensor  # (runs, G, Q, dv)
    level: torch.Tensor  # (runs, G, Q), log of the sum of exp(score); -inf where nothing is seen


def _by_torch(
    query: torch.Tensor, held: Contents, scaling: float, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    sequences, query_heads, rows, _ = query.shape
    runs, group, size = held.begin.numel(), query_heads // held.begin.shape[1], held.values.shape[1]
    query = query.reshape(runs, group, rows, query.shape[3])
    tail_keys, tail_values = (tail.flatten(0, 1) for tail in (held.tail_keys, held.tail_values))
    stacks = held.stacks()
    at = held.row_positions(rows)
    flash = FLASH is not None and query.device.type == "cpu" and softcap is None and size == query.shape[3]
    fused = flash and held.window is None and held.tail_visible is None
    most = max([runs * held.tail_length, *((stack.runs.stop - stack.runs.start) * stack.length for stack in stacks)])
    block = rows if fused else max(1, SCORES // max(1, group * most))
    precise = torch.promote_types(query.dtype, torch.float32)

    def softmax(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor | None, causal: bool = False
    ) -> _Part:
        if flash:
            return _by_flash(query, keys, values, seen, causal, scaling)
        return _by_products(query, keys, values, seen, scaling, softcap)

    output = query.new_empty(sequences, rows, query_heads, size)
    for first in range(0, rows, block):
        last = min(first + block, rows)
        asked, here = query[:, :, first:last], at[first:last]
        shape = (runs, group, last - first)
        frozen = _Part(
            query.new_zeros(*shape, size, dtype=precise), query.new_full(shape, float("-inf"), dtype=precise)
        )
        for stack in stacks:
            keys, values = (flat[stack.entries].unflatten(0, (-1, stack.length)) for flat in (held.keys, held.values))
            part = softmax(asked[stack.runs], keys, values, held.seen_in(stack, here))
            frozen.output[stack.runs], frozen.level[stack.runs] = part
        parts = [frozen]
        slots = held.tail_length - rows + last
        if fused:
            earlier = slots - rows
            if earlier:
                parts.append(softmax(asked, tail_keys[:, :earlier], tail_values[:, :earlier], None))
            parts.append(softmax(asked, tail_keys[:, earlier:slots], tail_values[:, earlier:slots], None, True))
        else:
            seen = held.seen_in_tail(slots, here)
            parts.append(softmax(asked, tail_keys[:, :slots], tail_values[:, :slots], seen))
        joined = _joined(parts, None if sinks is None else sinks.to(precise), sequences)
        output[:, first:last] = joined.unflatten(0, (sequences, -1)).flatten(1, 2).transpose(1, 2)
    return output.transpose(1, 2)


def _by_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    causal: bool,
    scaling: float,
) -> _Part:
    """Softmax of the rows (N, G, Q, d) over keys (N, n, d) and values (N, n, d), n > 0, by PyTorch's fused kernel."""
    group, rows = query.shape[1:3]
    mask = None
    if seen is not None:
        mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, float("-inf"))
    elif not causal:
        query = query.flatten(1, 2).unsqueeze(1)  # every row sees the same: one pass over the keys for all of a group
    keys, values = (x.unsqueeze(1).expand(-1, query.shape[1], -1, -1) for x in (keys, values))
    # The kernel takes the elements of a row to lie side by side, and does not look.
    query, keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (query, keys, values))
    output, level = FLASH(query, keys, values, 0.0, causal, attn_mask=mask, scale=scaling)
    output, level = (x.flatten(1, 2).unflatten(1, (group, rows)) for x in (output, level))
    if seen is not None:  # the kernel's level of a row that sees nothing is 0
        level = level.masked_fill(~seen.any(-1), float("-inf"))
    return _Part(output, level)


def _by_products(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> _Part:
    """Softmax of the rows (N, G, Q, d) over keys (N, n, d) and values (N, n, dv) by plain products."""
    weights, top = _weights(query, keys, seen, scaling, softcap)
    total = weights.sum(-1)
    output = (weights.flatten(1, 2) @ values.to(weights.dtype)).unflatten(1, weights.shape[1:3])
    output = output / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
    return _Part(output, top + total.log())


def _weights(
    query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor | None, scaling: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - top) (N, G, Q, n) of rows (N, G, Q, d) over keys (N, n, d), 0 where not seen, and top (N, G, Q).

    In float32, of float64 in float64. The top is the row's largest score, 0 if it sees nothing.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    rows = query.flatten(1, 2).to(precise) * scaling
    scores = (rows @ keys.to(precise).transpose(1, 2)).unflatten(1, query.shape[1:3])
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if seen is not None:
        scores.masked_fill_(~seen, float("-inf"))
    top = scores.amax(-1)
    top.masked_fill_(top == float("-inf"), 0.0)
    return scores.sub_(top.unsqueeze(-1)).exp_(), top


def _joined(parts: list[_Part], sinks: torch.Tensor | None, sequences: int) -> torch.Tensor:
    """Softmax over all parts, (runs, G, Q, dv), in the levels' precision; see the head of this file."""
    level = torch.stack([part.level for part in parts]).logsumexp(0)
    if sinks is not None:
        level = torch.logaddexp(level, sinks.view(-1, level.shape[1]).repeat(sequences, 1).unsqueeze(-1))
    level.masked_fill_(level == float("-inf"), 0.0)  # where nothing is seen every weight is 0
    return sum(part.output * (part.level - level).exp().unsqueeze(-1) for part in parts)

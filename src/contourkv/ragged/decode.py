r"""Attention of few query rows over a ragged layer on the CPU, compiled: every key and value is read once.

The entries of all runs and tails are cut into units of at most CHUNK consecutive entries of one KV head. Threads take
the next unit until none is left, so that they finish together however uneven the runs are. A unit computes, for all
rows of all query heads of its KV head at once, the largest score m, the sum S of exp(z - m) and the sum A of
exp(z - m) v; whoever finishes the last unit of a KV head joins its units in their order, hence with the same result
whatever the threads did:

    out = sum_u exp(m_u - m) A_u / (sum_u exp(m_u - m) S_u + exp(sink - m)),   m = max_u m_u.

Sums are in float32, of float64 in float64. bfloat16 is read as pairs in 32 bits: the upper half of a float32 is a
bfloat16, so one shift gives the odd elements and one mask the even ones; queries and outputs are taken apart likewise.

Threads are those that PyTorch works with: its own OpenMP runtime is called, so that no second pool of threads spins
beside it. Where that runtime has no GNU entry point, all is done by the calling thread.

Everything is passed in one block of 64-bit numbers, named by the constants below; what would be ten array arguments
costs more to pass than a short context takes to attend to.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from pathlib import Path

import numpy as np
import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from ..errors import InvalidInput

CHUNK = 256
"""Entries of a unit, at most; a multiple of 4."""
ALIGNED = 64
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
    SCALING, SOFTCAP, SLOTS,
) = range(46)  # fmt: skip

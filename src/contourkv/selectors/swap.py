r"""Balance: start at the heaviest keys and swap one kept key for one dropped key while that lowers the error.

With a_j = g_j . sum_{i in A} g_i, swapping i out and j in changes the squared numerator of es by
-2 a_i + G_ii + 2 a_j + G_jj - 2 G_ij and the mass by p_j - p_i, so the best of all swaps costs O(s M) from the
Gram matrix G of the M heaviest keys (paper, sections 2 and 4).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from ..operator import Instance, check_budget, check_instance, check_kept, whole_number

# A swap must lower es^2 by more than rounding could, or two equal sets would trade places for ever.
LOWERS = 1.0 - 1e-12


@njit(cache=True)
def swap_descent(gram, p, kept, first, stop):
    """Best single swaps from `kept` until none lowers the error.

    Parameters
    ----------
    gram : (M, M) float64, g_i . g_j of the keys in mass order; p : (M,) float64
    kept : (s,) int64 mass ranks of the start
    first, stop : only the ranks first .. stop-1 may enter or leave

    Returns
    -------
    (s,) int64
        Mass ranks of the last set, sorted.
    """
    n = p.size
    inside = np.zeros(n, np.bool_)
    pull = np.zeros(n)
    mass = 0.0
    for i in kept:
        inside[i] = True
        mass += p[i]
    for i in kept:
        for j in range(n):
            pull[j] += gram[i, j]
    square = 0.0
    for i in kept:
        square += pull[i]
    now = square / (mass * mass)
    while True:
        least = now * LOWERS
        leave = enter = -1
        for i in range(first, stop):
            if not inside[i]:
                continue
            square_without = square - 2.0 * pull[i] + gram[i, i]
            mass_without = mass - p[i]
            for j in range(first, stop):
                if inside[j]:
                    continue
                q = square_without + 2.0 * pull[j] + gram[j, j] - 2.0 * gram[i, j]
                m = mass_without + p[j]
                if q < least * m * m:
                    least = max(q, 0.0) / (m * m)
                    leave, enter = i, j
        if enter < 0:
            break
        inside[leave] = False
        inside[enter] = True
        mass = 0.0
        square = 0.0
        for j in range(n):
            pull[j] += gram[enter, j] - gram[leave, j]
        for j in range(n):
            if inside[j]:
                mass += p[j]
                square += pull[j]
        square = max(square, 0.0)
        after = square / (mass * mass)
        if not after < now * LOWERS:
            break
        now = after
    return np.flatnonzero(inside)


@njit(cache=True)
def without_most_misleading(gram, p, s):
    """Ranks 0 .. s without the one of the s heaviest whose removal leaves the rest with the least error.

    The freed place goes to the next heaviest key, rank s.
    """
    pull = np.zeros(s)
    square = 0.0
    mass = 0.0
    for i in range(s):
        mass += p[i]
        for j in range(s):
            pull[i] += gram[i, j]
        square += pull[i]
    worst = 0
    least = np.inf
    for i in range(s):
        rest = mass - p[i]
        if rest > 0.0:
            error = max(square - 2.0 * pull[i] + gram[i, i], 0.0) / (rest * rest)
            if error < least:
                least, worst = error, i
    out = np.empty(s, np.int64)
    filled = 0
    for i in range(s + 1):
        if i != worst:
            out[filled] = i
            filled += 1
    return out


@njit(cache=True)
def error_of(g, p, kept):
    """Forced error of the keys `kept` (indices into g and p), summed in the order given."""
    mass = 0.0
    for i in kept:
        mass += p[i]
    square = 0.0
    for c in range(g.shape[1]):
        total = 0.0
        for i in kept:
            total += g[i, c]
        square += total * total
    return np.sqrt(square) / mass


def descend(g: np.ndarray, p: np.ndarray, gram: np.ndarray, start: np.ndarray, first: int, stop: int) -> np.ndarray:
    """`swap_descent` from `start`, or `start` itself where the end is no better.

    The Gram form of a set far lighter than its row cancels; both ends are compared by their errors from g.
    """
    end = swap_descent(gram, p, start, first, stop)
    return end if error_of(g, p, end) < error_of(g, p, start) else start


def balance(
    instance: Instance, s: int, candidates: int | None = None, start: ArrayLike | str | None = None
) -> np.ndarray:
    """Keys kept by the balance rule.

    Parameters
    ----------
    instance : Instance
    s : budget, 1 <= s < N
    candidates : only so many of the heaviest keys may enter; default 256 or twice the budget, whichever is more
    start : the first kept set: None for the s heaviest keys (the paper's rule), "second" for the s heaviest
        without the single most misleading one, or s key indices

    Returns
    -------
    (s,) int array
        Sorted key indices.

    Raises
    ------
    InvalidInput
        Budget outside 1 .. N-1, fewer candidates than the budget, a start that is not s distinct candidates.
    """
    s = check_budget(s, check_instance(instance).size)
    candidates = max(256, 2 * s) if candidates is None else whole_number("candidates", candidates)
    if candidates < s:
        raise InvalidInput(f"candidates: expected at least the budget {s}, got {candidates}")
    keys = instance.order[:candidates]
    g, p = np.ascontiguousarray(instance.g[keys]), np.ascontiguousarray(instance.p[keys])
    gram = g @ g.T
    if start is None:
        ranks = np.arange(s)
    elif isinstance(start, str):
        if start != "second":
            raise InvalidInput(f'start: expected None, "second" or {s} key indices, got {start!r}')
        if keys.size == s:
            raise InvalidInput(f"start: the second start needs more than {s} candidates")
        ranks = without_most_misleading(gram, p, s)
    else:
        given = check_kept(start, instance.size)
        rank_of = np.full(instance.size, -1)
        rank_of[keys] = np.arange(keys.size)
        ranks = rank_of[given]
        if given.size != s or (ranks < 0).any():
            raise InvalidInput(f"start: expected {s} of the {keys.size} heaviest keys, got {given.size} keys")
    return np.sort(keys[descend(g, p, gram, np.sort(ranks), 0, keys.size)])

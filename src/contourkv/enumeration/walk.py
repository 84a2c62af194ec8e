r"""Every kept set of a row in mass order: key by key from the heaviest, one cut a node, the last two keys by pairs.

A node is a set F of keys, the heavier part of the kept sets below it: those add s - |F| keys of larger mass rank.
With r = sum_F g_j, u = r / ||r||, a = ||r|| - t p(F) and c_k = u . g_k - t p_k, a set A with es(A) < t needs

    0 > ||sum_A g_j|| - t p(A) >= a + (the sum of c_k over the keys that A adds),

so the node is closed if the s - |F| least c_k sum to more than -a, and a key is out below it if it would do so with
the others at their least. The pulls r . g_k of a node are its parent's plus one row of the Gram matrix: a node costs
an addition a key. Where two keys k, l are missing, one of them has c <= -a / 2, and

    ||r + g_k + g_l||^2 - t^2 (p(F) + p_k + p_l)^2

is the sum of a number for k, one for l and one for the pair: a few operations a set.

Against the branch and bound of `contourkv.enumeration.branch`, whose cuts are sharper and cost far more, this wins
where no cut closes a node high up: flat rows, where many light keys are equally good. The work is bounded for s = 4
by N^2 / 2 nodes, and a floor under the mass of the kept set makes the tree smaller.

Rounding: nodes are closed and pairs discarded only beyond the rounding error of what is compared; what remains is
decided by the forced error computed directly from g in float64.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..selectors.swap import error_of
from .branch import ROUNDING

MASS_ROUNDING = 1e-13
"""Relative, of the sum of at most a few dozen masses in any order, generously."""

CANCELLED = 1e-10
"""A sum whose square is this share of what its terms could give has no direction to cut along."""

BEST, THRESHOLD, TESTED, WORK = range(4)


def walk(
    g: np.ndarray,
    p: np.ndarray,
    kept: np.ndarray,
    tolerance: float,
    negligible: float = 0.0,
    floor_mass: float = 0.0,
    most_work: float = np.inf,
    gram: np.ndarray | None = None,
) -> tuple[np.ndarray, float, bool, int]:
    """The best kept set of as many keys as `kept` has, or none below (1 - tolerance) times the best known error.

    Parameters
    ----------
    g : (M, d) float64 contiguous, p_j (v_j - mu), keys in mass order
    p : (M,) float64 contiguous, falling
    kept : (s,) the best set known, sorted mass ranks, 2 <= s < M
    tolerance : relative
    negligible : an error up to here is rounding: the walk ends when it has one
    floor_mass : only sets with at least this mass count, summed in mass order; `kept` must be one
    most_work : keys looked at and pairs tested before the walk is given up; the same on every run
    gram : g @ g.T, if it is there already

    Returns
    -------
    kept : (s,) int64 the best set known, sorted mass ranks
    error : its forced error, summed in mass order
    finished : whether every set was decided
    tested : sets whose squared form was computed
    """
    gram = g @ g.T if gram is None else gram
    length = np.sqrt(np.diag(gram))
    # Rank by rank, the longest term at or after it.
    longest = np.append(np.maximum.accumulate(length[::-1])[::-1], 0.0)
    best = kept.astype(np.int64)
    error = float(error_of(g, p, best))
    levels = np.array([error, error * (1.0 - tolerance), 0.0, 0.0])
    finished = error <= negligible or _walk(
        g, gram, p, length, longest, best, levels, 1.0 - tolerance, negligible, floor_mass, most_work
    )
    return best, float(levels[BEST]), bool(finished), int(levels[TESTED])


@njit(cache=True, fastmath={"nnan", "ninf", "nsz", "reassoc", "contract"})
def _least_of_pairs(own, row, keys, mass, weight, first, stop):
    """min over first <= y < stop of own[y] + 2 row[keys[y]] - weight mass[y]."""
    least = np.inf
    for y in range(first, stop):
        x = own[y] + 2.0 * row[keys[y]] - weight * mass[y]
        least = x if x < least else least
    return least


@njit(cache=True)
def offer(g, p, kept, floor_mass, keep, best, levels):
    """Compute the error of `kept` (sorted ranks) directly; it becomes the best set if it is better and heavy enough."""
    mass = 0.0
    for i in kept:
        mass += p[i]
    if mass < floor_mass:
        return
    error = error_of(g, p, kept)
    if error < levels[BEST]:
        levels[BEST] = error
        best[:] = kept
        levels[THRESHOLD] = min(levels[THRESHOLD], error * keep)


@njit(cache=True)
def _pairs(
    g, gram, p, prefix, keys, pull, cost, count, a, slack, square, mass, margin, floor_mass, keep, best, levels, scratch
):
    """Test every pair of keys[:count] (after the prefix) that the cut leaves."""
    own, weight, place, trial = scratch
    s = best.size
    t2 = levels[THRESHOLD] ** 2
    # First the keys of which every pair must hold one.
    half = 0.5 * (slack - a)
    first = 0
    for y in range(count):
        if cost[y] <= half:
            place[first] = y
            first += 1
    filled = first
    for y in range(count):
        if cost[y] > half:
            place[filled] = y
            filled += 1
    for z in range(count):
        y = place[z]
        j = keys[y]
        own[z] = 2.0 * pull[y] + gram[j, j] - t2 * p[j] * (2.0 * mass + p[j])
        weight[z] = p[j]
    for z in range(count):
        place[z] = keys[place[z]]
    base = square - t2 * mass * mass - margin
    for x in range(first):
        row = gram[place[x]]
        twice = 2.0 * t2 * weight[x]
        least = _least_of_pairs(own, row, place, weight, twice, x + 1, count)
        levels[TESTED] += count - x - 1
        if base + own[x] + least > 0.0:
            continue
        for y in range(x + 1, count):
            if base + own[x] + own[y] + 2.0 * row[place[y]] - twice * weight[y] > 0.0:
                continue
            if mass + weight[x] + weight[y] < floor_mass * (1.0 - MASS_ROUNDING):
                continue
            trial[: s - 2] = prefix[: s - 2]
            trial[s - 2] = min(place[x], place[y])
            trial[s - 1] = max(place[x], place[y])
            offer(g, p, trial, floor_mass, keep, best, levels)
    levels[WORK] += first * (count - 0.5 * first)


@njit(cache=True)
def _walk(g, gram, p, length, longest, best, levels, keep, negligible, floor_mass, most_work):
    """Depth first over the heavier s - 2 keys. Whether the tree was exhausted."""
    n, d = g.shape
    s = best.size
    prefix = np.zeros(s, np.int64)
    keys = np.empty((s, n), np.int64)
    pull = np.zeros((s, n))
    cost = np.zeros(n)
    count = np.zeros(s, np.int64)
    at = np.zeros(s, np.int64)
    square = np.zeros(s)
    mass = np.zeros(s)
    span = np.zeros(s)
    low = np.empty(s)
    scratch = (np.empty(n), np.empty(n), np.empty(n, np.int64), np.empty(s, np.int64))
    enough = floor_mass * (1.0 - MASS_ROUNDING)
    rounding = 8.0 * ROUNDING * (d + s)
    keys[0] = np.arange(n)
    count[0] = n
    if s == 2:
        margin = rounding * (2.0 * longest[0] + 2.0 * levels[THRESHOLD] * p[0]) ** 2
        _pairs(
            g,
            gram,
            p,
            prefix,
            keys[0],
            pull[0],
            cost,
            n,
            0.0,
            0.0,
            0.0,
            0.0,
            margin,
            floor_mass,
            keep,
            best,
            levels,
            scratch,
        )
        return True
    depth = 0
    while depth >= 0:
        if levels[WORK] > most_work or levels[BEST] <= negligible:
            return levels[BEST] <= negligible
        need = s - depth - 1
        x = at[depth]
        if x + need >= count[depth]:
            depth -= 1
            continue
        at[depth] += 1
        j = keys[depth, x]
        t = levels[THRESHOLD]
        whole = mass[depth] + p[j]
        if floor_mass > 0.0:
            heaviest = whole
            for z in range(x + 1, x + 1 + need):
                heaviest += p[keys[depth, z]]
            if heaviest < enough:
                # The keys that follow are lighter still.
                depth -= 1
                continue
        reach = span[depth] + length[j]
        child_square = max(square[depth] + 2.0 * pull[depth, x] + gram[j, j], 0.0)
        r = np.sqrt(child_square)
        a = r - t * whole
        next_key = keys[depth, x + 1]
        rest = need * (longest[next_key] + t * p[next_key])
        every = reach + t * whole + rest
        levels[WORK] += 4.0
        if child_square <= CANCELLED * reach * reach:
            slack = np.inf
        else:
            # Of r itself too: its square is off by a share of reach^2.
            slack = rounding * (reach * (reach + need * longest[next_key]) / r + every)
        if a > rest + slack:
            continue
        child = depth + 1
        row = gram[j]
        stop = count[depth]
        size = stop - x - 1
        levels[WORK] += size
        inverse = 1.0 / r if slack < np.inf else 0.0
        below = keys[child]
        below_pull = pull[child]
        for z in range(size):
            k = keys[depth, x + 1 + z]
            y = pull[depth, x + 1 + z] + row[k]
            below[z] = k
            below_pull[z] = y
            cost[z] = y * inverse - t * p[k]
        if slack < np.inf:
            for q in range(need):
                low[q] = np.inf
            for z in range(size):
                y = cost[z]
                if y < low[need - 1]:
                    q = need - 1
                    while q > 0 and low[q - 1] > y:
                        low[q] = low[q - 1]
                        q -= 1
                    low[q] = y
            least = 0.0
            for q in range(need):
                least += low[q]
            if a + least > slack:
                continue
            limit = slack - a - (least - low[need - 1])
            filled = 0
            for z in range(size):
                if cost[z] <= limit:
                    below[filled] = below[z]
                    below_pull[filled] = below_pull[z]
                    cost[filled] = cost[z]
                    filled += 1
            size = filled
        prefix[depth] = j
        if need == 2:
            if size >= 2:
                _pairs(
                    g,
                    gram,
                    p,
                    prefix,
                    below,
                    below_pull,
                    cost,
                    size,
                    a,
                    slack,
                    child_square,
                    whole,
                    rounding * every * every,
                    floor_mass,
                    keep,
                    best,
                    levels,
                    scratch,
                )
            continue
        count[child] = size
        at[child] = 0
        square[child] = child_square
        mass[child] = whole
        span[child] = reach
        depth = child
    return True

r"""Free weights: how near the values of a kept set can come to the dense output, and the best set of s keys for it.

ef(A) = dist(mu, conv{v_j : j in A}) (paper, section 1) is solved by `contourkv.selectors.hull.nearest_point`.
EF(s), its minimum over the sets of s keys of a pool, is found by branch and bound. ef never rises when a key is
added, so of all sets between F (keys that must stay) and F + R (keys that may),

    ef(A) >= ef(F + R),

and a nearest point of F + R that needs no more than s keys, F among them, is the node's answer. The node of least
bound comes first, so that a search that runs out of work still has a lower bound of all sets. It is split on the key
that the nearest point can least do without: with A_c the lifted points of its corral, taking key j out costs the
affine hull w_j^2 / ((A_c^T A_c)^-1)_jj. With the key in, the bound stays and nothing is solved; with it out, one
nearest point is, from the last one's corral. Once all but two keys are in, the pairs are screened by the distance
of the affine hull and the few that pass are solved (`contourkv.selectors.hull.extend`).

Rounding: a nearest point y proves ef >= min_j y . x_j / ||y||, however it was come by; bounds are lowered by the
rounding of these products and of the points' rotation, `ROUNDING` of the longest point.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from ..operator import Instance, check_budget, check_instance, check_kept, whole_number
from ..selectors.hull import (
    BEST,
    FLOOR,
    HELD,
    SOLVES,
    UNIT,
    Corral,
    Points,
    check_candidates,
    extend,
    filled,
    free_descent,
    from_both_starts,
    nearest_point,
    negligible_error,
    offer,
    scaled,
    scratch_of,
)

LIMIT = 1000
"""Solves of one search unless told otherwise."""

MOST_NODES = 1 << 17
"""Nodes of one search; with a pool of 40 they take 140 MB."""

OUT, MAY, IN = range(3)


@dataclass(frozen=True, eq=False)
class FreeError:
    """The free-weight error of one kept set.

    Attributes
    ----------
    error : ef(A), float64, in the units of the values
    weights : (len(kept),) float64 in the order of `kept`, >= 0, sum 1; ||sum_A w_j v_j - mu|| = error to rounding
    gap : y . y - min_j y . (v_j - mu) for y = sum_A w_j (v_j - mu): 0 at the optimum but for rounding
    lower_bound : proved, <= error: no weights give less than (error^2 - gap) / error, lowered by rounding
    """

    error: float
    weights: np.ndarray
    gap: float
    lower_bound: float


@dataclass(frozen=True, eq=False)
class FreeResult:
    """What is known of EF(s) over a pool.

    Attributes
    ----------
    kept : (s,) sorted key indices of the best set found; keys of free weight 0 are the heaviest of the pool
    error : its ef, float64, in the units of the values
    lower_bound : proved, <= error: no set of s keys of the pool has an ef below it
    status : "exact" if the search ended: no set of s pool keys has an ef below (1 - tolerance) * `error`, or below the
        slightly smaller `lower_bound` where float64 cannot resolve the tolerance; otherwise "upper bound"
    solves : nearest points solved, a screening of all single keys or pairs that complete a set counted as one
    """

    kept: np.ndarray
    error: float
    lower_bound: float
    status: str
    solves: int

    @property
    def exact(self) -> bool:
        """Whether the search ended."""
        return self.status == "exact"


def free_error(instance: Instance, kept: ArrayLike) -> FreeError:
    """ef(A) = dist(mu, conv{v_j : j in A}): the error of `kept` with the best weights (paper, section 1).

    Parameters
    ----------
    instance : Instance
    kept : indices of the kept set A, distinct

    Returns
    -------
    FreeError

    Raises
    ------
    InvalidInput
        No key, a key that is not there or is named twice.

    Notes
    -----
    Never above es(A), whose weights p_j / p(A) are one choice; 0 within rounding where the hull holds mu. Cost:
    O(k len(kept) d) for k keys of positive weight, times the few times that a key leaves again.
    """
    keys = check_kept(kept, check_instance(instance).size)
    at, lift, scale = scaled(instance, keys)
    corral = Corral.of(at, lift)
    k, square, least = nearest_point(at, np.arange(keys.size), corral, 0)
    weights = np.zeros(keys.size)
    weights[corral.key[:k]] = corral.weight[:k]
    error = float(np.sqrt(square))
    proved = _proved(square, least) - UNIT * sum(at.shape)
    return FreeError(
        error=error * scale,
        weights=weights,
        gap=float(max(square - least, 0.0)) * scale * scale,
        lower_bound=min(max(proved, 0.0), error) * scale,
    )


@njit(cache=True)
def _proved(square, least):
    """min_j y . x_j / ||y||, which no point of the hull is nearer than, or 0: what a nearest point y proves."""
    return least / np.sqrt(square) if least > 0.0 else 0.0


def best_free(
    instance: Instance,
    s: int,
    pool_size: int,
    starts: Sequence[ArrayLike] = (),
    tolerance: float = 1e-6,
    limit: int = LIMIT,
) -> FreeResult:
    """EF(s): the kept set of least free-weight error among all sets of s of the `pool_size` heaviest keys.

    Parameters
    ----------
    instance : Instance
    s : budget, 1 <= s < N
    pool_size : keys in the pool, s <= pool_size; a row with fewer keys is searched whole
    starts : kept sets of s pool keys to start from beside the geometric selection's two; the result is no worse than
        any of them, so that with the set of least es among them EF <= ES
    tolerance : relative, 1e-9 to 0.5; a set counts as better if its ef is below (1 - tolerance) times the best
    limit : solves after which the search is given up, >= 0, the same on every run. The starts are solved all the
        same, and a last look for better swaps comes on top

    Returns
    -------
    FreeResult

    Raises
    ------
    InvalidInput
        A budget outside 1 .. N-1, a pool smaller than the budget, a start that is not s distinct pool keys, a
        tolerance or limit out of range.
    """
    s = check_budget(s, check_instance(instance).size)
    pool = instance.order[: check_candidates("pool_size", pool_size, s)]
    if not 1e-9 <= tolerance <= 0.5:
        raise InvalidInput(f"tolerance: expected a relative difference from 1e-9 to 0.5, got {tolerance}")
    limit = whole_number("limit", limit, least=0)
    rank_of = np.full(instance.size, -1)
    rank_of[pool] = np.arange(pool.size)
    given = [rank_of[check_kept(start, instance.size)] for start in starts]
    if any(ranks.size != s or (ranks < 0).any() for ranks in given):
        raise InvalidInput(f"starts: expected sets of {s} of the {pool.size} heaviest keys")

    points = Points.of(instance, pool)
    negligible = negligible_error(instance)
    ranks, bound, finished, solves = _best(
        points,
        s,
        _distinct(instance.v[pool]),
        given,
        (negligible / points.scale) ** 2,
        (1.0 - tolerance) ** 2,
        limit,
    )
    kept = np.sort(pool[ranks])
    error = free_error(instance, kept).error
    status = "exact" if finished or error <= negligible else "upper bound"
    # `d` roundings a product, in the rotation as in the screens, and one a point.
    proved = max(bound - UNIT * (pool.size + instance.v.shape[1]), 0.0) if error > negligible else 0.0
    return FreeResult(kept, error, min(proved * points.scale, error), status, solves)


def price(es: ArrayLike, ef: ArrayLike) -> np.ndarray:
    """pi = es / ef: the price of forced weights (paper, section 1).

    Parameters
    ----------
    es, ef : arrays of one shape, or that broadcast: forced- and free-weight errors, >= 0, in the same units

    Returns
    -------
    float64 array
        es / ef; 1 where both are 0, infinite where ef alone is. At least 1, but for rounding, where ef is the
        free-weight error of the same set or a minimum over sets that es's is among.

    Raises
    ------
    InvalidInput
        Negative numbers, NaN, shapes that do not fit.
    """
    es, ef = np.asarray(es, dtype=np.float64), np.asarray(ef, dtype=np.float64)
    for name, value in (("es", es), ("ef", ef)):
        if not (value >= 0).all():
            raise InvalidInput(f"{name}: expected errors of at least 0, got {value[~(value >= 0)].flat[0]}")
    try:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return np.where((es == 0) & (ef == 0), 1.0, es / ef)
    except ValueError:
        raise InvalidInput(f"es, ef: expected shapes that broadcast, got {es.shape} and {ef.shape}") from None


def _distinct(values: np.ndarray) -> np.ndarray:
    """Rows of `values` (M, d) that are no repetition of an earlier one: only a heavier twin is ever needed."""
    first: dict[bytes, int] = {}
    for rank, value in enumerate(values):
        first.setdefault(value.tobytes(), rank)
    return np.fromiter(first.values(), dtype=np.int64)


def _best(
    points: Points,
    s: int,
    distinct: np.ndarray,
    starts: list[np.ndarray],
    negligible: float,
    lowers: float,
    limit: int,
) -> tuple[np.ndarray, float, bool, int]:
    """The best set as ranks, the lower bound, whether the search ended, and the solves spent; in units of the points.

    Parameters
    ----------
    distinct : the ranks to search over; starts : the ranks of sets to start from
    negligible, lowers : on the squared error
    """
    corral = Corral.of(points.at, points.lift)
    k, square, least = nearest_point(points.at, distinct, corral, 0)
    if k <= s:
        return filled(points.at, corral.key[:k].copy(), s, corral), _proved(square, least), True, 1
    counts = np.array([1, s])
    kept, best = from_both_starts(points, s, corral, negligible, counts, limit)
    for start in starts:
        found, error = free_descent(points.at, points.gram, start, corral, negligible, counts, limit)
        if error < best:
            kept, best = found, error
    counts[HELD] = s
    levels = np.array([best, np.inf])
    finished = _search(points.at, points.gram, s, distinct, corral, kept, levels, counts, negligible, lowers, limit)
    bound = float(np.sqrt(min(levels[FLOOR], levels[BEST] * lowers)))
    kept = filled(points.at, kept[: counts[HELD]].copy(), s, corral)
    if levels[BEST] <= negligible:
        bound = 0.0
    elif not finished:
        kept, _ = free_descent(points.at, points.gram, kept, corral, negligible, counts, limit + 100 * s)
    return kept, bound, finished, int(counts[SOLVES])


@njit(cache=True)
def _split_costs(corral, k, costs, row):
    """What taking each point of the corral out costs its affine hull, into `costs`, in the corral's order."""
    for i in range(k):
        # Row i of the inverse factor: ((A_c^T A_c)^-1)_ii is its squared length.
        total = 0.0
        for j in range(i, k):
            value = 1.0 if j == i else 0.0
            for a in range(i, j):
                value -= row[a] * corral.factor[a, j]
            row[j] = value / corral.factor[j, j]
            total += row[j] * row[j]
        costs[i] = corral.weight[i] ** 2 / total


@njit(cache=True)
def _where(state, slot, low, high):
    """Keys of a node whose state lies in low .. high."""
    out = np.empty(state.shape[1], np.int64)
    n = 0
    for j in range(out.size):
        if low <= state[slot, j] <= high:
            out[n] = j
            n += 1
    return out[:n]


@njit(cache=True)
def _search(points, gram, s, distinct, corral, kept, levels, counts, negligible, lowers, limit):
    """Branch and bound from the set `kept`; the best set's first counts[HELD] ranks come into it. Whether it ended.

    No set has a squared error below the least of levels[FLOOR] and `lowers` times levels[BEST], that of `kept`.
    """
    m = points.shape[0]
    width = corral.key.size
    # One slot a node; a node's child with one more key in takes its place.
    # Memory that no node reaches is never touched.
    room = min(limit, MOST_NODES) + 1
    bound = np.empty(room)
    size = np.empty(room, np.int64)
    state = np.empty((room, m), np.int8)
    key = np.empty((room, width), np.int64)
    weight = np.empty((room, width))
    cost = np.empty((room, width))
    row = np.empty(width)
    k, square, least = nearest_point(points, distinct, corral, 0)
    _split_costs(corral, k, cost[0], row)
    bound[0] = _proved(square, least) ** 2
    size[0] = k
    for a in range(k):
        key[0, a] = corral.key[a]
        weight[0, a] = corral.weight[a]
    for j in range(m):
        state[0, j] = OUT
    for j in distinct:
        state[0, j] = MAY
    slots = 1
    scratch = scratch_of(m, width, s)
    if s <= 2:
        extend(points, gram, distinct[:0], distinct, s, corral, scratch, levels, kept, counts, lowers)
        return True
    heap = [(bound[0], 0)]
    while len(heap) > 0 and levels[BEST] > negligible:
        now, slot = heapq.heappop(heap)
        if now >= levels[BEST] * lowers or counts[SOLVES] >= limit or slots == room:
            levels[FLOOR] = min(levels[FLOOR], now)
            return now >= levels[BEST] * lowers
        fixed = _where(state, slot, IN, IN)
        split = -1
        loose = 0
        for a in range(size[slot]):
            if state[slot, key[slot, a]] == MAY:
                loose += 1
                if split < 0 or cost[slot, a] > cost[slot, split]:
                    split = a
        if fixed.size + loose <= s:
            union = np.empty(fixed.size + loose, np.int64)
            n = 0
            for j in fixed:
                union[n] = j
                n += 1
            for a in range(size[slot]):
                if state[slot, key[slot, a]] == MAY:
                    union[n] = key[slot, a]
                    n += 1
            offer(points, union, corral, levels, kept, counts, lowers)
            continue
        chosen = key[slot, split]

        # The key out: a new node, solved from its parent's corral.
        k = 0
        for a in range(size[slot]):
            if a != split:
                corral.key[k] = key[slot, a]
                corral.weight[k] = weight[slot, a]
                k += 1
        state[slot, chosen] = OUT
        counts[SOLVES] += 1
        k, square, least = nearest_point(points, _where(state, slot, MAY, IN), corral, k)
        proved = max(now, _proved(square, least) ** 2)
        if proved < levels[BEST] * lowers:
            _split_costs(corral, k, cost[slots], row)
            bound[slots] = proved
            size[slots] = k
            for a in range(k):
                key[slots, a] = corral.key[a]
                weight[slots, a] = corral.weight[a]
            for j in range(m):
                state[slots, j] = state[slot, j]
            heapq.heappush(heap, (proved, slots))
            slots += 1
        else:
            levels[FLOOR] = min(levels[FLOOR], proved)

        # The key in: the same bound and nearest point.
        state[slot, chosen] = IN
        if fixed.size + 1 < s - 2:
            heapq.heappush(heap, (now, slot))
        else:
            fixed, others = _where(state, slot, IN, IN), _where(state, slot, MAY, MAY)
            taken = s - fixed.size
            extend(points, gram, fixed, others, taken, corral, scratch, levels, kept, counts, lowers)
    return True

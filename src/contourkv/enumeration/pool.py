r"""The exact least forced error over a family of kept sets, by meet in the middle on an indefinite Gram form.

A family fixes a core that every set keeps and names the free keys among which the rest is chosen in every way:

* `MassPool` (core c, pool m): the c heaviest keys, and any s - c of the mass ranks c .. m-1. With c = 0 this is
  the paper's pool, the m heaviest keys.
* `Neighbourhood` (free f, pool m): around a given kept set, its f most doubtful keys are set free and the m - f
  most promising others join them. A swap rule ends where no single swap helps; this decides f swaps at once.

With u(A) = sum_A g_j and the best error e known so far, a set is better iff

    h(A) = ||u(A)||^2 - e^2 p(A)^2 = sum_{i,j in A} H_ij < 0,   H_ij = g_i . g_j - e^2 p_i p_j,

so the search is a minimum of one quadratic form, with no ratio in the inner loop. The free keys are cut into
two halves. For a left part L, h(L + R) over all right parts R of one size is a vector: the vector of L without
its last key plus that key's cross terms. A depth-first walk over L therefore spends one addition and one
minimum on a subset. If more than half of the free keys are kept, the walk chooses the dropped ones instead
(the base is the whole pool, the signs turn).

Rounding: h is screened against a bound of its own rounding error, and every set that passes is decided by
the forced error computed directly from g in float64. The result is therefore exact over the family.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb
from typing import NamedTuple

import numpy as np
from numba import njit

from ..errors import InvalidInput
from ..operator import Instance, check_budget, check_instance, whole_number
from ..selectors.swap import descend, error_of, without_most_misleading

MOST_SETS = 10**11
"""Sets of one family: about a minute of one core."""
_FAST = {"nnan", "ninf", "nsz", "reassoc", "contract"}


@dataclass(frozen=True)
class MassPool:
    """The kept sets "core heaviest keys and any budget - core of the mass ranks core .. pool-1".

    Raises
    ------
    InvalidInput
        Unless 0 <= core < budget <= pool.
    """

    budget: int
    core: int
    pool: int

    def __post_init__(self) -> None:
        if not 0 <= self.core < self.budget <= self.pool:
            raise InvalidInput(
                f"family: expected 0 <= core < budget <= pool, got core {self.core}, "
                f"budget {self.budget}, pool {self.pool}"
            )

    def split(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Mass ranks of the core and of the free keys on a row of `size` keys: the pool ends with the row."""
        return np.arange(self.core), np.arange(self.core, min(self.pool, size))

    def complete(self, size: int) -> bool:
        """Whether every kept set of that budget belongs to the family on a row of `size` keys."""
        return self.core == 0 and self.pool >= size


@dataclass(frozen=True)
class Neighbourhood:
    """The kept sets around a given one: `free` of its keys and pool - free others are chosen anew.

    Set free are the keys whose removal leaves the least error; joined by those whose addition would.

    Raises
    ------
    InvalidInput
        Unless 1 <= free <= budget and free < pool.
    """

    budget: int
    free: int
    pool: int

    def __post_init__(self) -> None:
        if not (1 <= self.free <= self.budget and self.free < self.pool):
            raise InvalidInput(
                f"family: expected 1 <= free <= budget and free < pool, got free {self.free}, "
                f"budget {self.budget}, pool {self.pool}"
            )

    def split(self, gram: np.ndarray, p: np.ndarray, centre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mass ranks of the core and of the free keys around the kept set `centre` (ranks)."""
        inside = np.zeros(p.size, dtype=bool)
        inside[centre] = True
        pull = gram[:, centre].sum(axis=1)
        square, mass = pull[centre].sum(), p[centre].sum()
        own = np.diag(gram)
        rest = mass - p[centre]
        removed = np.maximum(square - 2 * pull[centre] + own[centre], 0.0)
        # A lone key has no rest: removing it is the last thing to do.
        without = np.divide(removed, rest**2, out=np.full(centre.size, np.inf), where=rest > 0)
        others = np.flatnonzero(~inside)
        joined = np.maximum(square + 2 * pull + own, 0.0)[others] / (mass + p[others]) ** 2
        leave = centre[np.argsort(without, kind="stable")[: self.free]]
        enter = others[np.argsort(joined, kind="stable")[: self.pool - self.free]]
        return np.setdiff1d(centre, leave), np.sort(np.concatenate([leave, enter]))


@dataclass(frozen=True)
class PoolResult:
    """What a search over families found.

    Attributes
    ----------
    kept : (s,) sorted key indices of a set of least error; of equal errors, max-mass first
    error : its forced error, float64, in the units of the values
    subsets : kept sets that the result is exact over, counted per family
    complete : whether some family holds every set of that size, so that `error` is ES(s) itself
    """

    kept: np.ndarray
    error: float
    subsets: int
    complete: bool


def best_in_pool(instance: Instance, s: int, pool_size: int) -> PoolResult:
    """The kept set of least forced error among all sets of s of the `pool_size` heaviest keys, exactly.

    Parameters
    ----------
    instance : Instance
    s : budget, 1 <= s < N
    pool_size : keys in the pool, s <= pool_size; a row with fewer keys is searched whole

    Returns
    -------
    PoolResult

    Raises
    ------
    InvalidInput
        A budget outside 1 .. N-1, or a pool smaller than the budget.

    Notes
    -----
    ES_pool(s) of the paper, section 1. Cost: C(pool_size, s) subsets.
    """
    s = check_budget(s, check_instance(instance).size)
    return best_in_families(instance, s, [MassPool(s, 0, whole_number("pool_size", pool_size))])


def best_in_families(
    instance: Instance, s: int, families: Sequence[MassPool | Neighbourhood], swap_keys: int = 256
) -> PoolResult:
    """The kept set of least forced error over the union of `families`, all of budget s, exactly.

    Parameters
    ----------
    instance : Instance
    s : budget, 1 <= s < N
    families : neighbourhoods are taken around the better of balance's two starts over `swap_keys` keys
    swap_keys : the heaviest keys that balance may swap among

    Returns
    -------
    PoolResult

    Raises
    ------
    InvalidInput
        A budget outside 1 .. N-1, no family, or one of another budget.
    """
    s = check_budget(s, check_instance(instance).size)
    if not families or any(family.budget != s for family in families):
        raise InvalidInput(f"families: expected at least one family, each with budget {s}")
    around = any(isinstance(family, Neighbourhood) for family in families)
    if around and swap_keys <= s:
        raise InvalidInput(f"swap_keys: expected more than the budget {s}, got {swap_keys}")
    row = RankedRow.of(instance, max(swap_keys if around else s + 1, *(family.pool for family in families)))
    found = row.search(s, families, swap_keys)
    return PoolResult(
        kept=np.sort(instance.order[found.pool.kept]),
        error=found.pool.error,
        subsets=found.subsets,
        complete=any(isinstance(f, MassPool) and f.complete(instance.size) for f in families),
    )


class KeptSet(NamedTuple):
    """A kept set as sorted mass ranks, and its forced error."""

    kept: np.ndarray
    error: float

    def or_better(self, other: KeptSet) -> KeptSet:
        """This set unless the other's error is truly lower."""
        return other if other.error < self.error else self


class Found(NamedTuple):
    """What every rule finds on one row at one budget; the sets are mass ranks.

    `mass_pool` is exact over the mass pools alone and `balance_pool` swaps inside those same families; `pool` is
    exact over all families; `subsets` counts the sets of all families.
    """

    max_mass: KeptSet
    balance: KeptSet
    balance_second: KeptSet
    balance_pool: KeptSet
    mass_pool: KeptSet
    pool: KeptSet
    subsets: int

    @property
    def best(self) -> KeptSet:
        """The set of least error; of equals, max-mass, then the pool's, then balance's."""
        return self.max_mass.or_better(self.pool).or_better(self.balance).or_better(self.balance_second)


class Asked(NamedTuple):
    """An exact search: the best of `known` and all sets "core and any s - core.size of free" (mass ranks)."""

    core: np.ndarray
    free: np.ndarray
    known: KeptSet

    @property
    def keys(self) -> np.ndarray:
        """The core, then the free keys."""
        return np.concatenate([self.core, self.free])


class RankedRow:
    """The heaviest keys of a row in mass order, with their Gram matrix: what every search works on.

    Parameters
    ----------
    g : (M, d) float64 contiguous, p_j (v_j - mu) in mass order
    p : (M,) float64 contiguous, falling
    """

    def __init__(self, g: np.ndarray, p: np.ndarray) -> None:
        self.g, self.p = g, p
        self.gram = g @ g.T

    @classmethod
    def of(cls, instance: Instance, count: int) -> RankedRow:
        """The `count` heaviest keys of `instance`, or all of them if it has fewer."""
        keys = instance.order[:count]
        return cls(np.ascontiguousarray(instance.g[keys]), np.ascontiguousarray(instance.p[keys]))

    def kept_set(self, ranks: np.ndarray) -> KeptSet:
        """The set of `ranks` (sorted) with its forced error."""
        return KeptSet(ranks, float(error_of(self.g, self.p, ranks)))

    def search(self, s: int, families: Sequence[MassPool | Neighbourhood], swap_keys: int) -> Found:
        """Run max-mass, balance from both starts and the exact search over `families` at budget s < N.

        Balance swaps among the `swap_keys` heaviest keys, or among all that are here.
        """
        steps = self.searching(s, families, swap_keys)
        answer = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as end:
                return end.value
            answer = self.best_among(asked, s)

    def searching(
        self, s: int, families: Sequence[MassPool | Neighbourhood], swap_keys: int
    ) -> Generator[Asked, KeptSet, Found]:
        """`search` without its exact searches: yields each and is sent the best set, so that others can do them."""
        swap_keys = min(swap_keys, self.p.size)
        heaviest = self.kept_set(np.arange(s))
        first = self.kept_set(descend(self.g, self.p, self.gram, heaviest.kept, 0, swap_keys))
        misled = without_most_misleading(self.gram, self.p, s)
        second = self.kept_set(descend(self.g, self.p, self.gram, misled, 0, swap_keys))
        splits = [f.split(self.p.size) for f in families if isinstance(f, MassPool)]
        swapped = heaviest
        for core, free in splits:
            inside = descend(self.g, self.p, self.gram, heaviest.kept, core.size, core.size + free.size)
            swapped = swapped.or_better(self.kept_set(inside))
        mass_pool = swapped
        for core, free in splits:
            mass_pool = yield Asked(core, free, mass_pool)
        pool = mass_pool
        centre = first.or_better(second)
        for family in families:
            if isinstance(family, Neighbourhood):
                core, free = family.split(self.gram, self.p, centre.kept)
                splits.append((core, free))
                pool = yield Asked(core, free, pool.or_better(centre))
        subsets = sum(comb(free.size, s - core.size) for core, free in splits)
        return Found(heaviest, first, second, swapped, mass_pool, pool, subsets)

    def best_among(self, asked: Asked, s: int) -> KeptSet:
        """The answer to `asked` at budget s."""
        settled = self.settled(asked, s)
        if settled is not None:
            return settled
        core, keys, size = asked.core.size, asked.keys, asked.free.size
        chosen = s - core
        drop = 2 * chosen > size
        picked = size - chosen if drop else chosen
        binomials = _binomials(size - size // 2, picked)
        gram = np.ascontiguousarray(self.gram[np.ix_(keys, keys)])
        places = _search(self.g[keys], self.p[keys], gram, core, picked, drop, binomials, asked.known.error)
        return self.answer(asked, places)

    def settled(self, asked: Asked, s: int) -> KeptSet | None:
        """The answer where nothing is to be searched; None where it is, InvalidInput where that is too much."""
        chosen, size = s - asked.core.size, asked.free.size
        if asked.known.error == 0.0 or chosen > size:
            return asked.known
        if chosen == size:
            return asked.known.or_better(self.kept_set(np.sort(asked.keys)))
        sets = comb(size, chosen)
        if sets > MOST_SETS:
            raise InvalidInput(
                f"pool: {sets:.3g} sets of {chosen} among {size} free keys are more than the {MOST_SETS:.0e} that "
                "can be searched; take a smaller pool"
            )
        return None

    def answer(self, asked: Asked, places: np.ndarray) -> KeptSet:
        """The better of the set known and that at `places` of the keys, the first -1 if none was found."""
        if places[0] < 0:
            return asked.known
        # Summed anew in rank order, as every other set is, so that equal sets have equal errors.
        return asked.known.or_better(self.kept_set(np.sort(asked.keys[places])))


@cache
def _binomials(size: int, picked: int) -> np.ndarray:
    """C(n, k) for n <= size, k <= picked; what exceeds int64 is cut there and never reached."""
    table = np.zeros((size + 1, picked + 1), dtype=np.int64)
    table[:, 0] = 1
    for n in range(1, size + 1):
        table[n, 1:] = np.minimum(table[n - 1, 1:] + table[n - 1, :-1], 2**61)
    return table


@njit(cache=True, fastmath=_FAST)
def _leaf_minimum(prefix, cross, size):
    """min_r prefix[r] + cross[r]."""
    least = prefix[0] + cross[0]
    for r in range(size):
        x = prefix[r] + cross[r]
        least = x if x < least else least
    return least


@njit(cache=True, fastmath=_FAST)
def _leaf_minimum_4(prefix, a, b, c, d, size):
    """The same for four last keys at once: the prefix is read once."""
    la = prefix[0] + a[0]
    lb = prefix[0] + b[0]
    lc = prefix[0] + c[0]
    ld = prefix[0] + d[0]
    for r in range(size):
        x = prefix[r]
        xa = x + a[r]
        xb = x + b[r]
        xc = x + c[r]
        xd = x + d[r]
        la = xa if xa < la else la
        lb = xb if xb < lb else lb
        lc = xc if xc < lc else lc
        ld = xd if xd < ld else ld
    return la, lb, lc, ld


@njit(cache=True, fastmath=_FAST)
def _leaf_minimum_subsets(prefix, weights, size, picked, binomials, levels):
    """min over the k-subsets r of range(size), k = picked >= 1, of prefix[r] + sum of their weights.

    For outer parts of one key, whose vector of cross terms is used once: the last level is not stored.
    """
    _subset_sums(weights, size, picked - 1, binomials, levels)
    least = prefix[0] + 1e300
    for j in range(picked - 1, size):
        start = binomials[j, picked]
        w = weights[j]
        for r in range(binomials[j, picked - 1]):
            x = levels[picked - 1, r] + w + prefix[start + r]
            least = x if x < least else least
    return least


@njit(cache=True)
def _add(out, a, b, size):
    for r in range(size):
        out[r] = a[r] + b[r]


@njit(cache=True)
def _subset_sums(weights, size, picked, binomials, levels):
    """levels[k][:C(size, k)] = sums of `weights` over the k-subsets of range(size), in colex order, k <= picked.

    In colex order the k-subsets with largest element j follow one another, and without j they are exactly the
    first C(j, k-1) subsets of size k-1.
    """
    levels[0, 0] = 0.0
    for k in range(1, picked + 1):
        for j in range(k - 1, size):
            start = binomials[j, k]
            w = weights[j]
            for r in range(binomials[j, k - 1]):
                levels[k, start + r] = levels[k - 1, r] + w


@njit(cache=True)
def _subset_forms(form, linear, offset, size, picked, binomials, levels, scratch, weights):
    """levels[k] = quadratic form over the k-subsets: sum 2 linear_i + sum H_ij, keys offset .. offset+size-1."""
    levels[0, 0] = 0.0
    for j in range(size):
        for i in range(j):
            weights[i] = 2.0 * form[offset + j, offset + i]
        top = min(picked - 1, j)
        _subset_sums(weights, j, top, binomials, scratch)
        own = form[offset + j, offset + j] + 2.0 * linear[offset + j]
        for k in range(1, top + 2):
            start = binomials[j, k]
            for r in range(binomials[j, k - 1]):
                levels[k, start + r] = levels[k - 1, r] + own + scratch[k - 1, r]


@njit(cache=True)
def _unrank(rank, k, size, binomials, out):
    """Write the k-subset of range(size) of colex rank `rank` to out[:k], falling."""
    top = size - 1
    for place in range(k):
        need = k - place
        while binomials[top, need] > rank:
            top -= 1
        out[place] = top
        rank -= binomials[top, need]
        top -= 1


@njit(cache=True)
def rounding_share(dimensions, picked, keys):
    """Relative bound of the rounding of h: of the square of the longest sum plus that of e times the mass."""
    return 4.0 * (dimensions + 4.0 * picked + keys + 16.0) * 1.1102230246251565e-16


@njit(cache=True)
def _search(g, p, gram, core, picked, drop, binomials, error):
    """Places of the best set if it is better than `error`, over "the first `core` keys and ... of the rest".

    `picked` of the free keys are chosen; with `drop` they are the ones left out. The first place is -1 if no set
    is better.
    """
    pool = p.size
    free = pool - core
    budget = core + (free - picked if drop else picked)
    left = free // 2
    right = free - left
    sign = -1.0 if drop else 1.0
    base_end = pool if drop else core
    d = g.shape[1]

    # Worst case of sum |terms| over any set, for the rounding bound of the screen.
    norms = np.sqrt(np.diag(gram)[:pool])
    reach = 2.0 * norms.sum()
    gamma = rounding_share(d, picked, pool)

    base = np.zeros(d)
    base_mass = 0.0
    for i in range(base_end):
        base_mass += p[i]
        for c in range(d):
            base[c] += g[i, c]
    base_square = 0.0
    for c in range(d):
        base_square += base[c] * base[c]
    pull = np.zeros(free)
    for i in range(free):
        dot = 0.0
        for c in range(d):
            dot += base[c] * g[core + i, c]
        pull[i] = sign * dot

    best_kept = np.full(budget, -1, np.int64)
    best = error
    form = np.empty((free, free))
    linear = np.empty(free)
    largest = max(left, right)
    weights = np.empty(largest)
    part = np.empty(picked, np.int64)
    member = np.empty(free, np.bool_)
    trial = np.empty(budget, np.int64)
    stack = np.empty(picked + 1, np.int64)

    # Inner vectors are indexed by the half with more parts of the size at hand.
    width = 1
    for k in range(picked + 1):
        if k <= right:
            width = max(width, binomials[right, k])
        if k <= left:
            width = max(width, binomials[left, k])
    forms_left = np.empty((min(picked, left) + 1, width))
    forms_right = np.empty((min(picked, right) + 1, width))
    scratch = np.empty((min(picked, largest) + 1, width))
    cross = np.empty((largest, width))
    prefix = np.empty((picked + 1, width))

    # Least mass of any set: an error found since the form was built moves the screen down by at least that.
    light = np.sort(p[core:])
    least_mass = base_mass
    for i in range(picked):
        least_mass += -light[free - 1 - i] if drop else light[i]
    least_mass = max(least_mass, 0.0)

    stale = True
    screened = best
    screen = 0.0
    for outer_size in range(min(picked, max(left, right)) + 1):
        inner_size = picked - outer_size
        for turn in range(2):
            # turn 0: outer parts from the left half; turn 1: from the right. Each split is done once,
            # with the half that has fewer parts outside.
            outer_is_left = turn == 0
            n_out = left if outer_is_left else right
            n_in = right if outer_is_left else left
            if outer_size > n_out or inner_size > n_in:
                continue
            count_out = binomials[n_out, outer_size]
            count_in = binomials[n_in, inner_size]
            if count_out > count_in or (count_out == count_in and not outer_is_left):
                continue
            if stale or best < screened:
                screened = best
                e2 = best * best
                for i in range(free):
                    for j in range(free):
                        form[i, j] = gram[core + i, core + j] - e2 * p[core + i] * p[core + j]
                    linear[i] = pull[i] - sign * e2 * base_mass * p[core + i]
                _subset_forms(form, linear, 0, left, min(picked, left), binomials, forms_left, scratch, weights)
                _subset_forms(form, linear, left, right, min(picked, right), binomials, forms_right, scratch, weights)
                slack = gamma * (reach * reach + e2 * (base_mass + 1.0) ** 2)
                stale = False
                screen = slack
            out_offset = 0 if outer_is_left else left
            in_offset = left if outer_is_left else 0
            forms_in = forms_right if outer_is_left else forms_left
            forms_out = forms_left if outer_is_left else forms_right
            constant = base_square - e2 * base_mass * base_mass
            for i in range(n_out if outer_size > 1 or inner_size == 0 else 0):
                for j in range(n_in):
                    weights[j] = 2.0 * form[out_offset + i, in_offset + j]
                _subset_sums(weights, n_in, inner_size, binomials, scratch)
                for r in range(count_in):
                    cross[i, r] = scratch[inner_size, r]
            for r in range(count_in):
                prefix[0, r] = forms_in[inner_size, r]

            # Walk the outer parts; stack[0] < stack[1] < ...; the last place is scanned four keys at a time.
            depth = 0
            stack[0] = -1
            single = outer_size == 0
            while depth >= 0:
                if single:
                    last_from, last_to = 0, 1
                elif depth == outer_size - 1:
                    last_from = (stack[depth - 1] + 1) if depth > 0 else 0
                    last_to = n_out
                else:
                    stack[depth] += 1
                    if stack[depth] > n_out - (outer_size - depth):
                        depth -= 1
                        continue
                    _add(prefix[depth + 1], prefix[depth], cross[stack[depth]], count_in)
                    stack[depth + 1] = stack[depth]
                    depth += 1
                    continue

                last = last_from
                while last < last_to:
                    lanes = 1
                    if single:
                        m0 = prefix[0, 0]
                        for r in range(count_in):
                            m0 = min(m0, prefix[0, r])
                        m1 = m2 = m3 = m0
                    elif outer_size == 1 and inner_size > 0:
                        for j in range(n_in):
                            weights[j] = 2.0 * form[out_offset + last, in_offset + j]
                        m0 = _leaf_minimum_subsets(prefix[0], weights, n_in, inner_size, binomials, scratch)
                        m1 = m2 = m3 = m0
                    elif last + 4 <= last_to:
                        m0, m1, m2, m3 = _leaf_minimum_4(
                            prefix[depth],
                            cross[last],
                            cross[last + 1],
                            cross[last + 2],
                            cross[last + 3],
                            count_in,
                        )
                        lanes = 4
                    else:
                        m0 = _leaf_minimum(prefix[depth], cross[last], count_in)
                        m1 = m2 = m3 = m0
                    for lane in range(lanes):
                        least = m0 if lane == 0 else (m1 if lane == 1 else (m2 if lane == 2 else m3))
                        # The outer part's own form: colex rank of (stack[:depth], last + lane).
                        rank = 0
                        if not single:
                            for place in range(depth):
                                rank += binomials[stack[place], place + 1]
                            rank += binomials[last + lane, depth + 1]
                        own = constant + forms_out[outer_size, rank]
                        if least + own > screen:
                            continue
                        if outer_size == 1:
                            _subset_sums(weights, n_in, inner_size, binomials, scratch)
                            cross[last, :count_in] = scratch[inner_size, :count_in]
                        for r in range(count_in):
                            h = prefix[depth, r] + own
                            if not single:
                                h += cross[last + lane, r]
                            if h > screen:
                                continue
                            for i in range(free):
                                member[i] = drop
                            if not single:
                                for place in range(depth):
                                    member[out_offset + stack[place]] = not drop
                                member[out_offset + last + lane] = not drop
                            _unrank(r, inner_size, n_in, binomials, part)
                            for place in range(inner_size):
                                member[in_offset + part[place]] = not drop
                            filled = core
                            for i in range(core):
                                trial[i] = i
                            for i in range(free):
                                if member[i]:
                                    trial[filled] = core + i
                                    filled += 1
                            found = error_of(g, p, trial)
                            if found < best:
                                best = found
                                best_kept[:] = trial
                                screen = slack - (e2 - best * best) * least_mass * least_mass
                    last += lanes
                depth -= 1
    return best_kept

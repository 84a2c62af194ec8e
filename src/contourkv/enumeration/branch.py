r"""Is there a kept set of s keys, among all keys of a row, with a lesser forced error? Branch and bound decides it.

For a threshold t and a unit vector u let c_j(u) = u . g_j - t p_j. Every kept set A satisfies

    ||sum_A g_j|| - t p(A)  >=  sum_{j in A} c_j(u),

so es(A) <= t needs sum_A c_j(u) <= 0 for every u: each u is a cut. Let F be keys that A must hold and R the keys
still free. Then

    L(u) = sum_F c_j(u) + (the sum of the s - |F| least c_j(u) over R)

is a lower bound of the left side over all such A, and three things follow without any search:

* L(u) > 0: no such set has es <= t. The node is closed.
* L(u) + c_j(u) - (the largest c taken) > 0 for a free key j not taken: no such set holds j. The key is out.
* L(u) - c_j(u) + (the least c not taken) > 0 for a key j taken: every such set holds j. The key is in.

The best u is that of the point nearest to feasible in the convex hull of the kept sets: a small bundle of kept
sets ("atoms", one per cut tried) is blended so that ||sum|| - t mass is least, and the blend's direction is the
next u. A blend that reaches zero shows that no cut can close the node. Then the free key that can move the sum
most, among those the blend holds in part, is put in and put out (two children, depth first); nodes with few
sets left are enumerated. Each better set found lowers t.

Rounding: a node is closed and a key fixed only if the bound exceeds zero by more than the rounding error of the
bound itself, and a set is discarded by the Gram form only by more than that form's rounding error. The sets that
remain are decided by the forced error computed directly from g in float64.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numba import njit

from ..selectors.swap import swap_descent

ATOMS = 12
CUTS_A_NODE = 12
LEAF_SETS = 3000
REPACK_BELOW = 0.6
ROUNDING = 1e-15
"""Four units of rounding of float64: times the number of terms, a safe bound of a sum's relative error."""

SLICE = 5e7
"""Work between two looks at the clock, about 0.05 s."""

DEPTH, NODES, CUTS, SETS = range(4)
BEST, THRESHOLD, DOUBTFUL, WORK = range(4)
UNSEEN, DIVED, DONE = range(3)


class Problem(NamedTuple):
    """What is searched. `length` is ||g_j||, `reach` a bound of |c_j(u)| for every u."""

    g: np.ndarray
    columns: np.ndarray
    mass: np.ndarray
    length: np.ndarray
    reach: np.ndarray
    negligible: float
    keep: float


class Frames(NamedTuple):
    """One frame per depth of the tree: the node's keys, its partial sum, its bundle, and how far it is done.

    `span` is the sum of ||g_j|| over the fixed keys: the rounding error of their sum is a share of it.
    """

    free: np.ndarray
    frees: np.ndarray
    fixed: np.ndarray
    fixeds: np.ndarray
    total: np.ndarray
    mass: np.ndarray
    span: np.ndarray
    direction: np.ndarray
    key: np.ndarray
    first: np.ndarray
    stage: np.ndarray
    atom: np.ndarray
    atoms: np.ndarray
    atom_total: np.ndarray
    atom_mass: np.ndarray
    weight: np.ndarray
    pack: np.ndarray


class Packs(NamedTuple):
    """Copies of the columns of g for the keys still free at some depth: products run over contiguous memory."""

    offset: np.ndarray
    width: np.ndarray
    key: np.ndarray
    data: np.ndarray


class Gram(NamedTuple):
    """g_i . g_j, a row computed when first asked for."""

    row: np.ndarray
    known: np.ndarray


class Search:
    """A resumable search over all kept sets of one row at one budget.

    Parameters
    ----------
    g : (N, d) float64, p_j (v_j - mu)
    p : (N,) float64
    kept : (s,) the best set known
    tolerance : relative; a set counts as better if its error is below (1 - tolerance) times the best known
    negligible : an error up to here is rounding: the search ends when it has one

    Attributes
    ----------
    kept : (s,) the best set known
    error : its forced error
    threshold : t; when `finished`, no set has an error below `lower_bound`, which is t but for rounding
    finished : the tree is exhausted
    work : what has been spent, in units of about a nanosecond
    cuts, nodes, sets : directions tried, nodes visited, sets enumerated
    """

    def __init__(
        self, g: np.ndarray, p: np.ndarray, kept: np.ndarray, tolerance: float, negligible: float = 0.0
    ) -> None:
        n, d = g.shape
        s = kept.size
        error = float(np.linalg.norm(g[kept].sum(axis=0)) / p[kept].sum())
        length = np.sqrt(np.einsum("nd,nd->n", g, g))
        self._problem = Problem(
            g=np.ascontiguousarray(g),
            columns=np.ascontiguousarray(g.T),
            mass=np.ascontiguousarray(p),
            length=length,
            reach=length + error * p,
            negligible=float(negligible),
            keep=1.0 - tolerance,
        )
        depths = n + 2
        self._frames = Frames(
            free=np.empty((depths, n), np.int32),
            frees=np.zeros(depths, np.int64),
            fixed=np.empty((depths, s), np.int32),
            fixeds=np.zeros(depths, np.int64),
            total=np.zeros((depths, d)),
            mass=np.zeros(depths),
            span=np.zeros(depths),
            direction=np.zeros((depths, d)),
            key=np.zeros(depths, np.int64),
            first=np.zeros(depths, np.int64),
            stage=np.zeros(depths, np.int64),
            atom=np.empty((depths, ATOMS, s), np.int32),
            atoms=np.zeros(depths, np.int64),
            atom_total=np.empty((depths, ATOMS, d)),
            atom_mass=np.empty((depths, ATOMS)),
            weight=np.zeros((depths, ATOMS)),
            pack=np.zeros(depths, np.int64),
        )
        # Each pack is at most REPACK_BELOW as wide as the one before: the sum is geometric.
        levels = 2 + int(np.ceil(np.log(n) / -np.log(REPACK_BELOW)))
        self._packs = Packs(
            offset=np.zeros(levels, np.int64),
            width=np.zeros(levels, np.int64),
            key=np.empty((levels, n), np.int32),
            data=np.empty(int(n * d / (1.0 - REPACK_BELOW)) + d),
        )
        self._packs.width[0] = n
        self._packs.key[0] = np.arange(n)
        self._packs.data[: n * d] = self._problem.columns.ravel()
        self._gram = Gram(row=np.empty((n, n)), known=np.zeros(n, np.bool_))
        self._kept = kept.astype(np.int32)
        self._counts = np.zeros(4, np.int64)
        self._levels = np.array([error, 0.0, np.inf, 0.0])
        self.restart(error * (1.0 - tolerance))

    def restart(self, threshold: float) -> None:
        """Begin at the root again, to decide whether a set has es <= `threshold`; the best set stays."""
        frames, kept = self._frames, self._kept
        frames.free[0] = np.arange(frames.free.shape[1])
        frames.frees[0] = frames.free.shape[1]
        frames.fixeds[0] = 0
        frames.total[0] = 0.0
        frames.mass[0] = 0.0
        frames.span[0] = 0.0
        frames.stage[0] = UNSEEN
        frames.pack[0] = 0
        total = self._problem.g[kept].sum(axis=0)
        length = np.linalg.norm(total)
        frames.direction[0] = total / length if length > 0 else 0.0
        frames.atoms[0] = 1
        frames.atom[0, 0] = kept
        frames.atom_total[0, 0] = total
        frames.atom_mass[0, 0] = self._problem.mass[kept].sum()
        frames.weight[0, 0] = 1.0
        self._counts[DEPTH] = 0
        self._levels[THRESHOLD] = threshold
        self._levels[DOUBTFUL] = np.inf

    def explore(self, seed: int, work: float, deadline: float) -> None:
        """Look for better sets by swap descents; if one is found, begin at the root again with its threshold.

        The starts are windows of s neighbouring mass ranks, heavy to light (the best set is often one of light
        keys, which swaps from the heaviest do not reach), then the best set with a few keys changed by chance.

        Parameters
        ----------
        seed : of the changes
        work : what may be spent on the changes; the windows are always tried
        deadline : a value of time.monotonic()
        """
        n, s = self._problem.mass.size, self._kept.size
        if s == n:
            return
        if not self._gram.known.all():
            self._gram.row[:] = self._problem.g @ self._problem.g.T
            self._gram.known[:] = True
            self._levels[WORK] += 0.2 * n * n * self._problem.g.shape[1]
        before = self.threshold
        first = 0
        while first <= n - s and time.monotonic() < deadline:
            self._descend(np.arange(first, first + s))
            first = max(first + 1, first * 3 // 2)
        rng = np.random.default_rng(seed)
        until = self.work + work
        while self.work < until and time.monotonic() < deadline:
            start = self.kept
            changes = int(rng.integers(1, min(4, s, n - s) + 1))
            others = np.setdiff1d(np.arange(n), start)
            others = others[: max(4 * s, int(others.size * rng.random()))]
            start[rng.choice(s, changes, replace=False)] = rng.choice(others, changes, replace=False)
            self._descend(start)
        if self.threshold < before:
            self.restart(self.threshold)

    def _polish(self) -> None:
        if self._gram.known.all():
            self._descend(self.kept)

    def _descend(self, start: np.ndarray) -> None:
        """Swap from `start` while that lowers the error; keep the end if it is the best set."""
        n, s = self._problem.mass.size, self._kept.size
        found = swap_descent(self._gram.row, self._problem.mass, np.sort(start), 0, n)
        _offer(self._problem, found.astype(np.int32), np.empty(self._problem.g.shape[1]), self._kept, self._levels)
        self._levels[WORK] += 30.0 * s * n + 2e5

    def run(self, work: float, deadline: float) -> bool:
        """Search on until the tree is exhausted, `self.work` reaches `work`, or the clock passes `deadline`.

        Parameters
        ----------
        work : in units of about a nanosecond; what is done up to it is the same on every run
        deadline : a value of time.monotonic()

        Returns
        -------
        bool
            Whether the tree is exhausted.
        """
        while not self.finished and self.work < work and time.monotonic() < deadline:
            before = self.error
            _search(
                self._problem,
                self._frames,
                self._packs,
                self._gram,
                self._kept,
                self._counts,
                self._levels,
                min(self.work + SLICE, work),
            )
            if self.error < before and not self.finished:
                self._polish()
        return self.finished

    @property
    def finished(self) -> bool:
        return bool(self._counts[DEPTH] < 0)

    @property
    def kept(self) -> np.ndarray:
        return self._kept.astype(np.int64)

    @property
    def error(self) -> float:
        return float(self._levels[BEST])

    @property
    def threshold(self) -> float:
        return float(self._levels[THRESHOLD])

    @property
    def lower_bound(self) -> float:
        """Proved if `finished`: the threshold, or less where float64 could not tell a set from it."""
        return float(min(self._levels[THRESHOLD], self._levels[DOUBTFUL]))

    @property
    def work(self) -> float:
        return float(self._levels[WORK])

    @property
    def cuts(self) -> int:
        return int(self._counts[CUTS])

    @property
    def nodes(self) -> int:
        return int(self._counts[NODES])

    @property
    def sets(self) -> int:
        return int(self._counts[SETS])


# Plain loops, not array expressions: the same speed, and a third of the time to compile.
@njit(cache=True)
def _copy(target, source):
    for i in range(source.size):
        target[i] = source[i]


@njit(cache=True)
def _add(target, source):
    for i in range(source.size):
        target[i] += source[i]


@njit(cache=True)
def _fill(target, value):
    for i in range(target.size):
        target[i] = value


@njit(cache=True)
def _norm(x):
    square = 0.0
    for i in range(x.size):
        square += x[i] * x[i]
    return np.sqrt(square)


@njit(cache=True)
def _dot(x, y):
    total = 0.0
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@njit(cache=True)
def _binomial(n, r, cap):
    """C(n, r), or something above `cap` if it is above."""
    count = 1.0
    for i in range(min(r, n - r)):
        count = count * (n - i) / (i + 1)
        if count > cap:
            return count
    return count


@njit(cache=True)
def _offer(problem, keys, total, kept, levels):
    """Compute the sum of g over the complete set `keys` into `total`; keep the set if it is better. Its mass."""
    _fill(total, 0.0)
    mass = 0.0
    span = 0.0
    for j in keys:
        mass += problem.mass[j]
        span += problem.length[j]
        _add(total, problem.g[j])
    error = _norm(total) / mass
    if error < levels[BEST]:
        levels[BEST] = error
        _copy(kept, keys)
        if error < levels[THRESHOLD]:
            levels[THRESHOLD] = error * problem.keep
    # Only where the tolerance is finer than float64 resolves: the set may truly lie below the threshold.
    least = error - ROUNDING * (total.size + keys.size) * span / mass
    if least < levels[THRESHOLD]:
        levels[DOUBTFUL] = min(levels[DOUBTFUL], max(least, 0.0))
    return mass


@njit(cache=True)
def _take_least(cost, free, count, taken, low_cost, low_key):
    """The taken + 1 least costs over free[:count], ascending, into low_cost and low_key. How many there are."""
    limit = taken + 1
    found = 0
    for a in range(count):
        j = free[a]
        x = cost[j]
        if found < limit:
            at = found
            found += 1
        elif x < low_cost[limit - 1]:
            at = limit - 1
        else:
            continue
        while at > 0 and low_cost[at - 1] > x:
            low_cost[at] = low_cost[at - 1]
            low_key[at] = low_key[at - 1]
            at -= 1
        low_cost[at] = x
        low_key[at] = j
    return found


@njit(cache=True)
def _costs(columns, keys, direction, threshold, mass, packed, cost):
    """c_j = u . g_j - t p_j for the packed keys, into cost[j]."""
    d, width = columns.shape
    for a in range(width):
        packed[a] = -threshold * mass[keys[a]]
    whole = d - d % 4
    for i in range(0, whole, 4):
        u0, u1, u2, u3 = direction[i], direction[i + 1], direction[i + 2], direction[i + 3]
        for a in range(width):
            packed[a] += (u0 * columns[i, a] + u1 * columns[i + 1, a]) + (
                u2 * columns[i + 2, a] + u3 * columns[i + 3, a]
            )
    for i in range(whole, d):
        for a in range(width):
            packed[a] += direction[i] * columns[i, a]
    for a in range(width):
        cost[keys[a]] = packed[a]


@njit(cache=True)
def _blend(inner, mass, count, threshold, weight, pull):
    """Weights on the simplex that make f = ||sum of atoms|| - t mass least, by exact steps between two atoms.

    inner : inner products of the atoms' sums; weight : start and result; pull : scratch. Returns f.
    """
    square = 0.0
    for a in range(count):
        pull[a] = 0.0
        for b in range(count):
            pull[a] += inner[a, b] * weight[b]
    for a in range(count):
        square += weight[a] * pull[a]
    for _ in range(60):
        if square <= 0.0:
            break
        length = np.sqrt(square)
        to = away = -1
        steepest = np.inf
        flattest = -np.inf
        for a in range(count):
            slope = pull[a] / length - threshold * mass[a]
            if slope < steepest:
                steepest, to = slope, a
            if weight[a] > 0.0 and slope > flattest:
                flattest, away = slope, a
        if flattest - steepest <= 1e-7 * length or to == away:
            break
        # Along the step x: f' = 0 where (b + a x) / ||.|| = rise, with ||.||^2 = square + 2 b x + a x^2.
        a = inner[to, to] + inner[away, away] - 2.0 * inner[to, away]
        b = pull[to] - pull[away]
        rise = threshold * (mass[to] - mass[away])
        step = weight[away]
        if a > rise * rise:
            rest = max(square * a - b * b, 0.0)
            step = min(step, (rise * np.sqrt(rest / (a - rise * rise)) - b) / a)
        if not step > 0.0:
            break
        weight[away] = 0.0 if step == weight[away] else weight[away] - step
        weight[to] += step
        for i in range(count):
            pull[i] += step * (inner[i, to] - inner[i, away])
        square = max(square + 2.0 * b * step + step * step * a, 0.0)
    blended = 0.0
    for a in range(count):
        blended += weight[a] * mass[a]
    return np.sqrt(square) - threshold * blended


@njit(cache=True)
def _gram_row(problem, gram, j):
    """Row j of the Gram matrix."""
    if not gram.known[j]:
        row = gram.row[j]
        _fill(row, 0.0)
        for i in range(problem.columns.shape[0]):
            x = problem.g[j, i]
            for a in range(row.size):
                row[a] += x * problem.columns[i, a]
        gram.known[j] = True
    return gram.row[j]


@njit(cache=True)
def _enumerate(problem, gram, free, fixed, partial, partial_mass, open_places, margin, kept, levels):
    """Decide every set "fixed and `open_places` of free", depth first on the Gram form. How many there are."""
    m = free.size
    f = fixed.size
    keys = np.empty(f + open_places, np.int32)
    _copy(keys, fixed)
    total = np.empty(partial.size)
    pull = np.empty((open_places, m))
    square = np.empty(open_places)
    mass = np.empty(open_places)
    at = np.zeros(open_places, np.int64)
    square[0] = _dot(partial, partial)
    mass[0] = partial_mass
    for a in range(m):
        pull[0, a] = _dot(partial, problem.g[free[a]])
    last = open_places - 1
    level = 0
    count = 0
    while level >= 0:
        if level == last:
            for a in range(at[level], m):
                j = free[a]
                q = square[level] + 2.0 * pull[level, a] + problem.length[j] ** 2
                reach = levels[THRESHOLD] * (mass[level] + problem.mass[j])
                if q < reach * reach + margin:
                    keys[f + level] = j
                    _offer(problem, keys, total, kept, levels)
            count += m - at[level]
        elif at[level] <= m - (open_places - level):
            a = at[level]
            j = free[a]
            row = _gram_row(problem, gram, j)
            keys[f + level] = j
            square[level + 1] = square[level] + 2.0 * pull[level, a] + problem.length[j] ** 2
            mass[level + 1] = mass[level] + problem.mass[j]
            for b in range(a + 1, m):
                pull[level + 1, b] = pull[level, b] + row[free[b]]
            at[level + 1] = a + 1
            level += 1
            continue
        level -= 1
        if level >= 0:
            at[level] += 1
    return count


@njit(cache=True)
def _repack(problem, frames, packs, depth):
    """Copy the free keys' columns together if few of the pack are left. The work spent."""
    level = frames.pack[depth]
    count = frames.frees[depth]
    if count >= REPACK_BELOW * packs.width[level] or level + 1 >= packs.width.size:
        return 0.0
    d = problem.columns.shape[0]
    start = packs.offset[level] + packs.width[level] * d
    level += 1
    frames.pack[depth] = level
    packs.offset[level] = start
    packs.width[level] = count
    for a in range(count):
        packs.key[level, a] = frames.free[depth, a]
    for i in range(d):
        for a in range(count):
            packs.data[start + i * count + a] = problem.columns[i, frames.free[depth, a]]
    return 1.0 * d * count


@njit(cache=True)
def _inner_products(frames, depth, inner):
    for a in range(frames.atoms[depth]):
        for b in range(a + 1):
            inner[a, b] = _dot(frames.atom_total[depth, a], frames.atom_total[depth, b])
            inner[b, a] = inner[a, b]


@njit(cache=True)
def _move_atom(frames, source, a, depth, b):
    """Copy atom a of frame `source` to place b of frame `depth`."""
    _copy(frames.atom[depth, b], frames.atom[source, a])
    _copy(frames.atom_total[depth, b], frames.atom_total[source, a])
    frames.atom_mass[depth, b] = frames.atom_mass[source, a]
    frames.weight[depth, b] = frames.weight[source, a]


@njit(cache=True)
def _normalise(frames, depth, count):
    """Keep the first `count` atoms of a frame; their weights sum to one again."""
    frames.atoms[depth] = count
    whole = 0.0
    for a in range(count):
        whole += frames.weight[depth, a]
    for a in range(count):
        frames.weight[depth, a] = frames.weight[depth, a] / whole if whole > 0.0 else 1.0 / count


@njit(cache=True)
def _drop_atoms(frames, depth, state):
    """Drop the atoms that hold a key which is out, or miss one which is in. Whether any was."""
    before = frames.atoms[depth]
    fixed = frames.fixed[depth, : frames.fixeds[depth]]
    free = frames.free[depth, : frames.frees[depth]]
    for j in free:
        state[j] = 1
    for j in fixed:
        state[j] = 2
    count = 0
    for a in range(before):
        held = 0
        legal = True
        for j in frames.atom[depth, a]:
            legal = legal and state[j] > 0
            held += state[j] == 2
        if legal and held == fixed.size:
            if count != a:
                _move_atom(frames, depth, a, depth, count)
            count += 1
    for j in free:
        state[j] = 0
    for j in fixed:
        state[j] = 0
    if count < before:
        _normalise(frames, depth, count)
    return count < before


@njit(cache=True)
def _place_for_atom(frames, depth):
    """A place for one more atom: a new one, or that of the atom with least weight."""
    count = frames.atoms[depth]
    if count < ATOMS:
        frames.atoms[depth] = count + 1
        frames.weight[depth, count] = 0.0 if count else 1.0
        return count
    least = 0
    for a in range(1, count):
        if frames.weight[depth, a] < frames.weight[depth, least]:
            least = a
    frames.weight[depth, least] = 0.0
    _normalise(frames, depth, count)
    return least


@njit(cache=True)
def _fix(problem, frames, depth, cost, taken, found, low_cost, low_key, bound, slack, state):
    """Put out and put in what the cut decides. Whether it decided anything."""
    if found <= taken:
        return False
    free = frames.free[depth]
    count = frames.frees[depth]
    limit = low_cost[taken - 1] + (slack - bound)
    left = 0
    for a in range(count):
        if cost[free[a]] <= limit:
            free[left] = free[a]
            left += 1
    changed = left < count
    limit = low_cost[taken] + (bound - slack)
    joined = 0
    for a in range(taken):
        if low_cost[a] < limit:
            j = low_key[a]
            state[j] = 1
            joined += 1
            frames.fixed[depth, frames.fixeds[depth]] = j
            frames.fixeds[depth] += 1
            frames.mass[depth] += problem.mass[j]
            frames.span[depth] += problem.length[j]
            _add(frames.total[depth], problem.g[j])
    if joined:
        count, left = left, 0
        for a in range(count):
            if not state[free[a]]:
                free[left] = free[a]
                left += 1
        for a in range(taken):
            state[low_key[a]] = 0
    frames.frees[depth] = left
    return changed or joined > 0


@njit(cache=True)
def _close(problem, frames, packs, gram, depth, kept, counts, levels, scratch, state):
    """Bound the node, fix keys in it, enumerate it if it is small. Whether it is closed; if not, branch."""
    d = problem.columns.shape[0]
    s = kept.size
    cost, packed, low_cost, low_key, keys, total, inner, pull = scratch
    direction = frames.direction[depth]
    levels[WORK] += _repack(problem, frames, packs, depth)
    level = frames.pack[depth]
    width = packs.width[level]
    start = packs.offset[level]
    columns = packs.data[start : start + d * width].reshape((d, width))
    _inner_products(frames, depth, inner)
    relaxed = False
    cuts = 0
    while True:
        count = frames.frees[depth]
        fixed = frames.fixeds[depth]
        taken = s - fixed
        threshold = levels[THRESHOLD]
        if taken == 0:
            _offer(problem, frames.fixed[depth], total, kept, levels)
            return True
        if count < taken:
            return True
        # The longest terms in any bound or Gram form of this node; their rounding is a share of it.
        longest = 0.0
        for a in range(count):
            longest = max(longest, problem.reach[frames.free[depth, a]])
        longest = frames.span[depth] + threshold * frames.mass[depth] + taken * longest
        slack = ROUNDING * (d + s) * longest
        if taken == 1 or _binomial(count, taken, LEAF_SETS) <= LEAF_SETS:
            sets = _enumerate(
                problem,
                gram,
                frames.free[depth, :count],
                frames.fixed[depth, :fixed],
                frames.total[depth],
                frames.mass[depth],
                taken,
                slack * longest,
                kept,
                levels,
            )
            counts[SETS] += sets
            levels[WORK] += d * count + 6.0 * sets
            return True
        if relaxed or cuts == CUTS_A_NODE:
            return False
        cuts += 1
        counts[CUTS] += 1
        _costs(columns, packs.key[level], direction, threshold, problem.mass, packed, cost)
        found = _take_least(cost, frames.free[depth], count, taken, low_cost, low_key)
        levels[WORK] += 0.35 * d * width + 4.0 * count + 2.0 * s * (d + 20) + 600.0
        bound = _dot(direction, frames.total[depth]) - threshold * frames.mass[depth]
        for a in range(taken):
            bound += low_cost[a]
        if bound > slack:
            return True
        _copy(keys, frames.fixed[depth, :fixed])
        _copy(keys[fixed:], low_key[:taken])
        mass = _offer(problem, keys, total, kept, levels)
        if levels[BEST] <= problem.negligible:
            return True
        # A threshold that fell in between only makes these cuts weaker than they could be.
        if _fix(problem, frames, depth, cost, taken, found, low_cost, low_key, bound, slack, state):
            if _drop_atoms(frames, depth, state):
                _inner_products(frames, depth, inner)
        place = _place_for_atom(frames, depth)
        _copy(frames.atom[depth, place], keys)
        _copy(frames.atom_total[depth, place], total)
        frames.atom_mass[depth, place] = mass
        atoms = frames.atoms[depth]
        for a in range(atoms):
            inner[place, a] = _dot(frames.atom_total[depth, a], total)
            inner[a, place] = inner[place, a]
        nearest = _blend(inner, frames.atom_mass[depth], atoms, levels[THRESHOLD], frames.weight[depth], pull)
        _fill(total, 0.0)
        for a in range(atoms):
            for i in range(d):
                total[i] += frames.weight[depth, a] * frames.atom_total[depth, a, i]
        length = _norm(total)
        levels[WORK] += atoms * (d + 150.0)
        relaxed = nearest <= 0.0 or length == 0.0
        if length > 0.0:
            for i in range(d):
                direction[i] = total[i] / length


@njit(cache=True)
def _choose(problem, frames, depth, share):
    """The key to branch on: of most reach among those the blend holds in part, else of most reach."""
    for a in range(frames.atoms[depth]):
        for j in frames.atom[depth, a]:
            share[j] += frames.weight[depth, a]
    key = widest = -1
    for a in range(frames.frees[depth]):
        j = frames.free[depth, a]
        if widest < 0 or problem.reach[j] > problem.reach[widest]:
            widest = j
        if 0.0 < share[j] < 1.0 - 1e-12 and (key < 0 or problem.reach[j] > problem.reach[key]):
            key = j
    key = widest if key < 0 else key
    frames.key[depth] = key
    frames.first[depth] = 1 if share[key] >= 0.5 else 0
    for a in range(frames.atoms[depth]):
        for j in frames.atom[depth, a]:
            share[j] = 0.0


@njit(cache=True)
def _push(problem, frames, depth, held):
    """The child of the node at `depth` in which the chosen key is in (held) or out."""
    child = depth + 1
    key = frames.key[depth]
    count = 0
    for a in range(frames.frees[depth]):
        if frames.free[depth, a] != key:
            frames.free[child, count] = frames.free[depth, a]
            count += 1
    frames.frees[child] = count
    fixed = frames.fixeds[depth]
    _copy(frames.fixed[child], frames.fixed[depth, :fixed])
    _copy(frames.total[child], frames.total[depth])
    _copy(frames.direction[child], frames.direction[depth])
    frames.mass[child] = frames.mass[depth]
    frames.span[child] = frames.span[depth]
    if held:
        frames.fixed[child, fixed] = key
        fixed += 1
        _add(frames.total[child], problem.g[key])
        frames.mass[child] += problem.mass[key]
        frames.span[child] += problem.length[key]
    frames.fixeds[child] = fixed
    count = 0
    for a in range(frames.atoms[depth]):
        holds = 0
        for j in frames.atom[depth, a]:
            if j == key:
                holds = 1
        if holds == held:
            _move_atom(frames, depth, a, child, count)
            count += 1
    _normalise(frames, child, count)
    frames.pack[child] = frames.pack[depth]
    frames.stage[child] = UNSEEN


@njit(cache=True)
def _search(problem, frames, packs, gram, kept, counts, levels, until):
    """Walk the tree from where it was left until it is exhausted (counts[DEPTH] < 0) or the work is done."""
    n = problem.mass.size
    d = problem.columns.shape[0]
    s = kept.size
    scratch = (
        np.empty(n),
        np.empty(n),
        np.empty(s + 1),
        np.empty(s + 1, np.int32),
        np.empty(s, np.int32),
        np.empty(d),
        np.empty((ATOMS, ATOMS)),
        np.empty(ATOMS),
    )
    state = np.zeros(n, np.int8)
    share = np.zeros(n)
    depth = counts[DEPTH]
    while depth >= 0 and levels[WORK] < until:
        if levels[BEST] <= problem.negligible:
            depth = -1
            break
        if frames.stage[depth] == UNSEEN:
            counts[NODES] += 1
            levels[WORK] += frames.frees[depth] + ATOMS * (s + d) + ATOMS * ATOMS * d // 4
            if _close(problem, frames, packs, gram, depth, kept, counts, levels, scratch, state):
                depth -= 1
                continue
            _choose(problem, frames, depth, share)
            frames.stage[depth] = DIVED
            _push(problem, frames, depth, frames.first[depth])
            depth += 1
        elif frames.stage[depth] == DIVED:
            frames.stage[depth] = DONE
            _push(problem, frames, depth, 1 - frames.first[depth])
            depth += 1
        else:
            depth -= 1
    counts[DEPTH] = depth

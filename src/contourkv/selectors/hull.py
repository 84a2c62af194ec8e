r"""Geometric: keep the keys whose convex hull comes nearest to the dense output, as if the weights were free.

With x_j = v_j - mu, the free-weight error is ef(A) = min ||sum_A w_j x_j|| over w >= 0, sum w = 1: the point of
conv{x_j : j in A} nearest to the origin (paper, section 1). `nearest_point` finds it by Wolfe's method. It holds a
corral, affinely independent points whose affine hull has its nearest point y inside, and lets in the point
with the least y . x_j until none lies below ||y||^2. The corral is kept as a QR factorisation of the lifted points
a_j = (l, x_j), l > 0 a constant: the condition is never squared, as it would be in a Gram matrix of the x_j, and a
point that depends on the corral shows by the length that it has left.

Any y proves a bound: a point z of the hull has y . z >= min_j y . x_j, so

    ef(A) >= min_j y . x_j / ||y||.

The set is grown a key at a time, by the least y . x_j, with all weights solved anew after each (fully corrective),
then single keys are swapped while that lowers ef. The same is done to the s heaviest keys, and the better end is kept.
A swap is first screened by the distance of the affine hull, which never exceeds that of the convex hull and has a
closed form: with h the vector of the span of a_F that has a_j . h = l on F, r_j the part of a_j orthogonal to that span
and e_j = l - a_j . h,

    l^2 / (l^2 + dist(0, aff(F + J))^2) = ||h||^2 + e_J^T M^-1 e_J,    M_ij = r_i . r_j,  i, j in J.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from ..errors import InvalidInput
from ..operator import Instance, check_budget, check_instance, forced_error, whole_number

DEPENDENT = 1e-14
"""A lifted point with less than this share of its length outside the corral's span adds nothing but rounding."""
CONVERGED = 1e-13
"""Relative duality gap at which a nearest point is final."""
UNIT = 1e-15
"""Four units of rounding of float64, of points that are at most 1 long."""
LEAST_LIFT = 1e-9
"""Where a point lies on the dense output, nothing is left to resolve."""
NEGLIGIBLE = 1e-13
"""An error up to this share of the longest value is rounding of the values' differences: it counts as zero."""
SWAP = 1e-9
"""A swap must lower ef by this share: ef is solved, not summed, so that two equal sets differ by more than rounding."""
REACHED = 1e-2
"""A free-weight error up to this share of max-mass's forced error counts as none where keys are only selected."""
# Of `levels`: the least squared error found, and the least squared bound of the sets ruled out by their own solution.
BEST, FLOOR = range(2)
# Of `counts`: nearest points and screens so far, and the keys of the set that has the least error.
SOLVES, HELD = range(2)
# Sums may be reordered, which lets them run in vector registers; NaN and infinity keep their meaning.
_FAST = {"nsz", "reassoc", "contract"}


class Corral(NamedTuple):
    """The work space of one nearest point among M points of D coordinates; the first k places are in use.

    `key`, `weight` : the corral and its weights; `basis` (k, D + 1) and `factor` (k, k) the QR factors of its lifted
    points; `corner` solves factor^T corner = l, so that basis^T corner is h; `target` the affine hull's weights;
    `nearest` (D,) the point; `inner` (M,) its products with the points; `barred` (M,) points that rounding keeps out;
    `last_key` and `last_weight` the corral of the nearest point so far.
    """

    key: np.ndarray
    weight: np.ndarray
    basis: np.ndarray
    factor: np.ndarray
    corner: np.ndarray
    target: np.ndarray
    nearest: np.ndarray
    inner: np.ndarray
    barred: np.ndarray
    last_key: np.ndarray
    last_weight: np.ndarray
    lift: float

    @classmethod
    def of(cls, points: np.ndarray, lift: float) -> Corral:
        """An empty work space for `points` (M, D)."""
        m, d = points.shape
        places = min(m, d + 1) + 1
        return cls(
            key=np.empty(places, np.int64),
            weight=np.empty(places),
            basis=np.empty((places, d + 1)),
            factor=np.zeros((places, places)),
            corner=np.empty(places),
            target=np.empty(places),
            nearest=np.empty(d),
            inner=np.empty(m),
            barred=np.zeros(m, np.bool_),
            last_key=np.empty(places, np.int64),
            last_weight=np.empty(places),
            lift=lift,
        )


class Points(NamedTuple):
    """The keys of a search as points at most 1 long, in as few coordinates as they span, in mass order.

    `at` (M, D) the points, D = min(M, d); `lift`, and `gram` (M, M) the products of the lifted points; `scale` what one
    unit is in units of the values, a power of two.
    """

    at: np.ndarray
    gram: np.ndarray
    lift: float
    scale: float

    @classmethod
    def of(cls, instance: Instance, keys: np.ndarray) -> Points:
        """The points x_j of `keys`, rotated by a QR factorisation: distances stay but for rounding."""
        at, lift, scale = scaled(instance, keys)
        if at.shape[0] < at.shape[1]:
            at = np.ascontiguousarray(np.linalg.qr(at.T, mode="r").T)
        return cls(at, lift * lift + at @ at.T, lift, scale)


def scaled(instance: Instance, keys: np.ndarray) -> tuple[np.ndarray, float, float]:
    """x_j = v_j - mu of `keys`, (len(keys), d), divided by a power of two so that none is longer than 1; lift; scale.

    The lift is the shortest of them: of the size of the distances that it is added to.
    """
    at = instance.v[keys] - instance.mu
    length = np.sqrt(np.einsum("nd,nd->n", at, at))
    scale = float(2.0 ** np.frexp(length.max())[1])
    return np.ascontiguousarray(at / scale), max(float(length.min()) / scale, LEAST_LIFT), scale


@njit(cache=True, fastmath=_FAST)
def _dot(x, y, count):
    total = 0.0
    for i in range(count):
        total += x[i] * y[i]
    return total


@njit(cache=True, fastmath=_FAST)
def _subtract(x, share, y):
    for i in range(x.size):
        x[i] -= share * y[i]


# Plain loops below, not array expressions: the same speed, and a third of the time to compile.
@njit(cache=True)
def _copy(target, source, count):
    for i in range(count):
        target[i] = source[i]


@njit(cache=True)
def join(points, j, corral, k):
    """Put the lifted point j at place k of the factorisation. False if it depends on the k that are there."""
    if k == corral.key.size:
        return False
    d = points.shape[1]
    row = corral.basis[k]
    row[0] = corral.lift
    for i in range(d):
        row[i + 1] = points[j, i]
    whole = left = _dot(row, row, d + 1)
    for i in range(k):
        corral.factor[i, k] = 0.0
    # Once more where much cancelled: "twice is enough" for a basis orthogonal to rounding.
    for _ in range(2):
        before = left
        for i in range(k):
            share = _dot(corral.basis[i], row, d + 1)
            corral.factor[i, k] += share
            _subtract(row, share, corral.basis[i])
        left = _dot(row, row, d + 1)
        if left > 0.5 * before:
            break
    if left <= DEPENDENT * DEPENDENT * whole:
        return False
    left = np.sqrt(left)
    corral.factor[k, k] = left
    for i in range(d + 1):
        row[i] /= left
    corral.key[k] = j
    v = corral.lift
    for i in range(k):
        v -= corral.factor[i, k] * corral.corner[i]
    corral.corner[k] = v / left
    return True


@njit(cache=True)
def _joined(points, corral, first, count):
    """Factor places first .. count-1 (anew), leaving out dependent points. How many places are in use."""
    k = first
    for a in range(first, count):
        weight = corral.weight[a]
        if join(points, corral.key[a], corral, k):
            corral.weight[k] = weight
            k += 1
    return k


@njit(cache=True)
def _to_affine(points, corral, k):
    """Move the weights towards the affine hull's nearest point, dropping points that would go negative. k."""
    factor, weight, target = corral.factor, corral.weight, corral.target
    while True:
        length = _dot(corral.corner, corral.corner, k)
        for i in range(k):
            target[i] = corral.corner[i] * (corral.lift / length)
        for i in range(k - 1, -1, -1):
            target[i] /= factor[i, i]
            for a in range(i):
                target[a] -= factor[a, i] * target[i]
        step = 1.0
        leaves = -1
        for i in range(k):
            if target[i] <= 0.0:
                reach = weight[i] - target[i]
                share = weight[i] / reach if reach > 0.0 else 0.0
                if leaves < 0 or share < step:
                    step, leaves = share, i
        if leaves < 0:
            _copy(weight, target, k)
            return k
        for i in range(k):
            weight[i] = max(weight[i] + step * (target[i] - weight[i]), 0.0)
        for i in range(leaves, k - 1):
            corral.key[i] = corral.key[i + 1]
            weight[i] = weight[i + 1]
        k = _joined(points, corral, leaves, k - 1)


@njit(cache=True)
def _blend(points, corral, k):
    nearest = corral.nearest
    for c in range(nearest.size):
        nearest[c] = 0.0
    for i in range(k):
        _subtract(nearest, -corral.weight[i], points[corral.key[i]])


@njit(cache=True)
def nearest_point(points, keys, corral, k):
    """The point of conv{points[j] : j in keys} nearest to the origin, into `corral`.

    Parameters
    ----------
    points : (M, D) float64, at most 1 long
    keys : (n,) int64, distinct, n >= 1
    corral : work space; its first k keys and weights are the start
    k : 0 to start at the shortest point

    Returns
    -------
    k, square, least
        Points in the corral; the squared distance; min_j y . points[j] over keys, y the nearest point. Weights are
        positive and sum to 1 to rounding.
    """
    d = points.shape[1]
    if k == 0:
        shortest = np.inf
        for j in keys:
            square = _dot(points[j], points[j], d)
            if square < shortest:
                shortest = square
                corral.key[0] = j
        corral.weight[0] = 1.0
        k = 1
    k = _joined(points, corral, 0, k)
    whole = 0.0
    for i in range(k):
        whole += corral.weight[i]
    for i in range(k):
        corral.weight[i] /= whole
    for j in keys:
        corral.barred[j] = False
    square = least = np.inf
    enters = -1
    before = 0
    # Wolfe's method ends by itself; the count guards against rounding alone.
    for _ in range(20 * keys.size + 100):
        k = _to_affine(points, corral, k)
        nearest = corral.nearest
        _blend(points, corral, k)
        now = _dot(nearest, nearest, d)
        if now < square:
            square = now
            least = np.inf
            for j in keys:
                corral.barred[j] = False
                corral.inner[j] = _dot(nearest, points[j], d)
                least = min(least, corral.inner[j])
            before = k
            _copy(corral.last_key, corral.key, k)
            _copy(corral.last_weight, corral.weight, k)
        else:
            # Rounding only: go back, and let another point in.
            k = before
            _copy(corral.key, corral.last_key, k)
            _copy(corral.weight, corral.last_weight, k)
            k = _joined(points, corral, 0, k)
            _blend(points, corral, k)
            corral.barred[enters] = True
        length = np.sqrt(square)
        enough = square - max(CONVERGED * square, UNIT * length)
        joined = False
        while least < enough and not joined:
            enters = -1
            for j in keys:
                if not corral.barred[j] and corral.inner[j] < enough:
                    if enters < 0 or corral.inner[j] < corral.inner[enters]:
                        enters = j
            if enters < 0:
                break
            joined = join(points, enters, corral, k)
            corral.barred[enters] = not joined
        if not joined:
            break
        corral.weight[k] = 0.0
        k += 1
    return k, square, least


@njit(cache=True)
def offer(points, keys, corral, levels, kept, counts, lowers):
    """Solve the set `keys`; keep it in `kept` if its squared error is below `lowers` times the least. If it was."""
    counts[SOLVES] += 1
    _k, square, least = nearest_point(points, keys, corral, 0)
    # Where rounding stopped the solver short, the set could be as near as its bound.
    if least > 0.0 and square > 0.0:
        levels[FLOOR] = min(levels[FLOOR], least / square * least)
    else:
        levels[FLOOR] = 0.0
    if not square < levels[BEST] * lowers:
        return False
    levels[BEST] = square
    _copy(kept, keys, keys.size)
    counts[HELD] = keys.size
    return True


@njit(cache=True)
def extend(points, gram, fixed, others, taken, corral, scratch, levels, kept, counts, lowers):
    """Every set "fixed and `taken` (1 or 2) of others": solve those that the affine hull does not rule out.

    Those that it rules out have a squared error of at least `lowers` times levels[BEST].

    Returns
    -------
    bool
        Whether a better set was found; it is in `kept`, its squared error in levels[BEST].
    """
    across, apart, own, keys = scratch
    d = points.shape[1]
    counts[SOLVES] += 1
    k = 0
    smallest = 1.0
    for j in fixed:
        if join(points, j, corral, k):
            smallest = min(smallest, corral.factor[k, k] / np.sqrt(gram[j, j]))
            k += 1
    length = _dot(corral.corner, corral.corner, k)
    count = others.size
    for a in range(count):
        j = others[a]
        covered = 0.0
        for i in range(k):
            share = corral.lift * corral.basis[i, 0] + _dot(corral.basis[i, 1:], points[j], d)
            across[a, i] = share
            covered += share * corral.corner[i]
        apart[a] = corral.lift - covered
        own[a] = gram[j, j] - _dot(across[a], across[a], k)
    # The corral is used again below by the solver; all that is needed of it is in `across` now.
    _copy(keys, fixed, fixed.size)
    n = fixed.size + taken
    slack = 16.0 * UNIT * (d + n) / smallest
    better = False
    lift = corral.lift * corral.lift
    limit = lift / (lift + levels[BEST] * lowers) - length
    for a in range(count):
        row = gram[others[a]]
        for b in range(a if taken == 2 else 1):
            if taken == 1:
                area = own[a]
                gain = apart[a] * apart[a]
            else:
                both = row[others[b]] - _dot(across[a], across[b], k)
                area = own[a] * own[b] - both * both
                gain = apart[a] * (apart[a] * own[b] - 2.0 * apart[b] * both) + apart[b] * apart[b] * own[a]
            if gain >= limit * area - slack:
                keys[fixed.size] = others[a]
                if taken == 2:
                    keys[fixed.size + 1] = others[b]
                if offer(points, keys[:n], corral, levels, kept, counts, lowers):
                    better = True
                    limit = lift / (lift + levels[BEST] * lowers) - length
    return better


@njit(cache=True)
def scratch_of(m, places, s):
    """The arrays that `extend` fills, for m points."""
    return np.empty((m, places)), np.empty(m), np.empty(m), np.empty(max(s, 2), np.int64)


@njit(cache=True)
def fully_corrective(points, s, corral):
    """s points: the shortest, then each time the one with the least product with the nearest point.

    Once none of them would bring the hull nearer, the heaviest others.
    """
    m = points.shape[0]
    chosen = np.empty(s, np.int64)
    inside = np.zeros(m, np.bool_)
    k = 0
    square = np.inf
    for n in range(s):
        lowest = 0.0
        enters = heaviest = -1
        for j in range(m):
            if not inside[j]:
                if heaviest < 0:
                    heaviest = j
                product = _dot(points[j] if n == 0 else corral.nearest, points[j], points.shape[1])
                if enters < 0 or product < lowest:
                    lowest, enters = product, j
        if n > 0 and lowest >= square - max(CONVERGED * square, UNIT * np.sqrt(square)):
            enters = heaviest
        chosen[n] = enters
        inside[enters] = True
        k, square, _ = nearest_point(points, chosen[: n + 1], corral, k)
    return chosen


@njit(cache=True)
def filled(points, keys, s, corral):
    """The keys of positive weight in the nearest point of `keys`, and the heaviest others to make up s. Sorted."""
    k, _, _ = nearest_point(points, keys, corral, 0)
    inside = np.zeros(points.shape[0], np.bool_)
    for i in range(k):
        inside[corral.key[i]] = True
    missing = s - k
    for j in range(points.shape[0]):
        if missing > 0 and not inside[j]:
            inside[j] = True
            missing -= 1
    return np.flatnonzero(inside)


@njit(cache=True)
def free_descent(points, gram, start, corral, negligible, counts, limit):
    """Swap single keys from `start` while that lowers ef, up to `limit` solves in counts[SOLVES].

    Keys of weight 0 give way to the heaviest others, which takes nothing from the hull's nearest point.

    Returns
    -------
    (s,) int64, float
        The last set, and its squared error.
    """
    m = points.shape[0]
    s = start.size
    kept = filled(points, start, s, corral)
    levels = np.empty(2)
    levels[FLOOR] = before = np.inf
    scratch = scratch_of(m, corral.key.size, s)
    lowers = (1.0 - SWAP) ** 2
    fixed = np.empty(s - 1, np.int64)
    others = np.empty(m - s, np.int64)
    inside = np.zeros(m, np.bool_)
    for j in kept:
        inside[j] = True
    while True:
        levels[BEST] = np.inf
        offer(points, kept.copy(), corral, levels, kept, counts, 1.0)
        place = unchanged = 0
        while unchanged < s and m > s and levels[BEST] > negligible and counts[SOLVES] < limit:
            n = 0
            for j in range(m):
                if not inside[j]:
                    others[n] = j
                    n += 1
            leaves = enters = kept[place]
            for i in range(s - 1):
                fixed[i] = kept[i if i < place else i + 1]
            if extend(points, gram, fixed, others, 1, corral, scratch, levels, kept, counts, lowers):
                # The newcomer comes last there: it takes the place of the key that it replaced.
                enters = kept[s - 1]
                unchanged = 0
            for i in range(s - 1):
                kept[i if i < place else i + 1] = fixed[i]
            kept[place] = enters
            inside[leaves] = False
            inside[enters] = True
            unchanged += 1
            place = (place + 1) % s
        kept = filled(points, kept, s, corral)
        same = True
        for j in kept:
            same = same and inside[j]
        if same or not levels[BEST] < before * lowers or counts[SOLVES] >= limit:
            return kept, levels[BEST]
        before = levels[BEST]
        for j in range(m):
            inside[j] = False
        for j in kept:
            inside[j] = True


def from_both_starts(
    points: Points, s: int, corral: Corral, negligible: float, counts: np.ndarray, limit: int
) -> tuple[np.ndarray, float]:
    """The better end of two descents, from the fully corrective set and from the s heaviest keys."""
    ends = [
        free_descent(points.at, points.gram, start, corral, negligible, counts, limit)
        for start in (fully_corrective(points.at, s, corral), np.arange(s))
    ]
    return min(ends, key=lambda end: end[1])


def negligible_error(instance: Instance) -> float:
    """The error that is rounding of the values' differences and counts as zero, in the units of the values."""
    return NEGLIGIBLE * float(np.linalg.norm(instance.v, axis=1).max())


def check_candidates(name: str, value: object, s: int) -> int:
    """Return `value` as an int if it is a whole number of keys that holds a budget of s; raise InvalidInput if not."""
    count = whole_number(name, value)
    if count < s:
        raise InvalidInput(f"{name}: expected at least the budget {s}, got {count}")
    return count


def geometric(instance: Instance, s: int, candidates: int | None = None) -> np.ndarray:
    """Keys chosen for free weights: the paper's geometric selection, which is renormalised afterwards (Table 8).

    Parameters
    ----------
    instance : Instance
    s : budget, 1 <= s < N
    candidates : only so many of the heaviest keys may enter; default 256 or twice the budget, whichever is more

    Returns
    -------
    (s,) int array
        Sorted key indices of a set that no single swap brings nearer to the dense output, or whose free-weight error
        is at most `REACHED` of max-mass's forced error: swaps among s >= d keys go on far below what anyone could tell.

    Raises
    ------
    InvalidInput
        Budget outside 1 .. N-1, fewer candidates than the budget.

    Notes
    -----
    Its error once renormalised is `contourkv.forced_error`. `contourkv.enumeration.best_free` searches on from here,
    with a proved bound. Keys of free weight 0 take part in the renormalised output all the same: where fewer than s
    keys reach the dense output, the heaviest others fill the set.
    """
    s = check_budget(s, check_instance(instance).size)
    candidates = max(256, 2 * s) if candidates is None else check_candidates("candidates", candidates, s)
    keys = instance.order[:candidates]
    points = Points.of(instance, keys)
    corral = Corral.of(points.at, points.lift)
    reached = REACHED * forced_error(instance, instance.order[:s])
    negligible = (max(negligible_error(instance), reached) / points.scale) ** 2
    counts = np.zeros(2, np.int64)
    kept, _ = from_both_starts(points, s, corral, negligible, counts, np.iinfo(np.int64).max)
    return np.sort(keys[kept])

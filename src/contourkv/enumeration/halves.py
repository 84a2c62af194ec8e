r"""The best kept set over all keys of a row, proved: branch and bound first, then what it leaves, set by set.

`best_of_all` combines three exact methods; each of them alone gives the same answer:

* `branch`: the branch and bound of `contourkv.enumeration.branch`, for a given amount of work. It decides most rows
  in milliseconds and leaves a good set where it does not.
* `walk`: all sets in mass order, of `contourkv.enumeration.walk`. It decides the flat rows that are left.
* `halves`, here: half against half, by matrix products on any device. The keys of a set in mass order are cut in its
  heavier half and its lighter half, all of whose mass ranks are greater: every set is one such pair. With u the sum
  of g over a half, projected on k orthonormal directions (projection shortens, so the test loses no set), n = ||u||^2
  and P its mass, a set has es < t only if

      ||u1 + u2||^2 - t^2 (P1 + P2)^2 < 0,

  and that, over P1^2, is one inner product of k + 3 numbers a half:

      [2 u1, -2 t^2 P1, n1 - t^2 P1^2, 1] / P1^2   .   [u2, P2, 1, n2 - t^2 P2^2].

  Heavier halves that no lighter half can balance, and keys that can take part in none, are left out first, by the
  cut of `walk`.

Rounding of `halves`: the products are float32. Rounding the factors and summing k + 3 products in any order errs by
at most (k + 6) 2^-24 times the sum of the products' absolute values, itself at most (Cauchy, Schwarz)

    2 ||u1|| L / P1^2 + 2 t^2 Q / P1 + |n1 / P1^2 - t^2| + max(L^2, t^2 Q^2) / P1^2,

L and Q the greatest norm and mass of the lighter halves in the block. The division by P1^2 and units in which the
values are of size 1 and the light keys too keep float32 within its range. All that is not above this bound (with room
for the float64 rounding of the sums) is decided by the forced error computed directly from g in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import comb, inf
from typing import TYPE_CHECKING

import numpy as np
from numba import njit
from numpy.typing import ArrayLike

from ..devices import checked_device
from ..errors import InvalidInput
from ..operator import Instance, check_budget, check_instance, check_kept, forced_error, real_number, whole_number
from ..selectors.hull import negligible_error
from ..selectors.swap import descend, error_of
from .branch import ROUNDING, Search
from .certificate import LARGEST_ROW
from .walk import BEST, CANCELLED, MASS_ROUNDING, THRESHOLD, offer, walk

if TYPE_CHECKING:
    import torch

BUDGETS = (2, 4, 6, 8)
METHODS = ("auto", "branch", "walk", "halves")

FIRST_WORK = 5e7
"""Of branch and bound, before anything else is tried: most rows are decided by it."""

BRANCH_WORK = 1e9

EXPLORE_WORK = 5e7
"""Spent then on looking for a better set by swaps: a lower threshold makes everything after it smaller."""

MOST_PARTS = 6_000_000
"""Halves of one row, whose products with the others must fit in memory."""

HELD, LEAST_DIMENSIONS, MOST_DIMENSIONS = 0.9, 12, 64
"""Directions of the products: fewer are faster, and leave more sets to be decided one by one."""

RESCALE = 2.0**-10
"""The columns are scaled anew where the keys have become lighter by this."""

FLOAT32_UNIT = 2.0**-24
UNDERFLOW = 1e-30
"""More than k + 3 products, none of whose factors is above 2^12, can lose where one is too small for float32."""


@dataclass(frozen=True, eq=False)
class AllKeys:
    """The best kept set over all keys, or over the heaviest of them.

    Attributes
    ----------
    kept : (s,) sorted key indices
    error : its forced error, float64, in the units of the values
    proved : no set that counts has an error below (1 - tolerance) * `error`, but for float64's rounding of the sums
    sets : sets of s of the keys searched, whatever they keep of the mass
    tested : those whose squared form or error was computed one by one by the method that ended the search
    method : "branch", "walk" or "halves", whichever ended the search; "none" where there was nothing to search
    """

    kept: np.ndarray
    error: float
    proved: bool
    sets: int
    tested: int
    method: str

    @property
    def skipped(self) -> int:
        """Sets decided by bounds; where not `proved`, those not reached too."""
        return max(self.sets - self.tested, 0)


def best_of_all(
    instance: Instance,
    s: int,
    incumbent: ArrayLike | None = None,
    keys: int | None = None,
    floor: float = 0.0,
    tolerance: float = 1e-6,
    device: str | torch.device = "cpu",
    method: str = "auto",
    branch_work: float | None = None,
    most_work: float = 1e11,
    dimensions: int | None = None,
    block: int | None = None,
) -> AllKeys:
    """The kept set of least forced error among all sets of s keys, proved up to `tolerance`.

    Parameters
    ----------
    instance : Instance of up to 4,096 keys
    s : budget, 2, 4, 6 or 8, below N
    incumbent : (s,) distinct key indices of a set to start from; default the s heaviest. A good one saves time, a
        bad one changes nothing
    keys : search only so many of the heaviest keys, s <= keys; default all
    floor : only sets count that keep at least this share of the mass of the s heaviest keys, 0 to 1 (masses summed
        in mass order): a set of a hundredth of the mass is an optimum on paper only
    tolerance : relative, 1e-9 to 0.5
    device : where "halves" computes its products. With "auto" and another device than the CPU, `halves` takes the
        place of `walk`
    method : "auto" (branch, then walk or halves) or one of the three alone
    branch_work : what branch and bound may spend, in units of about a nanosecond; default 1e9, with "auto" 5e7 for
        s = 2 and 4, whose remaining sets are decided faster one by one
    most_work : keys and sets that the other two may look at, about two nanoseconds each; then they give up
    dimensions : k of "halves"; default what holds nine tenths of the values' spread, 12 to 64
    block : entries of one product of "halves": memory, 4 bytes each; default 2^18 on the CPU, 2^26 elsewhere

    Returns
    -------
    AllKeys
        The same for the same arguments: no clock takes part.

    Raises
    ------
    InvalidInput
        A budget that is not 2, 4, 6 or 8 or not below N; an incumbent that is not s distinct keys among those
        searched, or lighter than the floor; keys, floor, tolerance, work, dimensions or block out of range; an
        unknown method or device; a row that is too long; more than six million halves.

    Notes
    -----
    ES(s) of the paper, section 1. Cost: at most N^2 / 2 nodes and C(N, 4) pairs of pairs for s = 4, of which the
    cuts leave a hundredth to a tenth on the flattest real rows; exponential in s for 6 and 8.
    """
    s = check_budget(s, check_instance(instance).size)
    if s not in BUDGETS:
        raise InvalidInput(f"s: expected one of {', '.join(map(str, BUDGETS))} (sets are cut in halves), got {s}")
    if instance.size > LARGEST_ROW:
        raise InvalidInput(f"instance: best_of_all takes up to {LARGEST_ROW} keys, got {instance.size}")
    count = instance.size if keys is None else min(whole_number("keys", keys, least=s), instance.size)
    floor = real_number("floor", floor, 0.0, 1.0, "a share of the mass from 0 to 1")
    tolerance = real_number("tolerance", tolerance, 1e-9, 0.5, "a relative difference from 1e-9 to 0.5")
    if not isinstance(method, str) or method not in METHODS:
        raise InvalidInput(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if branch_work is None:
        branch_work = FIRST_WORK if method == "auto" and s <= 4 else BRANCH_WORK
    branch_work = real_number("branch_work", branch_work, 0.0, inf, "work >= 0")
    most_work = real_number("most_work", most_work, 0.0, inf, "work >= 0")
    dimensions = None if dimensions is None else whole_number("dimensions", dimensions, least=1)
    block = None if block is None else whole_number("block", block, least=1)
    by_products = method == "halves" or (method == "auto" and str(device) != "cpu")
    if by_products:
        device = checked_device(device)
        if comb(count, s // 2) > MOST_PARTS:
            raise InvalidInput(
                f"keys: {count} keys have {comb(count, s // 2)} halves of {s // 2}, more than the {MOST_PARTS} that "
                "can be held; search fewer keys, or on the CPU"
            )

    order = instance.order[:count]
    g, p = np.ascontiguousarray(instance.g[order]), np.ascontiguousarray(instance.p[order])
    gram = g @ g.T
    floor_mass = floor * mass_of(p, np.arange(s))
    best = _start(instance, g, p, gram, s, incumbent, floor_mass)
    negligible = negligible_error(instance)
    sets = comb(count, s)

    proved, tested, ended = count == s or float(error_of(g, p, best)) <= negligible, 0, "none"
    if not proved and method in ("auto", "branch"):
        best, proved, tested = _branch(g, p, best, tolerance, negligible, floor_mass, branch_work)
        ended = "branch"
    if not proved and by_products:
        best, _, proved, tested = halves(
            g, p, best, tolerance, negligible, floor_mass, most_work, gram, device, dimensions, block
        )
        ended = "halves"
    elif not proved and method != "branch":
        best, _, proved, tested = walk(g, p, best, tolerance, negligible, floor_mass, most_work, gram)
        ended = "walk"
    kept = np.sort(order[best])
    return AllKeys(kept, forced_error(instance, kept), proved, sets, tested, ended)


def mass_of(p: np.ndarray, ranks: np.ndarray) -> float:
    """p(A) of the sorted mass ranks `ranks`, summed in that order."""
    return float(np.cumsum(p[ranks])[-1])


def _start(instance, g, p, gram, s, incumbent, floor_mass) -> np.ndarray:
    """The best of max-mass, the incumbent and what swaps make of each, as sorted mass ranks."""
    starts = [np.arange(s)]
    if incumbent is not None:
        given = check_kept(incumbent, instance.size)
        if given.size != s:
            raise InvalidInput(f"incumbent: expected {s} keys, as many as the budget, got {given.size}")
        rank = np.empty(instance.size, np.int64)
        rank[instance.order] = np.arange(instance.size)
        ranks = np.sort(rank[given])
        if ranks[-1] >= p.size:
            raise InvalidInput(f"incumbent: key {given[rank[given].argmax()]} is not one of the {p.size} heaviest")
        if mass_of(p, ranks) < floor_mass:
            raise InvalidInput(
                f"incumbent: it keeps {mass_of(p, ranks):.3g} of the mass, less than the floor of {floor_mass:.3g}"
            )
        starts.append(ranks)
    if p.size > s:
        starts += [descend(g, p, gram, start, 0, p.size) for start in starts]
    heavy = [ranks for ranks in starts if mass_of(p, ranks) >= floor_mass]
    return min(heavy, key=lambda ranks: error_of(g, p, ranks))


def _branch(g, p, best, tolerance, negligible, floor_mass, work) -> tuple[np.ndarray, bool, int]:
    """Branch and bound up to `work`. It knows no floor: a set too light ends it, and only a heavy one is kept."""
    search = Search(g, p, best, tolerance, negligible)

    def heavy() -> bool:
        return mass_of(p, np.sort(search.kept)) >= floor_mass

    if not search.run(min(FIRST_WORK, work), np.inf) and heavy():
        search.explore(0, min(EXPLORE_WORK, work), np.inf)
        if heavy():
            best = np.sort(search.kept)
            search.run(search.work + work, np.inf)
    if not heavy():
        return best, False, search.sets
    kept = np.sort(search.kept)
    return (kept if error_of(g, p, kept) < error_of(g, p, best) else best), search.finished, search.sets


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Products of float32 in float32: the shorter formats that torch may be set to would break the bound."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@njit(cache=True)
def _offer_all(g, gram, p, sets, rounding, floor_mass, keep, best, levels):
    """Decide the sets (rows of unsorted ranks): by the Gram form those it is sure of, the rest from g."""
    for i in range(sets.shape[0]):
        kept = np.sort(sets[i])
        square = mass = span = 0.0
        for a in range(kept.size):
            mass += p[kept[a]]
            span += np.sqrt(gram[kept[a], kept[a]])
            square += gram[kept[a], kept[a]]
            for b in range(a):
                square += 2.0 * gram[kept[a], kept[b]]
        reach = levels[THRESHOLD] * mass
        if square <= reach * reach + rounding * (span + reach) ** 2:
            offer(g, p, kept, floor_mass, keep, best, levels)


def subsets(size: int, picked: int) -> np.ndarray:
    """The subsets of `picked` of range(size), each rising, in colex order: by their last member, and so on."""
    found = np.arange(size, dtype=np.int16)[:, None]
    for k in range(2, picked + 1):
        # Those with last member j: the first C(j, k - 1) of one member fewer, then j.
        longer = np.empty((comb(size, k), k), dtype=np.int16)
        filled = 0
        for j in range(k - 1, size):
            these = comb(j, k - 1)
            longer[filled : filled + these, :-1] = found[:these]
            longer[filled : filled + these, -1] = j
            filled += these
        found = longer
    return found


def halves(
    g: np.ndarray,
    p: np.ndarray,
    kept: np.ndarray,
    tolerance: float,
    negligible: float = 0.0,
    floor_mass: float = 0.0,
    most_work: float = np.inf,
    gram: np.ndarray | None = None,
    device: str | torch.device = "cpu",
    dimensions: int | None = None,
    block: int | None = None,
) -> tuple[np.ndarray, float, bool, int]:
    """The best kept set by products of heavier and lighter halves; arguments and results as those of `walk`.

    `kept` has an even number of keys. `device`, `dimensions`, `block`: see `best_of_all`. `tested` counts entries
    of the products.
    """
    with _whole_float32():
        return _Halves(g, p, kept, tolerance, negligible, floor_mass, gram, device, dimensions, block).run(most_work)


class _Halves:
    """One search by halves: the row in float64 on the device, the columns of the lighter halves in float32."""

    def __init__(self, g, p, kept, tolerance, negligible, floor_mass, gram, device, dimensions, block) -> None:
        import torch

        self.torch, self.device = torch, torch.device(device)
        self.g, self.p = g, p
        self.best = kept.astype(np.int64)
        self.keep, self.negligible, self.floor_mass = 1.0 - tolerance, negligible, floor_mass
        error = float(error_of(g, p, self.best))
        self.levels = np.array([error, error * self.keep, 0.0, 0.0])
        self.size, self.half = p.size, kept.size // 2
        self.block = block or (2**18 if self.device.type == "cpu" else 2**26)
        length = np.linalg.norm(g, axis=1)
        # The unit of the values: with it every ||g_j|| <= p_j.
        self.unit = float((length / p).max()) or 1.0
        self.longest = np.maximum.accumulate(length[::-1])[::-1] / self.unit
        # Light keys count too: directions of values weighted by the root of the mass.
        scaled = g / (self.unit * np.sqrt(p)[:, None])
        share, directions = np.linalg.eigh(scaled.T @ scaled)
        if dimensions is None:
            held = np.cumsum(share[::-1]) / max(share.sum(), np.finfo(float).tiny)
            dimensions = min(max(int(np.searchsorted(held, HELD)) + 1, LEAST_DIMENSIONS), MOST_DIMENSIONS)
        directions = directions[:, ::-1][:, :dimensions]
        self.width = directions.shape[1]
        self.rounding = 16.0 * ROUNDING * (g.shape[1] + kept.size)
        self.mass = self._put(p)
        self.length = self._put(length / self.unit)
        self.flat = self._put(g @ np.ascontiguousarray(directions) / self.unit)
        self.plain = g @ g.T if gram is None else gram
        self.gram = self._put(self.plain / self.unit**2)
        self.parts = subsets(self.size, self.half)
        self.rows = torch.as_tensor(self.parts, device=self.device)
        self.tested = 0

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return self.torch.as_tensor(np.ascontiguousarray(array), dtype=self.torch.float64, device=self.device)

    @property
    def threshold(self) -> float:
        return float(self.levels[THRESHOLD]) / self.unit

    def run(self, most_work: float) -> tuple[np.ndarray, float, bool, int]:
        finished = True
        scale = np.inf
        # The last key of the heavier half; the lighter half needs as many keys after it.
        for last in range(self.half - 1, self.size - self.half):
            if self.levels[BEST] <= self.negligible:
                break
            if self.tested > most_work:
                finished = False
                break
            rows = self._heavier(last)
            if rows is None:
                continue
            if self.p[last] < RESCALE * scale:
                scale = float(self.p[last])
                self._fill_columns(last, scale)
            self._multiply(last, scale, *rows)
        return self.best, float(self.levels[BEST]), finished, self.tested

    def _light(self, last: int) -> tuple[float, float]:
        """The greatest norm and mass that a lighter half after `last` can have."""
        return self.half * float(self.longest[last + 1]), float(self.p[last + 1 : last + 1 + self.half].sum())

    def _heavier(self, last: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The heavier halves that end with `last` and may belong to a better set, and which keys may join them."""
        torch, t = self.torch, self.threshold
        first, stop = comb(last, self.half), comb(last + 1, self.half)
        norm, weight = self._light(last)
        found = []
        alive = torch.zeros(self.size - last - 1, dtype=torch.bool, device=self.device)
        step = max(1, self.block // (2 * self.size))
        for start in range(first, stop, step):
            part = self.rows[start : min(stop, start + step)].long()
            mass = self.mass[part].sum(dim=1)
            span = self.length[part].sum(dim=1)
            pull = self.gram[part[:, 0]].clone()
            for place in range(1, self.half):
                pull += self.gram[part[:, place]]
            square = pull.gather(1, part).sum(dim=1).clamp_min(0.0)
            r = square.sqrt()
            cancelled = square <= CANCELLED * span**2
            inverse = torch.where(cancelled, 0.0, 1.0 / r)
            short = r - t * mass
            every = span + t * mass + norm + t * weight
            slack = torch.where(cancelled, torch.inf, self.rounding * (span * (span + norm) * inverse + every))
            cost = pull[:, last + 1 :] * inverse[:, None] - t * self.mass[last + 1 :]
            least = cost.topk(self.half, dim=1, largest=False).values
            others = least[:, :-1].sum(dim=1)
            may = short + others + least[:, -1] <= slack
            may &= mass + weight >= self.floor_mass * (1.0 - MASS_ROUNDING)
            index = may.nonzero()[:, 0]
            if index.numel():
                limit = (slack - short - others)[index]
                alive |= (cost[index] <= limit[:, None]).any(dim=0)
                found.append(index + start)
        return (torch.cat(found), alive) if found else None

    def _columns(self, start: int, stop: int) -> torch.Tensor:
        """Keys of the lighter halves start .. stop-1: the colex list from the lightest key on."""
        return self.size - 1 - self.rows[start:stop].long()

    def _fill_columns(self, last: int, scale: float) -> None:
        """Features of all lighter halves after `last`, in units in which their keys are of size 1."""
        torch = self.torch
        total = comb(self.size - 1 - last, self.half)
        self.features = torch.empty((self.width + 3, total), dtype=torch.float32, device=self.device)
        self.square = torch.empty(total, dtype=torch.float64, device=self.device)
        self.weight = torch.empty(total, dtype=torch.float64, device=self.device)
        step = max(1, self.block // (self.width + 3))
        for start in range(0, total, step):
            stop = min(total, start + step)
            keys = self._columns(start, stop)
            u = self.flat[keys].sum(dim=1) / scale
            self.square[start:stop] = (u * u).sum(dim=1)
            self.weight[start:stop] = self.mass[keys].sum(dim=1) / scale
            self.features[: self.width, start:stop] = u.T
        self.features[self.width] = self.weight
        self.features[self.width + 1] = 1.0
        self._lower_columns()

    def _lower_columns(self) -> None:
        """The one feature that depends on the threshold."""
        t = self.threshold
        self.features[self.width + 2] = self.square - (t * self.weight) ** 2
        self.at = t

    def _multiply(self, last: int, scale: float, rows: torch.Tensor, alive: torch.Tensor) -> None:
        """Test the heavier halves `rows` against the lighter halves of keys that are `alive`, a block at a time."""
        total = comb(self.size - 1 - last, self.half)
        chosen = self._chosen(last, total, alive)
        count = total if chosen is None else chosen.numel()
        if count == 0:
            return
        tall = max(1, min(rows.numel(), int(self.block**0.5)))
        wide = max(1, self.block // tall)
        for left in range(0, count, wide):
            if chosen is None:
                index = None
                columns = self.features[:, left : min(count, left + wide)]
            else:
                index = chosen[left : left + wide]
                columns = self.features[:, index]
            for top in range(0, rows.numel(), tall):
                if self.threshold < self.at:
                    self._lower_columns()
                    columns = (
                        self.features[:, left : min(count, left + wide)] if index is None else (self.features[:, index])
                    )
                part = rows[top : top + tall]
                factors, bound = self._factors(last, scale, part)
                product = factors @ columns
                self.tested += product.numel()
                low = (product.amin(dim=1) <= bound).nonzero()[:, 0]
                if low.numel() == 0:
                    continue
                hits = (product[low] <= bound[low, None]).nonzero()
                row = part[low[hits[:, 0]]]
                column = hits[:, 1] + left if index is None else index[hits[:, 1]]
                heavy = self._heavy_enough(row, column, scale)
                self._decide(row[heavy], column[heavy])

    def _chosen(self, last: int, total: int, alive: torch.Tensor) -> torch.Tensor | None:
        """The lighter halves of keys that may join some heavier half; None for all of them."""
        torch = self.torch
        share = float(alive.double().mean()) ** self.half
        if share > 0.7:
            return None
        found = []
        step = max(1, self.block // self.half)
        for start in range(0, total, step):
            keys = self._columns(start, min(total, start + step))
            found.append(alive[keys - last - 1].all(dim=1).nonzero()[:, 0] + start)
        return torch.cat(found)

    def _factors(self, last: int, scale: float, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the product, float32, and the value above which no better set lies, float32 rounded up."""
        torch, t = self.torch, self.at
        keys = self.rows[part].long()
        mass = self.mass[keys].sum(dim=1)
        u = self.flat[keys].sum(dim=1)
        own = (u * u).sum(dim=1) / mass**2 - t * t
        factors = torch.empty((part.numel(), self.width + 3), dtype=torch.float64, device=self.device)
        factors[:, : self.width] = 2.0 * scale * u / (mass**2)[:, None]
        factors[:, self.width] = -2.0 * t * t * scale / mass
        factors[:, self.width + 1] = own
        factors[:, self.width + 2] = (scale / mass) ** 2
        norm, weight = self._light(last)
        span = self.length[keys].sum(dim=1)
        terms = 2.0 * u.norm(dim=1) * norm / mass**2 + 2.0 * t * t * weight / mass + own.abs()
        terms += max(norm**2, (t * weight) ** 2) / mass**2
        bound = 1.01 * (self.width + 6) * FLOAT32_UNIT * terms + UNDERFLOW
        bound += self.rounding * ((span + norm + t * (mass + weight)) / mass) ** 2
        return factors.float(), (bound * (1.0 + 2.0 * FLOAT32_UNIT)).float()

    def _heavy_enough(self, row: torch.Tensor, column: torch.Tensor, scale: float) -> torch.Tensor:
        if self.floor_mass == 0.0:
            return self.torch.ones_like(row, dtype=self.torch.bool)
        mass = self.mass[self.rows[row].long()].sum(dim=1) + self.weight[column] * scale
        return mass >= self.floor_mass * (1.0 - MASS_ROUNDING)

    def _decide(self, row: torch.Tensor, column: torch.Tensor) -> None:
        if row.numel():
            light = self.size - 1 - self.rows[column].long()
            sets = self.torch.cat([self.rows[row].long(), light], dim=1).cpu().numpy()
            _offer_all(
                self.g, self.plain, self.p, sets, self.rounding, self.floor_mass, self.keep, self.best, self.levels
            )

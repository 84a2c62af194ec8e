r"""A certificate over ALL keys of a row: is the best known kept set the best there is (paper, section 2)?

Three outcomes. `optimal`: no kept set of the same size has an error below (1 - tolerance) times the incumbent's.
`improved`: one has, here it is; whether the search also proved that nothing beats it says `proved`. `timeout`:
neither was found out, which is not a "no".

Two methods decide it. `branch` is the branch and bound of `contourkv.enumeration.branch`, which at small budgets hands
the rows that it does not end soon to `contourkv.enumeration.walk`; `outer` is CP-SAT on
outer-approximation cuts, of `contourkv.enumeration.outer`, slower by orders of magnitude and independent: where
both end, they must agree.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidInput
from ..operator import Instance, check_budget, check_instance, check_kept, forced_error, real_number, whole_number
from ..progress import Progress
from ..selectors.hull import negligible_error
from .branch import Search
from .walk import walk

if TYPE_CHECKING:
    import pandas as pd

WALKED = 4
"""Largest budget at which all sets are looked at where the tree does not end soon."""

WORK_PER_SECOND = 7e8
"""Work units that a second of the time limit buys. A quiet core does two to three times as many, so that the work,
which is the same on every run, ends a search before the clock does."""

FIRST_WORK = 5e7
"""Most rows are decided by this much."""

STAGES = (0.3, 0.8)
"""Shares of the work at which the search pauses to look for better sets, and at which it is given up. The rest is
kept back to prove a lower bound."""

EXPLORE_SHARE = 0.05
"""Share of the work spent on each look for better sets."""

BOUND_STEPS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""The lower bounds tried then, as shares of the best error."""

CP_SAT_TIME = 0.3
"""CP-SAT's deterministic time that a second of the time limit buys: it runs at half the clock or faster."""

LARGEST_ROW = 4096
"""Keys of the longest row searched; memory grows with the square."""

OUTCOMES = ("optimal", "improved", "timeout")
KEYS = ("model", "arm", "input", "layer", "head", "position", "s")
STRATUM = ("model", "arm", "s")


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is known of ES(s) after the search.

    Attributes
    ----------
    status : "optimal", "improved" or "timeout" (see the module)
    kept : (s,) sorted key indices of the best set known
    error : its forced error, float64, in the units of the values
    lower_bound : no kept set of s keys has an error below it; 0 if nothing was proved
    incumbent_error : forced error of the set that was to be beaten
    proved : whether the search ended: no set has an error below (1 - tolerance) * `error`, or below the slightly
        smaller `lower_bound` where float64 cannot resolve the tolerance (errors below about 1e-7 of the values)
    repeatable : whether the same call gives the same certificate again: the search ended by itself or by its
        work, not by the clock
    seconds : wall time of the search
    cuts : directions u tried
    """

    status: str
    kept: np.ndarray
    error: float
    lower_bound: float
    incumbent_error: float
    proved: bool
    repeatable: bool
    seconds: float
    cuts: int

    @property
    def gap(self) -> float:
        """1 - lower_bound / error: how much lower an unknown set could still be; 0 where the error is rounding."""
        if self.proved and self.lower_bound == 0.0:
            return 0.0
        return 1.0 - self.lower_bound / self.error

    @property
    def improvement(self) -> float:
        """1 - error / incumbent_error: how much lower the best set is than the incumbent."""
        return 1.0 - self.error / self.incumbent_error if self.incumbent_error > 0.0 else 0.0


def certify(
    instance: Instance,
    s: int,
    incumbent: ArrayLike,
    time_limit: float,
    tolerance: float,
    seed: int = 0,
    workers: int = 1,
    method: str = "branch",
) -> Certificate:
    """Decide over all keys whether a kept set of s keys beats `incumbent` by more than `tolerance`.

    Parameters
    ----------
    instance : Instance of up to 4,096 keys
    s : budget, 1 <= s < N
    incumbent : (s,) distinct key indices
    time_limit : seconds, >= 0. It buys an amount of work, `WORK_PER_SECOND` a second, that is the same on every
        run and takes a third to a half of the time on a quiet core; the clock stops the search only where that
        was too much (`repeatable` tells). The first call of a process also loads or compiles the search, outside
        this time.
    tolerance : relative, 1e-9 to 0.5
    seed : of the sets that the search for better ones starts from, and of CP-SAT
    workers : threads of CP-SAT; with more than one it is not repeatable. "branch" has one thread
    method : "branch" or "outer"

    Returns
    -------
    Certificate

    Raises
    ------
    InvalidInput
        A budget outside 1 .. N-1; an incumbent that is not s distinct keys; a time limit, tolerance, seed,
        workers or method out of range; a row that is too long.
    """
    s = check_budget(s, check_instance(instance).size)
    kept = np.sort(check_kept(incumbent, instance.size))
    if kept.size != s:
        raise InvalidInput(f"incumbent: expected {s} keys, as many as the budget, got {kept.size}")
    time_limit = real_number("time_limit", time_limit, 0.0, sys.float_info.max, "seconds >= 0")
    tolerance = real_number("tolerance", tolerance, 1e-9, 0.5, "a relative difference from 1e-9 to 0.5")
    seed, workers = whole_number("seed", seed, least=0), whole_number("workers", workers, least=1)
    if seed >= 2**31:
        raise InvalidInput(f"seed: expected a seed from 0 to 2^31-1, got {seed}")
    if not isinstance(method, str) or method not in _METHODS:
        raise InvalidInput(f"method: expected one of {', '.join(_METHODS)}, got {method!r}")
    if instance.size > LARGEST_ROW:
        raise InvalidInput(f"instance: certify takes up to {LARGEST_ROW} keys, got {instance.size}")

    incumbent_error = forced_error(instance, kept)
    negligible = negligible_error(instance)
    _load(method)
    started = time.monotonic()
    if incumbent_error <= negligible:
        return Certificate("optimal", kept, incumbent_error, 0.0, incumbent_error, True, True, 0.0, 0)
    found = _METHODS[method](instance, kept, started, time_limit, tolerance, negligible, seed, workers)
    # Summed anew in the order of the keys, as every other error of a set is.
    best = np.sort(found.kept)
    error = forced_error(instance, best)
    if not error < incumbent_error:
        best, error = kept, incumbent_error
    lower = found.lower_bound if error > negligible else 0.0
    improved = error < (1.0 - tolerance) * incumbent_error
    return Certificate(
        status="improved" if improved else "optimal" if found.proved else "timeout",
        kept=best,
        error=error,
        lower_bound=min(lower, error),
        incumbent_error=incumbent_error,
        proved=found.proved,
        repeatable=found.repeatable,
        seconds=time.monotonic() - started,
        cuts=found.cuts,
    )


@dataclass(frozen=True)
class _Found:
    """What a method hands back; every method takes the same arguments, so that another one is one more name."""

    kept: np.ndarray
    lower_bound: float
    proved: bool
    repeatable: bool
    cuts: int


@cache
def _load(method: str) -> None:
    """Load or compile what the method needs, before its clock starts."""
    if method == "outer":
        import ortools.sat.python.cp_model  # noqa: F401
    else:
        search = Search(np.array([[1.0], [-0.5], [-0.5]]), np.full(3, 1 / 3), np.array([0]), 0.1)
        search.explore(0, 1.0, np.inf)
        search.run(search.work + 1.0, np.inf)
        walk(np.eye(3) - 1 / 3, np.full(3, 1 / 3), np.array([0, 1]), 0.1)


def _by_branch(instance, kept, started, time_limit, tolerance, negligible, seed, workers) -> _Found:
    order = instance.order
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    search = Search(instance.g[order], instance.p[order], np.sort(rank[kept]), tolerance, negligible)
    whole = WORK_PER_SECOND * time_limit
    last = started + STAGES[-1] * time_limit
    if not search.run(min(FIRST_WORK, STAGES[-1] * whole), last):
        if 2 <= kept.size <= WALKED:
            # All sets, one by one: of the few rows that the tree does not end soon, it ends all but the longest.
            best, error, finished, _ = walk(
                instance.g[order], instance.p[order], np.sort(search.kept), tolerance, negligible, most_work=whole
            )
            if finished:
                return _Found(order[best], (1.0 - tolerance) * error, True, True, search.cuts)
        for stage in STAGES:
            # Better sets first: a lower threshold makes a smaller tree.
            search.explore(seed, EXPLORE_SHARE * whole, last)
            if search.run(stage * whole, last):
                break
    proved, repeatable = search.finished, search.finished or search.work >= STAGES[-1] * whole
    lower = search.lower_bound if proved else 0.0
    if not proved:
        # The tree of a lower threshold is smaller by far: climb as long as the work lasts.
        for share in BOUND_STEPS:
            target = share * search.error
            if target <= lower:
                continue
            search.restart(target)
            if not search.run(whole, started + time_limit):
                repeatable = repeatable and search.work >= whole
                break
            lower = search.lower_bound
            # A set below the target was found, and the threshold followed it down to the tolerance.
            proved = search.threshold < target
            if proved:
                break
    return _Found(order[search.kept], lower, proved, repeatable, search.cuts)


def _by_outer(instance, kept, started, time_limit, tolerance, negligible, seed, workers) -> _Found:
    from .outer import OuterApproximation

    search = OuterApproximation(instance.g, instance.p, kept, tolerance, negligible, seed, workers)
    proved = search.run(CP_SAT_TIME * time_limit, started + time_limit)
    repeatable = workers == 1 and (proved or search.spent >= CP_SAT_TIME * time_limit)
    return _Found(search.kept, search.lower_bound if proved else 0.0, proved, repeatable, search.cuts)


_METHODS = {"branch": _by_branch, "outer": _by_outer}


def certify_sample(
    instances: pd.DataFrame,
    s: int,
    per_stratum: int | None,
    seed: int,
    time_limit: float,
    tolerance: float,
    instance_of: Callable[[Mapping], Instance],
    incumbent: Callable[[Instance, int], ArrayLike],
    method: str = "branch",
    kept: Callable[[str, Callable[[], pd.DataFrame]], pd.DataFrame] = lambda name, make: make(),
) -> pd.DataFrame:
    """Certify a seeded sample of measured rows at one budget, stratified by model and content arm.

    Parameters
    ----------
    instances : the instances table (columns model, arm, input, layer, head, position, s); rows of other budgets
        are left out. The sample does not depend on the order of its rows.
    s : budget
    per_stratum : rows drawn of each (model, arm), without replacement; None for all of them
    seed : of the draw
    time_limit, tolerance, method : see `certify`
    instance_of : gives the Instance of a row, a mapping with the columns above
    incumbent : gives the s keys to be beaten, of an Instance and s
    kept : gives the outcome of a row by its name, from an earlier call that was cut off or else from what makes it

    Returns
    -------
    DataFrame
        One row per sampled instance, sorted: the columns above and

        * es_certified: the least error known after the search, float64
        * certificate: "optimal", "improved" or "timeout"
        * certificate_lower: the proved lower bound of ES(s) over all keys
        * certificate_proved: whether es_certified is ES(s) to `tolerance`
        * certificate_mass: p of the best set
        * certificate_max_rank: its largest mass rank, counted from 0

        Seconds are not in it, so that the same call gives the same table; they go to standard error.

    Raises
    ------
    InvalidInput
        No row at this budget, or a stratum with fewer rows than `per_stratum`.
    """
    import pandas as pd

    sample = draw_sample(instances, s, per_stratum, seed)
    progress = Progress(len(sample), f"certify s={s}", "rows")

    def outcome(row: Mapping) -> pd.DataFrame:
        instance = instance_of(row)
        found = certify(instance, s, incumbent(instance, s), time_limit, tolerance, seed, method=method)
        rank = np.empty(instance.size, np.int64)
        rank[instance.order] = np.arange(instance.size)
        record = {
            "es_certified": found.error,
            "certificate": found.status,
            "certificate_lower": found.lower_bound,
            "certificate_proved": found.proved,
            "certificate_mass": float(instance.p[found.kept].sum()),
            "certificate_max_rank": int(rank[found.kept].max()),
            "seconds": found.seconds,
            "repeatable": found.repeatable,
        }
        return pd.DataFrame([record])

    outcomes = []
    for number, row in enumerate(progress.over(sample.to_dict("records"))):
        found = kept(f"row-{number:05d}", partial(outcome, row))
        outcomes.append(found)
        if not found["repeatable"].iloc[0]:
            place = ", ".join(f"{key} {row[key]}" for key in KEYS)
            print(
                f"certify: {place}: stopped by the clock after {found['seconds'].iloc[0]:.1f} s, before its work was "
                "done: another run may find more",
                file=sys.stderr,
                flush=True,
            )
    found = pd.concat(outcomes, ignore_index=True)
    seconds = found.pop("seconds")
    table = pd.concat([sample, found.drop(columns="repeatable")], axis=1)
    counts = ", ".join(f"{int((table['certificate'] == name).sum())} {name}" for name in OUTCOMES)
    print(
        f"certify s={s}: {len(table)} rows: {counts}; {int(table['certificate_proved'].sum())} proved; "
        f"median {np.median(seconds):.3g} s, longest {max(seconds):.3g} s a row",
        file=sys.stderr,
        flush=True,
    )
    return table


def draw_sample(instances: pd.DataFrame, s: int, per_stratum: int | None, seed: int) -> pd.DataFrame:
    """The rows of budget s that `certify_sample` certifies: its key columns, sorted, with a fresh index."""
    rows = instances.loc[instances["s"] == s, list(KEYS)]
    # Categories would group by strata that are not there.
    rows = rows.astype({name: object for name in ("model", "arm", "input")})
    rows = rows.sort_values(list(KEYS), ignore_index=True)
    if rows.empty:
        raise InvalidInput(f"instances: no row with budget s = {s}; name a budget of enumeration.budgets")
    chosen = []
    for stratum, members in rows.groupby(list(STRATUM), sort=True):
        if per_stratum is None:
            chosen.append(members.index.to_numpy())
            continue
        if not 1 <= per_stratum <= len(members):
            raise InvalidInput(
                f"per_stratum: expected 1 to {len(members)} rows, as many as model {stratum[0]}, arm {stratum[1]} "
                f"has at s = {s}, got {per_stratum}"
            )
        # A seed of its own, so that another model or arm in the run changes nothing here.
        name = zlib.crc32("/".join(map(str, stratum)).encode())
        rng = np.random.default_rng([seed, name])
        chosen.append(members.index.to_numpy()[rng.choice(len(members), per_stratum, replace=False)])
    return rows.loc[np.sort(np.concatenate(chosen))].reset_index(drop=True)

r"""The same question put to OR-Tools CP-SAT by outer approximation: a second, independent way to a certificate.

es(A) <= t holds iff for every unit vector u

    sum_{j in A} c_j(u) <= 0,        c_j(u) = u . g_j - t p_j,

so a model with one 0/1 variable a key, sum x = s, and finitely many of these cuts is a relaxation. CP-SAT finds a
point of it or proves that there is none; a point that is no solution gives the cut u = sum_A g / ||sum_A g|| that
excludes it; a point that is one lowers t.

Integer cuts. CP-SAT wants integers a_j, and every integer cut must RELAX the true one, or a proof would prove
nothing. Let c'_j be c_j as computed in float64 with a vector u whose length is 1 + e, w_j = ||g_j|| + t p_j, and
K = 2^24 / max_j w_j. For d < 2^20, |c'_j - c_j| <= (d + 2) 2^-53 w_j <= 2^-32 w_j and |e| <= 2^-32, so that
K |c'_j - c_j| <= 2^-8 and K |e| t p_j <= 2^-8; the product K c'_j errs by less than 2^-8 too. Take

    a_j = floor(K c'_j) - 1  <=  K c_j + 2^-7 - 1.

Any A with es(A) <= t has sum_A c_j = u . sum_A g - t p(A) <= |e| t p(A), hence

    sum_A a_j  <=  K |e| t p(A) + s (2^-7 - 1)  <=  s (2^-8 + 2^-7 - 1)  <  0,

and satisfies sum a_j x_j <= 0. The cut gives away at most 2 s / 2^24 of the largest w_j; a point that it fails to
exclude for that reason has been decided in float64 and is excluded by a clause.

Why 24 bits: with 40, CP-SAT 9.15 called 3 of 150 feasible models infeasible (its presolve; brute force had the
point), with 24 and with 30 none.
"""

from __future__ import annotations

import time

import numpy as np

from .branch import ROUNDING

SCALE_BITS = 24
PRINCIPAL = 16
ASCENT_STEPS = 200


def integer_cut(g: np.ndarray, p: np.ndarray, threshold: float, direction: np.ndarray) -> np.ndarray:
    """Coefficients a_j such that sum_A a_j <= 0 for every kept set A with es(A) <= threshold.

    Parameters
    ----------
    g : (N, d) float64, p_j (v_j - mu)
    p : (N,) float64
    threshold : t > 0, in the units of the values
    direction : (d,) unit vector u

    Returns
    -------
    (N,) int64
    """
    reach = np.sqrt(np.einsum("nd,nd->n", g, g)) + threshold * p
    scale = 2.0**SCALE_BITS / reach.max()
    return np.floor(scale * (g @ direction - threshold * p)).astype(np.int64) - 1


def presolve(
    g: np.ndarray, p: np.ndarray, s: int, threshold: float, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]] | None:
    """Decide keys at the root by cuts alone: subgradient ascent on the Lagrangian bound from `start`.

    Returns
    -------
    None if no set has es <= threshold; else masks of the keys that are certainly in and certainly out of every
    such set, and the directions that were worth a cut.
    """
    n, d = g.shape
    reach = np.sqrt(np.einsum("nd,nd->n", g, g)) + threshold * p
    slack = ROUNDING * (d + s) * np.sort(reach)[n - s :].sum()
    inside, outside = np.zeros(n, bool), np.zeros(n, bool)
    direction, best, directions = start, -np.inf, []
    for step in range(ASCENT_STEPS):
        cost = g @ direction - threshold * p
        free = np.flatnonzero(~(inside | outside))
        places = s - int(inside.sum())
        if places < 0 or places > free.size:
            return None
        ranked = free[np.argsort(cost[free], kind="stable")]
        taken = ranked[:places]
        bound = cost[inside].sum() + cost[taken].sum()
        if bound > slack:
            return None
        if bound > best:
            best = bound
            directions.append(direction)
        total = g[inside].sum(axis=0) + g[taken].sum(axis=0)
        if 0 < places < free.size:
            last, following = cost[ranked[places - 1]], cost[ranked[places]]
            outside[free[bound + cost[free] - last > slack]] = True
            inside[taken[bound - cost[taken] + following > slack]] = True
        length = np.linalg.norm(total)
        if length == 0.0:
            break
        direction = direction + (2.0 / (step + 2.0)) * (total / length - direction)
        direction = direction / max(np.linalg.norm(direction), 1e-300)
    return inside, outside, directions[-PRINCIPAL:]


class OuterApproximation:
    """A search over all kept sets by cuts and CP-SAT.

    Parameters
    ----------
    g, p, kept, tolerance, negligible : see `contourkv.enumeration.branch.Search`
    seed, workers : of CP-SAT; with one worker the same seed gives the same run

    Attributes
    ----------
    kept, error, threshold, lower_bound, finished, cuts : see `contourkv.enumeration.branch.Search`
    """

    def __init__(
        self,
        g: np.ndarray,
        p: np.ndarray,
        kept: np.ndarray,
        tolerance: float,
        negligible: float = 0.0,
        seed: int = 0,
        workers: int = 1,
    ) -> None:
        self.g, self.p, self.tolerance, self.negligible = g, p, tolerance, negligible
        self.seed, self.workers = seed, workers
        self.kept = np.sort(kept)
        self.error = self._error(self.kept)
        self.finished = False
        self.spent = 0.0
        self._doubtful = np.inf
        self.threshold = self.error * (1.0 - tolerance)
        _, _, axes = np.linalg.svd(g, full_matrices=False)
        self.directions = [sign * axis for axis in axes[:PRINCIPAL] for sign in (1.0, -1.0)]
        self.directions.append(self._direction(self.kept))
        self.decided: list[np.ndarray] = []
        self._rounding = ROUNDING * (g.shape[1] + kept.size) * np.sqrt(np.einsum("nd,nd->n", g, g))

    @property
    def cuts(self) -> int:
        return len(self.directions)

    @property
    def lower_bound(self) -> float:
        """Proved if `finished`: the threshold, or less where float64 could not tell a set from it."""
        return min(self.threshold, self._doubtful)

    def run(self, limit: float, deadline: float) -> bool:
        """Solve and cut until CP-SAT proves that no better set is left, or a limit is reached.

        Parameters
        ----------
        limit : CP-SAT's deterministic time, about seconds: what is done up to it is the same on every run
        deadline : a value of time.monotonic()
        """
        from ortools.sat.python import cp_model

        while not self.finished:
            if self.error <= self.negligible:
                self.finished = True
                break
            decided = presolve(self.g, self.p, self.kept.size, self.threshold, self.directions[-1])
            if decided is None:
                self.finished = True
                break
            inside, outside, more = decided
            self.directions.extend(more)
            model = cp_model.CpModel()
            keys = [model.new_bool_var("") for _ in range(self.p.size)]
            model.add(sum(keys) == self.kept.size)
            for j in np.flatnonzero(inside):
                model.add(keys[j] == 1)
            for j in np.flatnonzero(outside):
                model.add(keys[j] == 0)
            for direction in self.directions:
                self._cut(model, keys, direction)
            for known in self.decided:
                model.add_bool_or([keys[j].negated() for j in known])
            if not self._solve(cp_model, model, keys, limit, deadline):
                break
        return self.finished

    def _solve(self, cp_model, model, keys, limit: float, deadline: float) -> bool:
        """Add cuts at this threshold until there is no point (finished) or a better set. False at a limit."""
        while True:
            seconds = deadline - time.monotonic()
            if seconds <= 0.0 or self.spent >= limit:
                return False
            solver = cp_model.CpSolver()
            solver.parameters.num_workers = self.workers
            solver.parameters.random_seed = self.seed
            solver.parameters.max_time_in_seconds = seconds
            solver.parameters.max_deterministic_time = limit - self.spent
            status = solver.solve(model)
            # A solve that presolve settles reports no time; the floor keeps the loop finite.
            self.spent += max(solver.response_proto.deterministic_time, 1e-3)
            if status == cp_model.INFEASIBLE:
                self.finished = True
                return True
            if status not in (cp_model.FEASIBLE, cp_model.OPTIMAL):
                return False
            found = np.flatnonzero([solver.boolean_value(key) for key in keys])
            error = self._error(found)
            self.decided.append(found)
            self.directions.append(self._direction(found))
            if error < self.error:
                self.kept, self.error = found, error
            improved = error < self.threshold
            if improved:
                self.threshold = error * (1.0 - self.tolerance)
            least = error - self._rounding[found].sum() / self.p[found].sum()
            if least < self.threshold:
                self._doubtful = min(self._doubtful, max(least, 0.0))
            if improved:
                return True
            self._cut(model, keys, self.directions[-1])
            model.add_bool_or([keys[j].negated() for j in found])

    def _cut(self, model, keys, direction: np.ndarray) -> None:
        from ortools.sat.python import cp_model

        coefficients = integer_cut(self.g, self.p, self.threshold, direction)
        model.add(cp_model.LinearExpr.weighted_sum(keys, coefficients.tolist()) <= 0)

    def _error(self, kept: np.ndarray) -> float:
        return float(np.linalg.norm(self.g[kept].sum(axis=0)) / self.p[kept].sum())

    def _direction(self, kept: np.ndarray) -> np.ndarray:
        total = self.g[kept].sum(axis=0)
        length = np.linalg.norm(total)
        return total / length if length > 0.0 else np.zeros_like(total)

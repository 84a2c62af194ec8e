"""95% percentile intervals by drawing INPUTS (contexts) again, within each content arm, never rows.

Rows of one context share its text, so they are not independent draws; the context is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..errors import InvalidInput
from . import estimators

LEVELS = (0.025, 0.975)


@dataclass(frozen=True)
class Estimate:
    """A point estimate with its 95% interval.

    Attributes
    ----------
    value, low, high : float
        NaN where it cannot be computed (`value`), or where there is no interval (`low`, `high`).
    degenerate : int
        Resamples that gave no value (one class only, no row) and were left out of the interval.
    note : str
        Why something is missing; "" if nothing is.
    """

    value: float
    low: float
    high: float
    degenerate: int = 0
    note: str = ""


class Scope:
    """Rows of an instances table with the resamples of their inputs.

    The inputs of a scope are drawn with replacement within each arm, as many as the arm has. An input's rows
    of every model and budget go together: one text measured on two models counts once as chance.
    The same inputs, resamples and seed give the same draws.

    Parameters
    ----------
    frame : pandas.DataFrame
        Columns `arm`, `input` and whatever the estimators are asked for. At least one row.
    resamples : int
        Number of resamples, >= 1.
    seed : int

    Attributes
    ----------
    inputs : int
        Number of inputs, those without a row left after `where` included.
    missing : str
        Why there is no interval: an arm with fewer than two inputs has no spread to resample. "" otherwise.
    """

    def __init__(self, frame: pd.DataFrame, resamples: int, seed: int) -> None:
        if len(frame) == 0:
            raise InvalidInput("instances: no rows to estimate from; run the enumeration first")
        if resamples < 1:
            raise InvalidInput(f"statistics.resamples: expected a whole number >= 1, got {resamples}")
        arm_codes, arms = pd.factorize(frame["arm"].astype(object), sort=True)
        input_codes, _ = pd.factorize(frame["input"].astype(object), sort=True)
        pairs = np.stack([arm_codes, input_codes], axis=1)
        labels, codes = np.unique(pairs, axis=0, return_inverse=True)
        self.columns = {name: frame[name].to_numpy() for name in frame.columns}
        self.rows = np.arange(len(frame))
        self.codes = codes
        self.inputs = len(labels)
        self.missing = ""
        sizes = np.bincount(labels[:, 0])
        if sizes.min() < 2:
            self.missing = f"no interval: 1 input in {', '.join(arms[sizes < 2])}"
            drawn = np.empty((0, self.inputs))
        else:
            rng = np.random.default_rng(seed)
            # The labels are sorted by arm, so the draws of the arms stand side by side.
            drawn = np.hstack([rng.multinomial(size, np.full(size, 1 / size), resamples) for size in sizes])
        # Line 0 is the sample itself: the point estimate comes out of the same code as the resamples.
        self.weights = np.vstack([np.ones(self.inputs), drawn])

    def __len__(self) -> int:
        return self.codes.size

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name][self.rows]

    def where(self, rows: np.ndarray) -> Scope:
        """The same inputs and draws, with only the rows that `rows` (boolean or indices) picks."""
        part = object.__new__(Scope)
        part.__dict__.update(self.__dict__)
        part.rows, part.codes = self.rows[rows], self.codes[rows]
        return part

    def share(self, hit: np.ndarray) -> Estimate:
        """Share of rows where the boolean array `hit` holds."""
        return self.estimate(lambda w: estimators.weighted_share(hit, self.codes, w), "no rows")

    def quantiles(self, values: np.ndarray, levels: Sequence[float]) -> list[Estimate]:
        """Quantiles of `values` at `levels`; rows with NaN are left out."""
        known = ~np.isnan(values)
        table = estimators.weighted_quantiles(values[known], self.codes[known], self.weights, levels)
        return [self.summarise(column, "no rows") for column in table.T]

    def median(self, values: np.ndarray) -> Estimate:
        """Median of `values`; rows with NaN are left out."""
        return self.quantiles(values, [0.5])[0]

    def auc(self, score: np.ndarray, positive: np.ndarray) -> Estimate:
        """AUC of `score` for the boolean array `positive`, ties half."""
        return self.estimate(lambda w: estimators.weighted_auc(score, positive, self.codes, w), "one class only")

    def spearman(self, x: np.ndarray, y: np.ndarray) -> Estimate:
        """Spearman's rank correlation of `x` and `y`."""
        return self.estimate(lambda w: estimators.weighted_spearman(x, y, self.codes, w), "constant")

    def cells(self) -> list[np.ndarray]:
        """Rows of each (layer, head) cell, in this order; at least one row is needed."""
        layer, head = self["layer"].astype(np.int64), self["head"].astype(np.int64)
        cells = layer * (head.max() + 1) + head
        order = np.argsort(cells, kind="stable")
        return np.split(order, np.flatnonzero(np.diff(cells[order])) + 1)

    def cell_medians(self, values: np.ndarray) -> np.ndarray:
        """Median of `values` in every cell, for the sample and each resample: (1 + resamples, cells)."""
        medians = [
            estimators.weighted_quantiles(values[rows], self.codes[rows], self.weights, [0.5])[:, 0]
            for rows in self.cells()
        ]
        return np.stack(medians, axis=1)

    def estimate(self, estimator: Callable[[np.ndarray], np.ndarray], undefined: str) -> Estimate:
        """Apply `estimator` to the weights of the sample and all resamples; `undefined` says why it may fail."""
        return self.summarise(estimator(self.weights), undefined)

    def summarise(self, values: np.ndarray, undefined: str) -> Estimate:
        """Estimate from the sample's value (first) and those of the resamples (rest)."""
        point, drawn = float(values[0]), values[1:]
        if np.isnan(point):
            return Estimate(np.nan, np.nan, np.nan, 0, undefined)
        if self.missing:
            return Estimate(point, np.nan, np.nan, 0, self.missing)
        known = drawn[~np.isnan(drawn)]
        lost = drawn.size - known.size
        note = f"{lost} of {drawn.size} resamples left out: {undefined}" if lost else ""
        if known.size == 0:
            return Estimate(point, np.nan, np.nan, lost, note)
        # "lower"/"higher" never interpolate between infinities, and err to the wide side.
        low = float(np.quantile(known, LEVELS[0], method="lower"))
        high = float(np.quantile(known, LEVELS[1], method="higher"))
        return Estimate(point, low, high, lost, note)

r"""Estimators on many resamples at once, from one sort.

A resample of inputs gives every row of input h the same whole weight w_h. So nothing is ever repeated row by
row: with `codes` the input of each row and `weights` of shape (resamples, inputs), each estimator below
returns one number a resample, equal to what numpy or scipy give on the repeated rows.

- a quantile needs only cumulated weights, and those are `weights @ counts` at block ends, then one block;
- the AUC's concordant pairs are a quadratic form in w, U[g, h] = pairs (positive of g, negative of h) won;
- Spearman's sums are cubic in w: the rank of row i is sum_h w_h * (rows of h below i, ties half).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CELLS_AT_ONCE = 1 << 24


def weighted_share(hit: np.ndarray, codes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Share of rows where `hit` holds.

    Parameters
    ----------
    hit : (n,) bool
    codes : (n,) int, input of each row, 0..inputs-1
    weights : (resamples, inputs) float64, how often each input was drawn

    Returns
    -------
    (resamples,) float64, NaN where the resample holds no row
    """
    inputs = weights.shape[1]
    wins = weights @ np.bincount(codes[hit], minlength=inputs).astype(np.float64)
    rows = weights @ np.bincount(codes, minlength=inputs).astype(np.float64)
    return _ratio(wins, rows)


def weighted_quantiles(
    values: np.ndarray, codes: np.ndarray, weights: np.ndarray, levels: Sequence[float]
) -> np.ndarray:
    """Quantiles of the weighted rows, numpy's default definition (linear between order statistics).

    Parameters
    ----------
    values : (n,) float64, no NaN; infinity is allowed
    codes : (n,) int, input of each row
    weights : (resamples, inputs) float64 holding whole numbers
    levels : quantile levels in [0, 1]

    Returns
    -------
    (resamples, levels) float64, NaN where the resample holds no row
    """
    resamples, inputs = weights.shape
    out = np.full((resamples, len(levels)), np.nan)
    n = values.size
    if n == 0:
        return out
    order = np.argsort(values, kind="stable")
    values, codes = values[order], codes[order]
    # Two costs: resamples x blocks x inputs in one matrix product, resamples x block size in gathers.
    size = int(min(n, max(8, np.sqrt(n * inputs / 64))))
    blocks = -(-n // size)
    counts = np.bincount(np.arange(n) // size * inputs + codes, minlength=blocks * inputs)
    ends = weights @ np.cumsum(counts.reshape(blocks, inputs), axis=0).T.astype(np.float64)
    full = np.flatnonzero(ends[:, -1] > 0)
    ends, drawn = ends[full], np.hstack([weights[full], np.zeros((full.size, 1))])
    padded = np.append(codes, np.full(blocks * size - n, inputs)).reshape(blocks, size)

    def at(rank: np.ndarray, lines: np.ndarray) -> np.ndarray:
        block = (ends[lines] <= rank[:, None]).sum(axis=1)
        before = np.where(block > 0, ends[lines, block - 1], 0.0)
        inside = before[:, None] + np.cumsum(drawn[lines[:, None], padded[block]], axis=1)
        return values[block * size + (inside <= rank[:, None]).sum(axis=1)]

    for column, level in enumerate(levels):
        where = (ends[:, -1] - 1) * level
        rank = np.floor(where)
        found = at(rank, np.arange(full.size))
        between = np.flatnonzero(where > rank)
        low, high = found[between], at(rank[between] + 1, between)
        with np.errstate(invalid="ignore"):
            step = (high - low) * (where - rank)[between]
        found[between] = np.where(low == high, low, low + step)
        out[full, column] = found
    return out


def weighted_auc(score: np.ndarray, positive: np.ndarray, codes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Area under the ROC curve: chance that a positive row scores above a negative one, ties half.

    Parameters
    ----------
    score : (n,) float64
    positive : (n,) bool
    codes : (n,) int, input of each row
    weights : (resamples, inputs) float64

    Returns
    -------
    (resamples,) float64, NaN where the resample holds one class only
    """
    inputs = weights.shape[1]
    pairs = np.zeros((inputs, inputs))
    counts = _MidCounts(score[~positive], codes[~positive], inputs)
    for rows in _by_input(codes, np.flatnonzero(positive)):
        for part in _parts(rows, inputs):
            pairs[codes[rows[0]]] += counts(score[part]).sum(axis=0)
    wins = ((weights @ pairs) * weights).sum(axis=1)
    above, below = (
        weights @ np.bincount(codes[some], minlength=inputs).astype(float) for some in (positive, ~positive)
    )
    return _ratio(wins, above * below)


def weighted_spearman(x: np.ndarray, y: np.ndarray, codes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of x and y, average ranks for ties.

    Parameters
    ----------
    x, y : (n,) float64
    codes : (n,) int, input of each row
    weights : (resamples, inputs) float64

    Returns
    -------
    (resamples,) float64, NaN where x or y is constant in the resample
    """
    resamples, inputs = weights.shape
    sums = np.zeros((3, resamples))
    counts = [_MidCounts(column, codes, inputs) for column in (x, y)]
    centre = np.bincount(codes, minlength=inputs) / 2.0
    for rows in _by_input(codes, np.arange(x.size)):
        form = np.zeros((3, inputs, inputs))
        for part in _parts(rows, inputs):
            a, b = counts[0](x[part]) - centre, counts[1](y[part]) - centre
            form += np.stack([a.T @ b, a.T @ a, b.T @ b])
        for total, product in zip(sums, form, strict=True):
            total += weights[:, codes[rows[0]]] * ((weights @ product) * weights).sum(axis=1)
    return _ratio(sums[0], np.sqrt(sums[1] * sums[2]))


def auc_by_resample(score: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """AUC in each line of two (resamples, items) arrays; an item with a NaN score is left out of its line."""
    out = np.full(len(score), np.nan)
    for line, (values, hit) in enumerate(zip(score, positive, strict=True)):
        known = ~np.isnan(values)
        above, below = values[known & hit], np.sort(values[known & ~hit])
        if above.size and below.size:
            wins = np.searchsorted(below, above, "left") + np.searchsorted(below, above, "right")
            out[line] = wins.sum() / 2 / (above.size * below.size)
    return out


def auc(score: np.ndarray, positive: np.ndarray) -> float:
    """AUC of `score` for `positive` (ties half); NaN where there is one class only."""
    return _one(weighted_auc, np.asarray(score, float), np.asarray(positive, bool))


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rank correlation of x and y; NaN where one is constant."""
    return _one(weighted_spearman, np.asarray(x, float), np.asarray(y, float))


class _MidCounts:
    """For any value, how many reference values of each input lie below it, ties half: (values, inputs)."""

    def __init__(self, reference: np.ndarray, codes: np.ndarray, inputs: int) -> None:
        order = np.argsort(reference, kind="stable")
        self.sorted = reference[order]
        self.upto = np.zeros((reference.size + 1, inputs), np.int32)
        self.upto[np.arange(1, reference.size + 1), codes[order]] = 1
        np.cumsum(self.upto, axis=0, out=self.upto)

    def __call__(self, values: np.ndarray) -> np.ndarray:
        left = self.upto[np.searchsorted(self.sorted, values, "left")]
        right = self.upto[np.searchsorted(self.sorted, values, "right")]
        return (left + right) / 2.0


def _by_input(codes: np.ndarray, rows: np.ndarray) -> list[np.ndarray]:
    if rows.size == 0:
        return []
    rows = rows[np.argsort(codes[rows], kind="stable")]
    return np.split(rows, np.flatnonzero(np.diff(codes[rows])) + 1)


def _parts(rows: np.ndarray, inputs: int) -> list[np.ndarray]:
    return np.array_split(rows, max(1, -(-rows.size * inputs // CELLS_AT_ONCE)))


def _ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)


def _one(estimator, first: np.ndarray, second: np.ndarray) -> float:
    return float(estimator(first, second, np.zeros(first.size, int), np.ones((1, 1)))[0])

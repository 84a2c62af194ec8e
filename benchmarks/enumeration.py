"""Subsets per second of the pool search, a depth-first Gram update and itertools + numpy, side by side in one run.

Usage: python benchmarks/enumeration.py [--repeats 9] [--rows 4] [--seed 1]

One process, one thread. All three return the same error on every row (checked). Prints the median, the spread
(least and most over the repeats) and the ratio to the depth-first form.
"""

from __future__ import annotations

import argparse
import os
from itertools import combinations, islice
from math import comb
from statistics import median
from time import perf_counter

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np
from numba import njit

from contourkv import Instance, best_in_pool

SIZES = [(4, 70), (8, 24), (16, 24), (8, 30), (32, 37)]
ITERTOOLS_SUBSETS = 20_000


@njit
def depth_first(gram, p, s):
    """Least squared error over all s-subsets: every step adds one key to the numerator and the mass."""
    n = p.size
    stack = np.full(s, -1, np.int64)
    pull = np.zeros((s + 1, n))
    square = np.zeros(s + 1)
    mass = np.zeros(s + 1)
    best = np.inf
    depth = 0
    while depth >= 0:
        if depth == s - 1:
            start = stack[depth - 1] + 1 if depth > 0 else 0
            for j in range(start, n):
                q = square[depth] + 2.0 * pull[depth, j] + gram[j, j]
                m = mass[depth] + p[j]
                if q < best * m * m:
                    best = q / (m * m)
            depth -= 1
            continue
        stack[depth] += 1
        j = stack[depth]
        if j > n - (s - depth):
            depth -= 1
            continue
        square[depth + 1] = square[depth] + 2.0 * pull[depth, j] + gram[j, j]
        mass[depth + 1] = mass[depth] + p[j]
        for i in range(j + 1, n):
            pull[depth + 1, i] = pull[depth, i] + gram[j, i]
        depth += 1
        stack[depth] = j
    return best


def itertools_numpy(gram, p, s, limit):
    """The plain form over the first `limit` subsets."""
    best = np.inf
    for kept in islice(combinations(range(p.size), s), limit):
        keys = np.array(kept)
        best = min(best, gram[np.ix_(keys, keys)].sum() / p[keys].sum() ** 2)
    return best


def random_row(rng, keys=256, head_dim=64):
    scores = 2.0 * rng.standard_normal(keys)
    scores[0] += 2.0
    weights = np.exp(scores - scores.max())
    return Instance(weights / weights.sum(), rng.standard_normal((keys, head_dim)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    rows = [random_row(rng) for _ in range(options.rows)]
    best_in_pool(rows[0], 2, 6)
    depth_first(np.eye(4), np.ones(4), 2)
    print(
        f"{'s':>3} {'pool':>4} {'subsets':>11}  {'form':<16} {'M subsets/s':>11} {'least':>9} {'most':>9} {'ratio':>7}"
    )
    for s, pool in SIZES:
        subsets = comb(pool, s)
        rates = {"meet in middle": [], "depth first": [], "itertools+numpy": []}
        for _ in range(options.repeats):
            for row in rows:
                keys = row.order[:pool]
                gram, p = row.g[keys] @ row.g[keys].T, row.p[keys]
                began = perf_counter()
                ours = best_in_pool(row, s, pool).error
                rates["meet in middle"].append(subsets / (perf_counter() - began))
                began = perf_counter()
                other = np.sqrt(depth_first(gram, p, s))
                rates["depth first"].append(subsets / (perf_counter() - began))
                if abs(ours - other) > 1e-9 * other:
                    raise SystemExit(f"s={s}, pool={pool}: {ours!r} and {other!r} differ")
        some = min(subsets, ITERTOOLS_SUBSETS)
        for _ in range(3):
            began = perf_counter()
            itertools_numpy(gram, p, s, some)
            rates["itertools+numpy"].append(some / (perf_counter() - began))
        base = median(rates["depth first"])
        for form, seen in rates.items():
            print(
                f"{s:>3} {pool:>4} {subsets:>11,}  {form:<16} {median(seen) / 1e6:>11.2f} "
                f"{min(seen) / 1e6:>9.2f} {max(seen) / 1e6:>9.2f} {median(seen) / base:>7.2g}"
            )


if __name__ == "__main__":
    main()

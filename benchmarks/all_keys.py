"""Seconds to the best kept set over all keys, proved: by sets, by products of halves, by branch and bound alone.

Usage: python benchmarks/all_keys.py --shards results/demo/shards [--rows 6] [--seed 1] [--limit 10] [--halves]

Rows of captured shards, per model: `drawn` uniformly, and the `flat` ones, those with the greatest dropped mass of
ten times as many. All methods start from the same set, the best that the pools, the neighbourhoods and balance find.
One process, one thread; seconds of processor time (wall time beside them: the machine may be shared). `certify` has
the time limit --limit, of the wall clock: a busy machine ends it early, what it leaves is unproved. Where two
methods prove a row, their errors must agree (checked). Prints the median, the spread (least and most over the rows),
the ratio of medians to `certify`, the share proved, and the share of rows with a better set than the start.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[name] = "1"

import numpy as np

from contourkv import Instance
from contourkv.capture.shard import Shard
from contourkv.enumeration import MassPool, Neighbourhood, best_of_all, certify
from contourkv.enumeration.pool import RankedRow
from contourkv.operator import dropped_mass

TOLERANCE = 1e-6
SWAP_KEYS = 256
FAMILIES = {
    4: [MassPool(4, 0, 70), Neighbourhood(4, 4, 70)],
    8: [MassPool(8, 0, 24), Neighbourhood(8, 8, 24)],
}
CASES = [(4, 256, 0.0), (4, None, 0.0), (4, None, 0.5), (8, 64, 0.0), (8, 96, 0.0), (8, 96, 0.5)]
"""Budget, keys, floor."""


def draw(shards: list[Shard], count: int, rng: np.random.Generator) -> list[tuple[str, Instance]]:
    found = []
    for _ in range(count):
        shard = shards[int(rng.integers(len(shards)))]
        layer = int(rng.integers(shard.layers))
        captured = shard.layer(layer)
        at, head = int(rng.integers(len(captured.positions))), int(rng.integers(captured.p.shape[1]))
        row = captured.row(at, head)
        name = f"{shard.metadata['arm']} layer {layer} head {head} at {int(captured.positions[at])}"
        found.append((name, Instance(row.p, row.v)))
    return found


def start(instance: Instance, s: int, keys: int) -> np.ndarray:
    """The best set of `keys` keys that the pools, the neighbourhoods and balance find."""
    row = RankedRow.of(instance, min(keys, max(SWAP_KEYS, *(family.pool for family in FAMILIES[s]))))
    return np.sort(instance.order[row.search(s, FAMILIES[s], SWAP_KEYS).best.kept])


def timed(call):
    wall, processor = perf_counter(), process_time()
    found = call()
    return found, process_time() - processor, perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=Path, required=True, help="folder of models, each with shards of its arms")
    parser.add_argument("--rows", type=int, default=6, help="per model and group")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=10.0, help="seconds of certify")
    parser.add_argument("--halves", action="store_true", help="time the products of halves on the CPU as well")
    options = parser.parse_args()
    folders = sorted(path for path in options.shards.glob("*") if any(path.glob("*/*.safetensors")))
    if not folders:
        parser.error(f"--shards: {options.shards} has no <model>/<arm>/*.safetensors; run capture_all first")
    small = Instance(np.full(12, 1 / 12), np.arange(12.0)[:, None])
    for method in ("branch", "walk", "halves"):
        best_of_all(small, 4, method=method)
    certify(small, 4, [0, 1, 2, 3], 1.0, TOLERANCE)
    print(
        f"{'model':<14} {'rows':<6} {'s':>2} {'keys':>5} {'floor':>5}  {'method':<8} {'median s':>9} {'least':>8} "
        f"{'most':>8} {'wall':>8} {'ratio':>7} {'proved':>7} {'better':>7} {'by most':>8}"
    )
    for folder in folders:
        shards = [Shard(path) for path in sorted(folder.glob("*/*.safetensors"))]
        rng = np.random.default_rng(options.seed)
        drawn = draw(shards, options.rows, rng)
        flat = sorted(draw(shards, 10 * options.rows, rng), key=lambda found: -dropped_mass(found[1], 4))
        for group, rows in (("drawn", drawn), ("flat", flat[: options.rows])):
            for s, keys, floor in CASES:
                report(folder.name, group, rows, s, keys, floor, options)


def report(model, group, rows, s, keys, floor, options) -> None:
    seconds, walls, proved, gains = {}, {}, {}, {}
    for name, instance in rows:
        count = min(keys or instance.size, instance.size)
        known = start(instance, s, count)
        errors = []
        calls = {}
        # certify knows no floor, and no row of fewer keys: its mean would be another.
        if keys is None and floor == 0.0:
            calls["certify"] = lambda i=instance, k=known: certify(i, s, k, options.limit, TOLERANCE)
        else:
            calls["branch"] = lambda i=instance, k=known: best_of_all(
                i,
                s,
                k if floor == 0.0 else None,
                keys,
                floor,
                TOLERANCE,
                method="branch",
                branch_work=7e8 * options.limit,
            )
        calls["auto"] = lambda i=instance, k=known: best_of_all(
            i, s, k if floor == 0.0 else None, keys, floor, TOLERANCE
        )
        if options.halves:
            calls["halves"] = lambda i=instance, k=known: best_of_all(
                i, s, k if floor == 0.0 else None, keys, floor, TOLERANCE, method="halves"
            )
        for method, call in calls.items():
            found, processor, wall = timed(call)
            seconds.setdefault(method, []).append(processor)
            walls.setdefault(method, []).append(wall)
            proved.setdefault(method, []).append(found.proved)
            if found.proved:
                errors.append(found.error)
            before = np.linalg.norm(instance.g[known].sum(axis=0)) / instance.p[known].sum()
            gains.setdefault(method, []).append(max(1.0 - found.error / before, 0.0) if before > 0 else 0.0)
        if errors and max(errors) - min(errors) > 3 * TOLERANCE * max(errors):
            raise SystemExit(f"{model}, {name}, s={s}: {errors} differ")
    base = median(next(iter(seconds.values())))
    for method, seen in seconds.items():
        better = [gain > TOLERANCE for gain in gains[method]]
        gain = f"{np.mean(better):>7.2f} {max(gains[method]):>8.1%}" if floor == 0.0 else f"{'':>16}"
        print(
            f"{model:<14} {group:<6} {s:>2} {keys or 'all':>5} {floor:>5.1f}  {method:<8} {median(seen):>9.3f} "
            f"{min(seen):>8.3f} {max(seen):>8.3f} {median(walls[method]):>8.3f} {median(seen) / base:>7.2f} "
            f"{np.mean(proved[method]):>7.2f} {gain}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Free weights: what renormalising costs beside the best weights of a kept set (paper, section 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .capture.shard import Shard
from .enumeration.free import best_free
from .enumeration.pool import best_in_pool
from .errors import InvariantBroken
from .measurement import measure_sample, measured_from, sample_parts
from .operator import Instance, forced_error
from .selectors.hull import geometric
from .selectors.mass import max_mass
from .selectors.swap import balance
from .statistics.columns import WEIGHED
from .statistics.instances import SLACK_ABSOLUTE, SLACK_RELATIVE, write_columns


def weigh_row(instance: Instance, pools: Mapping[int, int], limit: int, candidates: int) -> list[dict[str, object]]:
    """One record a budget: ES and EF over one pool, and the errors of sets chosen for forced and for free weights.

    Parameters
    ----------
    instance : Instance
    pools : budget -> keys of the pool, over which ES is exact
    limit : of `enumeration.best_free`
    candidates : that the geometric selection and balance choose among

    Raises
    ------
    InvariantBroken
        The least error with free weights is above that with forced ones.
    """
    records = []
    for s, size in pools.items():
        forced = best_in_pool(instance, s, size)
        free = best_free(instance, s, size, starts=[forced.kept], limit=limit)
        if free.error > forced.error * (1 + SLACK_RELATIVE) + SLACK_ABSOLUTE:
            raise InvariantBroken(f"s = {s}: EF = {free.error:.17g} is above ES = {forced.error:.17g}")
        kept = geometric(instance, s, candidates)
        records.append(
            {
                "s": s,
                "visible": instance.size,
                "pool_keys": min(size, instance.size),
                "es_pool": forced.error,
                "ef_pool": free.error,
                "ef_lower": free.lower_bound,
                "ef_exact": free.exact,
                "es_max_mass": forced_error(instance, max_mass(instance, s)),
                "es_balance": forced_error(instance, balance(instance, s, max(candidates, s))),
                "es_geometric": forced_error(instance, kept),
                "mass_geometric": float(instance.p[kept].sum()),
            }
        )
    return records


def weigh_file(shard_paths: Sequence[str | Path], output: str | Path, settings: Mapping, made_by: object = "") -> None:
    """Weigh a seeded sample of the rows of one model's shards; write parquet, see `statistics.columns.WEIGHED`.

    Parameters
    ----------
    shard_paths : all of the model's contexts
    settings : the config section `weights`: pools (budget and pool each), limit, candidates, rows, seed
    made_by : digest of the code that computes this; parts of another are not used
    """
    pools = {entry["budget"]: entry["pool"] for entry in settings["pools"]}

    def one(instance: Instance) -> list[dict[str, object]]:
        return weigh_row(instance, pools, settings["limit"], settings["candidates"])

    with sample_parts(shard_paths, output, settings, WEIGHED, made_by) as parts:
        frame = measure_sample(shard_paths, one, "free weights", settings["rows"], settings["seed"], parts=parts)
        meta = measured_from(Shard(shard_paths[0]).metadata, {"weights": settings}, weights=settings["seed"])
        write_columns(output, frame, WEIGHED, meta)

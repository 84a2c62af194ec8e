"""Exact kappa: the best kept set over ALL keys of every row of short contexts (paper, section 2).

Where every row is decided over all of its keys, kappa itself stands beside kappa-hat. The optimum over all keys is
often a set of light keys whose mean value happens to lie near the dense output; so the same is decided once more among
the sets that keep at least a share of max-mass's mass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from .capture.shard import Shard
from .devices import device_name
from .enumeration.halves import AllKeys, best_of_all
from .enumeration.pool import MassPool, Neighbourhood, RankedRow
from .errors import InvariantBroken
from .measurement import families_of, measure_sample, measured_from, sample_parts
from .operator import Instance, dropped_mass
from .statistics.columns import EXACT
from .statistics.instances import SLACK_ABSOLUTE, SLACK_RELATIVE, write_columns


def exact_row(
    instance: Instance,
    s: int,
    families: Sequence[MassPool | Neighbourhood],
    swap_keys: int,
    floor: float,
    tolerance: float,
    most_work: float,
    device: str = "cpu",
) -> list[dict[str, object]]:
    """One record: max-mass, the families' best, and the best set over all keys, free and under a floor on kept mass.

    Parameters
    ----------
    instance : Instance
    s : budget, 2, 4, 6 or 8
    families, swap_keys : what `es_pool` is the exact minimum over, see `measurement.measure_row`
    floor : share of max-mass's mass that a set must keep to count in the second search
    tolerance, most_work, device : see `enumeration.best_of_all`

    Raises
    ------
    InvariantBroken
        A search ends above the set that it started from, or the freer one above the other.
    """
    row = RankedRow.of(instance, max(swap_keys, *(family.pool for family in families)))
    found = row.search(s, families, swap_keys)
    known = np.sort(instance.order[found.best.kept])
    search = partial(best_of_all, instance, s, tolerance=tolerance, most_work=most_work, device=device)
    heaviest = float(instance.p[instance.order[:s]].sum())
    # The best set known is a start for the second search only if it counts there.
    start = known if instance.p[known].sum() >= floor * heaviest * (1 + 1e-12) else None
    bounded = search(incumbent=start, floor=floor)
    free = search(incumbent=known if found.best.error <= bounded.error else bounded.kept)
    for low, high, words in (
        (free.error, found.best.error, "the best set over all keys is above the best one known"),
        (free.error, bounded.error, "the best set over all keys is above that under the floor"),
        (bounded.error, found.max_mass.error, "the best set under the floor is above max-mass"),
    ):
        if low > high * (1 + SLACK_RELATIVE) + SLACK_ABSOLUTE:
            raise InvariantBroken(f"s = {s}: {words}: {low:.17g}, {high:.17g}")
    return [
        {
            "s": s,
            "visible": instance.size,
            "es_max_mass": found.max_mass.error,
            "es_pool": found.pool.error,
            "es_balance": found.balance.error,
            "dropped_mass": dropped_mass(instance, s),
            **_of("exact", free, instance),
            **_of("floor", bounded, instance),
        }
    ]


def _of(name: str, found: AllKeys, instance: Instance) -> dict[str, object]:
    rank = np.empty(instance.size, np.int64)
    rank[instance.order] = np.arange(instance.size)
    return {
        f"es_{name}": found.error,
        f"{name}_proved": found.proved,
        f"{name}_mass": float(instance.p[found.kept].sum()),
        f"{name}_max_rank": int(rank[found.kept].max()),
        f"{name}_method": found.method,
    }


def exact_file(
    shard_paths: Sequence[str | Path],
    output: str | Path,
    settings: Mapping,
    enumeration: Mapping,
    device: str = "cpu",
    made_by: object = "",
) -> None:
    """Decide every row of one model's shards over all keys; write parquet, see `statistics.columns.EXACT`.

    Parameters
    ----------
    shard_paths : all of the model's short contexts
    settings : the config section `exact`: s, floor, tolerance, most_work, rows, seed
    enumeration : the config section `enumeration`: families of budget s, swap_keys
    device : where the search by products is computed, see `enumeration.best_of_all`
    made_by : digest of the code that computes this; parts of another are not used
    """
    s = settings["s"]
    one = partial(
        exact_row,
        s=s,
        families=families_of({**enumeration, "budgets": [s]})[s],
        swap_keys=enumeration["swap_keys"],
        device=device,
        **{key: settings[key] for key in ("floor", "tolerance", "most_work")},
    )
    made_with = {"exact": settings, "enumeration": enumeration}
    with sample_parts(shard_paths, output, {**made_with, "device": device_name(device)}, EXACT, made_by) as parts:
        frame = measure_sample(shard_paths, one, f"exact s={s}", settings["rows"], settings["seed"], parts=parts)
        meta = measured_from(Shard(shard_paths[0]).metadata, made_with, device, exact=settings["seed"])
        write_columns(output, frame, EXACT, meta)

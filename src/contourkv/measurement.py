"""From captured rows to the table of instances: each row at each budget, by every rule and exactly over the pool."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd

from .capture.shard import Shard
from .devices import device_name
from .enumeration.pool import Found, MassPool, Neighbourhood, RankedRow
from .errors import InvalidInput, InvariantBroken
from .operator import Instance, check_budget, spectral_ratio, spread
from .progress import Progress
from .provenance import record
from .statistics.instances import check_invariants, write_instances
from .statistics.table_parts import TableParts

TOGETHER = 1024
"""Rows whose exact searches are done together on a GPU."""


def families_of(settings: Mapping) -> dict[int, list[MassPool | Neighbourhood]]:
    """The candidate families of each budget, from the config section `enumeration`.

    Raises
    ------
    InvalidInput
        A budget without a mass pool, or a family whose sizes do not fit.
    """
    families: dict[int, list[MassPool | Neighbourhood]] = {int(s): [] for s in settings["budgets"]}
    for entry in settings["families"]:
        s = entry["budget"]
        if s in families:
            around = "free" in entry
            family = (
                Neighbourhood(s, entry["free"], entry["pool"]) if around else MassPool(s, entry["core"], entry["pool"])
            )
            families[s].append(family)
    for s, found in families.items():
        if not any(isinstance(family, MassPool) for family in found):
            raise InvalidInput(
                f"enumeration.families: no mass pool for budget {s}; add {{budget: {s}, core: 0, pool: ...}}"
            )
    return families


def measure_row(
    instance: Instance, families: Mapping[int, Sequence[MassPool | Neighbourhood]], swap_keys: int
) -> list[dict[str, object]]:
    """One record per budget: the columns of the instances table that depend on the row alone.

    Parameters
    ----------
    instance : Instance
    families : budget -> families of kept sets that `es_pool` is the exact minimum over
    swap_keys : balance may swap among so many of the heaviest keys

    Raises
    ------
    InvalidInput
        A budget that is not below the row's number of keys.
    """
    row = _ranked(instance, families, swap_keys)
    return _records(instance, row, {s: row.search(s, several, swap_keys) for s, several in families.items()}, families)


def _ranked(instance: Instance, families: Mapping[int, Sequence], swap_keys: int) -> RankedRow:
    for s in families:
        check_budget(s, instance.size)
    return RankedRow.of(instance, max(swap_keys, *(family.pool for several in families.values() for family in several)))


def _records(
    instance: Instance, row: RankedRow, searched: Mapping[int, Found], families: Mapping[int, Sequence]
) -> list[dict[str, object]]:
    distance, directions = spread(instance), spectral_ratio(instance)
    largest = float(np.linalg.norm(instance.v, axis=1).max())
    records = []
    for s, several in families.items():
        found = searched[s]
        rules = {name: getattr(found, name).error for name in ("max_mass", "pool", "balance", "balance_second")}
        best = min(rules, key=rules.get)
        mass_pools = [family for family in several if isinstance(family, MassPool)]
        dropped = float(instance.p[instance.order[s:]].sum())
        records.append(
            {
                "s": s,
                "visible": instance.size,
                "es_max_mass": found.max_mass.error,
                "es_pool": found.pool.error,
                "es_mass_pool": found.mass_pool.error,
                "es_balance": found.balance.error,
                "es_balance_second": found.balance_second.error,
                "es_balance_pool": found.balance_pool.error,
                "es_best": rules[best],
                "best": best,
                "dropped_mass": dropped,
                "phi": found.max_mass.error * float(row.p[:s].sum()),
                "spread": distance,
                "bound": 2.0 * distance * dropped,
                "absolute_bound": 2.0 * largest * dropped,
                "spectral": directions,
                "mass_pool": float(row.p[found.pool.kept].sum()),
                "pool_subsets": found.subsets,
                "pool_keys": min(instance.size, max(family.pool for family in mass_pools)),
                "pool_complete": any(family.complete(instance.size) for family in mass_pools),
            }
        )
    return records


def rows_of(shard: Shard, wanted: Container[int] | None = None) -> Iterator[tuple[dict[str, int], Instance]]:
    """Every captured row as (layer, head, kv_head, position) and Instance; of them, those numbered in `wanted`."""
    every = ((captured.layer, row) for captured in shard for row in captured.rows())
    for number, (layer, row) in enumerate(every):
        if wanted is None or number in wanted:
            where = {"layer": layer, "head": row.head, "kv_head": row.kv_head, "position": row.position}
            yield where, Instance(row.p, row.v)


def measure_file(shard_path: str | Path, output: str | Path, settings: Mapping, device: str = "cpu") -> None:
    """Measure every row of a shard at every budget and write the instances (parquet) to `output`.

    Parameters
    ----------
    settings : the config section `enumeration`: budgets, families, swap_keys
    device : "cpu", row by row; else the exact searches of TOGETHER rows at a time are done there

    Raises
    ------
    InvalidInput
        A broken shard, or a budget that some row's visible keys do not exceed.
    InvariantBroken
        See `contourkv.statistics.check_invariants`; nothing is written.
    """
    families = families_of(settings)
    shard = Shard(shard_path)
    meta = shard.metadata
    name = {"model": meta["model"], "arm": meta["arm"], "input": f"{meta['arm']}/{meta['index']:03d}"}
    records: list[dict] = []
    total = shard.layers * meta["geometry"]["heads"] * len(shard.positions)
    progress = Progress(total, f"enumerate {name['model']} {name['input']}", "rows")
    measured = _row_by_row if str(device) == "cpu" else partial(_together, device=device)
    for where, found in measured(progress.over(rows_of(shard)), shard_path, families, settings["swap_keys"]):
        records.extend({**name, **where, **entry} for entry in found)
    frame = pd.DataFrame.from_records(records)
    if "retrieval" in meta:
        frame["retrieval"] = frame["position"].isin(meta["retrieval"])
    check_invariants(frame)
    write_instances(output, frame, measured_from(meta, {"enumeration": settings}, device))


def _row_by_row(
    rows: Iterable[tuple[dict[str, int], Instance]], path: str | Path, families: Mapping, swap_keys: int
) -> Iterator[tuple[dict[str, int], list[dict[str, object]]]]:
    for where, instance in rows:
        with _placed(path, where):
            found = measure_row(instance, families, swap_keys)
        yield where, found


def _together(
    rows: Iterable[tuple[dict[str, int], Instance]], path: str | Path, families: Mapping, swap_keys: int, device: str
) -> Iterator[tuple[dict[str, int], list[dict[str, object]]]]:
    from .enumeration.batched import search_together

    rows = iter(rows)
    while some := list(islice(rows, TOGETHER)):
        ranked = []
        for where, instance in some:
            with _placed(path, where):
                ranked.append(_ranked(instance, families, swap_keys))
        by_budget = {s: search_together(ranked, s, several, swap_keys, device) for s, several in families.items()}
        for at, ((where, instance), row) in enumerate(zip(some, ranked, strict=True)):
            yield where, _records(instance, row, {s: found[at] for s, found in by_budget.items()}, families)


@contextmanager
def _placed(path: str | Path, where: Mapping[str, int]) -> Iterator[None]:
    """Errors say which row of which shard they are about."""
    try:
        yield
    except (InvalidInput, InvariantBroken) as error:
        place = ", ".join(f"{key} {value}" for key, value in where.items())
        raise type(error)(f"{path}: {place}: {error}") from None


def measure_sample(
    shard_paths: Sequence[str | Path],
    one: Callable[[Instance], list[dict[str, object]]],
    label: str,
    rows: int | None = None,
    seed: int = 0,
    *,
    parts: TableParts | None = None,
) -> pd.DataFrame:
    """Records of a seeded sample of the rows of one model's shards, with the columns that name each row.

    Parameters
    ----------
    shard_paths : all of the model's contexts
    one : gives the records of a row
    label : what runs, for progress
    rows : drawn of each context, without replacement; None for all
    seed : of the draw; each context has its own
    parts : keeps the records of each finished context

    Raises
    ------
    InvalidInput
        A broken shard, and whatever `one` raises, with the place of its row.
    InvariantBroken
        The same.
    """
    shards = [Shard(path) for path in shard_paths]
    drawn = [_drawn(shard, rows, seed) for shard in shards]
    named = [f"{shard.metadata['arm']}-{shard.metadata['index']:03d}" for shard in shards]
    before = sum(len(rows) for name, rows in zip(named, drawn, strict=True) if parts and parts.has(name))
    progress = Progress(sum(map(len, drawn)), f"{label} of {shards[0].metadata['model']}", "rows", before=before)

    def measured(path: str | Path, shard: Shard, wanted: set[int]) -> pd.DataFrame:
        meta = shard.metadata
        name = {"model": meta["model"], "arm": meta["arm"], "input": f"{meta['arm']}/{meta['index']:03d}"}
        records: list[dict] = []
        for where, instance in progress.over(rows_of(shard, wanted)):
            with _placed(path, where):
                records.extend({**name, **where, **entry} for entry in one(instance))
        return pd.DataFrame.from_records(records)

    frames = []
    for part, *given in zip(named, shard_paths, shards, drawn, strict=True):
        make = partial(measured, *given)
        frames.append(parts.table(part, make) if parts else make())
    # A context of which no row was measured has no columns.
    frames = [frame for frame in frames if len(frame)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def sample_parts(
    shard_paths: Sequence[str | Path], output: str | Path, settings: Mapping, kinds: Mapping[str, str], made_by: object
) -> TableParts:
    """Keeps the finished contexts of a sample that `settings` and the code `made_by` measure on these shards."""
    shards = [Shard(path).digest for path in shard_paths]
    return TableParts(output, {"shards": shards, "settings": settings, "made_by": made_by}, kinds)


def _drawn(shard: Shard, rows: int | None, seed: int) -> set[int]:
    """Numbers of the rows of a shard that are measured."""
    meta = shard.metadata
    total = shard.layers * meta["geometry"]["heads"] * len(shard.positions)
    if rows is None or rows >= total:
        return set(range(total))
    name = zlib.crc32(f"{meta['arm']}/{meta['index']}".encode())
    return set(np.random.default_rng([seed, name]).choice(total, rows, replace=False).tolist())


def measured_from(meta: Mapping, settings: Mapping, device: str = "cpu", **seeds: int) -> dict:
    """Provenance of a table made from a shard: settings, capture, devices, model revision, seeds, registered bounds."""
    bounds = (meta.get("about") or {}).get("bounds")
    return record(
        {**settings, "capture": meta["provenance"]},
        devices={"capture": meta.get("device"), "measurement": device_name(device)},
        **({"bounds": bounds} if bounds else {}),
        model={"name": meta["model"], "revision": (meta["source"] or {}).get("revision")},
        seeds={f"contexts.{meta['arm']}": meta["origin"].get("seed"), **seeds},
    )

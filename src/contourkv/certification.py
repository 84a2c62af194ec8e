"""From instances to certificates: a seeded sample of rows, each decided over all of its keys."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from .capture.shard import Shard
from .enumeration.agreement import EXTRA_KEYS, methods_agree
from .enumeration.certificate import certify_sample
from .enumeration.pool import RankedRow
from .measurement import families_of, measured_from
from .operator import Instance
from .progress import Progress
from .provenance import file_sha256
from .statistics.instances import read_instances, write_instances
from .statistics.table_parts import TableParts


def certify_file(
    shard_paths: Sequence[str | Path],
    instance_paths: Sequence[str | Path],
    output: str | Path,
    model: str,
    budget: int,
    settings: Mapping,
    enumeration: Mapping,
    made_by: object = "",
) -> None:
    """Certify a seeded sample of one model's rows at one budget over all keys; write the outcomes (parquet).

    Parameters
    ----------
    shard_paths, instance_paths : all of the model's contexts, in the same order
    settings : the config section `certificate`: per_stratum, cross_check, time_limit_s, tolerance, seed
    enumeration : the config section `enumeration`, whose best known set is what the certificate is about
    made_by : digest of the code that computes this; parts of another are not used

    Raises
    ------
    InvalidInput
        A broken or missing file, or fewer rows than the sample asks for.
    InvariantBroken
        The three methods do not agree on one of the `cross_check` rows a content arm.
    """
    families, swap_keys = families_of(enumeration)[budget], enumeration["swap_keys"]
    shards = {}
    for path in shard_paths:
        shard = Shard(path)
        shards[f"{shard.metadata['arm']}/{shard.metadata['index']:03d}"] = shard
    frame = pd.concat([read_instances(path)[0] for path in instance_paths], ignore_index=True)
    frame = frame[(frame["s"] == budget) & (frame["model"].astype(str) == model)]

    def instance_of(row: Mapping) -> Instance:
        captured = shards[str(row["input"])].layer(int(row["layer"]))
        at = int(np.flatnonzero(captured.positions == row["position"])[0])
        found = captured.row(at, int(row["head"]))
        return Instance(found.p, found.v)

    def incumbent(instance: Instance, s: int) -> np.ndarray:
        row = RankedRow.of(instance, max(swap_keys, *(family.pool for family in families)))
        return np.sort(instance.order[row.search(s, families, swap_keys).best.kept])

    def agreement(row: Mapping) -> pd.DataFrame:
        agree = methods_agree(instance_of(row), budget, settings["time_limit_s"], settings["tolerance"])
        return pd.DataFrame({"agree": [agree]})

    made_with = {"certificate": settings, "enumeration": enumeration}
    made_from = [
        *(model, budget, made_with, made_by),
        *([shard.digest for shard in shards.values()], [file_sha256(path) for path in instance_paths]),
    ]
    with TableParts(output, made_from, {}) as parts:
        outcomes = certify_sample(
            frame,
            budget,
            settings["per_stratum"],
            settings["seed"],
            settings["time_limit_s"],
            settings["tolerance"],
            instance_of=instance_of,
            incumbent=incumbent,
            kept=parts.table,
        )
        checked = [
            row for _, rows in outcomes.groupby("arm") for row in rows[: settings["cross_check"]].to_dict("records")
        ]
        progress = Progress(len(checked), f"cross-check s={budget}", "rows")
        agreed = 0
        for number, row in enumerate(progress.over(checked)):
            agreed += bool(parts.table(f"check-{number:05d}", partial(agreement, row))["agree"].iloc[0])
        print(
            f"cross-check s={budget}: all subsets, branch and bound and CP-SAT agree on {agreed} rows cut to "
            f"{budget + EXTRA_KEYS} keys; {len(checked) - agreed} ran out of time",
            file=sys.stderr,
        )
        meta = next(iter(shards.values())).metadata
        write_instances(output, outcomes, measured_from(meta, made_with, certificate=settings["seed"]))

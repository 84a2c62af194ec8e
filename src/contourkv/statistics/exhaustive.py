"""The table of exact kappa: every row decided over all of its keys (paper, section 2)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from .bootstrap import Scope
from .columns import EXACT
from .ratios import ATTAINED
from .tables import MATERIAL, Row, by_model, write_joined_table

CAPTION = (
    "Every row decided over ALL of its keys, among all sets (all) and among those that keep at least the floor's share "
    "of max-mass's mass (floor): share proved; kappa = es(max-mass) / es(best), median and p90; share where max-mass "
    "is the best; where a set at least 1e-6 better than the pool's best exists (beaten), and the median relative gain "
    "there; mass and largest mass rank of the best set, medians. Numbers of rows that were not proved are bounds."
)


def exact_table(
    frame: pd.DataFrame, resamples: int, seed: int, labels: Mapping[str, str], apart: Collection[str] = ()
) -> pd.DataFrame:
    """Two rows a model, all sets and those above the floor, and the same for all models together.

    Parameters
    ----------
    frame : DataFrame
        Of all models, columns `EXACT`.
    resamples, seed : int
        Bootstrap over the contexts.
    labels, apart : see `tables.by_model`
    """
    rows = []
    for label, some in by_model(frame, labels, apart):
        if not len(some):
            continue
        part = Scope(some, resamples, seed)
        for name, among in (("exact", "all"), ("floor", "floor")):
            row = Row(model=label, s=str(int(part["s"][0])), sets=among, inputs=part.inputs, n=len(part))
            error, heaviest, pool = part[f"es_{name}"], part["es_max_mass"], part["es_pool"]
            with np.errstate(divide="ignore", invalid="ignore"):
                kappa = np.where((heaviest == 0) & (error == 0), 1.0, heaviest / error)
                gain = np.where(pool == 0, 0.0, 1 - error / pool)
            row.put("proved", part.share(part[f"{name}_proved"].astype(bool)))
            median, p90 = part.quantiles(kappa, [0.5, 0.9])
            row.put("kappa", median)
            row.put("kappa_p90", p90)
            row.put("attained", part.share(np.abs(heaviest - error) <= ATTAINED * heaviest))
            beaten = gain > MATERIAL
            row.put("beaten", part.share(beaten))
            row.put("gain", part.where(beaten).median(gain[beaten]))
            row["mass"] = float(np.median(part[f"{name}_mass"]))
            row["max_rank"] = float(np.median(part[f"{name}_max_rank"]))
            row["keys"] = float(np.median(part["visible"]))
            row.notes = [note for note in row.notes if not note.endswith("no rows")]
            rows.append(row.done())
    table = pd.DataFrame(rows)
    table.attrs["caption"] = CAPTION
    return table


def write_exact_table(paths: Sequence[str | os.PathLike], *where: object, apart: Collection[str] = ()) -> list[Path]:
    """Write the table `exact` of a run from the files that `contourkv.exhaustive` wrote; see `write_joined_table`."""
    return write_joined_table("exact", exact_table, EXACT, paths, *where, apart=apart)

"""The table of free weights: the price of forced ones, and the geometric selection (paper, section 2, Table 8)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..enumeration.free import price
from .bootstrap import Scope
from .columns import WEIGHED
from .tables import Row, by_model, write_joined_table

CAPTION = (
    "Free weights: pi = ES / EF over one pool, median, p90 and p99, where ES is exact and EF is exact in the share "
    "`exact` and an upper bound elsewhere, so that pi is a lower bound there; and, once renormalised, the error of the "
    "set chosen for free weights (geometric) over max-mass's and balance's, medians, and the share of rows where it is "
    "worse than max-mass."
)


def weights_table(
    frame: pd.DataFrame, resamples: int, seed: int, labels: Mapping[str, str], apart: Collection[str] = ()
) -> pd.DataFrame:
    """One row a model and budget, and the same for all models together.

    Parameters
    ----------
    frame : DataFrame
        Of all models, columns `WEIGHED`.
    resamples, seed : int
        Bootstrap over the contexts.
    labels, apart : see `tables.by_model`
    """
    rows = []
    for label, some in by_model(frame, labels, apart):
        for s in sorted(set(some["s"])):
            part = Scope(some[some["s"] == s], resamples, seed)
            row = Row(model=label, s=str(int(s)), inputs=part.inputs, n=len(part), pool=int(part["pool_keys"].max()))
            row.put("exact", part.share(part["ef_exact"].astype(bool)))
            levels = part.quantiles(price(part["es_pool"], part["ef_pool"]), [0.5, 0.9, 0.99])
            for name, level in zip(("pi", "pi_p90", "pi_p99"), levels, strict=True):
                row.put(name, level)
            for name in ("max_mass", "balance"):
                other = part[f"es_{name}"]
                with np.errstate(divide="ignore", invalid="ignore"):
                    ratio = np.where((part["es_geometric"] == 0) & (other == 0), 1.0, part["es_geometric"] / other)
                row.put(f"geometric_over_{name}", part.median(ratio))
            row.put("geometric_worse", part.share(part["es_geometric"] > part["es_max_mass"] * (1 + 1e-12)))
            row["mass_geometric"] = float(np.median(part["mass_geometric"]))
            rows.append(row.done())
    table = pd.DataFrame(rows)
    table.attrs["caption"] = CAPTION
    return table


def write_weights_table(paths: Sequence[str | os.PathLike], *where: object, apart: Collection[str] = ()) -> list[Path]:
    """Write the table `weights` of a run from the files that `contourkv.weights` wrote; see `write_joined_table`."""
    return write_joined_table("weights", weights_table, WEIGHED, paths, *where, apart=apart)

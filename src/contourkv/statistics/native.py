"""The table of native budgets (paper, section 2, Table 1)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from .bootstrap import Scope
from .columns import NATIVE
from .estimators import weighted_quantiles
from .tables import Row, write_joined_table

MARKED = 0.10
"""Relative gain of balance over max-mass from which a row counts as improved."""
CAPTION = (
    "Native budgets: `closed`, the median share of max-mass's error that balance takes away; `improved`, the share of "
    "rows where that is at least 10%; `cap`, the median of Lemma 2.1's cap over its median at s = {reference} on the "
    "same rows; `cap_held`, the largest error over its cap."
)


def native_table(frame: pd.DataFrame, resamples: int, seed: int, labels: Mapping[str, str]) -> pd.DataFrame:
    """One row a model and budget, from the rows that `contourkv.native` wrote.

    Parameters
    ----------
    frame : DataFrame
        Of all models, see `contourkv.native.NATIVE`.
    resamples, seed : int
        Bootstrap over the contexts.
    labels : model -> label
        In the order to show them.
    """
    rows = []
    for model in labels:
        whole = frame[frame["model"].astype(str) == model]
        for s in sorted(set(whole["s"])):
            part = Scope(whole[whole["s"] == s], resamples, seed)
            row = Row(model=labels[model], s=str(s), inputs=part.inputs, n=len(part))
            with np.errstate(divide="ignore", invalid="ignore"):
                error = part["es_max_mass"]
                closed = np.where(error == 0, 0.0, 1 - part["es_balance"] / error)
                held = np.where(part["bound"] == 0, 0.0, error / part["bound"])
            row.put("closed", part.median(closed))
            row.put("improved", part.share(closed >= MARKED))
            row.put("cap", part.estimate(partial(_ratio_of_medians, part), "the cap is 0"))
            row["cap_held"] = float(held.max())
            row["dropped_mass"] = float(np.median(part["dropped_mass"]))
            rows.append(row.done())
    table = pd.DataFrame(rows)
    table.attrs["caption"] = CAPTION.format(reference=int(frame["reference_s"].iloc[0]))
    return table


def write_native_table(paths: Sequence[str | os.PathLike], *where: object) -> list[Path]:
    """Write the table `native` of a run from the files that `contourkv.native` wrote; see `write_joined_table`."""
    return write_joined_table("native", native_table, NATIVE, paths, *where)


def _ratio_of_medians(part: Scope, weights: np.ndarray) -> np.ndarray:
    caps, before = (
        weighted_quantiles(part[name], part.codes, weights, [0.5])[:, 0] for name in ("bound", "reference_bound")
    )
    return np.divide(caps, before, out=np.full(caps.shape, np.nan), where=before > 0)

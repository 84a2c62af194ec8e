"""The table of the audit: what deployed methods lose on the rows of a model (paper, section 4)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from .bootstrap import Scope
from .columns import AUDITED
from .tables import Row, by_model, write_joined_table

LABELS = {
    "max_mass": "max-mass",
    "tova": "TOVA, the head's own row",
    "tova_layer": "TOVA, averaged over heads",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "quest": "Quest",
    "streaming_llm": "StreamingLLM",
}
CAPTION = (
    "Deployed methods on rows: median and p90 of a kept set's error over that of max-mass at the same budget, and, "
    "where a pool was enumerated, over the pool's best; Spearman of the dropped mass with the method's excess error "
    "over the best known of the two, in units of D, the spread of the row's values. max-mass itself stands first."
)


def audit_table(
    frame: pd.DataFrame, resamples: int, seed: int, labels: Mapping[str, str], apart: Collection[str] = ()
) -> pd.DataFrame:
    """One row a model, budget and method, and the same for all models together.

    Parameters
    ----------
    frame : DataFrame
        Verdicts of all models, columns `AUDITED`.
    resamples, seed : int
        Bootstrap over the contexts.
    labels, apart : see `tables.by_model`
    """
    plain = frame.assign(model=frame["model"].astype(str), method=frame["method"].astype(str))
    keys = ["model", "arm", "input", "layer", "head", "position", "s"]
    # A method by itself: its error is in every verdict.
    own = plain.drop_duplicates(keys).assign(method="max_mass", es=lambda some: some["es_max_mass"])
    plain = pd.concat([own, plain], ignore_index=True)
    order = [name for name in LABELS if name in set(plain["method"])]
    order += sorted(set(plain["method"]) - set(order))
    rows = []
    for label, some in by_model(plain, labels, apart):
        for s in sorted(set(some["s"])):
            for method in order:
                part = some[(some["s"] == s) & (some["method"] == method)]
                if len(part):
                    rows.append(_row(label, int(s), method, Scope(part, resamples, seed)))
    table = pd.DataFrame(rows)
    table.attrs["caption"] = CAPTION
    return table


def _row(label: str, s: int, method: str, part: Scope) -> dict:
    row = Row(model=label, s=str(s), method=LABELS.get(method, method), inputs=part.inputs, n=len(part))
    error, heaviest, pool = part["es"], part["es_max_mass"], part["es_pool"]
    for name, against in (("max_mass", heaviest), ("pool", pool)):
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where((error == 0) & (against == 0), 1.0, error / against)
        median, p90 = part.quantiles(ratio, [0.5, 0.9])
        row.put(f"over_{name}", median)
        row.put(f"over_{name}_p90", p90)
    least = np.fmin(pool, heaviest)
    known = ~np.isnan(error) & (part["spread"] > 0)
    judged = part.where(known)
    excess = (error - least)[known] / judged["spread"]
    row.put("spearman", judged.spearman(judged["dropped_mass"], excess))
    row["mass"] = float(np.nanmedian(part["mass"]))
    row.notes = [note for note in row.notes if not (note.endswith("no rows") and np.isnan(pool).all())]
    return row.done()


def write_audit_table(paths: Sequence[str | os.PathLike], *where: object, apart: Collection[str] = ()) -> list[Path]:
    """Write the table `audit` of a run from the files that `contourkv.audit` wrote; see `write_joined_table`."""
    return write_joined_table("audit", audit_table, AUDITED, paths, *where, apart=apart)

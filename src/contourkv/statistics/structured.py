"""Task-structured contexts against the bounds registered for them, and against the generic contexts (section 3)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from ..errors import InvalidInput
from ..provenance import file_sha256
from ..registered import Bound, read_bounds
from .bootstrap import Estimate, Scope
from .estimators import weighted_quantiles
from .instances import MEASURED, read_columns, read_instances
from .ratios import FLAT, derive
from .tables import Row, by_model, write_tables

NEEDED = 2.0
"""kappa-hat of a row above which selection has to look at values."""
REFERENCE = 8
HELD, BROKEN, OPEN = "held", "broken", "not measured"
BOUNDS_CAPTION = (
    "Registered bounds on task-structured contexts (config/registered_bounds.yaml), all models together and each "
    "alone; held where the value keeps the bound, and whether its interval does too."
)
CELLS_CAPTION = (
    "Cell maps of the structured contexts beside those of the generic ones, at s = {s}: share of cells with the same "
    "label, flat where median kappa-hat >= {flat}, and Spearman's rank correlation of the cells' median dropped mass "
    "and median kappa-hat."
)


def bounds_table(
    frame: pd.DataFrame,
    bounds: Sequence[Bound],
    captured_under: Sequence[str],
    sha256: str,
    resamples: int,
    seed: int,
    labels: Mapping[str, str],
    apart: Collection[str] = (),
) -> pd.DataFrame:
    """Bound, value, interval, held or broken: one row a bound, for all models and for each.

    Parameters
    ----------
    frame : DataFrame
        Instances of structured contexts, with the bool column `retrieval`.
    bounds : sequence of Bound
    captured_under : sequence of str
        SHA-256 of the bounds under which the rows were captured.
    sha256 : str
        Of the file that `bounds` were read from.
    resamples, seed : int
        Bootstrap over the contexts.
    labels, apart : see `tables.by_model`

    Raises
    ------
    InvalidInput
        The rows were captured under another file of bounds.
    """
    if set(captured_under) != {sha256}:
        found = ", ".join(sorted(each[:12] for each in captured_under)) or "none"
        raise InvalidInput(
            f"registered bounds: the rows were captured under {found}, the file is {sha256[:12]}: bounds that are "
            "newer than their rows are not judged; take the change back, or delete the structured shards and recapture"
        )
    *each, whole = by_model(derive(frame), labels, apart)
    rows = []
    for label, some in [whole, *each]:
        scope = Scope(some, resamples, seed) if len(some) else None
        for bound in bounds:
            row = Row(model=label, bound=bound.name, says=bound.says, limit=bound.printed, paper=bound.paper)
            row |= {"inputs": scope.inputs if scope else 0, "n": 0}
            estimate = Estimate(np.nan, np.nan, np.nan, 0, "no rows")
            if scope:
                row["n"], estimate = VALUES[bound.name](scope)
            row.put("value", estimate)
            known = not np.isnan(estimate.value)
            row["verdict"] = (HELD if bound.held(estimate.value) else BROKEN) if known else OPEN
            edge = estimate.high if bound.at_most else estimate.low
            row["interval"] = "none" if np.isnan(edge) else "keeps it" if bound.held(edge) else "crosses it"
            rows.append(row.done())
    table = pd.DataFrame(rows)
    table.attrs["caption"] = BOUNDS_CAPTION
    return table


def _pooled_c(scope: Scope) -> tuple[int, Estimate]:
    return len(scope), scope.median(scope["c_hat"])


def _margin(scope: Scope) -> tuple[int, Estimate]:
    asked = scope["retrieval"].astype(bool)

    def ratio(weights: np.ndarray) -> np.ndarray:
        top, bottom = (
            weighted_quantiles(scope["kappa_hat"][rows], scope.codes[rows], weights, [0.9])[:, 0]
            for rows in (asked, ~asked)
        )
        return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)

    return int(asked.sum()), scope.estimate(ratio, "no rows of one kind")


def _value_aware(scope: Scope) -> tuple[int, Estimate]:
    some = scope.where(scope["retrieval"].astype(bool) & (scope["s"] == REFERENCE))
    return len(some), some.share(some["kappa_hat"] > NEEDED)


def _auc(scope: Scope) -> tuple[int, Estimate]:
    return len(scope), scope.auc(scope["dropped_mass"], scope["kappa_hat"] > FLAT)


VALUES: dict[str, Callable[[Scope], tuple[int, Estimate]]] = {
    "pooled_c_hat": _pooled_c,
    "margin_ratio_p90": _margin,
    "value_aware_share": _value_aware,
    "auc": _auc,
}
"""How each of `registered.NAMES` is computed: instances behind it, and the estimate."""


def cell_agreement(
    frame: pd.DataFrame, generic: pd.DataFrame, resamples: int, seed: int, labels: Mapping[str, str]
) -> pd.DataFrame:
    """How the cell maps of structured contexts agree with those of the generic ones; one row a model and arm.

    Parameters
    ----------
    frame, generic : DataFrame
        Instances; those at s = 8, or at the least budget that both have, are compared.
    resamples, seed : int
        Bootstrap over the structured contexts; the generic maps stay as they are.
    labels : model -> label
    """
    shared = sorted(set(frame["s"]) & set(generic["s"]))
    if not shared:
        raise InvalidInput("structured: the instances share no budget with those of the generic contexts")
    s = REFERENCE if REFERENCE in shared else int(shared[0])
    here, there = (derive(some[some["s"] == s]) for some in (frame, generic))
    rows = []
    for model, label in labels.items():
        own = here[here["model"].astype(str) == model]
        other = there[there["model"].astype(str) == model]
        if not len(own) or not len(other):
            continue
        medians = other.groupby(["layer", "head"])[["dropped_mass", "kappa_hat"]].median()
        for arm in ("all arms", *sorted(set(own["arm"].astype(str)))):
            scope = Scope(own if arm == "all arms" else own[own["arm"].astype(str) == arm], resamples, seed)
            row = Row(model=label, arm=arm, s=str(s), inputs=scope.inputs, cells=len(medians))
            kappa = scope.cell_medians(scope["kappa_hat"])
            flat = medians["kappa_hat"].to_numpy() >= FLAT
            row["flat_generic"], row["flat"] = int(flat.sum()), int((kappa[0] >= FLAT).sum())
            row.put("agreement", scope.summarise(((kappa >= FLAT) == flat).mean(axis=1), "no rows"))
            for name in ("dropped_mass", "kappa_hat"):
                found = scope.cell_medians(scope[name])
                ranks = np.array([_rank_correlation(line, medians[name].to_numpy()) for line in found])
                row.put(f"spearman_{name}", scope.summarise(ranks, "constant"))
            rows.append(row.done())
    table = pd.DataFrame(rows)
    table.attrs["caption"] = CELLS_CAPTION.format(s=s, flat=FLAT)
    return table


def write_structured_tables(
    instances: str | os.PathLike,
    generic: str | os.PathLike,
    bounds: str | os.PathLike,
    folder: str | os.PathLike,
    run: str,
    labels: Mapping[str, str],
    statistics: Mapping[str, int],
    apart: Collection[str] = (),
) -> list[Path]:
    """Write the tables `bounds` and `structured_cells` of a run into `folder`.

    Parameters
    ----------
    instances, generic : paths of the merged instances of structured and of generic contexts
    bounds : path of the registered bounds
    apart : see `tables.by_model`

    Raises
    ------
    InvalidInput
        See `bounds_table` and `read_bounds`.
    """
    frame, metadata = read_columns(instances, {**MEASURED, "retrieval": "bool"})
    other, _ = read_instances(generic)
    captured = metadata.get("bounds", [])
    registered, sha256 = read_bounds(bounds), file_sha256(bounds)
    tables = {
        "bounds": bounds_table(frame, registered, captured, sha256, **statistics, labels=labels, apart=apart),
        "structured_cells": cell_agreement(frame, other, **statistics, labels=labels),
    }
    return write_tables(tables, folder, {**metadata, "run": run, "statistics": statistics})


def _rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    known = ~np.isnan(one)
    if known.sum() < 2 or np.ptp(one[known]) == 0 or np.ptp(other[known]) == 0:
        return np.nan
    return float(spearmanr(one[known], other[known]).statistic)

"""The table of losses in the forward pass (paper, section 4)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import InvalidInput
from .bootstrap import Estimate, Scope
from .columns import LOSSES, VARIANTS
from .instances import read_columns
from .merging import combine
from .tables import ALL_ARMS, Row, write_tables

MEASURED = ["model", "arm", "input", "s", "variant"]


def read_losses(paths: Iterable[str | os.PathLike]) -> tuple[pd.DataFrame, dict]:
    """The losses of several files as one table.

    Returns
    -------
    frame : DataFrame
        With the columns `LOSSES`, names as text.
    metadata : dict
        The provenance of all files, as one; `flat_cells` by model.

    Raises
    ------
    InvalidInput
        No path; a file that is missing, truncated, not ours or without a column; a loss that comes twice; files of a
        model with different flat cells.
    """
    read, flat = [], {}
    for path in paths:
        frame, metadata = read_columns(path, LOSSES)
        for model in sorted(set(frame["model"].astype(str))):
            found = metadata.get("flat_cells")
            if flat.setdefault(model, found) != found:
                raise InvalidInput(
                    f"{path}: the flat cells of {model} are not those of the other files; measure all its contexts "
                    "with the same"
                )
        read.append((frame, metadata))
    if not read:
        raise InvalidInput("losses: no files given; measure the losses first")
    text = {name: object for name, kind in LOSSES.items() if kind == "category"}
    frame = pd.concat([frame.astype(text) for frame, _ in read], ignore_index=True)
    _check_once(frame)
    return frame, combine([metadata for _, metadata in read]) | {"flat_cells": flat}


def _check_once(frame: pd.DataFrame) -> None:
    twice = frame.duplicated(MEASURED).to_numpy()
    if twice.any():
        row = frame[twice].iloc[0]
        raise InvalidInput(
            f"losses: {', '.join(f'{name} {row[name]}' for name in MEASURED)} comes twice; give each file once"
        )


def loss_table(frame: pd.DataFrame, resamples: int, seed: int, labels: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Losses and their differences from all-max-mass and from dense, paired by context.

    Parameters
    ----------
    frame : DataFrame
        With the columns `LOSSES`: every variant of each context.
    resamples : int
        Bootstrap resamples of the contexts, drawn within each arm.
    seed : int
        Seed of the bootstrap.
    labels : model -> label, optional
        What to call the models, in the order to show them; without it, their names in alphabetical order.

    Returns
    -------
    DataFrame
        One row a model, arm ("all arms" pools them, each context counting once), s and variant: `inputs`, their
        `tokens`, `flat_cells` of `cells`, and in nats a token, each with its 95% interval, `nats` and the mean of its
        difference from the variants max_mass and dense in the same context, `minus_max_mass` and `minus_dense` (NaN
        for a variant's difference from itself). `note` says why there is no interval. `attrs["caption"]` is one line.

    Raises
    ------
    InvalidInput
        No rows, a loss that comes twice or is not a number, a context without one of the variants, contexts of a model
        that were measured with different flat cells.
    """
    if len(frame) == 0:
        raise InvalidInput("losses: no rows to make a table of; measure the losses first")
    frame = frame.astype({name: object for name, kind in LOSSES.items() if kind == "category"})
    _check_once(frame)
    if not np.isfinite(frame["nats"]).all():
        row = frame[~np.isfinite(frame["nats"])].iloc[0]
        raise InvalidInput(f"losses: {row['variant']} of {row['model']} {row['input']} is {row['nats']} nats")
    names = sorted(set(frame["model"]))
    labels = dict(labels or {})
    order = [name for name in labels if name in names] + [name for name in names if name not in labels]
    rows = []
    for model in order:
        of_model = frame[frame["model"] == model]
        for s in sorted(set(of_model["s"])):
            contexts = _by_context(of_model[of_model["s"] == s])
            arms = sorted(set(contexts["arm"]))
            for arm in [*arms, *([ALL_ARMS] if len(arms) > 1 else [])]:
                part = contexts if arm == ALL_ARMS else contexts[contexts["arm"] == arm]
                first = {"model": str(labels.get(model, model)), "arm": arm, "s": str(s)}
                rows += _variant_rows(first, Scope(part.reset_index(drop=True), resamples, seed))
    table = pd.DataFrame(rows)
    table.attrs["caption"] = (
        "Cross-entropy of held-out continuations in the model's own forward pass, nats a token, every cell of the "
        "continuation keeping s keys: by max-mass, by balance, or by balance on the flat cells and max-mass on the "
        "rest (flat_balance); differences from all-max-mass and from dense attention are paired by context."
    )
    return table


def _by_context(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a context: arm, input, what is the same in all variants, and the nats of each."""
    facts = ["arm", "input", "start", "tokens", "flat_cells", "cells"]
    wide = frame.pivot(index=facts, columns="variant", values="nats")
    for variant in VARIANTS:
        missing = wide.index[wide[variant].isna()] if variant in wide else wide.index
        if len(missing):
            place = dict(zip(facts, missing[0], strict=True))
            raise InvalidInput(
                f"losses: no {variant} of {frame['model'].iloc[0]} {place['input']} at s = {frame['s'].iloc[0]}, start "
                f"{place['start']}; measure all variants of a context in one file"
            )
    contexts = wide.reset_index()
    for name in ("flat_cells", "cells"):
        if contexts[name].nunique() > 1:
            raise InvalidInput(
                f"losses: {frame['model'].iloc[0]} has {contexts[name].min()} {name} in one file and "
                f"{contexts[name].max()} in another; measure all contexts with the same flat cells"
            )
    return contexts


def _variant_rows(first: dict, scope: Scope) -> list[dict]:
    def mean(values: np.ndarray) -> Estimate:
        def of_draws(weights: np.ndarray) -> np.ndarray:
            drawn = weights[:, scope.codes]
            return drawn @ values / drawn.sum(axis=1)

        return scope.estimate(of_draws, "no contexts")

    counts = {"inputs": scope.inputs, "tokens": int(scope["tokens"].sum())}
    counts |= {name: int(scope[name][0]) for name in ("flat_cells", "cells")}
    rows = []
    for variant in VARIANTS:
        row = Row(**first, variant=variant, **counts)
        row.put("nats", mean(scope[variant]))
        for other in ("max_mass", "dense"):
            nothing = Estimate(np.nan, np.nan, np.nan)
            row.put(f"minus_{other}", nothing if other == variant else mean(scope[variant] - scope[other]))
        rows.append(row.done())
    return rows


def write_loss_table(
    paths: Sequence[str | os.PathLike],
    folder: str | os.PathLike,
    run: str,
    labels: Mapping[str, str],
    statistics: Mapping[str, int],
) -> list[Path]:
    """Write the table `loss` of a run, from the files that `contourkv.loss` wrote, into `folder`."""
    frame, metadata = read_losses(paths)
    table = loss_table(frame, **statistics, labels=labels)
    metadata = {name: value for name, value in metadata.items() if name != "flat_cells"}
    return write_tables({"loss": table}, folder, {**metadata, "run": run, "statistics": statistics})

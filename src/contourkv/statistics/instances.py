"""The instances table: its columns, what must hold on every row, and how the shards become one file.

One row is one attention row (model, arm, input, layer, query head, query position) at one budget s.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd

from ..errors import DamagedFile, InvalidInput, InvariantBroken, said
from ..plain import NotPlain, parse_json
from ..provenance import atomic_path

SLACK_RELATIVE, SLACK_ABSOLUTE = 1e-9, 1e-12
"""Rounding allowed to the invariants."""

KEYS = ["model", "arm", "input", "layer", "head", "position", "s"]
METHODS = ["max_mass", "pool", "balance", "balance_second"]
INSTANCE = {
    "model": "category",
    "arm": "category",
    "input": "category",
    "layer": "int16",
    "head": "int16",
    "kv_head": "int16",
    "position": "int32",
    "s": "int32",
}
"""What names an attention row of a model on a context, at one budget."""
MEASURED = {
    **INSTANCE,
    "visible": "int32",
    "es_max_mass": "float64",
    "es_pool": "float64",
    "es_mass_pool": "float64",
    "es_balance": "float64",
    "es_balance_second": "float64",
    "es_balance_pool": "float64",
    "es_best": "float64",
    "best": "category",
    "dropped_mass": "float64",
    "phi": "float64",
    "spread": "float64",
    "bound": "float64",
    "absolute_bound": "float64",
    "spectral": "float64",
    "mass_pool": "float64",
    "pool_subsets": "int64",
    "pool_keys": "int32",
    "pool_complete": "bool",
}
CERTIFIED = {
    "es_certified": "float64",
    "certificate": "category",
    "certificate_lower": "float64",
    "certificate_proved": "bool",
    "certificate_mass": "float64",
    "certificate_max_rank": "float64",
}
OUTCOMES = ["", "optimal", "improved", "timeout"]
METADATA_KEY = b"contourkv"


def check_invariants(frame: pd.DataFrame) -> None:
    """Check what must hold on every instance.

    No NaN in a measured column; dropped mass in [0, 1); Lemma 2.1, es_max_mass <= bound; kappa-hat >= 1, that
    is es_pool <= es_mass_pool <= es_max_mass; es_balance_pool >= es_mass_pool, the exact minimum over the same
    candidates; es_best <= every error and equal to the one `best`
    names. Rounding of 1e-9 relative and 1e-12 absolute is allowed.

    Raises
    ------
    InvariantBroken
        With the first offending row and the values that clash.
    """
    for name in MEASURED:
        missing = frame[name].isna().to_numpy()
        if missing.any():
            _broken(frame, missing, f"{name} is NaN", [])
    dropped = frame["dropped_mass"].to_numpy()
    outside = ~((dropped >= 0) & (dropped < 1))
    if outside.any():
        _broken(frame, outside, "dropped mass lies outside [0, 1)", ["dropped_mass"])

    def at_most(low: str, high: str, statement: str) -> None:
        small, large = frame[low].to_numpy(), frame[high].to_numpy()
        # Written so that a NaN on the right, an instance without a certificate, breaks nothing.
        clash = small > large * (1 + SLACK_RELATIVE) + SLACK_ABSOLUTE
        if clash.any():
            _broken(frame, clash, statement, [low, high])

    at_most("es_max_mass", "bound", "Lemma 2.1, es(A*_s) <= 2 D m_s, does not hold")
    at_most("es_pool", "es_max_mass", "kappa-hat is below 1: the pool's minimum is above max-mass")
    at_most("es_mass_pool", "es_max_mass", "the mass pools' minimum is above max-mass, which is one of their sets")
    at_most("es_pool", "es_mass_pool", "the minimum over all families is above that over the mass pools alone")
    at_most("es_mass_pool", "es_balance_pool", "balance is below the exact minimum over the same candidates")
    errors = {name: f"es_{name}" for name in METHODS}
    if "es_certified" in frame:
        errors["certificate"] = "es_certified"
    for column in [*errors.values(), "es_balance_pool"]:
        at_most("es_best", column, "es_best is not the least error known")
    best = frame["best"].astype(str).to_numpy()
    unknown = ~np.isin(best, list(errors))
    if unknown.any():
        _broken(frame, unknown, f"best must be one of {', '.join(errors)}", ["best"])
    for name, column in errors.items():
        named = frame[column].to_numpy()
        clash = (best == name) & ~(named <= frame["es_best"].to_numpy() * (1 + SLACK_RELATIVE) + SLACK_ABSOLUTE)
        if clash.any():
            _broken(frame, clash, "best names a method that does not attain es_best", ["best", column, "es_best"])


def write_instances(path: str | os.PathLike, frame: pd.DataFrame, metadata: dict) -> None:
    """Write instances as parquet, `metadata` as JSON under the schema key "contourkv"; see `write_columns`."""
    write_columns(path, frame, {**MEASURED, **CERTIFIED}, metadata)


def write_columns(path: str | os.PathLike, frame: pd.DataFrame, known: dict[str, str], metadata: dict) -> None:
    """Write a table as parquet (zstd), the columns `known` (name -> dtype) in their order and compact types.

    Of `known`, columns that the frame has not are left out; columns beyond them follow, by name. The same frame and
    metadata give the same bytes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {name: kind for name, kind in known.items() if name in frame}
    extra = sorted(set(frame.columns) - set(kinds))
    fields, arrays = [], []
    for name in [*kinds, *extra]:
        column = frame[name]
        if kinds.get(name) == "category":
            # Sorted categories, whatever order the rows came in: the bytes depend on the content only.
            text = column.astype(object).astype(str)
            column = pd.Categorical(text, categories=sorted(set(text)))
        elif name in kinds:
            column = column.astype(kinds[name])
        array = pa.array(column, from_pandas=False)
        fields.append(pa.field(name, array.type))
        arrays.append(array)
    text = json.dumps(metadata, sort_keys=True, ensure_ascii=False)
    schema = pa.schema(fields, metadata={METADATA_KEY: text.encode()})
    with atomic_path(path) as temporary:
        pq.write_table(
            pa.Table.from_arrays(arrays, schema=schema), temporary, compression="zstd", write_page_checksum=True
        )


def read_instances(path: str | os.PathLike) -> tuple[pd.DataFrame, dict]:
    """Read what `write_instances` wrote.

    Returns
    -------
    frame : DataFrame
        With the columns of `MEASURED`, those of `CERTIFIED` if the file has them, and any other it has.
    metadata : dict

    Raises
    ------
    InvalidInput
        A file that is missing, truncated, not ours or without a column; it is named, with what to do.
    """
    return read_columns(path, MEASURED)


def read_columns(path: str | os.PathLike, wanted: dict[str, str]) -> tuple[pd.DataFrame, dict]:
    """Read a parquet file of ours that must have the columns `wanted` (name -> dtype); see `read_instances`."""
    import pyarrow.parquet as pq

    if not Path(path).is_file():
        raise InvalidInput(f"{path}: no such file; run the rule that makes it")
    try:
        size, rows = os.path.getsize(path), pq.read_metadata(path).num_rows
        if rows > size:
            raise ValueError(f"it says {rows} rows and has {size} bytes")
        table = pq.read_table(path, page_checksum_verification=True)
        table.validate(full=True)
        frame = table.to_pandas(ignore_metadata=True)
    except Exception as error:  # a flipped bit makes pyarrow raise all kinds
        raise DamagedFile(path, f"not a whole parquet file ({said(error)})") from error
    missing = [name for name in wanted if name not in table.column_names]
    if missing:
        raise DamagedFile(path, f"columns missing: {', '.join(missing)}; made by another version?")
    try:
        metadata = parse_json((table.schema.metadata or {})[METADATA_KEY])
    except (KeyError, NotPlain) as error:
        raise DamagedFile(path, "no provenance under the schema key 'contourkv'") from error
    for name, kind in wanted.items():
        try:
            if kind != "category" and str(frame[name].dtype) != kind:
                frame[name] = frame[name].astype(kind)
        except (TypeError, ValueError) as error:
            raise DamagedFile(path, f"column {name} is not {kind} ({said(error)})") from error
    if "certificate" in wanted:
        strange = sorted(set(frame["certificate"].astype(str)) - set(OUTCOMES))
        if strange:
            raise DamagedFile(path, f"certificate {strange[0]!r} is none of {', '.join(OUTCOMES[1:])}")
    return frame, metadata


def _broken(frame: pd.DataFrame, rows: np.ndarray, statement: str, columns: list[str]) -> None:
    row = frame.iloc[int(np.argmax(rows))]
    values = ", ".join(f"{name} = {_plain(row[name])}" for name in columns)
    raise InvariantBroken(
        f"{statement}: {where(row)}{': ' + values if values else ''} ({int(rows.sum())} of {len(frame)} rows)"
    )


def where(row: pd.Series) -> str:
    """The instance of a row, in words, for an error."""
    return ", ".join(f"{name} {row[name]}" for name in KEYS)


def _plain(value: object) -> str:
    return f"{value:.17g}" if isinstance(value, float) else str(value)

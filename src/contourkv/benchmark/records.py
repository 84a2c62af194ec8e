"""The answers table: one row is one question to one cell (model, task, method, storage, visibility, budget)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import pandas as pd

from ..errors import InvalidInput
from ..statistics.instances import read_columns, write_columns

ANSWERED = {
    "model": "category",
    "task": "category",
    "generator": "category",
    "arm": "category",
    "length": "int64",
    "measure": "category",
    "rule": "category",
    "floor": "float64",
    "sample": "int64",
    "question": "int64",
    "question_id": "category",
    "seed": "int64",
    "method": "category",
    "storage": "category",
    "visibility": "category",
    "budget": "float64",
    "status": "category",
    "message": "category",
    "score": "float64",
    "answer": "category",
    "expected": "category",
    "context_tokens": "int64",
    "entries": "int64",
    "full_bytes": "int64",
    "nominal_bytes": "int64",
    "payload_bytes": "int64",
    "metadata_bytes": "int64",
    "slack_bytes": "int64",
    "held_bytes": "int64",
    "read_bytes": "int64",
    "score_seconds": "float64",
}
"""Columns of one task's answers; `results/README.md` says what each holds."""

COSTED = {
    "model": "category",
    "length": "int64",
    "method": "category",
    "storage": "category",
    "visibility": "category",
    "budget": "float64",
    "cost_status": "category",
    "cost_message": "category",
    "probed_bytes": "float64",
    "left_bytes": "float64",
    "peak_bytes": "float64",
    "prefill_seconds": "float64",
    "compress_seconds": "float64",
    "tokens_per_s": "float64",
    "device": "category",
}
"""Columns of the cost probes."""

CELL = ["model", "length", "method", "storage", "visibility", "budget"]
COSTS = [name for name in COSTED if name not in CELL]
MERGED = {**ANSWERED, **{name: COSTED[name] for name in COSTS}}
"""Columns of the merged table."""


def write_answers(path: str | os.PathLike, frame: pd.DataFrame, metadata: dict) -> None:
    """Write answers, of one task or merged, as parquet."""
    write_columns(path, frame, MERGED, metadata)


def write_costs(path: str | os.PathLike, frame: pd.DataFrame, metadata: dict) -> None:
    """Write cost probes as parquet."""
    write_columns(path, frame, COSTED, metadata)


def read_answers(path: str | os.PathLike) -> tuple[pd.DataFrame, dict]:
    """The merged answers, names as text, and their provenance.

    Raises
    ------
    InvalidInput
        A file that is missing, truncated, not ours or without a column.
    """
    frame, metadata = read_columns(path, MERGED)
    return _plain(frame, MERGED), metadata


def merge_answers(
    answers: Sequence[str | os.PathLike], costs: Sequence[str | os.PathLike], output: str | os.PathLike
) -> None:
    """Join all tasks' answers with the cost probes of their cells; write the merged table.

    Raises
    ------
    InvalidInput
        A broken or missing file, no answers; a question and cell, or the probe of a cell, that is there twice.
    """
    if not answers:
        raise InvalidInput("answers: expected at least one file, got none")
    frame, made = _together(answers, ANSWERED)
    keys = ["model", "task", "sample", "question", "method", "storage", "visibility", "budget"]
    _refuse_twice("answers", frame, keys)
    probed, probes = _together(costs, COSTED)
    _refuse_twice("costs", probed, CELL)
    frame = frame.merge(probed[[*CELL, *COSTS]], how="left", on=CELL, validate="many_to_one")
    for name in COSTS:
        if COSTED[name] == "category":
            frame[name] = frame[name].fillna("")
    frame = frame.sort_values(keys, kind="stable", ignore_index=True)
    write_answers(output, frame, {"answers": made, "costs": probes})


def _together(paths: Sequence[str | os.PathLike], kinds: dict[str, str]) -> tuple[pd.DataFrame, list[dict]]:
    """Rows of all files, and what these were made from, in an order that does not depend on theirs."""
    read = [read_columns(path, kinds) for path in paths]
    frames = [_plain(frame, kinds) for frame, _ in read]
    made = sorted((metadata for _, metadata in read), key=lambda one: json.dumps(one, sort_keys=True))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(kinds)), made


def _refuse_twice(what: str, frame: pd.DataFrame, keys: list[str]) -> None:
    again = frame.duplicated(keys)
    if again.any():
        row = frame[again].iloc[0]
        raise InvalidInput(f"{what}: two rows for {', '.join(f'{name} {row[name]}' for name in keys)}")


def _plain(frame: pd.DataFrame, kinds: dict[str, str]) -> pd.DataFrame:
    """Categories as text: files that know different ones are put together."""
    texts = [name for name, kind in kinds.items() if kind == "category"]
    frame = frame.copy()
    frame[texts] = frame[texts].astype(object).astype(str)
    return frame

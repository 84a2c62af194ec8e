"""What a run of config/test.yaml made, and what of it a second run makes again to the byte."""

from __future__ import annotations

import hashlib

import pandas as pd
from workflow_copy import Copy

RESULTS = "results/test"
# Seconds stand in these, which no second run repeats; all else in them is the same.
TIMED = ("answers", "costs", "memory", "scores", "decomposition")
TAKEN = ("costs.md", "costs.csv", "report.html")
SECONDS = ["score_seconds", "prefill_seconds", "compress_seconds", "tokens_per_s"]


def made(copy: Copy) -> dict[str, str]:
    """SHA-256 of every result, by its name; logs and records are none."""
    folder = copy.folder / RESULTS
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if path.relative_to(folder).parts[0] not in ("logs", "benchmarks")]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_same_results(one: Copy, other: Copy) -> None:
    """Check that two copies hold the same results: the same bytes, but for seconds."""
    first, second = made(one), made(other)
    assert set(first) == set(second)
    unlike = [name for name in sorted(first) if first[name] != second[name]]
    timed = {name for name in unlike if name.startswith(tuple(f"benchmark/{kind}" for kind in TIMED))}
    assert sorted(set(unlike) - timed - set(TAKEN)) == []
    for name in sorted(timed):
        if not name.endswith(".md"):
            pd.testing.assert_frame_equal(timeless(one, name), timeless(other, name))


def timeless(copy: Copy, name: str) -> pd.DataFrame:
    """A table without its columns of seconds."""
    path = copy.folder / RESULTS / name
    frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    return frame.drop(columns=[column for column in frame if column.removeprefix("baseline_") in SECONDS])

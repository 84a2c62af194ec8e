"""costs.md: what the jobs of a run took, rule by rule, and what the workflow took beside them.

Snakemake leaves a record of each finished job, `<rule>.tsv` or `<rule>/<wildcards>.tsv`: seconds, CPU seconds and peak
memory. A record is written the moment its job ends, so its time of change is that end, and the end less the seconds is
the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from .errors import InvalidInput
from .machine import cores, machine
from .provenance import VERSION, write_text
from .statistics.tables import markdown, number, provenance_line, write_tables

GOAL = 0.05
"""Largest share of a run that the workflow itself should take."""
PAUSE = 60.0
"""Seconds without any job that part two sittings: Snakemake takes no such time between jobs."""
TICK = 0.01
"""Resolution of a record's seconds: ends and starts nearer than this are at the same time."""
CROWD = 4
"""Jobs a core that can be believed to have run side by side; copied records all seem to end at one time."""
ALL_JOBS, WORKFLOW = "all jobs", "the workflow itself"
COLUMNS = ["rule", "jobs", "seconds", "share", "seconds_median", "seconds_max", "cpu_seconds", "peak_mib"]
COLUMNS += ["instances", "per_instance", "note"]
WHOLE = {"jobs": "Int64", "instances": "Int64"}
"""Columns of whole numbers, some of them unknown: csv does not say so."""
CAPTION = (
    "What the jobs of this run took, by rule: seconds from before a job's interpreter starts until its files are "
    "written, their share of the run, CPU seconds and the largest peak of memory (sampled every half second at first, "
    "every 30 seconds later: a peak between is missed). Instances are the rows of the parquet files that the rule's "
    "jobs wrote; per_instance is seconds. Of a job that ran twice the last time counts; the jobs that write this table "
    "and the page do not."
)


@dataclass(frozen=True)
class Sitting:
    """Jobs without a pause between them.

    Attributes
    ----------
    start, end : float
        Of the first and the last job, seconds since the epoch.
    seconds : float
        Of all jobs together.
    side : int
        The most jobs that ran side by side.
    waits : float
        From a job's end to the start of the next one, summed over jobs: Snakemake starts a job when another ends, so
        this is the time in which a slot waited for Snakemake. Time in which a slot had nothing to do, because every
        job left needed one that still ran, is not in it.
    before : float
        From the start of Snakemake to that of the first job; NaN where its log is not there.
    """

    start: float
    end: float
    seconds: float
    side: int
    waits: float
    before: float

    @property
    def wall(self) -> float:
        return self.end - self.start

    @property
    def overhead(self) -> float:
        """Seconds of slots that the workflow took for itself; all of them wait while Snakemake starts."""
        return self.waits + self.side * (0.0 if np.isnan(self.before) else self.before)


def read_records(folder: str | os.PathLike, without: Sequence[str] = ()) -> pd.DataFrame:
    """Snakemake's records of the jobs of a run.

    Parameters
    ----------
    folder : path
    without : list of str
        Rules to leave out.

    Returns
    -------
    DataFrame
        rule, name (of the job inside its rule), start, end (seconds since the epoch), seconds, cpu_seconds, peak_mib;
        sorted by rule and name.

    Raises
    ------
    InvalidInput
        There is no record, or one that is none.
    """
    folder, rows = Path(folder), []
    for path in sorted(folder.rglob("*.tsv")):
        rule, _, name = path.relative_to(folder).with_suffix("").as_posix().partition("/")
        if rule in without:
            continue
        try:
            (record,) = pd.read_csv(path, sep="\t", na_values=["-"]).to_dict("records")
            numbers = [float(record[column]) for column in ("s", "cpu_time", "max_rss")]
        except (ValueError, KeyError):
            raise InvalidInput(
                f"{path}: not a job's record, expected one line with s, max_rss and cpu_time; remove it"
            ) from None
        if numbers[2] == 0:  # it ended before its first sample
            numbers[1:] = np.nan, np.nan
        end = path.stat().st_mtime
        rows.append([rule, name, end - numbers[0], end, *numbers])
    if not rows:
        raise InvalidInput(f"{folder}: no record of any job; run the workflow first")
    return pd.DataFrame(rows, columns=["rule", "name", "start", "end", "seconds", "cpu_seconds", "peak_mib"])


def sittings(records: pd.DataFrame, logs: str | os.PathLike | None = None) -> list[Sitting]:
    """The sittings in which a run was made, in order of time.

    Parameters
    ----------
    records : as `read_records` returns them
    logs : folder, optional
        Snakemake's own logs, whose names say when it was started.
    """
    records = records.sort_values(["start", "end"])
    ends = records["end"].cummax().shift()
    groups = (records["start"] - ends > PAUSE).cumsum()
    found, before = [], -np.inf
    for _, jobs in records.groupby(groups):
        start, end = float(jobs["start"].min()), float(jobs["end"].max())
        started = _started(logs, before, start)
        seconds = float(jobs["seconds"].sum())
        found.append(Sitting(start, end, seconds, _side(jobs), _waits(jobs), start - started))
        before = end
    return found


def cost_table(
    records: pd.DataFrame,
    parts: Sequence[Sitting],
    results: str | os.PathLike,
    written: Mapping[str, str],
) -> pd.DataFrame:
    """One row a rule, the dearest first; then all jobs, and the workflow itself.

    Parameters
    ----------
    records : as `read_records` returns them
    parts : as `sittings` returns them
    results : folder of the run
    written : rule -> folder in `results`
        Where a rule's jobs write parquet files named as their records.
    """
    rows = []
    for rule, jobs in records.groupby("rule"):
        files = [Path(results) / written[rule] / f"{name}.parquet" for name in jobs["name"]] if rule in written else []
        there = [path.is_file() for path in files]
        instances = sum(pq.read_metadata(path).num_rows for path in files) if files and all(there) else np.nan
        rows.append({**_costs(str(rule), jobs), "instances": instances})
    rows.sort(key=lambda row: (-row["seconds"], row["rule"]))
    believed = max(part.side for part in parts) <= CROWD * cores()
    overhead = sum(part.overhead for part in parts) if believed else np.nan
    times = _times(parts) if believed else f"{number(records['seconds'].sum())} s."
    rows.append(_costs(ALL_JOBS, records) | {"note": f"{times} The records were gathered on: {machine()}."})
    rows.append({"rule": WORKFLOW, "jobs": 0, "seconds": overhead})
    rows[-1]["note"] = _overhead(parts) if believed else _unknown(parts)
    table = pd.DataFrame(rows).reindex(columns=COLUMNS)
    table["share"] = table["seconds"] / np.nansum([records["seconds"].sum(), overhead])
    table["per_instance"] = table["seconds"] / table["instances"].where(table["instances"] > 0)
    table = table.astype(WHOLE)
    table["note"] = table["note"].fillna("")
    table.attrs["caption"] = CAPTION
    return table


def write_costs(
    stem: str | os.PathLike,
    records: str | os.PathLike,
    written: Mapping[str, str],
    without: Sequence[str],
    logs: str | os.PathLike | None,
    run: str,
) -> Path:
    """Write the costs of a run as <stem>.md and <stem>.csv, `stem` being in the run's folder.

    Parameters
    ----------
    stem : path without its ending
    records : folder of Snakemake's records
    written, logs : see `cost_table` and `sittings`
    without : rules to leave out
    run : name of the run
    """
    stem, metadata = Path(stem), {"contourkv": VERSION}
    jobs = read_records(records, without)
    table = cost_table(jobs, sittings(jobs, logs), stem.parent, written)
    write_tables({stem.name: table}, stem.parent, metadata)
    notes = [f"{row['rule'].capitalize()}: {row['note']}\n" for _, row in table[table["note"] != ""].iterrows()]
    parts = [f"# What the run {run} took\n", f"{table.attrs['caption']}\n", markdown(table.assign(note=""), stem.name)]
    write_text(stem.with_suffix(".md"), "\n".join([*parts, *notes, f"Provenance: {provenance_line(metadata)}\n"]))
    return stem


def _costs(rule: str, jobs: pd.DataFrame) -> dict:
    seconds = jobs["seconds"]
    row = {"rule": rule, "jobs": len(jobs), "seconds": seconds.sum(), "seconds_median": seconds.median()}
    row |= {"seconds_max": seconds.max(), "cpu_seconds": jobs["cpu_seconds"].sum(min_count=1)}
    return row | {"peak_mib": jobs["peak_mib"].max()}


def _side(jobs: pd.DataFrame) -> int:
    """The most jobs at one time; what ends and starts within a tick of each other was not side by side."""
    half = np.minimum(TICK, jobs["seconds"] / 4)
    times = np.concatenate([jobs["start"] + half, jobs["end"] - half])
    steps = np.repeat([1, -1], len(jobs))
    return int(steps[np.lexsort((steps, times))].cumsum().max())


def _waits(jobs: pd.DataFrame) -> float:
    """From the last end before a job's start to that start, summed over the jobs that have such an end."""
    ends = np.sort(jobs["end"])
    before = np.searchsorted(ends, jobs["start"] + TICK, side="right") - 1
    waits = jobs["start"].to_numpy() - ends[before]
    return float(np.maximum(waits, 0.0)[before >= 0].sum())


def _started(logs: str | os.PathLike | None, after: float, until: float) -> float:
    """When the Snakemake that ran jobs from `until` on was started, by the name of its log; NaN if there is none."""
    times = []
    for path in Path(logs).glob("*.snakemake.log") if logs else ():
        try:
            time = datetime.strptime(path.name, "%Y-%m-%dT%H%M%S.%f.snakemake.log").timestamp()
        except ValueError:
            continue
        # Its log was still written to when the first job began.
        if after < time <= until and path.stat().st_mtime >= until - TICK:
            times.append(time)
    return max(times, default=np.nan)


def _times(parts: Sequence[Sitting]) -> str:
    wall, seconds = sum(part.wall for part in parts), sum(part.seconds for part in parts)
    slots = sum(part.side * part.wall for part in parts)
    side = max(part.side for part in parts)
    abreast = "one job at a time" if side == 1 else f"at most {side} jobs side by side"
    several = "one sitting" if len(parts) == 1 else f"{len(parts)} sittings (a minute without a job parts them)"
    return (
        f"{number(wall)} s from the first job's start to the last one's end, in {several}, "
        f"{abreast}; jobs filled {min(seconds / slots, 1):.1%} of these slots, and an empty one either waited for "
        "Snakemake or had nothing to do."
    )


def _unknown(parts: Sequence[Sitting]) -> str:
    return (
        f"not known: by the times of their records up to {max(part.side for part in parts)} jobs ran side by side, "
        f"which {cores()} core{'s' * (cores() != 1)} cannot have done. The records have been copied or touched since, "
        "or other machines took part."
    )


def _overhead(parts: Sequence[Sitting]) -> str:
    overhead, seconds = sum(part.overhead for part in parts), sum(part.seconds for part in parts)
    waits = number(sum(part.waits for part in parts))
    share = overhead / (overhead + seconds)
    known = [part for part in parts if not np.isnan(part.before)]
    least = "at least " * (len(known) < len(parts))
    verdict = "missed" if share >= GOAL else "not decided" if least else "met"
    before = number(sum(part.before for part in known)) + " s"
    if len(known) < len(parts):
        before = "an unknown time" if not known else f"{before} in {len(known)} of {len(parts)} sittings"
    return (
        f"{least}{share:.2%} of the run (goal: under {GOAL:.0%}, {verdict}): {waits} s from "
        f"a job's end to the next one's start, summed over jobs, and {before} from Snakemake's own start to its first "
        "job, counted once for each job that may run side by side. A job that was made again leaves a hole where it "
        "ran first, which counts as such a wait if it is shorter than a minute; what Snakemake does after the last job "
        "is on no record."
    )

"""paper.md: one row a claim of the paper, beside it what this run found, and the command that computes it again."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from ..provenance import write_text
from .summary import ABSENT, SECTIONS, judged, lines_table, no_evidence
from .tables import interval, provenance_line, write_tables

RULES = {
    "native": "native_table",
    "weights": "weights_table",
    "exact": "exact_table",
    "audit": "audit_table",
    "loss": "loss_table",
    "bounds": "structured_tables",
    "structured_cells": "structured_tables",
    "verdicts": "benchmark_tables",
}
"""Rule that makes a table, where that is not `tables`."""
COLUMNS = ["section", "claim", "where", "paper", "here", "here_low", "here_high", "n", "of", "inputs", "verdict"]
COLUMNS += ["interval", "table", "column", "command", "note"]
PRICE = {
    "section": "3",
    "claim": "Time of the dropped mass over that of a dense attention layer, 2,048 to 16,384 tokens",
    **{"where": "–", "paper": "0.002 to 0.03", "n": 0, "of": "instances", "inputs": 0, "verdict": ABSENT},
    **{"interval": "none", "table": "", "column": "", "command": "python benchmarks/dropped_mass.py"},
    "note": "timed apart from runs",
}
"""What no run measures: seconds of a run are no benchmark."""
SECTION = re.compile(r" *\(section (\d)(?:, ([^)]*))?\)$")


def paper_table(
    tables: Mapping[str, pd.DataFrame], verdicts: pd.DataFrame | None, config_file: str | None
) -> pd.DataFrame:
    """One row a claim and model, in the order of the paper's sections.

    Parameters
    ----------
    tables : as `read_tables` reads them
    verdicts : DataFrame, optional
        The benchmark's table of that name.
    config_file : str, optional
        What the run was configured with, for the command.
    """
    rows = []
    for claim in (claim for section in SECTIONS for claim in section.claims):
        for each in judged(claim, tables):
            row = _named(claim.text) | {"where": each.where, "paper": claim.printed}
            row |= {"here": each.value, "here_low": each.low, "here_high": each.high}
            row |= {"n": each.count, "of": each.unit.strip() or "instances", "inputs": each.inputs}
            row |= {"verdict": each.verdict, "interval": each.interval, "table": claim.table, "column": claim.column}
            row["note"] = each.said if np.isnan(each.value) and each.said != "–" else ""
            rows.append(row)
    for _, line in verdicts.iterrows() if verdicts is not None else ():
        row = _named(line["claim"]) | {"where": f"{line['model']}, {line['where']}", "paper": line["paper"]}
        row |= {"here": line["value"], "here_low": line["value_low"], "here_high": line["value_high"]}
        row |= {"n": int(line["n"]), "of": line["of"], "inputs": 0, "verdict": line["verdict"], "interval": "none"}
        unit = "" if line["unit"] == "–" else f"in {line['unit']}; "
        row |= {"table": "verdicts", "column": "value", "note": unit + line["note"]}
        rows.append(row)
    rows.append(dict.fromkeys(COLUMNS, np.nan) | PRICE)
    for row in rows:
        row["command"] = row.get("command") or again(RULES.get(row["table"], "tables"), config_file)
    table = pd.DataFrame(rows, columns=COLUMNS)
    table = table.sort_values("section", kind="stable", ignore_index=True)
    table.attrs["caption"] = (
        "Every claim of the paper that this project computes: its section, the paper's band, this run's number with "
        "its 95% interval and what is behind it, the verdict, and the command that computes it again."
    )
    return table


def write_paper(
    path: str | os.PathLike,
    tables: Mapping[str, pd.DataFrame],
    verdicts: pd.DataFrame | None,
    config_file: str | None,
    metadata: dict,
) -> Path:
    """Write `paper_table` as <path>.md and <path>.csv, `path` without an ending."""
    path = Path(path)
    table = paper_table(tables, verdicts, config_file)
    write_tables({path.name: table}, path.parent, metadata)
    write_text(path.with_suffix(".md"), _markdown(table, no_evidence(tables, metadata), metadata))
    return path


def again(rule: str, config_file: str | None) -> str:
    """The command that runs one rule of a run again."""
    config = f" --configfile {config_file}" if config_file else ""
    return f"snakemake --cores 2{config} --force {rule}"


def reasons(section: str) -> list[tuple[str, str]]:
    """Why numbers of a section of the paper may differ: subjects of the summary whose claims stand there, and why."""
    return [
        (part.title, part.why)
        for part in SECTIONS
        if any(_named(claim.text)["section"] == section for claim in part.claims)
    ]


def _markdown(table: pd.DataFrame, trained: str, metadata: dict) -> str:
    parts = [f"# The paper's claims in the run {metadata['run']}\n", f"{table.attrs['caption']}\n"]
    if trained:
        parts.append(f"{trained}.\n")
    counts = table["verdict"].value_counts()
    parts.append(", ".join(f"{counts[name]} {name}" for name in counts.index) + f"; {len(table)} rows.\n")
    header = ["claim", "where", "paper", "here [95%]", "n", "verdict", "interval"]
    for section, some in table.groupby("section", sort=True):
        lines = []
        for _, row in some.iterrows():
            known = not np.isnan(row["here"])
            here = interval(row["here"], row["here_low"], row["here_high"]) if known else row["note"] or "–"
            n = f"{row['n']:,} {row['of']}" if row["where"] != "–" else "–"
            lines.append([row["claim"], row["where"], row["paper"], here, n, row["verdict"], row["interval"]])
        why = [f"*{subject}.* {words}\n" for subject, words in reasons(section)]
        commands = "".join(f"    {command}\n" for command in dict.fromkeys(some["command"]))
        parts += [f"## Section {section}\n", lines_table(header, lines), *why]
        parts.append(f"Computed again by:\n\n{commands}")
    absent = sorted(set(table.loc[table["verdict"] == ABSENT, "claim"]))
    if absent:
        parts.append(f"Not measured in this run: {'; '.join(absent)}.\n")
    parts.append(f"Provenance: {provenance_line(metadata)}\n")
    return "\n".join(parts)


def _named(text: str) -> dict[str, str]:
    """The claim without its section, and the section."""
    found = SECTION.search(text)
    if not found:
        return {"section": "–", "claim": text}
    return {"section": found[1], "claim": SECTION.sub("", text) + (f" ({found[2]})" if found[2] else "")}

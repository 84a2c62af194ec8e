"""A finished run in a folder, made from numbers alone: what the page of a run is made from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from benchmark.synthetic_answers import COMPARISONS, make_answers
from synthetic_instances import make_instances

from contourkv.benchmark.comparisons import Answers, ComparisonSettings
from contourkv.benchmark.tables import build_benchmark_tables
from contourkv.figures import BENCHMARK_FIGURES, FIGURES, draw
from contourkv.job_costs import write_costs
from contourkv.report import Contents
from contourkv.statistics.paper import write_paper
from contourkv.statistics.tables import build_tables, read_tables, write_tables

CAPTIONS = Path(__file__).parents[1] / "workflow/report"
METADATA = {
    "contourkv": "0.1.0",
    "config": ["0123456789ab"],
    "models": [{"name": "one", "revision": "sha256:abc"}],
    "seeds": {"contexts.prose": 101},
    "statistics": {"resamples": 20, "seed": 0},
    "run": "unit",
}
GENERIC = ["ceiling", "kappa", "kappa_quantiles", "recovered", "certificates", "pools", "invariants"]
SECTIONS = {
    "1 Summary": ["summary", "paper", "costs"],
    "2 Enumeration": [*GENERIC, "native"],
    "3 Prediction": ["prediction", "predictors", "content_arms", "edges", "cells"],
    "4 Deployed selectors": ["audit"],
    "5 Bytes and downstream": [
        *("tasks", "scores", "comparisons", "comparison_counts", "enforcing", "visibility", "memory"),
        *("decomposition", "reuse", "verdicts"),
    ],
}


def make_run(
    results: Path, label: str = "one", drawn: tuple[str, ...] | None = None, benchmark: bool = True
) -> Contents:
    """Tables, figures, paper.csv and costs.csv of a run of two models.

    Parameters
    ----------
    results : folder to write into
    label : str
        What the first model is called.
    drawn : names of figures, optional
        Without it, every figure whose tables are there.
    benchmark : bool
        Whether the run has a downstream benchmark.
    """
    labels = {"one": label, "two": "two"}
    frame = make_instances({"one": (3, 4, 1), "two": (2, 2, 1)}, per_arm=2)
    write_tables(build_tables(frame, 20, 0, labels), results / "tables", METADATA)
    known = {name: results / "tables" for name, (_, sources, _) in FIGURES.items() if {*sources} <= {*_all(results)}}
    verdicts = None
    if benchmark:
        answers = make_answers(models=("one",), budgets=(0.5,), samples=6)
        tables = build_benchmark_tables(Answers(answers, labels, ComparisonSettings(**COMPARISONS)))
        write_tables(tables, results / "benchmark", METADATA)
        verdicts = tables["verdicts"]
        known |= {name: results / "benchmark" for name in BENCHMARK_FIGURES}
    figures = [name for name in known if drawn is None or name in drawn]
    for name in figures:
        draw(
            name,
            known[name],
            known[name].parent / ("benchmark/figures" if name in BENCHMARK_FIGURES else "figures") / name,
        )
    write_paper(results / "paper", read_tables(results / "tables"), verdicts, "config/unit.yaml", METADATA)
    make_records(
        results / "benchmarks", {"tables": (3.0, 5.0), "figures/fig_kappa": (5.0, 6.5), "ask/one/squad": (0.0, 3.0)}
    )
    write_costs(results / "costs", results / "benchmarks", {}, [], None, "unit")
    return Contents(
        run="unit",
        labels=labels,
        sections=SECTIONS,
        tables=_all(results),
        figures=figures,
        captions={path.stem: path.read_text() for path in CAPTIONS.glob("*.rst")},
        config_file="config/unit.yaml",
    )


def make_records(folder: Path, times: dict[str, tuple[float, float]], base: float = 1_800_000_000.0) -> Path:
    """Snakemake's records of jobs: name -> start and end in seconds after `base`."""
    for name, (start, end) in times.items():
        path = folder / f"{name}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        header = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time\n"
        path.write_text(f"{header}{end - start:.2f}\t0:00:00\t100.00\t1\t1\t1\t0\t0\t50\t{(end - start) / 2:.2f}\n")
        os.utime(path, (base + end, base + end))
    return folder


def without(contents: Contents, *names: str) -> Contents:
    """The same without some tables and figures."""
    return replace(
        contents,
        tables=[name for name in contents.tables if name not in names],
        figures=[name for name in contents.figures if name not in names],
    )


def _all(results: Path) -> list[str]:
    return [path.stem for folder in ("tables", "benchmark") for path in sorted((results / folder).glob("*.csv"))]

"""The tables of the downstream benchmark, each from the merged answers alone.

Everywhere: x, x_low, x_high are a point estimate and its 95% percentile interval over samples (contexts) drawn anew
in each task; every sample counts once, however many questions it has, and a pooled row is the mean over its tasks.
Points are hundredths of accuracy. `samples` and `questions` count what is behind a row; `note` says in words why a
number or an interval is missing. A table that would have no row has one that says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..progress import Progress
from ..statistics.tables import Row, write_tables
from .claims import ENFORCING, POOLED, SEEING
from .comparisons import (
    COMPARED,
    COUNTS,
    INFORMATIVE,
    Answers,
    Cell,
    ComparisonSettings,
    compare,
    count,
    read_answers,
    shared,
)
from .methods import AGNOSTIC, ENFORCED, METHODS, PUBLISHED, QUERY_AWARE, RECTANGULAR, Method
from .verdicts import VERDICTS, build_verdicts

BASELINE = METHODS["snapkv"]
"""The field's plain baseline: against it, enforced and agnostic, every published gap is taken apart."""

Rows = list[dict]
Pair = tuple[Cell, Cell]


def ranged(name: str) -> list[str]:
    """Columns of an estimate."""
    return [name, f"{name}_low", f"{name}_high"]


def build_benchmark_tables(answers: Answers) -> dict[str, pd.DataFrame]:
    """All tables of the benchmark.

    Parameters
    ----------
    answers : Answers

    Returns
    -------
    dict of DataFrame
        tasks, scores, comparisons, comparison_counts, enforcing, visibility, memory, decomposition, reuse, verdicts.
        Each carries a one-line `attrs["caption"]`.
    """
    tables: dict[str, pd.DataFrame] = {}
    cells = list(answers.cells.values())
    failed = sum(bool(cell.failure) for cell in cells)
    behind = (
        f" From {len(answers.frame):,} answers in {len(cells):,} cells, {failed:,} of them failed; brackets are 95% "
        "intervals over samples."
    )
    settings = answers.settings
    numbers = {"level": settings.level, "flips": settings.flips, "informative": INFORMATIVE, "baseline": BASELINE.label}
    for name in Progress(len(BUILDERS), "benchmark tables", "tables").over(BUILDERS):
        builder, columns, caption, nothing = BUILDERS[name]
        table = builder(answers, tables)
        if not isinstance(table, pd.DataFrame):
            table = pd.DataFrame(table)
        table = table.reindex(columns=list(columns))
        if table.empty:
            table = pd.DataFrame([{"model": "–", "note": nothing}], columns=list(columns))
        table.attrs = {"caption": caption.format(**numbers) + behind}
        tables[name] = table
    return tables


def write_benchmark_tables(
    answers_path: str | os.PathLike,
    out_folder: str | os.PathLike,
    run: str,
    labels: Mapping[str, str],
    comparisons: Mapping[str, object],
) -> list[Path]:
    """Write every table of the benchmark as <name>.csv and <name>.md into `out_folder`.

    Parameters
    ----------
    answers_path : path of the merged answers
    out_folder : folder
    run : str
        Name of the run, for the provenance.
    labels : model -> label
        In the order to show them.
    comparisons : mapping
        `benchmark.comparisons` of the configuration, see `ComparisonSettings`.

    Returns
    -------
    list of Path
        The files written. The same answers give the same bytes, whatever the order of their rows.

    Raises
    ------
    InvalidInput
        See `read_answers` and `ComparisonSettings`.
    """
    settings = ComparisonSettings.of(comparisons)
    frame = read_answers(answers_path)
    draws = {"resamples": settings.resamples, "seed": settings.seed}
    metadata = {**frame.attrs["metadata"], "run": run, "statistics": draws}
    return write_tables(build_benchmark_tables(Answers(frame, labels, settings)), out_folder, metadata)


# One number from one or two cells a task


def _unit(answers: Answers, cell: Cell) -> tuple[str, float]:
    """What a score difference of this task is reported in, and its factor."""
    return ("points", 100.0) if answers.tasks[cell.model, cell.task]["measure"] == "accuracy" else ("nats", 1.0)


def _lost(row: Row, answers: Answers, pairs: Sequence[Pair], names: tuple[str, str, str]) -> Row:
    """Add to `row` the scores of the two sides of `pairs` (one a task) and their difference, first minus second.

    names : columns of the first score, the second score and the difference
    """
    row |= dict.fromkeys(names[:2], np.nan) | dict.fromkeys(ranged(names[2]), np.nan)
    row |= {"tasks": 0, "samples": 0, "questions": 0, "unit": _unit(answers, pairs[0][0])[0]}
    differences, means = {}, []
    for pair in pairs:
        failures = [f"{_named(cell)} {cell.failure}" for cell in pair if cell.failure]
        both = shared(pair)
        if failures or not both.questions:
            at = f"{pair[0].task}: " if len(pairs) > 1 else ""
            row.notes += [f"{at}{failure}" for failure in failures or ["no question in common"]]
            continue
        row.notes += [both.note] if both.note else []
        differences[pair[0].task] = _unit(answers, pair[0])[1] * (both.scores[0] - both.scores[1])
        means.append(both.scores.mean(axis=1))
        row["tasks"] += 1
        row["samples"] += both.samples
        row["questions"] += both.questions
    if differences:
        row[names[0]], row[names[1]] = np.mean(means, axis=0)
        row.put(names[2], answers.estimate(differences))
    return row


def _named(cell: Cell) -> str:
    return f"{METHODS[cell.method].label} {cell.storage}, {cell.visibility}"


def _mean(cells: Iterable[Cell], column: str) -> float:
    """Mean over cells of `Cell.mean`, those without a value left out."""
    values = [value for value in (cell.mean(column) for cell in cells) if not np.isnan(value)]
    return float(np.mean(values)) if values else np.nan


def _yes(good: bool) -> str:
    return "yes" if good else "no"


def _pooled_then_each(answers: Answers, model: str, pairs: Sequence[Pair]) -> list[tuple[str, str, str, list[Pair]]]:
    """(task, measure, informative, pairs) of the pooled row, if any task is in it, then of each task."""
    good = set(answers.informative_tasks(model))
    pool = [pair for pair in pairs if pair[0].task in good]
    lines = [(POOLED, "accuracy", "yes", pool)] if pool else []
    for pair in pairs:
        task = pair[0].task
        measure = answers.tasks[model, task]["measure"]
        lines.append((task, measure, _yes(answers.informative(model, task)[0]), [pair]))
    return lines


# The builders, in the order of the tables

TASKS = [
    *("model", "task", "generator", "arm", "length", "measure", "samples", "questions", *ranged("full"), "floor"),
    *("informative", "reason", "note"),
]


def _tasks(answers: Answers, _: Mapping) -> Rows:
    rows = []
    for (model, task), facts in answers.tasks.items():
        cell = answers.fulls.get((model, task))
        row = Row(model=answers.models[model], task=task, **{name: facts[name] for name in facts if name != "rule"})
        row["arm"] = facts["arm"] or "–"
        row |= {"samples": 0, "questions": 0} | dict.fromkeys(ranged("full"), np.nan)
        good, row["reason"] = answers.informative(model, task)
        row["informative"] = _yes(good)
        if cell and not cell.failure:
            values = cell.by_sample("score")
            row |= {"samples": values.size, "questions": cell.keys.size}
            row.put("full", answers.estimate({task: values}))
        else:
            row.notes.append(f"full cache {cell.failure}" if cell else "full cache not run")
        rows.append(row.done())
    return rows


SCORES = [
    *("model", "task", "measure", "method", "storage", "visibility", "budget", "samples", "questions"),
    *(*ranged("score"), "full", "floor", "informative", "full_bytes", "nominal_bytes", "held_bytes", "held_share"),
    *("score_seconds", "note"),
]


def _scores(answers: Answers, _: Mapping) -> Rows:
    rows = []
    for cell in answers.ordered():
        facts = answers.tasks[cell.model, cell.task]
        row = Row(model=answers.models[cell.model], task=cell.task, measure=facts["measure"])
        row |= {"method": METHODS[cell.method].label, "storage": cell.storage, "visibility": cell.visibility}
        row |= {"budget": cell.budget, "samples": 0, "questions": 0} | dict.fromkeys(ranged("score"), np.nan)
        row |= {"full": answers.full(cell.model, cell.task), "floor": facts["floor"]}
        row["informative"] = _yes(answers.informative(cell.model, cell.task)[0])
        row |= {name: cell.mean(name) for name in ("full_bytes", "nominal_bytes", "held_bytes", "score_seconds")}
        row["held_share"] = row["held_bytes"] / row["full_bytes"]
        if cell.failure:
            row.notes.append(cell.failure)
        else:
            values = cell.by_sample("score")
            row |= {"samples": values.size, "questions": cell.keys.size}
            row.put("score", answers.estimate({cell.task: values}))
        rows.append(row.done())
    return rows


ENFORCED_ROWS = [
    *("model", "task", "measure", "method", "visibility", "budget", "storage", "tasks", "samples", "questions"),
    *("published", "score", *ranged("lost"), "unit", "published_held_bytes", "held_bytes", "nominal_bytes"),
    *("full_bytes", "informative", "paper", "note"),
]


def _enforcing(answers: Answers, _: Mapping) -> Rows:
    rows = []
    for model, label in answers.models.items():
        tasks = [task for owner, task in answers.tasks if owner == model]
        for method in (method for method in METHODS.values() if method.keeps == "heads"):
            for visibility in (AGNOSTIC, QUERY_AWARE):
                for storage in (ENFORCED, RECTANGULAR):
                    for budget in answers.budgets:
                        place = (visibility, budget)
                        pairs = [
                            (loose, tight)
                            for task in tasks
                            for loose in answers.find(model, task, method.name, PUBLISHED, *place)
                            for tight in answers.find(model, task, method.name, storage, *place)
                        ]
                        for task, measure, informative, some in _pooled_then_each(answers, model, pairs):
                            row = Row(model=label, task=task, measure=measure, method=method.label, storage=storage)
                            row |= {"visibility": visibility, "budget": budget, "informative": informative}
                            _lost(row, answers, some, ("published", "score", "lost"))
                            row["published_held_bytes"] = _mean((loose for loose, _ in some), "held_bytes")
                            for name in ("held_bytes", "nominal_bytes", "full_bytes"):
                                row[name] = _mean((tight for _, tight in some), name)
                            row["paper"] = ENFORCING
                            rows.append(row.done())
    return _pooled_first(rows)


SEEN_ROWS = [
    *("model", "task", "measure", "method", "storage", "budget", "tasks", "samples", "questions", "query_aware"),
    *("agnostic", *ranged("gained"), "unit", "held_bytes", "informative", "paper", "note"),
]


def _visibility(answers: Answers, _: Mapping) -> Rows:
    rows = []
    for model, label in answers.models.items():
        tasks = [task for owner, task in answers.tasks if owner == model]
        for method in METHODS.values():
            storage = ENFORCED if ENFORCED in method.storages else PUBLISHED
            for budget in answers.budgets:
                pairs = [
                    (seeing, blind)
                    for task in tasks
                    for seeing in answers.find(model, task, method.name, storage, QUERY_AWARE, budget)
                    for blind in answers.find(model, task, method.name, storage, AGNOSTIC, budget)
                ]
                for task, measure, informative, some in _pooled_then_each(answers, model, pairs):
                    row = Row(model=label, task=task, measure=measure, method=method.label, storage=storage)
                    row |= {"budget": budget, "informative": informative, "paper": SEEING}
                    _lost(row, answers, some, ("query_aware", "agnostic", "gained"))
                    row["held_bytes"] = _mean((blind for _, blind in some), "held_bytes")
                    rows.append(row.done())
    return _pooled_first(rows)


def _pooled_first(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: row["task"] != POOLED)


MEMORY = [
    *("model", "length", "method", "storage", "visibility", "budget", "contexts", "full_bytes", "nominal_bytes"),
    *("held_bytes", "payload_bytes", "metadata_bytes", "slack_bytes", "held_over_nominal", "largest_over_nominal"),
    *("held_share", "read_bytes", "probed_bytes", "left_bytes", "peak_bytes", "peak_share", "prefill_seconds"),
    *("compress_seconds", "score_seconds", "tokens_per_s", "device", "note"),
]


def _memory(answers: Answers, _: Mapping) -> Rows:
    groups: dict[tuple, list[Cell]] = {}
    for cell in answers.ordered():
        length = answers.tasks[cell.model, cell.task]["length"]
        key = (cell.model, length, cell.method, cell.storage, cell.visibility, cell.budget)
        groups.setdefault(key, []).append(cell)
    rows = []
    models = list(answers.models)
    for key in sorted(groups, key=lambda key: (models.index(key[0]), key[1])):
        model, length, method, storage, visibility, budget = key
        whole = [cell for cell in groups[key] if not cell.failure]
        row = Row(model=answers.models[model], length=length, method=METHODS[method].label, storage=storage)
        row |= {"visibility": visibility, "budget": budget}
        row["contexts"] = sum(cell.by_sample("held_bytes").size for cell in whole)
        for name in [name for name in MEMORY if name.endswith(("_bytes", "_seconds", "_per_s"))]:
            # Each context counts once, whichever task it is from.
            values = np.concatenate([np.zeros(0), *(cell.by_sample(name) for cell in whole)])
            row[name] = float(values.mean()) if values.size else np.nan
        row["held_over_nominal"] = _ratio(row["held_bytes"], row["nominal_bytes"])
        shares = [cell.columns["held_bytes"] / np.maximum(cell.columns["nominal_bytes"], 1) for cell in whole]
        row["largest_over_nominal"] = max((float(share.max()) for share in shares), default=np.nan)
        row["held_share"] = _ratio(row["held_bytes"], row["full_bytes"])
        row["peak_share"] = _ratio(row["peak_bytes"], row["probed_bytes"])
        row["device"] = ", ".join(sorted({d for cell in whole for d in cell.columns["device"]} - {""})) or "–"
        row.notes += sorted({cell.failure for cell in groups[key]} - {""})
        if whole and np.isnan(row["peak_bytes"]):
            said = sorted({message for cell in whole for message in cell.columns["cost_message"]} - {""})
            row.notes.append(f"cost: failed: {said[0]}" if said else "cost not probed")
        rows.append(row.done())
    return rows


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else np.nan


TERMS = ("gap", "memory", "information", "compute_ranking")
DECOMPOSED = [
    *("model", "task", "budget", "method", "sees", "tasks", "samples", "published", "baseline"),
    *(column for term in TERMS for column in ranged(term)),
    *("compress_seconds", "baseline_compress_seconds", "score_seconds", "baseline_score_seconds", "note"),
]


def _decomposition(answers: Answers, _: Mapping) -> Rows:
    rows = []
    for model, label in answers.models.items():
        tasks = answers.informative_tasks(model)
        # A question that is in view while keys are ranked is one question: only such tasks stand for all methods.
        single = [task for task in tasks if not answers.several_questions(model, task)]
        if not tasks:
            words = "not measurable: no accuracy task is informative"
            rows.append({"model": label, "task": POOLED, "method": "–", "sees": "–", "note": words})
        for method in METHODS.values():
            if method.keeps == "all" or method.name == "random":
                continue
            for budget in answers.budgets:
                parts = {task: Gap(answers, model, task, method, budget) for task in tasks}
                if any(part.own for part in parts.values()):
                    pool = {task: parts[task] for task in single}
                    if pool:
                        rows.append(_taken_apart(answers, label, POOLED, method, budget, pool))
                    for task, part in parts.items():
                        rows.append(_taken_apart(answers, label, task, method, budget, {task: part}))
    return _pooled_first(rows)


class Gap:
    """A method under its published conditions against the baseline, on one task.

    Attributes
    ----------
    cells : name -> Cell
        published (its own storage and visibility), enforced (its own visibility), agnostic (enforced), baseline: those
        that were run and did not fail.
    missing : list of str
        Which of them were not, in words.
    probed : name -> Cell
        The same for published and baseline without the question, which is how costs are probed.
    own : bool
        The method was run at all.
    terms : name -> (samples,) float64, points
        Of the terms whose two cells are there; on the questions that all cells there have, so that the three add up to
        the gap.
    """

    def __init__(self, answers: Answers, model: str, task: str, method: Method, budget: float) -> None:
        published = PUBLISHED if PUBLISHED in method.storages else ENFORCED
        # Quest ranks anew for each query token: it sees every question, whenever that is read, and is run once.
        sees = AGNOSTIC if method.keeps == "pages" else method.sees
        wanted = {"published": (method, published, sees)}
        if ENFORCED in method.storages:
            wanted |= {"enforced": (method, ENFORCED, sees), "agnostic": (method, ENFORCED, AGNOSTIC)}
        wanted["baseline"] = (BASELINE, ENFORCED, AGNOSTIC)
        self.cells: dict[str, Cell] = {}
        self.missing: list[str] = []
        self.own = False
        for name, (whose, storage, visibility) in wanted.items():
            found = answers.find(model, task, whose.name, storage, visibility, budget)
            self.own |= bool(found) and name != "baseline"
            if found and not found[0].failure:
                self.cells[name] = found[0]
            else:
                words = f"{whose.label} {storage}, {visibility}"
                self.missing.append(f"{words} {found[0].failure}" if found else f"not run: {words}")
        self.missing = list(dict.fromkeys(self.missing))
        self.probed = {
            name: cell
            for name, whose, storage in (("published", method, published), ("baseline", BASELINE, ENFORCED))
            for cell in answers.find(model, task, whose.name, storage, AGNOSTIC, budget)
        }
        both = shared(list(self.cells.values())) if self.cells else None
        self.questions = both.questions if both else 0
        self.scores = dict(zip(self.cells, both.scores, strict=True)) if self.questions else {}
        ends = {
            "gap": ("published", "baseline"),
            "memory": ("published", "enforced"),
            "information": ("enforced", "agnostic"),
            "compute_ranking": ("agnostic", "baseline"),
        }
        self.terms = {
            name: 100 * (self.scores[first] - self.scores[second])
            for name, (first, second) in ends.items()
            if first in self.scores and second in self.scores
        }


def _taken_apart(
    answers: Answers, label: str, task: str, method: Method, budget: float, parts: Mapping[str, Gap]
) -> dict:
    row = Row(model=label, task=task, budget=budget, method=method.label, sees=method.sees, tasks=0, samples=0)
    row |= dict.fromkeys(DECOMPOSED[DECOMPOSED.index("published") : -1], np.nan)
    if task == POOLED:
        # Terms of different tasks add up only where each task has them all.
        whole = {name: part for name, part in parts.items() if not part.missing and part.scores}
        for name, part in parts.items():
            row.notes += [f"without {name}: {words}" for words in part.missing]
    else:
        whole = {name: part for name, part in parts.items() if part.scores}
        row.notes += [words for part in parts.values() for words in part.missing]
    if method.keeps == "pages":
        terms = ", ".join(TERMS[1:])
        row.notes.append(f"{terms}: not possible: {method.label} frees nothing, it has no enforced storage")
    if method.keeps == "ragged":
        row.notes.append("memory: none, its own storage is the enforced one")
    row |= {"tasks": len(whole), "samples": sum(next(iter(p.scores.values())).size for p in whole.values())}
    for term in TERMS:
        values = {name: part.terms[term] for name, part in whole.items() if term in part.terms}
        if values:
            row.put(term, answers.estimate(values))
    for name, prefix in (("published", ""), ("baseline", "baseline_")):
        some = [part for part in whole.values() if name in part.scores]
        if some:
            row[name] = float(np.mean([part.scores[name].mean() for part in some]))
        row[f"{prefix}score_seconds"] = _mean((part.cells[name] for part in some), "score_seconds")
        probed = [part.probed[name] for part in some if name in part.probed]
        row[f"{prefix}compress_seconds"] = _mean(probed, "compress_seconds")
    return row.done()


REUSED = [
    *("model", "task", "measure", "method", "storage", "budget", "question", "samples"),
    *(*ranged("score"), *ranged("change"), *ranged("beyond_full"), "note"),
]


def _reuse(answers: Answers, _: Mapping) -> Rows:
    rows = []
    for cell in answers.ordered():
        if cell.visibility != AGNOSTIC or not answers.several_questions(cell.model, cell.task):
            continue
        facts = {"model": answers.models[cell.model], "task": cell.task}
        facts["measure"] = answers.tasks[cell.model, cell.task]["measure"]
        facts |= {"method": METHODS[cell.method].label, "storage": cell.storage, "budget": cell.budget}
        full = answers.fulls.get((cell.model, cell.task))
        if cell.failure:
            rows.append({**facts, "samples": 0, "note": cell.failure})
            continue
        scores = _by_question(cell)
        references = _by_question(full) if full and not full.failure else None
        for question in scores:
            row = Row(**facts, question=question)
            change = (scores[question] - scores[scores.columns[0]]).dropna()
            row["samples"] = int(scores[question].count())
            row.put("score", answers.estimate({cell.task: scores[question].dropna().to_numpy()}))
            row.put("change", answers.estimate({cell.task: change.to_numpy()}))
            if references is None or question not in references:
                row |= dict.fromkeys(ranged("beyond_full"), np.nan)
                row.notes.append("beyond_full: no score of the full cache")
            else:
                beyond = (change - (references[question] - references[references.columns[0]])).dropna()
                row.put("beyond_full", answers.estimate({cell.task: beyond.to_numpy()}))
            rows.append(row.done())
    return rows


def _by_question(cell: Cell) -> pd.DataFrame:
    """Scores of a cell: one row a sample, one column a place in the order of questions."""
    columns = {name: cell.columns[name] for name in ("sample", "question", "score")}
    return pd.DataFrame(columns).pivot(index="sample", columns="question", values="score")


BUILDERS: dict[str, tuple[Callable[[Answers, Mapping], Rows | pd.DataFrame], Sequence[str], str, str]] = {
    "tasks": (
        _tasks,
        TASKS,
        "Tasks: what the full cache scores (`full`: accuracy 0 to 1, or minus nats per gold token) beside the accuracy "
        "of guessing (`floor`), and whether the task is informative: an accuracy task below {informative:.0%} with the "
        "full cache is listed and never counted.",
        "no task was run",
    ),
    "scores": (
        _scores,
        SCORES,
        "Scores of every cell (accuracy 0 to 1, or minus nats per gold token) beside the full cache's and the accuracy "
        "of guessing (`floor`), with the bytes of a context's full cache, of the budget (nominal) and really held, "
        "means over samples; held_share = held / full; score_seconds for scoring and choosing.",
        "no cell was run",
    ),
    "comparisons": (
        lambda answers, _: compare(answers),
        COMPARED,
        "ContourKV (enforced) against each other method on the same questions, both without the question in view: "
        "difference = score - peer_score (accuracy 0 to 1, or nats per gold token) over n = samples; p of McNemar's "
        "exact test or of a sign-flip permutation over samples (all flips up to {flips:,}, else {flips:,} drawn); "
        "win, loss or tie of ContourKV at p <= {level}, raw and after Holm over all counted comparisons of one "
        "ContourKV method against one peer in one storage; held bytes of both.",
        "no comparison: no ContourKV method and peer answered the same task without the question in view",
    ),
    "comparison_counts": (
        lambda _, tables: count(tables["comparisons"].dropna(subset="method")),
        COUNTS,
        "Comparisons counted, and how many ContourKV wins, loses and ties at p <= {level}, raw, after Holm (holm_) and "
        "by the sign of the mean difference alone (higher, lower, equal); the raw ones of accuracy tasks beside "
        "(accuracy_); those listed but not counted as uninformative, undecidable (too few samples) or failed; mean "
        "share of the full cache's bytes that each side holds.",
        "no comparison to count",
    ),
    "enforcing": (
        _enforcing,
        ENFORCED_ROWS,
        "The cost of enforcing: one head-wise selection with everything held under masks (`published`) against the "
        "same scores cut to the nominal bytes (`score`: ragged = enforced, or rectangular); lost = published - score "
        "in points (nats per gold token for tasks in nats), paper: "
        f"{ENFORCING} points; bytes are means over samples.",
        "no method with a head-wise selection was run both as published and enforced",
    ),
    "visibility": (
        _visibility,
        SEEN_ROWS,
        "The price of not seeing the question: one method and storage with the question in view when keys are ranked "
        "(`query_aware`) and without (`agnostic`); gained = the first minus the second in points (nats per gold token "
        f"for tasks in nats), paper: {SEEING} points on retrieval.",
        "no method was run both with the question in view and without",
    ),
    "memory": (
        _memory,
        MEMORY,
        "Memory of a context of about `length` tokens, bytes, means over n = contexts: the full cache, the budget "
        "(nominal), and what is really held = payload + metadata + slack; held_over_nominal is their ratio, "
        "largest_over_nominal the largest of any question. From one pass of the method alone, where probed: left and "
        "peak bytes while the context is read and compressed (share of that context's full cache, probed_bytes), "
        "seconds for the dense read right before and for compressing beyond it, decoded tokens a second. One pass "
        "each, beside whatever else the machine did: compare within a run; a negative time to compress is noise. "
        "score_seconds: scoring and choosing in this run.",
        "no cell was run",
    ),
    "decomposition": (
        _decomposition,
        DECOMPOSED,
        "What a published gap is made of, points over informative accuracy tasks: gap = the method under its published "
        "storage and visibility (`sees`) minus {baseline} enforced and agnostic at the same budget = memory (published "
        "- enforced storage) + information (question in view - not) + compute_ranking (the rest: what the scores "
        "cost and how well they rank); pooled over tasks with one question a sample; n = samples; seconds a context to "
        "compress (probed without the question) and to score, of both.",
        "no method with a publication was run",
    ),
    "reuse": (
        _reuse,
        REUSED,
        "Reuse of one compressed context for several questions, agnostic: score (accuracy 0 to 1, or minus nats per "
        "gold token) by the question's place in the order (from 0), n = samples; change = score - that of the first "
        "question of the same sample; beyond_full = change - the full cache's.",
        "no task asks several questions of one context",
    ),
    "verdicts": (
        build_verdicts,
        VERDICTS,
        "What the paper claims about bytes and downstream scores beside what was measured here; unit and n in their "
        "columns.",
        "nothing to judge",
    ),
}

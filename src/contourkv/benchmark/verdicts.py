"""What the paper claims about bytes and downstream scores (section 5), beside what a run of the benchmark measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from ..statistics.bootstrap import Estimate, Scope
from ..statistics.summary import INSIDE, OUTSIDE, lines_table, overlap_text
from ..statistics.tables import ALL_MODELS, interval, number
from .claims import COUNTED, ENFORCING, LEAST_LOST, LOST, MOST_LOST, SEEING, SEEN, WON
from .comparisons import EQUAL, UNCOUNTED, UNDECIDABLE, Answers, shared
from .methods import AGNOSTIC, ENFORCED, METHODS, PUBLISHED

UNMEASURABLE = "not measurable with these models"
WHOLE = 0.995
"""Share of the full cache's bytes from which a method is said to hold all of it."""

VERDICTS = [
    "model",
    "claim",
    "where",
    "paper",
    "value",
    "value_low",
    "value_high",
    "unit",
    "n",
    "of",
    "verdict",
    "note",
]

WHY = (
    "Unless a run is on the paper's models, these are smaller ones (135 to 270 million parameters) on short contexts, "
    "and only tasks that they answer with a full cache count; a task answered always or never leaves little to tell "
    "methods apart. The same selection in ragged storage loses only the entries that its metadata displaces, so what "
    "enforcing costs shows where storage is a rectangle. Few samples widen every interval; a tie may only mean that."
)

Lines = list[dict]


def build_verdicts(answers: Answers, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Each claim of section 5 with its measured value, interval and verdict.

    Parameters
    ----------
    answers : Answers
    tables : mapping
        The tables that come before: comparisons, comparison_counts, enforcing, visibility, scores, memory.

    Returns
    -------
    DataFrame
        Columns `VERDICTS`; the verdict is "inside", "outside" or "not measurable with these models", and `note` says
        by which rule, or why it is not measurable.
    """
    lines: Lines = []
    for claim in (_counts, _compactor, _enforcing, _seeing, _strongest, _masks, _within):
        lines += claim(answers, tables)
    return pd.DataFrame(lines, columns=VERDICTS)


def verdict_section(tables: Mapping[str, pd.DataFrame]) -> str:
    """The part "Bytes and downstream" of summary.md.

    Parameters
    ----------
    tables : as `build_benchmark_tables` returns them, or as `statistics.read_tables` reads them back

    Returns
    -------
    str
        Markdown, the same bytes for the same tables.
    """
    tasks, verdicts = tables["tasks"], tables["verdicts"]
    lines = []
    for _, row in verdicts.iterrows():
        known = not np.isnan(row["value"])
        here = interval(row["value"], row["value_low"], row["value_high"]) if known else "–"
        unit = f" {row['unit']}" if known and row["unit"] != "–" else ""
        n = f"{int(row['n']):,} {row['of']}"
        lines.append(
            [row["claim"], f"{row['model']}, {row['where']}", row["paper"], here + unit, n, row["verdict"], row["note"]]
        )
    good = tasks[tasks["informative"] == "yes"]
    unlike = [f"{row['task']} of {row['model']}" for _, row in tasks[tasks["informative"] == "no"].iterrows()]
    parts = [
        "## Bytes and downstream\n",
        f"Tasks that tell methods apart: {len(good)} of {len(tasks)}"
        + (f"; never counted: {', '.join(unlike)}" if unlike else "")
        + ". A win or a loss is a difference on the same questions that a paired test finds at the configured level, "
        "before any correction; Holm's correction stands beside. Brackets are 95% intervals.\n",
        lines_table(["claim", "where", "paper", "here [95%]", "n", "verdict", "note"], lines),
        _against_kvzip(tables["comparison_counts"]),
        f"Why a difference may be real: {WHY}\n",
    ]
    return "\n".join(parts)


def _against_kvzip(counts: pd.DataFrame) -> str:
    rows = counts[(counts["peer"] == METHODS["kvzip"].label) & (counts["model"] == ALL_MODELS)]
    if rows.empty:
        return "ContourKV met KVzip in no comparison of this run.\n"
    lines = [
        [
            *(str(row[name]) for name in ("method", "peer_storage")),
            f"{int(row['counted'])} of {int(row['listed'])}",
            " / ".join(str(int(row[name])) for name in ("wins", "losses", "ties")),
            " / ".join(str(int(row[f"holm_{name}"])) for name in ("wins", "losses", "ties")),
            " / ".join(str(int(row[name])) for name in ("higher", "lower", "equal")),
            *(
                f"{100 * row[name]:.1f}%" if not np.isnan(row[name]) else "–"
                for name in ("held_share", "peer_held_share")
            ),
        ]
        for _, row in rows.iterrows()
    ]
    header = ["all models", "KVzip's storage", "counted", "win / loss / tie", "after Holm"]
    header += ["mean higher / lower / equal", "held", "KVzip holds"]
    return lines_table(header, lines)


def _line(claim: str, model: str, where: str, paper: object, **more: object) -> dict:
    line = {"claim": claim, "model": model, "where": where, "paper": paper, "unit": "–", "n": 0, "of": "comparisons"}
    line |= {"value": np.nan, "value_low": np.nan, "value_high": np.nan, "verdict": UNMEASURABLE, "note": ""}
    return line | more


def _found(estimate: Estimate, good: bool, note: str) -> dict:
    """The part of a line that says what was measured."""
    notes = [note, estimate.note]
    return {
        "value": estimate.value,
        "value_low": estimate.low,
        "value_high": estimate.high,
        "verdict": INSIDE if good else OUTSIDE,
        "note": "; ".join(note for note in notes if note),
    }


def _why_none(answers: Answers) -> str:
    """Why there is nothing to judge: what the tasks and cells of the run say."""
    if not any(answers.informative(*key)[0] for key in answers.tasks):
        return "no task is informative"
    return ""


def _counts(answers: Answers, tables: Mapping[str, pd.DataFrame]) -> Lines:
    """Wins and losses against KVzip keeping its full cache."""
    table = tables["comparisons"]
    against = table[(table["peer"] == METHODS["kvzip"].label) & (table["peer_storage"] == PUBLISHED)]
    lines = []
    for method in (method.label for method in METHODS.values() if method.keeps == "ragged"):
        mine = against[against["method"] == method]
        rows = mine[mine["result"] != UNCOUNTED]
        for words, count, printed in (("win", WON, "wins"), ("loss", LOST, "losses")):
            claim = f"ContourKV {printed} against KVzip holding its full cache (section 5)"
            paper = f"{count} of {COUNTED} ({100 * count / COUNTED:.1f}%)"
            line = _line(claim, ALL_MODELS, method, paper, unit="% of comparisons")
            if rows.empty:
                failed = next((note for note in mine["note"] if "failed" in note), "")
                few = next((note for note in mine["note"] if note.startswith(UNDECIDABLE)), "")
                why = _why_none(answers) or few or failed or ("none counted" if len(mine) else "not run")
                lines.append(line | {"note": why})
                continue
            # Comparisons of one task share its questions: the task is what is drawn anew.
            frame = pd.DataFrame({"arm": rows["model"], "input": rows["task"]})
            scope = Scope(frame, answers.settings.resamples, answers.settings.seed)
            share = scope.share((rows["result"] == words).to_numpy())
            alone = share.note.replace("1 input", "1 task")
            percent = Estimate(100 * share.value, 100 * share.low, 100 * share.high, share.degenerate, alone)
            band = binomtest(count, COUNTED).proportion_ci()
            fewer = f", fewer than the {COUNTED} of the paper" if len(rows) < COUNTED else ""
            note = (
                f"{int((rows['result'] == words).sum())} of {len(rows)} comparisons{fewer}; inside: the share lies in "
                f"{100 * band.low:.1f} to {100 * band.high:.1f}%, the 95% binomial interval of the paper's count; "
                "interval over tasks"
            )
            found = line | {"n": len(rows)} | _found(percent, band.low <= share.value <= band.high, note)
            if found["verdict"] == OUTSIDE and share.low <= band.low and band.high <= share.high:
                found |= {"verdict": line["verdict"], "note": f"{note}; the interval holds all of the paper's"}
            lines.append(found)
    return lines


def _compactor(answers: Answers, tables: Mapping[str, pd.DataFrame]) -> Lines:
    """Ties Compactor at matched bytes: the mean difference over tasks and budgets is not told from 0."""
    peer = METHODS["compactor"]
    claim = "ContourKV ties Compactor at matched bytes (section 5)"
    counts = tables["comparison_counts"]
    lines = []
    for method in (method for method in METHODS.values() if method.keeps == "ragged"):
        pooled: dict[str, np.ndarray] = {}
        held: list[tuple[float, float]] = []
        failed = ""
        for model in answers.models:
            for task in answers.informative_tasks(model):
                some = []
                for mine in answers.find(model, task, method.name, ENFORCED, AGNOSTIC):
                    for theirs in answers.find(model, task, peer.name, ENFORCED, AGNOSTIC, mine.budget):
                        failed = failed or mine.failure or theirs.failure
                        if not mine.failure and not theirs.failure:
                            some.append((mine, theirs))
                if some:
                    both = shared([cell for pair in some for cell in pair])
                    if both.questions:
                        pooled[f"{model} {task}"] = 100 * (both.scores[::2] - both.scores[1::2]).mean(axis=0)
                        held += [(a.mean("held_bytes"), b.mean("held_bytes")) for a, b in some]
        line = _line(claim, ALL_MODELS, method.label, "a tie", unit="points", of="samples")
        if not pooled:
            none = not any(answers.informative_tasks(model) for model in answers.models)
            why = "no accuracy task is informative" if none else failed or "not run"
            lines.append(line | {"note": why})
            continue
        estimate = answers.estimate(pooled)
        mine, theirs = np.mean(held, axis=0)
        row = counts[
            (counts["model"] == ALL_MODELS)
            & (counts["method"] == method.label)
            & (counts["peer"] == peer.label)
            & (counts["peer_storage"] == ENFORCED)
        ].iloc[0]
        tied = abs(estimate.value) <= EQUAL or estimate.low <= 0 <= estimate.high
        note = (
            f"win / loss / tie {int(row['wins'])} / {int(row['losses'])} / {int(row['ties'])}; holds "
            f"{number(mine)} B, Compactor {number(theirs)} B; inside: the interval holds 0; mean over accuracy tasks "
            "and budgets"
        )
        found = _found(estimate, tied, note)
        if np.isnan(estimate.low) and not tied:
            found |= {"verdict": UNMEASURABLE, "note": f"no interval to tell a tie by; {note}"}
        lines.append(line | {"n": sum(values.size for values in pooled.values())} | found)
    return lines


def _enforcing(answers: Answers, tables: Mapping[str, pd.DataFrame]) -> Lines:
    """What enforcing the nominal budget costs KVzip's selection (else the first head-wise one that was run)."""
    claim = "Points lost by enforcing the nominal budget on one selection (section 5)"
    table = tables["enforcing"]
    table = table[(table["tasks"] > 0) & (table["visibility"] == AGNOSTIC)]
    lines = []
    for model, label in answers.models.items():
        rows = table[table["model"] == label]
        pooled = rows[(rows["measure"] == "accuracy") & ~rows["task"].isin(task for _, task in answers.tasks)]
        order = ["kvzip", *(name for name, method in METHODS.items() if method.keeps == "heads")]
        name = next((METHODS[name].label for name in order if METHODS[name].label in set(pooled["method"])), None)
        if name is None:
            none = not answers.informative_tasks(model)
            why = "no accuracy task is informative" if none else "no head-wise selection ran as published and enforced"
            lines.append(_line(claim, label, "head-wise selections", ENFORCING, unit="points", of="samples", note=why))
            continue
        for _, row in pooled[pooled["method"] == name].iterrows():
            estimate = Estimate(row["lost"], row["lost_low"], row["lost_high"])
            band = (LEAST_LOST - 0.05, MOST_LOST + 0.05)
            note = f"as published it holds {_share(row['published_held_bytes'], row['full_bytes'])} of the full cache, "
            note += f"{row['storage']} {_share(row['held_bytes'], row['full_bytes'])}"
            if not np.isnan(estimate.low):
                note += f"; interval {overlap_text(estimate.low, estimate.high, *band)}"
            where = f"{name}, {row['storage']}, budget {row['budget']:g}"
            line = _line(claim, label, where, ENFORCING, unit="points", n=int(row["samples"]), of="samples")
            lines.append(line | _found(estimate, band[0] <= estimate.value <= band[1], note))
    return lines


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%"


def _seeing(answers: Answers, tables: Mapping[str, pd.DataFrame]) -> Lines:
    """The largest gain from ranking with the question in view, over methods, budgets and retrieval tasks."""
    claim = "Points of a retrieval gap that seeing the question explains (section 5)"
    table = tables["visibility"]
    lines = []
    for model, label in answers.models.items():
        line = _line(claim, label, "retrieval tasks", f"{SEEING} on one", unit="points", of="samples")
        good = [task for task in answers.informative_tasks(model) if _retrieval(answers, model, task)]
        rows = table[(table["model"] == label) & table["task"].isin(good) & (table["tasks"] > 0)]
        if rows.empty:
            why = "no method ran with and without the question in view" if good else "no retrieval task is informative"
            lines.append(line | {"note": why})
            continue
        row = rows.loc[rows["gained"].idxmax()]
        where = f"{row['method']}, {row['task']}, budget {row['budget']:g}"
        estimate = Estimate(row["gained"], row["gained_low"], row["gained_high"])
        line |= {"where": where, "n": int(row["samples"])}
        reached = abs(estimate.value - SEEN) <= 0.05 or estimate.low <= SEEN <= estimate.high
        note = f"the largest of {len(rows)} (method, task, budget), picked for being it, so its interval is too kind; "
        note += f"the mean of all is {rows['gained'].mean():.1f}; inside: the interval holds {SEEN}"
        most = max(100 * answers.full(model, task) for task in good)
        found = _found(estimate, reached, note)
        if not reached and most < SEEN:
            found |= {"verdict": UNMEASURABLE, "note": f"the full cache itself scores at most {most:.1f}; {note}"}
        lines.append(line | found)
    return lines


def _retrieval(answers: Answers, model: str, task: str) -> bool:
    return answers.tasks[model, task]["generator"].startswith("niah")


def _strongest(answers: Answers, tables: Mapping[str, pd.DataFrame]) -> Lines:
    """What the highest-scoring methods that do not see the question hold as published."""
    claim = "The strongest query-agnostic methods, as published, hold all of the full cache (section 5)"
    others = {method.label for method in METHODS.values() if method.keeps in ("equal", "heads")}
    others -= {METHODS["random"].label}
    scores = tables["scores"]
    lines = []
    for model, label in answers.models.items():
        line = _line(
            claim, label, "–", f"at least {100 * WHOLE:.1f}% (nothing freed)", unit="% of the full cache", of="cells"
        )
        good = answers.informative_tasks(model)
        rows = scores[
            (scores["model"] == label)
            & scores["task"].isin(good)
            & scores["method"].isin(others)
            & (scores["storage"] == PUBLISHED)
            & (scores["visibility"] == AGNOSTIC)
        ]
        known = rows[rows["score"].notna()]
        # Only methods that answered the same cells can be ranked by their mean.
        tried = known.groupby("method")["score"].count()
        full = tried[tried == tried.max()].index if len(tried) else []
        known = known[known["method"].isin(full)]
        if known.empty:
            why = "no method ran as published without the question" if good else "no accuracy task is informative"
            lines.append(line | {"note": why})
            continue
        means = known.groupby("method")[["score", "held_share"]].mean()
        means = means.sort_values("score", ascending=False, kind="stable")
        best = means[means["score"] >= means["score"].iloc[0] - EQUAL]
        ranking = ", ".join(
            f"{name} {row['score']:.3f} holding {100 * row['held_share']:.1f}%"
            for name, row in means.head(3).iterrows()
        )
        held = float(best["held_share"].min())
        line |= {"where": " and ".join(best.index), "n": len(known)}
        note = f"mean accuracy over tasks and budgets: {ranking}; inside: at least {100 * WHOLE:.1f}%"
        lines.append(line | _found(Estimate(100 * held, np.nan, np.nan), held >= WHOLE, note))
    return lines


def _masks(answers: Answers, tables: Mapping[str, pd.DataFrame]) -> Lines:
    """The least that a head-wise selection holds as published."""
    claim = "Head-wise selections as published free nothing (section 5)"
    scores = tables["scores"]
    masks = {method.label for method in METHODS.values() if method.keeps == "heads"}
    rows = scores[scores["method"].isin(masks) & (scores["storage"] == PUBLISHED)]
    line = _line(
        claim,
        ALL_MODELS,
        "head-wise selections",
        f"at least {100 * WHOLE:.1f}%",
        unit="% of the full cache",
        of="cells",
    )
    known = rows[rows["held_share"].notna()]
    if known.empty:
        failed = next((note for note in rows["note"] if note), "")
        return [line | {"note": failed or "not run as published"}]
    row = known.loc[known["held_share"].idxmin()]
    line |= {"n": len(known), "where": f"{row['method']}, {row['task']}, budget {row['budget']:g}"}
    most = f"the most is {100 * known['held_share'].max():.1f}%"
    note = f"the least of all cells; {most}; inside: at least {100 * WHOLE:.1f}%"
    share = float(row["held_share"])
    return [line | _found(Estimate(100 * share, np.nan, np.nan), share >= WHOLE, note)]


def _within(answers: Answers, tables: Mapping[str, pd.DataFrame]) -> Lines:
    """ContourKV's bytes: at most the nominal ones in every cell."""
    claim = "ContourKV holds at most its nominal bytes in every cell (section 5)"
    memory = tables["memory"]
    ragged = {method.label for method in METHODS.values() if method.keeps == "ragged"}
    rows = memory[memory["method"].isin(ragged)]
    known = rows[rows["largest_over_nominal"].notna()]
    line = _line(claim, ALL_MODELS, "ContourKV", "at most 100%", unit="% of nominal", of="contexts in cells")
    if known.empty:
        failed = next((note for note in rows["note"] if note), "")
        return [line | {"note": failed or "not run"}]
    row = known.loc[known["largest_over_nominal"].idxmax()]
    line |= {"n": int(known["contexts"].sum())}
    line |= {"where": f"{row['method']}, {row['model']}, {int(row['length'])} tokens, budget {row['budget']:g}"}
    ratio = float(row["largest_over_nominal"])
    return [line | _found(Estimate(100 * ratio, np.nan, np.nan), ratio <= 1, "the largest of all questions and cells")]

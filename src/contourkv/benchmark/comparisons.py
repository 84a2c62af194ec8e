"""Paired comparisons of methods on the same questions, from the table of answers alone.

A row of that table is one question answered in one cell: (model, task, method, storage, visibility, budget). What is
drawn anew and whose signs are flipped is the sample, that is the context: its questions share a text and, once
compressed, a cache. A cell's score is the mean over samples of the mean over a sample's questions. A cell with a failed
question is a failed cell: it is shown with its message and counts nowhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from ..errors import DamagedFile, InvalidInput
from ..statistics.bootstrap import Estimate, Scope
from ..statistics.merging import combine
from ..statistics.tables import ALL_MODELS
from . import records
from .methods import AGNOSTIC, ENFORCED, METHODS, PUBLISHED, QUERY_AWARE, RECTANGULAR, Method

INFORMATIVE = 0.60
"""Least accuracy of the full cache at which a task tells methods apart; below it the task is never counted."""
EQUAL = 1e-12
"""Difference of mean scores up to which two cells count as equal: rounding of sums."""

CELL = ["model", "task", "method", "storage", "visibility", "budget"]
QUESTION = ["sample", "question"]
VALUES = {
    "method": tuple(METHODS),
    "storage": (PUBLISHED, ENFORCED, RECTANGULAR),
    "visibility": (AGNOSTIC, QUERY_AWARE),
    "measure": ("accuracy", "nats"),
    "status": ("ok", "failed"),
}
OF_TASK = ["generator", "arm", "length", "measure", "rule", "floor"]
"""Columns that are the same in every row of a model's task."""

WIN, LOSS, TIE, UNCOUNTED = "win", "loss", "tie", "not counted"
UNDECIDABLE = "undecidable"
STORAGES = {name: number for number, name in enumerate(VALUES["storage"])}
ORDER = {name: number for number, name in enumerate(METHODS)}


# The answers


def read_answers(path: str | os.PathLike) -> pd.DataFrame:
    """Read the merged answers of a run and check them.

    Returns
    -------
    DataFrame
        The columns `records.MERGED`, names as text; `attrs["metadata"]` is the provenance of all that was merged.

    Raises
    ------
    InvalidInput
        A file that is missing, truncated or not ours; a column that is missing, of another type, or holds what it
        must not; a question that comes twice in a cell. The file and the column are named, with what to do.
    """
    frame, metadata = records.read_answers(path)
    check_answers(frame, os.fspath(path))
    frame.attrs["metadata"] = combine(metadata.get("answers", [metadata]))
    return frame


def check_answers(frame: pd.DataFrame, path: str) -> None:
    """Check what must hold of a table of answers with the columns `records.MERGED`; `path` names it in errors.

    Raises
    ------
    InvalidInput
    """

    def refuse(column: str, problem: str) -> None:
        raise DamagedFile(path, f"column {column}: {problem}")

    def demand(good: pd.Series | np.ndarray, column: str, expected: str) -> None:
        if not np.all(good):
            row = frame.iloc[int(np.argmin(np.asarray(good)))]
            value = repr(row[column]) if isinstance(row[column], str) else row[column]
            refuse(column, f"expected {expected}, got {value} in {row['question_id']} of {row['method']}")

    if frame.empty:
        raise InvalidInput(f"{path}: no answers; run the benchmark first")
    for column, allowed in VALUES.items():
        demand(frame[column].isin(allowed), column, f"one of {', '.join(allowed)}")
    demand((frame["budget"] > 0) & (frame["budget"] <= 1), "budget", "a share of the full cache in (0, 1]")
    for column in ("sample", "question", *(name for name in records.MERGED if name.endswith("_bytes"))):
        demand(~(frame[column] < 0), column, "a number >= 0")
    failed = frame["status"] == "failed"
    demand(~failed | frame["score"].isna(), "score", "no number where the question failed")
    demand(failed | np.isfinite(frame["score"]), "score", "a number where the question did not fail")
    accuracy = frame["measure"] == "accuracy"
    demand(failed | ~accuracy | frame["score"].between(0, 1), "score", "an accuracy in [0, 1]")
    demand(accuracy | frame["floor"].isna(), "floor", "no guess floor for a task in nats")
    twice = frame.duplicated([*CELL, *QUESTION]).to_numpy()
    if twice.any():
        row = frame[twice].iloc[0]
        cell = ", ".join(str(row[name]) for name in CELL)
        refuse("question_id", f"{row['question_id']} comes twice in the cell {cell}")
    for (model, task), rows in frame.groupby(["model", "task"], sort=True):
        for column in OF_TASK:
            if rows[column].nunique(dropna=False) > 1:
                values = ", ".join(sorted(map(str, rows[column].unique()))[:2])
                refuse(column, f"expected one value for task {task} of {model}, got {values}")


@dataclass(frozen=True)
class ComparisonSettings:
    """How answers are compared: the mapping `benchmark.comparisons` of the configuration.

    Attributes
    ----------
    level : float
        Significance level of a win or loss, in (0, 1).
    flips : int
        Sign flips drawn, and the most that are enumerated instead, >= 1.
    resamples : int
        Resamples of the samples behind an interval, >= 1.
    seed : int
        Of the flips and of the resamples, >= 0.
    """

    level: float = 0.05
    flips: int = 10000
    resamples: int = 2000
    seed: int = 421

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise InvalidInput(f"benchmark.comparisons.level: expected a number in (0, 1), got {self.level!r}")
        for name, least in (("flips", 1), ("resamples", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidInput(f"benchmark.comparisons.{name}: expected a whole number >= {least}, got {value!r}")

    @classmethod
    def of(cls, mapping: Mapping[str, object]) -> ComparisonSettings:
        """From the configuration's mapping; InvalidInput for a key that is not one of the attributes."""
        for name in mapping:
            if name not in cls.__dataclass_fields__:
                expected = ", ".join(cls.__dataclass_fields__)
                raise InvalidInput(f"benchmark.comparisons.{name}: no such key; expected some of {expected}")
        return cls(**mapping)


@dataclass(frozen=True, eq=False)
class Cell:
    """The answers of one cell, by sample and question.

    Attributes
    ----------
    model, task, method, storage, visibility, budget : what the cell is
    columns : column -> array, one entry a question
    keys : (questions,) int64, ascending; the same question has the same key in every cell of the task
    stride : int, keys of one sample lie in [sample * stride, (sample + 1) * stride)
    """

    model: str
    task: str
    method: str
    storage: str
    visibility: str
    budget: float
    columns: Mapping[str, np.ndarray]
    keys: np.ndarray
    stride: int

    @property
    def failure(self) -> str:
        """What went wrong, on one line; "" if every question was answered."""
        failed = self.columns["status"] == "failed"
        if not failed.any():
            return ""
        messages = sorted({" ".join(message.split()) for message in self.columns["message"][failed]})
        # A table's cell: no bar, and no page of it.
        first = messages[0].replace("|", "/")[:200] or "no message"
        more = f" (and {len(messages) - 1} other messages)" if len(messages) > 1 else ""
        share = "" if failed.all() else f"{int(failed.sum())} of {failed.size} questions "
        return f"{share}failed: {first}{more}"

    def by_sample(self, column: str) -> np.ndarray:
        """Mean of a column over each sample's questions, samples ascending; none where the cell failed or it is NaN."""
        values = self.columns[column].astype(np.float64)
        known = ~np.isnan(values) & (self.failure == "")
        return _by_sample(self.columns["sample"][known], values[known])

    def mean(self, column: str) -> float:
        """Mean over samples of `by_sample`; NaN where that has none."""
        values = self.by_sample(column)
        return float(values.mean()) if values.size else np.nan


@dataclass(frozen=True)
class Shared:
    """Scores of several cells on the questions that all of them answered.

    Attributes
    ----------
    scores : (cells, samples) float64
        Mean over the sample's shared questions.
    questions : int
    single : bool
        Every sample has one question.
    note : str
        How many questions are left out because not all cells have them; "" if none is.
    """

    scores: np.ndarray
    questions: int
    single: bool
    note: str

    @property
    def samples(self) -> int:
        return self.scores.shape[1]


def shared(cells: Sequence[Cell]) -> Shared:
    """Align cells of one task on the questions that all of them have."""
    keys = reduce(lambda some, more: np.intersect1d(some, more, assume_unique=True), [cell.keys for cell in cells])
    most = max(cell.keys.size for cell in cells)
    note = "" if keys.size == most else f"{keys.size} of {most} questions in common"
    sample = keys // cells[0].stride
    scores = [_by_sample(sample, cell.columns["score"][np.searchsorted(cell.keys, keys)]) for cell in cells]
    single = np.unique(sample).size == sample.size
    return Shared(np.stack(scores), keys.size, single, note)


class Answers:
    """A run's answers, by cell.

    Parameters
    ----------
    frame : DataFrame
        As `read_answers` gives it; the order of its rows does not matter.
    labels : model -> label, optional
        What to call the models, in the order to show them; without it, their names in alphabetical order.
    settings : ComparisonSettings, optional

    Attributes
    ----------
    models : name -> label
    tasks : (model, task) -> the columns `OF_TASK` of that task; by model, then accuracy before nats, generator, arm,
        length, name
    cells : (model, task, method, storage, visibility, budget) -> Cell
    fulls : (model, task) -> the full cache's cell
    budgets : all budgets, ascending, that of the full cache left out
    """

    def __init__(
        self,
        frame: pd.DataFrame,
        labels: Mapping[str, str] | None = None,
        settings: ComparisonSettings | None = None,
    ) -> None:
        self.settings = settings or ComparisonSettings()
        frame = frame.sort_values([*CELL, *QUESTION], kind="stable", ignore_index=True)
        self.frame = frame
        names = sorted(set(frame["model"]))
        labels = dict(labels or {})
        order = [name for name in labels if name in names] + [name for name in names if name not in labels]
        self.models = {name: str(labels.get(name, name)) for name in order}
        if len({*self.models.values(), ALL_MODELS}) <= len(order):
            raise InvalidInput(f"labels: expected distinct labels other than {ALL_MODELS!r}, got {self.models}")
        facts = frame.drop_duplicates(["model", "task"]).set_index(["model", "task"])[OF_TASK]
        place = {name: number for number, name in enumerate(order)}
        described = sorted(
            ((key, row) for key, row in zip(facts.index, facts.to_dict("records"), strict=True)),
            key=lambda item: (
                place[item[0][0]],
                *(item[1][name] for name in ("measure", "generator", "arm", "length")),
                item[0][1],
            ),
        )
        self.tasks: dict[tuple[str, str], dict] = dict(described)
        self.cells = self._cells(frame)
        self.fulls = {}
        for cell in self.cells.values():
            # A full cache needs no ranking: if it was run with the question in view too, either will do.
            if METHODS[cell.method].keeps == "all":
                self.fulls.setdefault((cell.model, cell.task), cell)
        self.budgets = sorted({cell.budget for cell in self.cells.values() if METHODS[cell.method].keeps != "all"})
        self._several = {
            (cell.model, cell.task)
            for cell in self.cells.values()
            if np.unique(cell.columns["sample"]).size < cell.keys.size
        }
        self._scopes: dict[tuple, Scope] = {}

    @staticmethod
    def _cells(frame: pd.DataFrame) -> dict[tuple, Cell]:
        columns = {name: frame[name].to_numpy() for name in frame.columns}
        stride = int(columns["question"].max()) + 1
        keys = columns["sample"] * stride + columns["question"]
        cells = {}
        for key, rows in frame.groupby(CELL, sort=True).indices.items():
            part = slice(rows[0], rows[-1] + 1)
            cells[key] = Cell(*key, {name: values[part] for name, values in columns.items()}, keys[part], stride)
        return cells

    def find(
        self, model: str, task: str, method: str, storage: str, visibility: str, budget: float | None = None
    ) -> list[Cell]:
        """The cell, as a list of one, or an empty list; without a budget, the cells of all budgets, ascending."""
        key = (model, task, method, storage, visibility)
        if budget is not None:
            return [self.cells[*key, budget]] if (*key, budget) in self.cells else []
        return [self.cells[*key, b] for b in self.budgets if (*key, b) in self.cells]

    def ordered(self) -> list[Cell]:
        """All cells: by model, task, then method, storage, visibility, budget; the full cache first."""
        place = {key: number for number, key in enumerate(self.tasks)}
        return sorted(self.cells.values(), key=lambda cell: (place[cell.model, cell.task], *cell_order(cell)))

    def full(self, model: str, task: str) -> float:
        """Score of the full cache; NaN if it was not run or failed."""
        cell = self.fulls.get((model, task))
        return cell.mean("score") if cell else np.nan

    def informative(self, model: str, task: str) -> tuple[bool, str]:
        """Whether a task can tell methods apart, and why."""
        if self.tasks[model, task]["measure"] == "nats":
            return True, "log-likelihood has no floor"
        cell, score = self.fulls.get((model, task)), self.full(model, task)
        if np.isnan(score):
            return False, f"full cache {cell.failure}" if cell else "full cache not run"
        good = score >= INFORMATIVE - EQUAL
        return good, f"full-cache accuracy {score:.3f} {'>=' if good else '<'} {INFORMATIVE:.2f}"

    def several_questions(self, model: str, task: str) -> bool:
        """Whether a sample of the task has more than one question."""
        return (model, task) in self._several

    def informative_tasks(self, model: str, measure: str = "accuracy") -> list[str]:
        """The model's tasks with that measure that are informative."""
        return [
            task
            for (owner, task), facts in self.tasks.items()
            if owner == model and facts["measure"] == measure and self.informative(owner, task)[0]
        ]

    def estimate(self, values: Mapping[str, np.ndarray]) -> Estimate:
        """Mean over tasks of the mean over samples, with its 95% interval over samples drawn anew in each task.

        Parameters
        ----------
        values : task -> (samples,) float64
        """
        tasks = sorted(values)
        if not tasks or any(values[task].size == 0 for task in tasks):
            return Estimate(np.nan, np.nan, np.nan, 0, "no questions")
        sizes = tuple((task, values[task].size) for task in tasks)
        if sizes not in self._scopes:
            arms = [task for task, size in sizes for _ in range(size)]
            inputs = [number for _, size in sizes for number in range(size)]
            frame = pd.DataFrame({"arm": arms, "input": inputs})
            self._scopes[sizes] = Scope(frame, self.settings.resamples, self.settings.seed)
        ends = np.cumsum([0, *(size for _, size in sizes)])

        def mean(weights: np.ndarray) -> np.ndarray:
            parts = zip(tasks, ends[:-1], ends[1:], strict=True)
            return np.mean([weights[:, start:end] @ values[task] / (end - start) for task, start, end in parts], axis=0)

        found = self._scopes[sizes].estimate(mean, "no samples")
        return replace(found, note=found.note.replace("1 input", "1 sample"))


def cell_order(cell: Cell) -> tuple:
    """Where a cell stands among those of a task: method, storage, visibility, budget."""
    return ORDER[cell.method], STORAGES[cell.storage], cell.visibility, cell.budget


def _by_sample(sample: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mean of `values` in each sample, samples ascending."""
    _, codes = np.unique(sample, return_inverse=True)
    return np.bincount(codes, values) / np.bincount(codes) if codes.size else np.zeros(0)


# The tests


@lru_cache(maxsize=4096)
def mcnemar_p(better: int, worse: int) -> float:
    """Exact two-sided McNemar test: of the pairs that differ, each goes either way with chance 1/2; 1 if none does."""
    return float(binomtest(better, better + worse, 0.5).pvalue) if better + worse else 1.0


def sign_flip_p(differences: np.ndarray, flips: int, seed: int) -> tuple[float, str]:
    """Two-sided sign-flip permutation test of paired differences.

    The share of sign patterns whose sum is at least as far from 0 as the one seen. All 2^n patterns of the n samples
    that differ are enumerated if these are at most `flips`; else `flips` are drawn and p = (hits + 1) / (flips + 1),
    which is a valid p-value (Phipson and Smyth 2010).

    Parameters
    ----------
    differences : (samples,) float64
    flips, seed : int

    Returns
    -------
    p : float
    how : str
        "all sign flips" or "sign flips drawn".
    """
    moved = differences[differences != 0]
    exact = 2**moved.size <= flips
    how = "all sign flips" if exact else "sign flips drawn"
    if moved.size == 0:
        return 1.0, how
    seen = abs(moved.sum()) - 1e-9 * np.abs(moved).sum()  # sums that differ by rounding are equal
    hits = int((np.abs(_signs(moved.size, 0 if exact else flips, seed) @ moved) >= seen).sum())
    return (hits / 2**moved.size if exact else (hits + 1) / (flips + 1)), how


@lru_cache(maxsize=64)
def _signs(size: int, flips: int, seed: int) -> np.ndarray:
    """Sign patterns (patterns, size): `flips` drawn ones, or all 2^size if `flips` is 0."""
    if flips == 0:
        bits = np.arange(2**size)[:, None] >> np.arange(size) & 1
    else:
        bits = np.random.default_rng(seed).integers(0, 2, (flips, size), dtype=np.int8)
    return 1.0 - 2.0 * bits


def paired_p(first: np.ndarray, second: np.ndarray, single: bool, settings: ComparisonSettings) -> tuple[float, str]:
    """p-value of two score vectors over the same samples, and the test it comes from.

    Parameters
    ----------
    first, second : (samples,) float64
    single : bool
        Every sample has one question: then scores of 0 and 1 go to McNemar's test, all others to sign flips.
    settings : ComparisonSettings
    """
    if single and np.isin(first, (0, 1)).all() and np.isin(second, (0, 1)).all():
        return mcnemar_p(int((first > second).sum()), int((first < second).sum())), "McNemar"
    return sign_flip_p(first - second, settings.flips, settings.seed)


def holm(p: Iterable[float]) -> np.ndarray:
    """Holm's step-down adjustment of a family of p-values (Holm 1979), in the order given."""
    p = np.asarray(list(p), float)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)) if p.size else p
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


def decidable(samples: int, level: float) -> bool:
    """Whether any scores of that many samples can reach `level`: all differences one way give p = 2 / 2^samples."""
    return 2.0 ** (1 - samples) <= level


def outcome(p: float, difference: float, level: float) -> str:
    """Win, loss or tie of the first of two methods: a difference counts if p is at most `level`."""
    if np.isnan(p) or p > level or abs(difference) <= EQUAL:
        return TIE
    return WIN if difference > 0 else LOSS


# The comparisons

RANGED_DIFFERENCE = ["difference", "difference_low", "difference_high"]
COMPARED = [
    *("model", "task", "measure", "budget", "method", "peer", "peer_storage", "samples", "questions", "score"),
    *("peer_score", *RANGED_DIFFERENCE, "p", "test", "result", "p_holm", "result_holm", "by_mean"),
    *("held_bytes", "peer_held_bytes", "nominal_bytes", "full_bytes", "note"),
]
COUNTS = [
    *("model", "method", "peer", "peer_storage", "listed", "counted", "wins", "losses", "ties"),
    *("holm_wins", "holm_losses", "holm_ties", "higher", "lower", "equal"),
    *("accuracy_counted", "accuracy_wins", "accuracy_losses", "uninformative", "undecidable", "failed"),
    *("held_share", "peer_held_share", "note"),
]


def compare(answers: Answers) -> pd.DataFrame:
    """ContourKV against every other method: per model, task and budget, on the same questions, both agnostic.

    Each method that keeps ragged rows meets each that does not (the full cache with all its bytes included), in each
    storage that the peer was run in: as published, enforced (at most the nominal bytes), and in a rectangle.

    Holm's family is one block of the table: one ContourKV method against one peer in one storage, over all models,
    tasks and budgets that count. A task whose full-cache accuracy is below `INFORMATIVE`, a failed cell, a pair without
    a common question and one of too few samples for any test to reach the level are listed, with the reason in `note`,
    and never counted.

    Returns
    -------
    DataFrame
        Columns `COMPARED`, one row a comparison, KVzip first. `difference` is score - peer_score, in the score's unit
        (accuracy 0..1, or nats per token), with its 95% interval over samples; `result` and `result_holm` are win,
        loss or tie of ContourKV at `settings.level`, raw and after Holm; `by_mean` is the sign of the difference alone.
    """
    rows = []
    for method, peer, storage in pairings():
        block = [_compared(answers, *pair) for pair in _pairs(answers, method, peer, storage)]
        rows += block
    table = pd.DataFrame(rows, columns=COMPARED)
    table["p_holm"], table["result_holm"] = np.nan, UNCOUNTED
    counted = table["result"] != UNCOUNTED
    for _, block in table[counted].groupby(["method", "peer", "peer_storage"], sort=False):
        adjusted = holm(block["p"])
        table.loc[block.index, "p_holm"] = adjusted
        table.loc[block.index, "result_holm"] = [
            outcome(p, difference, answers.settings.level)
            for p, difference in zip(adjusted, block["difference"], strict=True)
        ]
    return table


def pairings() -> list[tuple[Method, Method, str]]:
    """Every (ContourKV method, peer, storage of the peer), in the order of the tables: KVzip's first."""
    contour = [method for method in METHODS.values() if method.keeps == "ragged"]
    peers = [method for method in METHODS.values() if method.keeps != "ragged"]
    peers.sort(key=lambda peer: peer.name != "kvzip")
    return [(method, peer, storage) for peer in peers for storage in peer.storages for method in contour]


def _pairs(answers: Answers, method: Method, peer: Method, storage: str) -> Iterator[tuple[Cell, Cell]]:
    for model, task in answers.tasks:
        for mine in answers.find(model, task, method.name, ENFORCED, AGNOSTIC):
            if peer.keeps == "all":
                theirs = [answers.fulls[model, task]] if (model, task) in answers.fulls else []
            else:
                theirs = answers.find(model, task, peer.name, storage, AGNOSTIC, mine.budget)
            yield from ((mine, cell) for cell in theirs)


def _compared(answers: Answers, mine: Cell, theirs: Cell) -> dict:
    """One row of the comparisons, without Holm's columns."""
    good, reason = answers.informative(mine.model, mine.task)
    row = {
        "model": answers.models[mine.model],
        "task": mine.task,
        "measure": answers.tasks[mine.model, mine.task]["measure"],
        "budget": mine.budget,
        "method": METHODS[mine.method].label,
        "peer": METHODS[theirs.method].label,
        "peer_storage": theirs.storage,
        "held_bytes": mine.mean("held_bytes"),
        "peer_held_bytes": theirs.mean("held_bytes"),
        "nominal_bytes": mine.mean("nominal_bytes"),
        "full_bytes": mine.mean("full_bytes"),
    }
    notes = [] if good else [f"uninformative: {reason}"]
    notes += [f"{METHODS[cell.method].label} {cell.failure}" for cell in (mine, theirs) if cell.failure]
    pair = shared([mine, theirs])
    if any(cell.failure for cell in (mine, theirs)) or not pair.questions:
        row |= {"samples": 0, "questions": 0, "score": mine.mean("score"), "peer_score": theirs.mean("score")}
        row |= dict.fromkeys((*RANGED_DIFFERENCE, "p"), np.nan)
        row |= {"test": "none", "result": UNCOUNTED, "by_mean": UNCOUNTED}
        notes += [] if pair.questions else ["no question in common"]
        return row | {"note": "; ".join(notes)}
    first, second = pair.scores
    estimate = answers.estimate({mine.task: first - second})
    p, test = paired_p(first, second, pair.single, answers.settings)
    row |= {"samples": pair.samples, "questions": pair.questions, "score": first.mean(), "peer_score": second.mean()}
    row |= dict(zip(RANGED_DIFFERENCE, (estimate.value, estimate.low, estimate.high), strict=True))
    row |= {"p": p, "test": test, "result": UNCOUNTED, "by_mean": UNCOUNTED}
    if good and not decidable(pair.samples, answers.settings.level):
        notes.append(f"{UNDECIDABLE}: no test over {pair.samples} samples can reach p <= {answers.settings.level:g}")
    elif good:
        row["result"] = outcome(p, estimate.value, answers.settings.level)
        row["by_mean"] = _by_mean(estimate.value)
    return row | {"note": "; ".join(note for note in (*notes, pair.note, estimate.note) if note)}


def _by_mean(difference: float) -> str:
    if abs(difference) <= EQUAL:
        return "equal"
    return "higher" if difference > 0 else "lower"


def count(table: pd.DataFrame) -> pd.DataFrame:
    """Wins, losses and ties of each ContourKV method against each peer and storage, over all models and in each.

    Parameters
    ----------
    table : DataFrame
        As `compare` gives it.

    Returns
    -------
    DataFrame
        Columns `COUNTS`: `listed` comparisons, of which `counted`; these as win, loss and tie at the raw p, after
        Holm, and by the sign of the mean difference; the raw ones among accuracy tasks alone; how many are not counted
        as `uninformative`, `undecidable` (too few samples) or `failed` (a failed cell, or no common question).
        `held_share` and `peer_held_share` are means of held over full bytes, of the counted ones. All models first,
        KVzip first.
    """
    rows = []
    models = list(dict.fromkeys(table["model"]))
    keys = ["method", "peer", "peer_storage"]
    for model in [ALL_MODELS, *(models if len(models) > 1 else [])]:
        part = table if model == ALL_MODELS else table[table["model"] == model]
        for (method, peer, storage), block in part.groupby(keys, sort=False):
            counted = block[block["result"] != UNCOUNTED]
            accuracy = counted[counted["measure"] == "accuracy"]
            unlike = block["note"].str.startswith("uninformative")
            row = {"model": model, "method": method, "peer": peer, "peer_storage": storage}
            row |= {"listed": len(block), "counted": len(counted)}
            for prefix, column in (("", "result"), ("holm_", "result_holm")):
                for name, word in (("wins", WIN), ("losses", LOSS), ("ties", TIE)):
                    row[f"{prefix}{name}"] = int((counted[column] == word).sum())
            for word in ("higher", "lower", "equal"):
                row[word] = int((counted["by_mean"] == word).sum())
            row["accuracy_counted"] = len(accuracy)
            row["accuracy_wins"] = int((accuracy["result"] == WIN).sum())
            row["accuracy_losses"] = int((accuracy["result"] == LOSS).sum())
            row["uninformative"] = int(unlike.sum())
            few = block["note"].str.startswith(UNDECIDABLE)
            row["undecidable"] = int(few.sum())
            row["failed"] = int((~unlike & ~few & (block["result"] == UNCOUNTED)).sum())
            row["held_share"] = float((counted["held_bytes"] / counted["full_bytes"]).mean())
            row["peer_held_share"] = float((counted["peer_held_bytes"] / counted["full_bytes"]).mean())
            row["note"] = "" if len(counted) else "none counted"
            rows.append(row)
    return pd.DataFrame(rows, columns=COUNTS)

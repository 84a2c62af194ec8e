"""Verdicts on the paper's claims: what is measured, inside or outside, and why something cannot be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmark.synthetic_answers import COMPARISONS, LABELS, fail, make_answers
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from contourkv.benchmark.claims import COUNTED, LOST, WON
from contourkv.benchmark.comparisons import Answers, ComparisonSettings
from contourkv.benchmark.tables import build_benchmark_tables
from contourkv.benchmark.verdicts import UNMEASURABLE, VERDICTS, build_verdicts, verdict_section
from contourkv.statistics.summary import INSIDE, OUTSIDE
from contourkv.statistics.tables import read_tables, write_tables

SETTINGS = ComparisonSettings(**COMPARISONS)
TASKS = ("single-prose-512", "keys-prose-512")
METHODS = ("full", "snapkv", "compactor", "kvzip", "contour_kvzip", "contour_compactor")


def judged(frame):
    answers = Answers(frame, LABELS, SETTINGS)
    tables = build_benchmark_tables(answers)
    return answers, tables


def about(table, words, **where):
    """Rows of the claim that has `words` in it."""
    rows = table[table["claim"].str.contains(words, regex=False)]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    assert len(rows)
    return rows


def one(table, words, **where):
    rows = about(table, words, **where)
    assert len(rows) == 1
    return rows.iloc[0]


def small(**more):
    return make_answers(**{"tasks": TASKS, "methods": METHODS, "samples": 8, **more})


def put(frame, score, **where) -> None:
    """Set the score of the rows whose columns are as in `where`."""
    rows = np.logical_and.reduce([frame[name] == value for name, value in where.items()])
    assert rows.any()
    frame.loc[rows, "score"] = score if np.isscalar(score) else score[rows]


@pytest.fixture(scope="module")
def run():
    return judged(make_answers(models=("smollm2-135m", "gemma3-270m"), samples=8))


def test_every_claim_has_a_verdict_of_three_and_words_beside_it(run):
    _, tables = run
    table = tables["verdicts"]
    assert list(table) == VERDICTS
    assert set(table["verdict"]) <= {INSIDE, OUTSIDE, UNMEASURABLE}
    assert (table["note"].str.len() > 0).all() and not table["note"].str.contains("nan").any()
    # A value may stand beside "not measurable": the gap that was seen under a full cache too weak to show more.
    assert (table.loc[table["value"].isna(), "verdict"] == UNMEASURABLE).all()
    assert (table.loc[table["value"].notna(), "n"] > 0).all()
    for words in ("wins", "losses", "ties Compactor", "enforcing", "seeing", "strongest", "free nothing", "at most"):
        about(table, words)


def test_wins_and_losses_are_shares_of_the_counted_comparisons_with_kvzip_as_published(run):
    _, tables = run
    comparisons = tables["comparisons"]
    for words, result in (("wins", "win"), ("losses", "loss")):
        for method in ("ContourKV (KVzip)", "ContourKV (SnapKV)"):
            row = one(tables["verdicts"], words, where=method)
            block = comparisons[(comparisons["method"] == method) & (comparisons["peer"] == "KVzip")]
            block = block[(block["peer_storage"] == "published") & (block["result"] != "not counted")]
            assert row["n"] == len(block)
            assert row["value"] == pytest.approx(100 * (block["result"] == result).mean())
            assert f"{(block['result'] == result).sum()} of {len(block)} comparisons" in row["note"]
            assert f"fewer than the {COUNTED} of the paper" in row["note"]
            # An interval over tasks: the least and the greatest task bound what a draw of them can give.
            by_task = 100 * (block["result"] == result).groupby([block["model"], block["task"]]).mean()
            assert by_task.min() <= row["value_low"] <= row["value_high"] <= by_task.max()


@pytest.fixture(scope="module")
def crafted():
    return judged(small(budgets=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)))


@settings(max_examples=15)
@given(st.integers(0, 16))
def test_a_count_is_inside_where_the_paper_s_own_count_could_have_come_from(crafted, wins):
    answers, tables = crafted
    comparisons = tables["comparisons"].copy()
    block = comparisons.index[
        (comparisons["method"] == "ContourKV (KVzip)")
        & (comparisons["peer"] == "KVzip")
        & (comparisons["peer_storage"] == "published")
    ]
    assert len(block) == 16
    comparisons.loc[block, "result"] = ["win"] * wins + ["loss"] * (16 - wins)
    table = build_verdicts(answers, {**tables, "comparisons": comparisons})
    for words, count, share in (("wins", WON, wins / 16), ("losses", LOST, 1 - wins / 16)):
        row = one(table, words, where="ContourKV (KVzip)")
        low, high = binomtest(count, COUNTED).proportion_ci()
        assert row["value"] == pytest.approx(100 * share)
        covered = row["value_low"] <= 100 * low and 100 * high <= row["value_high"]
        beyond = UNMEASURABLE if covered else OUTSIDE
        assert row["verdict"] == (INSIDE if low <= share <= high else beyond)


def test_too_few_samples_for_any_win_are_not_measurable():
    _, tables = judged(small(samples=5))
    row = one(tables["verdicts"], "wins", where="ContourKV (KVzip)")
    assert row["verdict"] == UNMEASURABLE and row["note"] == "undecidable: no test over 5 samples can reach p <= 0.05"
    _, tables = judged(small(samples=6))
    assert one(tables["verdicts"], "wins", where="ContourKV (KVzip)")["verdict"] != UNMEASURABLE


def test_a_tie_with_compactor_is_an_interval_that_holds_zero():
    frame = small()
    right = (frame["sample"] % 2).astype(float)
    put(frame, right, method="compactor")
    put(frame, right, method="contour_compactor")
    put(frame, 1.0, method="contour_kvzip")
    _, tables = judged(frame)
    tie = one(tables["verdicts"], "ties Compactor", where="ContourKV (Compactor)")
    assert tie["verdict"] == INSIDE and tie["value"] == 0 and tie["n"] == 16
    better = one(tables["verdicts"], "ties Compactor", where="ContourKV (KVzip)")
    assert better["verdict"] == OUTSIDE and better["value"] == pytest.approx(50)
    assert better["value_low"] > 0 and "win / loss / tie" in better["note"]
    absent = one(tables["verdicts"], "ties Compactor", where="ContourKV")
    assert absent["verdict"] == UNMEASURABLE and absent["note"] == "not run"


@pytest.mark.parametrize(("wrong", "verdict"), [(1, OUTSIDE), (3, INSIDE), (5, OUTSIDE)])
def test_enforcing_is_judged_by_the_points_lost_on_all_informative_tasks(wrong, verdict):
    frame = small(budgets=(0.25,))
    put(frame, 1.0, method="kvzip", storage="published")
    put(frame, (frame["sample"] >= wrong).astype(float), method="kvzip", storage="enforced")
    put(frame, 1.0, method="kvzip", storage="rectangular")
    _, tables = judged(frame)
    rows = about(tables["verdicts"], "enforcing").set_index("where")
    row = rows.loc["KVzip, enforced, budget 0.25"]
    assert row["value"] == pytest.approx(100 * wrong / 8) and row["verdict"] == (verdict if wrong != 5 else OUTSIDE)
    assert "holds 100.0% of the full cache, enforced 25.0%" in row["note"]
    assert rows.loc["KVzip, rectangular, budget 0.25", "value"] == 0
    assert rows.loc["KVzip, rectangular, budget 0.25", "verdict"] == OUTSIDE


@pytest.mark.parametrize(("right", "verdict"), [(7, INSIDE), (8, OUTSIDE), (1, OUTSIDE)])
def test_seeing_the_question_is_judged_by_the_largest_gain_on_a_retrieval_task(right, verdict):
    frame = small(query_aware=("snapkv",))
    put(frame, 1.0, method="full")
    put(frame, 0.0, method="snapkv")
    put(
        frame,
        (frame["sample"] < right).astype(float),
        method="snapkv",
        visibility="query_aware",
        task=TASKS[1],
        budget=0.5,
    )
    _, tables = judged(frame)
    row = one(tables["verdicts"], "seeing")
    assert row["where"] == f"SnapKV, {TASKS[1]}, budget 0.5" and row["value"] == pytest.approx(100 * right / 8)
    assert row["verdict"] == verdict and row["n"] == 8
    assert "largest of 4" in row["note"]


def test_a_full_cache_below_the_gap_cannot_show_it():
    frame = small(query_aware=("snapkv",))
    put(frame, (frame["sample"] < 6).astype(float), method="full")
    put(frame, 0.0, method="snapkv")
    _, tables = judged(frame)
    row = one(tables["verdicts"], "seeing")
    assert row["verdict"] == UNMEASURABLE and row["note"].startswith("the full cache itself scores at most 75.0")


def test_the_strongest_method_is_the_one_of_highest_mean_score_and_its_bytes_are_judged():
    frame = small()
    put(frame, 1.0, method="kvzip")
    put(frame, 0.5, method="compactor")
    _, tables = judged(frame)
    row = one(tables["verdicts"], "strongest")
    assert row["where"] == "KVzip" and row["value"] == 100 and row["verdict"] == INSIDE
    put(frame, 1.0, method="compactor")
    put(frame, 0.5, method="kvzip")
    _, tables = judged(frame)
    row = one(tables["verdicts"], "strongest")
    assert row["where"] == "Compactor" and row["verdict"] == OUTSIDE
    assert row["value"] == pytest.approx(37.5, abs=0.01)  # mean of budgets 25% and 50%
    assert "Compactor 1.000 holding 37.5%, KVzip 0.500 holding 100.0%" in row["note"]


def test_masks_that_freed_something_and_contourkv_over_its_budget_are_outside():
    frame = small()
    _, tables = judged(frame)
    assert one(tables["verdicts"], "free nothing")["value"] == 100
    held = one(tables["verdicts"], "at most its nominal")
    assert held["verdict"] == INSIDE and 99 < held["value"] <= 100
    rows = (frame["method"] == "kvzip") & (frame["storage"] == "published") & (frame["budget"] == 0.5)
    frame.loc[rows, "held_bytes"] //= 2
    over = (frame["method"] == "contour_kvzip") & (frame["sample"] == 3) & (frame["task"] == TASKS[0])
    frame.loc[over, "held_bytes"] = frame.loc[over, "nominal_bytes"] + 1
    _, tables = judged(frame)
    masks = one(tables["verdicts"], "free nothing")
    assert masks["verdict"] == OUTSIDE and masks["value"] == pytest.approx(50) and "budget 0.5" in masks["where"]
    held = one(tables["verdicts"], "at most its nominal")
    assert held["verdict"] == OUTSIDE and held["value"] > 100 and "ContourKV (KVzip)" in held["where"]


SINGLE = {"tasks": TASKS, "samples": 6}


@pytest.mark.parametrize(
    ("shape", "words", "reason"),
    [
        ({"tasks": ("chain-512",)}, "wins", "no task is informative"),
        ({"tasks": ("chain-512",)}, "ties Compactor", "no accuracy task is informative"),
        ({"tasks": ("squad-512",)}, "enforcing", "no accuracy task is informative"),
        ({"tasks": ("squad-512",)}, "seeing", "no retrieval task is informative"),
        ({"methods": ("full", "contour")}, "wins", "not run"),
        ({"methods": ("full", "snapkv"), "query_aware": ()}, "seeing", "no method ran with and without the question"),
        ({"methods": ("full", "kvzip")}, "at most its nominal", "not run"),
        ({"methods": ("full", "contour")}, "free nothing", "not run as published"),
        ({"methods": ("full", "contour")}, "strongest", "no method ran as published"),
        ({"failed": "kvzip", "methods": METHODS}, "wins", "KVzip failed: ValueError: fake key"),
        ({"failed": "kvzip", "methods": METHODS}, "free nothing", "failed: ValueError: fake key"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_measured_says_why(shape, words, reason):
    shape = {**SINGLE, **shape}
    failed = shape.pop("failed", None)
    frame = make_answers(**shape)
    _, tables = judged(fail(frame, "ValueError: fake key", method=failed) if failed else frame)
    rows = about(tables["verdicts"], words)
    rows = rows[~rows["where"].isin(["ContourKV (SnapKV)", "ContourKV (Compactor)"])] if words == "wins" else rows
    assert (rows["verdict"] == UNMEASURABLE).all() and rows["value"].isna().all()
    assert rows["note"].str.startswith(reason).any(), rows["note"].tolist()


def test_the_section_reads_the_same_from_memory_and_from_the_files(run, tmp_path):
    _, tables = run
    write_tables(tables, tmp_path, {})
    text = verdict_section(tables)
    assert verdict_section(read_tables(tmp_path)) == text
    assert text.startswith("## Bytes and downstream\n") and text.endswith("\n") and "nan" not in text
    assert "Tasks that tell methods apart: 8 of 10; never counted: chain-512 of SmolLM2-135M" in text
    for _, row in tables["verdicts"].iterrows():
        lines = [line for line in text.splitlines() if row["claim"] in line and row["where"] in line]
        assert any(f"| {row['verdict']} |" in line for line in lines)
    counts = tables["comparison_counts"]
    row = counts[(counts["peer"] == "KVzip") & (counts["method"] == "ContourKV (KVzip)")].iloc[0]
    cells = f"| ContourKV (KVzip) | published | {row['counted']} of {row['listed']} | {row['wins']} / "
    assert cells in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 2  # two tables, no cell broken by a bar


def test_the_section_of_a_run_with_nothing_in_it_is_still_words():
    _, tables = judged(fail(make_answers(samples=2), "broken | pipe", model="smollm2-135m"))
    text = verdict_section(tables)
    assert "Tasks that tell methods apart: 1 of 5" in text and UNMEASURABLE in text and "nan" not in text
    _, tables = judged(make_answers(methods=("full",), samples=2))
    assert "ContourKV met KVzip in no comparison of this run." in verdict_section(tables)


def test_paper_s_shares_are_those_of_its_counts():
    assert math.isclose(100 * WON / COUNTED, 58.125) and math.isclose(100 * LOST / COUNTED, 13.75)

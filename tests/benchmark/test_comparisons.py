"""Paired comparisons: what the tests give against their definitions, and the table against plain pandas."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pandas as pd
import pytest
from benchmark.synthetic_answers import LABELS, METADATA, TASKS, fail, make_answers
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from contourkv.benchmark.comparisons import (
    COMPARED,
    COUNTS,
    LOSS,
    TIE,
    UNCOUNTED,
    WIN,
    Answers,
    ComparisonSettings,
    compare,
    count,
    decidable,
    holm,
    mcnemar_p,
    outcome,
    paired_p,
    read_answers,
    sign_flip_p,
)
from contourkv.benchmark.methods import METHODS
from contourkv.benchmark.records import MERGED, write_answers
from contourkv.errors import InvalidInput
from contourkv.statistics.instances import write_columns

SETTINGS = ComparisonSettings(level=0.05, flips=500, resamples=60, seed=7)
KEYS = ["model", "task", "method", "storage", "visibility", "budget"]
scores = st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=1)
shares = st.lists(st.floats(0, 1), min_size=1, max_size=6)
few = st.lists(st.sampled_from([-1.0, -0.5, -0.1, 0.0, 0.1, 0.3, 1.0]), min_size=1, max_size=9)


def flipped_by_hand(differences) -> float:
    """Share of all sign patterns whose sum is as far from 0 as the one seen, one pattern at a time."""
    return _flipped(tuple(sorted(abs(float(d)) for d in differences)), abs(math.fsum(differences)))


@cache
def _flipped(differences: tuple[float, ...], seen: float) -> float:
    hits = total = 0
    for signs in itertools.product((-1, 1), repeat=len(differences)):
        total += 1
        hits += abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True))) >= seen - 1e-9
    return hits / total


# The tests against their definitions


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_binomial_test_on_the_pairs_that_differ(better, worse):
    p = mcnemar_p(better, worse)
    n = better + worse
    if n == 0:
        assert p == 1
        return
    assert p == pytest.approx(binomtest(better, n, 0.5).pvalue)
    assert p == pytest.approx(min(1, 2 * binom.cdf(min(better, worse), n, 0.5)))
    assert p == mcnemar_p(worse, better)


@given(few)
def test_enumerated_sign_flips_are_all_of_them(differences):
    p, how = sign_flip_p(np.array(differences), 1 << 9, 0)
    assert how == "all sign flips"
    assert p == pytest.approx(flipped_by_hand(differences), abs=1e-12)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=1, max_size=12))
def test_all_sign_flips_of_right_and_wrong_are_mcnemar(differences):
    moved = np.array(differences)
    p, _ = sign_flip_p(moved, 1 << 12, 0)
    assert p == pytest.approx(mcnemar_p(int((moved > 0).sum()), int((moved < 0).sum())))


@given(st.integers(0, 2**32 - 1), st.integers(1, 2000))
def test_drawn_sign_flips_never_give_zero_and_come_near_the_exact_value(seed, flips):
    differences = np.random.default_rng(seed).normal(0.3, 1, 11)
    assume(2**11 > flips)
    p, how = sign_flip_p(differences, flips, seed)
    assert how == "sign flips drawn"
    hits = p * (flips + 1) - 1
    assert hits == pytest.approx(round(hits), abs=1e-6) and 0 <= round(hits) <= flips
    exact, _ = sign_flip_p(differences, 2**11, 0)
    assert abs(p - exact) <= 1 / (flips + 1) + 6 * math.sqrt(0.25 / flips)
    assert sign_flip_p(differences, flips, seed) == (p, how)


@given(scores, st.booleans())
def test_swapping_sides_turns_the_sign_and_win_into_loss(pairs, single):
    first, second = np.array(pairs).T
    p, how = paired_p(first, second, single, SETTINGS)
    assert (p, how) == paired_p(second, first, single, SETTINGS)
    assert 0 < p <= 1
    difference = float((first - second).mean())
    result = outcome(p, difference, SETTINGS.level)
    assert outcome(p, -difference, SETTINGS.level) == {WIN: LOSS, LOSS: WIN, TIE: TIE}[result]
    assert result == TIE or (result == WIN) == (difference > 0)


@given(scores, st.booleans())
def test_equal_scores_tie_with_p_of_one(pairs, single):
    first = np.array(pairs)[:, 0]
    p, _ = paired_p(first, first.copy(), single, SETTINGS)
    assert p == 1 and outcome(p, 0.0, SETTINGS.level) == TIE


def test_mcnemar_is_used_for_right_and_wrong_of_one_question_and_no_other():
    first, second = np.array([1.0, 0, 1, 1]), np.array([0.0, 0, 1, 0])
    assert paired_p(first, second, True, SETTINGS)[1] == "McNemar"
    assert paired_p(first, second, False, SETTINGS)[1] == "all sign flips"
    assert paired_p(first, second / 2, True, SETTINGS)[1] == "all sign flips"
    assert paired_p(np.arange(12.0), np.zeros(12), True, SETTINGS)[1] == "sign flips drawn"


@given(shares)
def test_holm_is_the_closed_test_of_bonferroni(p):
    # Over every set of hypotheses that holds i: reject i if each of these sets is rejected by Bonferroni.
    adjusted = holm(p)
    for i in range(len(p)):
        sets = [s for r in range(1, len(p) + 1) for s in itertools.combinations(range(len(p)), r) if i in s]
        assert adjusted[i] == pytest.approx(max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets), abs=1e-12)


@given(shares, st.randoms(use_true_random=False))
def test_holm_keeps_order_is_never_below_raw_nor_above_bonferroni(p, random):
    adjusted = holm(p)
    assert (adjusted >= p).all() and (adjusted <= np.minimum(1, len(p) * np.array(p))).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()
    order = list(range(len(p)))
    random.shuffle(order)
    np.testing.assert_array_equal(holm([p[i] for i in order]), adjusted[order])
    assert holm([]).size == 0


@given(st.integers(1, 12), st.sampled_from([0.001, 0.01, 0.05, 0.2]))
def test_decidable_says_whether_the_most_extreme_scores_would_count(samples, level):
    reached = mcnemar_p(samples, 0) <= level
    assert decidable(samples, level) == reached
    assert (flipped_by_hand([0.3] * samples) <= level) == reached


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20), st.integers(0, 1000))
def test_intervals_are_those_of_samples_drawn_anew(values, seed):
    answers = object.__new__(Answers)
    answers.settings, answers._scopes = ComparisonSettings(resamples=50, seed=seed), {}
    values = np.array(values)
    found = answers.estimate({"task": values})
    drawn = np.random.default_rng(seed).multinomial(values.size, np.full(values.size, 1 / values.size), 50)
    means = np.sort([np.repeat(values, counts).mean() for counts in drawn])
    assert found.value == pytest.approx(values.mean())
    # The 2.5% and 97.5% points of 50 lie between order statistics: the outer ones.
    assert (found.low, found.high) == pytest.approx((means[1], means[48]))
    mirrored = answers.estimate({"task": -values})
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


def test_a_pooled_estimate_is_the_mean_of_its_tasks():
    answers = object.__new__(Answers)
    answers.settings, answers._scopes = SETTINGS, {}
    found = answers.estimate({"b": np.array([1.0, 0, 0, 0]), "a": np.array([1.0, 1])})
    assert found.value == pytest.approx((0.25 + 1) / 2)
    assert found.low >= 0.5 and found.high <= 1  # task a has no spread, and no draw leaves a task out
    assert answers.estimate({"a": np.array([1.0])}).note == "no interval: 1 sample in a"
    assert math.isnan(answers.estimate({}).value) and answers.estimate({"a": np.zeros(0)}).note == "no questions"


# The table of answers


@pytest.fixture(scope="module")
def frame():
    peers = ("full", "knorm", "snapkv", "compactor", "kvzip", "quest", "random")
    methods = (*peers, *(name for name, method in METHODS.items() if method.keeps == "ragged"))
    return make_answers(models=("smollm2-135m", "gemma3-270m"), methods=methods, samples=8)


@pytest.fixture(scope="module")
def answers(frame):
    return Answers(frame, LABELS, SETTINGS)


@pytest.fixture(scope="module")
def table(answers):
    return compare(answers)


def small() -> pd.DataFrame:
    return make_answers(tasks=("single-prose-512", "squad-512"), methods=("full", "snapkv", "contour"), samples=2)


def test_answers_come_back_as_they_were_written(tmp_path):
    frame = small()
    write_answers(tmp_path / "answers.parquet", frame, METADATA)
    read = read_answers(tmp_path / "answers.parquet")
    pd.testing.assert_frame_equal(read, frame)
    assert [model["name"] for model in read.attrs["metadata"]["models"]] == ["gemma3-270m", "smollm2-135m"]


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("method", "snapkw", "expected one of full, streaming_llm"),
        ("storage", "masked", "expected one of published, enforced, rectangular, got 'masked'"),
        ("visibility", "blind", "expected one of agnostic, query_aware"),
        ("status", "lost", "expected one of ok, failed"),
        ("measure", "f1", "expected one of accuracy, nats"),
        ("budget", 1.5, r"expected a share of the full cache in \(0, 1\]"),
        ("score", 1.2, r"expected an accuracy in \[0, 1\]"),
        ("score", np.nan, "expected a number where the question did not fail"),
        ("score", np.inf, "expected a number where the question did not fail"),
        ("status", "failed", "expected no number where the question failed"),
        ("held_bytes", -1, "expected a number >= 0, got -1"),
        ("sample", -1, "expected a number >= 0"),
        ("length", 7, "expected one value for task single-prose-512 of smollm2-135m, got 512, 7"),
        ("floor", 0.5, "expected one value for task"),
        ("budget", 0.5, "comes twice in the cell"),
    ],
)
def test_a_bad_value_is_named_with_file_and_column(tmp_path, column, value, said):
    frame = small()
    row = frame.index[(frame["method"] == "snapkv") & (frame["measure"] == "accuracy") & (frame["budget"] == 0.25)][0]
    frame[column] = frame[column].astype(object if isinstance(value, str) else type(value))
    frame.loc[row, column] = value
    path = tmp_path / "answers.parquet"
    write_answers(path, frame, METADATA)
    with pytest.raises(InvalidInput, match=said) as error:
        read_answers(path)
    named = "score" if (column, value) == ("status", "failed") else "question_id" if "twice" in said else column
    assert str(error.value).startswith(f"{path}: column {named}: ") and "\n" not in str(error.value)


def test_missing_files_columns_and_rows_are_named(tmp_path):
    path = tmp_path / "answers.parquet"
    with pytest.raises(InvalidInput, match=r"answers\.parquet: no such file"):
        read_answers(path)
    write_answers(path, small().drop(columns="held_bytes"), METADATA)
    with pytest.raises(InvalidInput, match="columns missing: held_bytes"):
        read_answers(path)
    write_columns(path, small().assign(score="high"), {**MERGED, "score": "category"}, METADATA)
    with pytest.raises(InvalidInput, match="column score is not float64"):
        read_answers(path)
    write_answers(path, small().iloc[:0], METADATA)
    with pytest.raises(InvalidInput, match=r"answers\.parquet: no answers"):
        read_answers(path)


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"level": 0}, r"benchmark.comparisons.level: expected a number in \(0, 1\), got 0"),
        ({"flips": 0}, "benchmark.comparisons.flips: expected a whole number >= 1, got 0"),
        ({"resamples": 2.5}, "benchmark.comparisons.resamples: expected a whole number"),
        ({"seed": -1}, "benchmark.comparisons.seed: expected a whole number >= 0"),
        ({"alpha": 0.1}, "benchmark.comparisons.alpha: no such key; expected some of level, flips, resamples, seed"),
    ],
)
def test_settings_are_checked(mapping, said):
    with pytest.raises(InvalidInput, match=said):
        ComparisonSettings.of(mapping)


def test_two_models_must_not_be_called_the_same():
    with pytest.raises(InvalidInput, match="labels: expected distinct labels"):
        Answers(
            make_answers(models=("a", "b"), methods=("full",), tasks=("squad-512",), samples=1), {"a": "x", "b": "x"}
        )


# The comparisons against plain pandas


def by_hand(frame: pd.DataFrame) -> pd.DataFrame:
    """The comparisons with p-values by enumeration, from the answers and nothing else."""
    rows = []
    ragged = {name for name, method in METHODS.items() if method.keeps == "ragged"}
    frame = frame[frame["visibility"] == "agnostic"]
    cells = {key: rows.set_index(["sample", "question"]) for key, rows in frame.groupby(KEYS)}
    for (model, task, method, _, visibility, budget), one in cells.items():
        if method not in ragged:
            continue
        full = cells[model, task, "full", "published", visibility, 1.0]["score"].groupby("sample").mean().mean()
        accuracy = one["measure"].iloc[0] == "accuracy"
        for key, other in cells.items():
            peer, storage = key[2], key[3]
            if key[:2] != (model, task) or peer in ragged or (key[5] != budget and peer != "full"):
                continue
            both = one[["score"]].join(other[["score"]], rsuffix="_peer", how="inner")
            means = both.groupby("sample").mean()
            d = (means["score"] - means["score_peer"]).to_numpy()
            p = flipped_by_hand(d)
            rows.append(
                {
                    "model": LABELS[model],
                    "task": task,
                    "budget": budget,
                    "method": METHODS[method].label,
                    "peer": METHODS[peer].label,
                    "peer_storage": storage,
                    "samples": len(means),
                    "questions": len(both),
                    "score": means["score"].mean(),
                    "peer_score": means["score_peer"].mean(),
                    "difference": d.mean(),
                    "p": p,
                    "counted": not (accuracy and full < 0.6),
                    "held_bytes": one["held_bytes"].groupby("sample").mean().mean(),
                    "peer_held_bytes": other["held_bytes"].groupby("sample").mean().mean(),
                }
            )
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def hand(frame):
    return by_hand(frame)


PLACE = ["model", "task", "budget", "method", "peer", "peer_storage"]


def test_the_comparisons_are_those_of_plain_pandas(table, hand):
    assert list(table) == COMPARED
    one, other = table.set_index(PLACE).sort_index(), hand.set_index(PLACE).sort_index()
    assert one.index.equals(other.index) and one.index.is_unique
    for name in ("samples", "questions", "score", "peer_score", "difference", "p", "held_bytes", "peer_held_bytes"):
        np.testing.assert_allclose(one[name].astype(float), other[name].astype(float), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(one["result"] != UNCOUNTED, other["counted"])
    counted = other[other["counted"]]
    won = (counted["p"] <= SETTINGS.level) & (counted["difference"] > 0)
    lost = (counted["p"] <= SETTINGS.level) & (counted["difference"] < 0)
    expected = np.select([won, lost], [WIN, LOSS], TIE)
    np.testing.assert_array_equal(one.loc[counted.index, "result"], expected)
    assert {WIN, LOSS, TIE, UNCOUNTED} <= set(table["result"])


def test_holms_family_is_one_method_against_one_peer_in_one_storage(table, hand):
    checked = 0
    for (method, peer, storage), block in hand[hand["counted"]].groupby(["method", "peer", "peer_storage"]):
        p = block["p"].sort_values()
        steps = (p * np.arange(len(p), 0, -1)).cummax().clip(upper=1)
        rows = table[(table["method"] == method) & (table["peer"] == peer) & table["p_holm"].notna()]
        rows = rows[rows["peer_storage"] == storage]
        np.testing.assert_allclose(np.sort(rows["p_holm"]), np.sort(steps), rtol=1e-12)
        assert len(rows) == len(block)
        assert (rows["p_holm"] >= rows["p"]).all()
        kept = (rows["p_holm"] <= SETTINGS.level).to_numpy()
        np.testing.assert_array_equal(rows["result_holm"] != TIE, kept)
        np.testing.assert_array_equal(rows["result"][kept], rows["result_holm"][kept])
        checked += 1
    assert checked == len(table.groupby(["method", "peer", "peer_storage"]))


def test_the_counts_are_those_of_the_comparisons(table):
    counts = count(table)
    assert list(counts) == COUNTS
    left_out = counts["uninformative"] + counts["undecidable"] + counts["failed"]
    assert (counts["listed"] == counts["counted"] + left_out).all()
    for ending in ("wins", "holm_wins"):
        prefix = ending.removesuffix("wins")
        total = counts[f"{prefix}wins"] + counts[f"{prefix}losses"] + counts[f"{prefix}ties"]
        assert (total == counts["counted"]).all()
    assert (counts["higher"] + counts["lower"] + counts["equal"] == counts["counted"]).all()
    for _, row in counts.iterrows():
        block = table[(table["method"] == row["method"]) & (table["peer"] == row["peer"])]
        block = block[block["peer_storage"] == row["peer_storage"]]
        if row["model"] != "all models":
            block = block[block["model"] == row["model"]]
        good = block[block["result"] != UNCOUNTED]
        right = good[good["measure"] == "accuracy"]
        assert row["wins"] == (good["result"] == "win").sum() and row["losses"] == (good["result"] == "loss").sum()
        assert row["higher"] == (good["difference"] > 1e-12).sum()
        assert row["accuracy_counted"] == len(right) and row["accuracy_wins"] == (right["result"] == "win").sum()
        assert row["held_share"] == pytest.approx((good["held_bytes"] / good["full_bytes"]).mean())
        assert row["peer_held_share"] == pytest.approx((good["peer_held_bytes"] / good["full_bytes"]).mean())
    parts, whole = counts[counts["model"] != "all models"], counts[counts["model"] == "all models"]
    assert parts["wins"].sum() == whole["wins"].sum() and parts["listed"].sum() == len(table)


def test_kvzip_comes_first_and_full_caches_hold_everything(table):
    assert table["peer"].iloc[0] == "KVzip"
    assert count(table)["peer"].iloc[0] == "KVzip"
    published = table[(table["peer"] == "KVzip") & (table["peer_storage"] == "published")]
    assert (published["peer_held_bytes"] == published["full_bytes"]).all()
    assert (published["held_bytes"] <= published["nominal_bytes"]).all()
    full = table[table["peer"] == "Full cache"]
    assert len(full) == len(published) and (full["budget"] < 1).all()


# What is not counted


def test_an_uninformative_task_is_listed_with_its_reason_and_never_counted(answers, table):
    rows = table[table["task"] == "chain-512"]
    assert len(rows) and (rows["result"] == UNCOUNTED).all() and (rows["result_holm"] == UNCOUNTED).all()
    assert rows["note"].str.match(r"uninformative: full-cache accuracy 0\.\d+ < 0\.60").all()
    assert rows["difference"].notna().all() and rows["p_holm"].isna().all()
    assert answers.informative("smollm2-135m", "squad-512")[0]


@pytest.mark.parametrize(("samples", "decided"), [(5, False), (6, True)])
def test_a_pair_of_too_few_samples_for_any_test_is_listed_and_never_counted(samples, decided):
    frame = make_answers(methods=("full", "kvzip", "contour"), samples=samples)
    table = compare(Answers(frame, LABELS, SETTINGS))
    good = table[~table["note"].str.startswith("uninformative")]
    assert len(good) and ((good["result"] != UNCOUNTED) == decided).all()
    assert good["note"].str.startswith("undecidable: no test over 5 samples").all() != decided
    counts = count(table)
    assert (counts["undecidable"].sum() == 0) == decided and (counts["failed"] == 0).all()


@pytest.mark.parametrize(("score", "good"), [(3, True), (2, False)])
def test_sixty_percent_is_informative(score, good):
    frame = make_answers(tasks=("single-prose-512",), methods=("full",), samples=5)
    frame["score"] = (frame["sample"] < score).astype(float)
    assert Answers(frame).informative("smollm2-135m", "single-prose-512")[0] is good


def test_a_failed_cell_is_reported_with_its_message_and_counts_nowhere(frame):
    some = fail(frame, "ValueError: fake key\nnot found | 8", method="kvzip", storage="published", budget=0.25)
    table = compare(Answers(some, LABELS, SETTINGS))
    rows = table[(table["peer"] == "KVzip") & (table["peer_storage"] == "published") & (table["budget"] == 0.25)]
    assert (rows["result"] == UNCOUNTED).all() and (rows["samples"] == 0).all() and rows["difference"].isna().all()
    assert rows["note"].str.contains("KVzip failed: ValueError: fake key not found / 8", regex=False).all()
    counts = count(table)
    row = counts[(counts["peer"] == "KVzip") & (counts["peer_storage"] == "published")].iloc[0]
    tasks = len(TASKS) - 1
    assert row["failed"] == 2 * tasks and row["counted"] == 2 * tasks and row["listed"] == 4 * len(TASKS)


def test_one_failed_question_fails_its_cell(frame):
    some = fail(frame, "out of luck", method="contour", task="single-prose-512", sample=3, budget=0.5)
    table = compare(Answers(some, LABELS, SETTINGS))
    rows = table[(table["method"] == "ContourKV") & (table["task"] == "single-prose-512") & (table["budget"] == 0.5)]
    assert (rows["result"] == UNCOUNTED).all()
    assert rows["note"].str.contains("ContourKV 1 of 8 questions failed: out of luck", regex=False).all()


def test_only_questions_that_both_answered_are_compared(frame):
    gone = (frame["method"] == "snapkv") & (frame["task"] == "reuse-prose-1024") & (frame["question"] > 1)
    gone |= (frame["method"] == "knorm") & (frame["sample"] > 3)
    some = frame[~gone & (frame["model"] == "smollm2-135m")]
    table = compare(Answers(some, LABELS, SETTINGS)).set_index(PLACE).sort_index()
    expected = by_hand(some).set_index(PLACE).sort_index()
    for name in ("samples", "questions", "difference", "p"):
        np.testing.assert_allclose(table[name].astype(float), expected[name].astype(float), atol=1e-12)
    assert set(table.xs("SnapKV", level="peer").xs("reuse-prose-1024", level="task")["note"]) == {
        "16 of 32 questions in common"
    }
    none = frame[~((frame["method"] == "knorm") & (frame["sample"] > 3))]
    none = none[~(none["method"].str.startswith("contour") & (none["sample"] < 4))]
    rows = compare(Answers(none, LABELS, SETTINGS))
    rows = rows[rows["peer"] == "Knorm"]
    assert (rows["result"] == UNCOUNTED).all() and rows["note"].str.endswith("no question in common").all()


def test_one_sample_ties_without_an_interval():
    table = compare(Answers(make_answers(samples=1), LABELS, SETTINGS))
    assert (table["p"] == 1).all() and set(table["result"]) <= {TIE, UNCOUNTED}
    assert table["difference_low"].isna().all() and table["note"].str.contains("no interval: 1 sample in").all()


def test_without_contourkv_or_without_peers_there_is_nothing_to_compare():
    for methods in (("full", "kvzip"), ("contour",)):
        table = compare(Answers(make_answers(methods=methods, samples=2), LABELS, SETTINGS))
        assert table.empty and list(table) == COMPARED
        assert count(table).empty


def test_a_missing_full_cache_leaves_no_accuracy_task_informative():
    frame = make_answers(methods=("kvzip", "contour"), samples=6)
    table = compare(Answers(frame, LABELS, SETTINGS))
    assert set(table[table["result"] != UNCOUNTED]["measure"]) == {"nats"}
    assert (table[table["measure"] == "accuracy"]["note"] == "uninformative: full cache not run").all()

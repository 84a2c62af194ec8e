"""The benchmark's tables against plain pandas, what they say where something is missing, and their files."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from benchmark.synthetic_answers import COMPARISONS, LABELS, METADATA, TASKS, fail, make_answers
from hypothesis import given, settings
from hypothesis import strategies as st

from contourkv.benchmark.claims import POOLED
from contourkv.benchmark.comparisons import Answers, ComparisonSettings
from contourkv.benchmark.methods import METHODS
from contourkv.benchmark.records import write_answers
from contourkv.benchmark.tables import TERMS, build_benchmark_tables, write_benchmark_tables
from contourkv.statistics import read_tables

NAMES = [
    *("tasks", "scores", "comparisons", "comparison_counts", "enforcing", "visibility", "memory", "decomposition"),
    *("reuse", "verdicts"),
]
KEYS = ["model", "task", "method", "storage", "visibility", "budget"]
LABEL = {name: method.label for name, method in METHODS.items()}
SETTINGS = ComparisonSettings(**COMPARISONS)
ACCURATE = ["single-prose-512", "keys-prose-512", "reuse-prose-1024"]


@pytest.fixture(scope="module")
def frame():
    return make_answers(models=("smollm2-135m", "gemma3-270m"), samples=8, cost_methods=("full", "snapkv", "kvzip"))


@pytest.fixture(scope="module")
def tables(frame):
    return build_benchmark_tables(Answers(frame, LABELS, SETTINGS))


@pytest.fixture(scope="module")
def cells(frame):
    """Mean score of each sample, of each cell, by plain pandas."""
    return frame.groupby([*KEYS, "sample"])["score"].mean()


def of(cells, **where) -> pd.Series:
    """The samples' scores of one cell."""
    return cells.loc[tuple(where[name] for name in KEYS)]


def named(row, **where) -> dict:
    """Keys of the answers for a row of a table."""
    model = next(name for name, label in LABELS.items() if label == row["model"])
    method = next((name for name, label in LABEL.items() if label == row["method"]), None)
    keys = {"model": model, "task": row["task"], "method": method, "budget": row.get("budget")}
    return {**keys, "storage": row.get("storage"), "visibility": row.get("visibility"), **where}


def drawn(values: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of `values`, samples drawn one by one from the same random numbers."""
    n = values.size
    rng = np.random.default_rng(SETTINGS.seed)
    counts = rng.multinomial(n, np.full(n, 1 / n), SETTINGS.resamples)
    means = np.sort([np.repeat(values, count).mean() for count in counts])
    last = SETTINGS.resamples - 1
    return means[int(np.floor(0.025 * last))], means[int(np.ceil(0.975 * last))]


# Each table against plain pandas


def test_all_tables_are_there_with_captions_and_intervals_around_their_points(tables):
    assert list(tables) == NAMES
    for name, table in tables.items():
        assert len(table) and "\n" not in table.attrs["caption"] and len(table.attrs["caption"]) > 60
        assert "answers in" in table.attrs["caption"]
        assert table["note"].map(lambda note: isinstance(note, str)).all()
        for column in table:
            if f"{column}_low" in table:
                rows = table[[f"{column}_low", column, f"{column}_high"]].astype(float).dropna()
                assert len(rows), (name, column)
                assert (rows.iloc[:, 0] <= rows.iloc[:, 1] + 1e-12).all()
                assert (rows.iloc[:, 1] <= rows.iloc[:, 2] + 1e-12).all()


def test_tasks(tables, frame, cells):
    table = tables["tasks"].set_index(["model", "task"])
    assert len(table) == 2 * len(TASKS)
    full = frame[frame["method"] == "full"]
    for (model, task), rows in full.groupby(["model", "task"]):
        row = table.loc[LABELS[model], task]
        means = rows.groupby("sample")["score"].mean()
        assert row["full"] == pytest.approx(means.mean()) and row["samples"] == len(means)
        assert (row["full_low"], row["full_high"]) == pytest.approx(drawn(means.to_numpy()))
        assert row["questions"] == len(rows)
        good = rows["measure"].iloc[0] == "nats" or means.mean() >= 0.6
        assert row["informative"] == ("yes" if good else "no")
        np.testing.assert_equal(row["floor"], rows["floor"].iloc[0])
    assert set(table.loc[table["informative"] == "no"].index.get_level_values("task")) == {"chain-512"}


def test_scores(tables, frame, cells):
    table = tables["scores"]
    assert len(table) == frame[KEYS].drop_duplicates().shape[0]
    bytes_ = frame.groupby([*KEYS, "sample"])[["full_bytes", "nominal_bytes", "held_bytes", "score_seconds"]].mean()
    for _, row in table.iterrows():
        keys = named(row)
        values = of(cells, **keys)
        assert row["score"] == pytest.approx(values.mean())
        full = of(cells, **(keys | {"method": "full", "storage": "published", "visibility": "agnostic", "budget": 1.0}))
        assert row["full"] == pytest.approx(full.mean())
        means = bytes_.loc[tuple(keys[name] for name in KEYS)].mean()
        for name in means.index:
            assert row[name] == pytest.approx(means[name])
        assert row["held_share"] == pytest.approx(means["held_bytes"] / means["full_bytes"])
    for _, row in table.iloc[::40].iterrows():
        assert (row["score_low"], row["score_high"]) == pytest.approx(drawn(of(cells, **named(row)).to_numpy()))


def paired(tables, cells, name, first, second, columns) -> None:
    """Check score columns and the difference of a table whose rows set one cell against another."""
    table = tables[name]
    checked = {"points": 0, "nats": 0, "pooled": 0}
    for _, row in table.iterrows():
        keys = named(row)
        tasks = [row["task"]] if row["task"] != POOLED else ACCURATE
        some = []
        for task in tasks:
            sides = [keys | {"task": task} | side for side in (first(row), second(row))]
            if all(tuple(side[name] for name in KEYS) in cells.index.droplevel("sample") for side in sides):
                some.append([of(cells, **side) for side in sides])
        means = np.mean([[one.mean(), other.mean()] for one, other in some], axis=0)
        assert (row[columns[0]], row[columns[1]]) == pytest.approx(tuple(means))
        scale = {"points": 100, "nats": 1}[row["unit"]]
        assert row[columns[2]] == pytest.approx(scale * (means[0] - means[1]))
        assert row["tasks"] == len(some) and row["samples"] == sum(len(one) for one, _ in some)
        if row["task"] != POOLED and not checked[row["unit"]] % 7:
            interval = drawn(scale * (some[0][0] - some[0][1]).to_numpy())
            assert (row[f"{columns[2]}_low"], row[f"{columns[2]}_high"]) == pytest.approx(interval)
        checked["pooled" if row["task"] == POOLED else row["unit"]] += 1
    assert all(checked[kind] for kind in ("points", "pooled"))


def test_enforcing(tables, cells):
    paired(
        tables,
        cells,
        "enforcing",
        lambda row: {"storage": "published"},
        lambda row: {"storage": row["storage"]},
        ("published", "score", "lost"),
    )
    table = tables["enforcing"]
    assert set(table["method"]) == {label for name, label in LABEL.items() if METHODS[name].keeps == "heads"}
    assert set(table["storage"]) == {"enforced", "rectangular"} and set(table["visibility"]) == {
        "agnostic",
        "query_aware",
    }
    assert (table["published_held_bytes"] == table["full_bytes"]).all()
    assert (table["held_bytes"] <= table["nominal_bytes"]).all()
    assert (table["paper"] == "14.1 to 62.2").all()


def test_visibility(tables, cells):
    paired(
        tables,
        cells,
        "visibility",
        lambda row: {"visibility": "query_aware"},
        lambda row: {"visibility": "agnostic"},
        ("query_aware", "agnostic", "gained"),
    )
    table = tables["visibility"]
    assert set(table["method"]) == {"TOVA", "SnapKV", "H2O", "AdaKV (SnapKV)", "KVzip"}
    assert set(table["storage"]) == {"enforced"} and set(table["paper"]) == {"87.6"}


def test_memory(tables, frame):
    table = tables["memory"]
    keys = ["model", "length", "method", "storage", "visibility", "budget"]
    names = ["full_bytes", "nominal_bytes", "held_bytes", "payload_bytes", "metadata_bytes", "read_bytes", "peak_bytes"]
    names += ["compress_seconds", "score_seconds", "tokens_per_s", "prefill_seconds", "left_bytes", "probed_bytes"]
    contexts = frame.groupby([*keys, "task", "sample"])[names].mean().groupby(keys)
    means, sizes = contexts.mean(), contexts.size()
    largest = (frame["held_bytes"] / frame["nominal_bytes"]).groupby([frame[key] for key in keys]).max()
    assert len(table) == len(means)
    for _, row in table.iterrows():
        place = {**named({**row, "task": ""}), "length": row["length"]}
        key = tuple(place[name] for name in keys)
        np.testing.assert_allclose(row[names].astype(float), means.loc[key], rtol=1e-12)
        assert row["contexts"] == sizes.loc[key] and row["largest_over_nominal"] == pytest.approx(largest.loc[key])
        assert row["held_over_nominal"] == pytest.approx(row["held_bytes"] / row["nominal_bytes"])
        assert row["held_bytes"] == pytest.approx(row["payload_bytes"] + row["metadata_bytes"] + row["slack_bytes"])
        probed = key[2] in ("full", "snapkv", "kvzip") and key[3] != "rectangular" and key[4] == "agnostic"
        assert (row["note"] == "cost not probed") == (not probed) and np.isnan(row["peak_share"]) == (not probed)


def test_decomposition(tables, cells):
    table = tables["decomposition"]
    singles = ["single-prose-512", "keys-prose-512"]
    assert set(table["method"]) == {LABEL[name] for name in METHODS if name not in ("full", "random")}
    known = missing = 0
    for _, row in table.iterrows():
        keys = named(row)
        method = METHODS[keys["method"]]
        sees = "agnostic" if method.keeps == "pages" else method.sees
        own = "published" if "published" in method.storages else "enforced"
        sides = {
            "published": {"storage": own, "visibility": sees},
            "enforced": {"storage": "enforced", "visibility": sees},
            "agnostic": {"storage": "enforced", "visibility": "agnostic"},
            "baseline": {"method": "snapkv", "storage": "enforced", "visibility": "agnostic"},
        }
        values = {}
        for name, side in sides.items():
            try:
                tasks = singles if row["task"] == POOLED else [row["task"]]
                values[name] = np.mean([of(cells, **(keys | {"task": task} | side)).mean() for task in tasks])
            except KeyError:
                values[name] = np.nan
        ends = (
            ("published", "baseline"),
            ("published", "enforced"),
            ("enforced", "agnostic"),
            ("agnostic", "baseline"),
        )
        for term, (one, other) in zip(TERMS, ends, strict=True):
            expected = 100 * (values[one] - values[other])
            if not (row["task"] == POOLED and row["tasks"] == 0):
                np.testing.assert_allclose(row[term], expected, atol=1e-9)
            known, missing = known + ~np.isnan(row[term]), missing + np.isnan(row[term])
        if not np.isnan(row["memory"]) and not np.isnan(row["information"]):
            total = row["memory"] + row["information"] + row["compute_ranking"]
            assert total == pytest.approx(row["gap"], abs=1e-9)
        else:
            assert "not run" in row["note"] or "not possible: Quest frees nothing" in row["note"]
    assert known and missing
    quest = table[table["method"] == "Quest"]
    assert quest["gap"].notna().all() and quest["memory"].isna().all()
    ours = table[table["method"].str.startswith("ContourKV")]
    assert (ours["memory"] == 0).all() and (ours["information"] == 0).all()
    snapkv = table[table["method"] == "SnapKV"]
    assert (snapkv["compute_ranking"] == 0).all() and snapkv["compress_seconds"].notna().any()


def test_reuse(tables, frame):
    table = tables["reuse"]
    assert set(table["task"]) == {"reuse-prose-1024"} and set(table["question"]) == {0, 1, 2, 3}
    rows = frame[(frame["task"] == "reuse-prose-1024") & (frame["visibility"] == "agnostic")]
    wide = rows.pivot(index=[*KEYS, "sample"], columns="question", values="score")
    for _, row in table.iterrows():
        keys = named(row, visibility="agnostic")
        mine = wide.loc[tuple(keys[name] for name in KEYS)]
        full = wide.loc[(keys["model"], row["task"], "full", "published", "agnostic", 1.0)]
        question = int(row["question"])
        assert row["score"] == pytest.approx(mine[question].mean()) and row["samples"] == len(mine)
        change, expected = mine[question] - mine[0], full[question] - full[0]
        assert row["change"] == pytest.approx(change.mean(), abs=1e-12)
        assert row["beyond_full"] == pytest.approx((change - expected).mean(), abs=1e-12)
    assert (table[table["question"] == 0][["change", "beyond_full"]] == 0).all().all()
    assert (table[table["method"] == "Full cache"]["beyond_full"] == 0).all()


# Properties


@settings(max_examples=12)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
def test_terms_add_up_to_the_gap_whatever_the_scores(seed, samples):
    frame = make_answers(
        tasks=("single-prose-512", "reuse-prose-1024"),
        methods=("full", "snapkv", "adakv_snapkv", "kvzip", "contour"),
        budgets=(0.25,),
        samples=samples,
    )
    rng = np.random.default_rng(seed)
    others = frame["method"] != "full"
    frame.loc[others, "score"] = rng.integers(0, 4, others.sum()) / 3
    frame.loc[~others, "score"] = 1.0
    table = build_benchmark_tables(Answers(frame, LABELS, ComparisonSettings(flips=8, resamples=9)))["decomposition"]
    whole = table.dropna(subset=list(TERMS))
    assert len(whole) >= 4
    total = whole["memory"] + whole["information"] + whole["compute_ranking"]
    np.testing.assert_allclose(total, whole["gap"], atol=1e-10)
    np.testing.assert_allclose(100 * (whole["published"] - whole["baseline"]), whole["gap"], atol=1e-10)


def test_the_order_of_the_rows_does_not_matter_to_a_byte(frame, tmp_path):
    some = frame[frame["task"].isin(["single-prose-512", "squad-512"]) | frame["method"].isin(["full", "tova"])]
    some = fail(some, "broken", method="tova", sample=1)
    for number, rows in enumerate((some, some.sample(frac=1, random_state=1), some.iloc[::-1])):
        write_answers(tmp_path / f"{number}.parquet", rows.reset_index(drop=True), METADATA)
        write_benchmark_tables(tmp_path / f"{number}.parquet", tmp_path / str(number), "unit", LABELS, COMPARISONS)
    files = sorted(path.name for path in (tmp_path / "0").iterdir())
    assert files == sorted(f"{name}.{ending}" for name in NAMES for ending in ("csv", "md"))
    for name in files:
        first = (tmp_path / "0" / name).read_bytes()
        assert first == (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


# The files


def test_files_hold_the_tables_with_captions_and_provenance(frame, tmp_path):
    some = frame[frame["task"].isin(["single-prose-512", "chain-512"]) & (frame["model"] == "smollm2-135m")]
    write_answers(tmp_path / "answers.parquet", some, METADATA)
    written = write_benchmark_tables(tmp_path / "answers.parquet", tmp_path / "out", "unit", LABELS, COMPARISONS)
    assert [path.name for path in written] == [f"{name}.{ending}" for name in NAMES for ending in ("csv", "md")]
    built = build_benchmark_tables(Answers(some, LABELS, SETTINGS))
    read = read_tables(tmp_path / "out")
    for name, table in built.items():
        assert list(read[name]) == list(table) and len(read[name]) == len(table)
        for column in table.select_dtypes("number"):
            np.testing.assert_allclose(read[name][column], table[column].astype(float), rtol=1e-9, atol=1e-12)
        text = (tmp_path / "out" / f"{name}.md").read_text()
        assert text.splitlines()[0] == table.attrs["caption"] and text.splitlines()[1] == ""
        assert text.splitlines()[-1].startswith("Provenance: contourkv ")
        assert "bootstrap 60 resamples, seed 421" in text
    assert "smollm2-135m@abc123" in (tmp_path / "out" / "tasks.csv").read_text()


def test_making_tables_loads_no_torch():
    code = "import contourkv.benchmark.tables, sys; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Where something is missing


def build(frame):
    return build_benchmark_tables(Answers(frame, LABELS, SETTINGS))


def check_defined(tables, tmp_path) -> None:
    """Every table has a row, its csv comes back, and no md shows a bare nan."""
    from contourkv.statistics.tables import write_tables

    write_tables(tables, tmp_path, {})
    read = read_tables(tmp_path)
    for name, table in tables.items():
        assert len(table) and len(read[name]) == len(table)
        text = (tmp_path / f"{name}.md").read_text()
        assert "nan" not in text.replace("nance", "") and "None" not in text


def test_one_sample(tmp_path):
    tables = build(make_answers(samples=1))
    check_defined(tables, tmp_path)
    for name in ("tasks", "scores", "enforcing", "visibility", "reuse"):
        assert tables[name]["note"].str.contains("no interval: 1 sample in").all(), name


def test_all_failed(tmp_path):
    frame = make_answers(samples=2)
    tables = build(fail(frame, "RuntimeError: no memory", model="smollm2-135m"))
    check_defined(tables, tmp_path)
    accuracy = tables["tasks"][tables["tasks"]["measure"] == "accuracy"]
    assert (accuracy["informative"] == "no").all()
    assert (accuracy["reason"] == "full cache failed: RuntimeError: no memory").all()
    assert tables["scores"]["score"].isna().all()
    assert (tables["scores"]["note"] == "failed: RuntimeError: no memory").all()
    assert (tables["comparisons"]["result"] == "not counted").all()
    assert (tables["comparison_counts"]["note"] == "none counted").all()
    assert (tables["memory"]["contexts"] == 0).all() and tables["memory"]["held_bytes"].isna().all()
    assert tables["decomposition"]["note"].tolist() == ["not measurable: no accuracy task is informative"]
    assert (tables["verdicts"]["verdict"] == "not measurable with these models").all()


def test_without_costs(tmp_path):
    tables = build(make_answers(samples=2, cost_methods=()))
    check_defined(tables, tmp_path)
    memory = tables["memory"]
    assert memory["peak_bytes"].isna().all() and (memory["note"] == "cost not probed").all()
    assert memory["held_bytes"].notna().all() and (memory["device"] == "–").all()
    assert tables["decomposition"]["compress_seconds"].isna().all()
    assert tables["decomposition"]["score_seconds"].notna().any()


def test_a_failed_probe_is_told_from_none():
    frame = make_answers(tasks=("single-prose-512",), samples=2)
    row = frame["method"] == "kvzip"
    frame.loc[
        row, ["probed_bytes", "left_bytes", "peak_bytes", "prefill_seconds", "compress_seconds", "tokens_per_s"]
    ] = np.nan
    frame.loc[row, "cost_message"] = "ValueError: fake key"
    memory = build(frame)["memory"]
    assert set(memory[memory["method"] == "KVzip"]["note"]) == {"cost: failed: ValueError: fake key"}


@pytest.mark.parametrize("method", ["full", "kvzip", "contour", "quest"])
def test_a_single_method(method, tmp_path):
    tables = build(make_answers(samples=2, methods=(method,)))
    check_defined(tables, tmp_path)
    assert tables["comparisons"]["note"].str.startswith("no comparison").all()
    assert tables["comparison_counts"]["note"].tolist() == ["no comparison to count"]
    if method != "kvzip":
        assert tables["enforcing"]["note"].str.startswith("no method with a head-wise selection").all()


def test_tasks_that_are_all_uninformative(tmp_path):
    tables = build(make_answers(samples=4, tasks=("chain-512",)))
    check_defined(tables, tmp_path)
    assert (tables["comparisons"]["result"] == "not counted").all()
    assert (tables["enforcing"]["task"] != POOLED).all() and (tables["enforcing"]["informative"] == "no").all()
    assert tables["enforcing"]["lost"].notna().all()
    assert tables["reuse"]["note"].tolist() == ["no task asks several questions of one context"]


def test_a_term_whose_cell_was_not_run_says_so():
    frame = make_answers(tasks=("single-prose-512", "keys-prose-512"), samples=3)
    gone = (frame["method"] == "adakv_snapkv") & (frame["storage"] == "enforced") & (frame["visibility"] == "agnostic")
    table = build(frame[~gone])["decomposition"]
    rows = table[table["method"] == "AdaKV (SnapKV)"]
    pooled = rows[rows["task"] == POOLED]
    assert pooled["gap"].isna().all() and (pooled["tasks"] == 0).all()
    assert (
        pooled["note"]
        .str.contains("without keys-prose-512: not run: AdaKV (SnapKV) enforced, agnostic", regex=False)
        .all()
    )
    each = rows[rows["task"] != POOLED]
    assert each["memory"].notna().all() and each["information"].isna().all() and each["compute_ranking"].isna().all()
    assert (each["note"] == "not run: AdaKV (SnapKV) enforced, agnostic").all()


def test_a_failed_cell_of_a_pair_is_named():
    frame = make_answers(tasks=("single-prose-512", "keys-prose-512"), samples=3)
    some = fail(frame, "ValueError: fake key", method="kvzip", storage="enforced", task="keys-prose-512", budget=0.25)
    tables = build(some)
    rows = tables["enforcing"]
    rows = rows[(rows["method"] == "KVzip") & (rows["storage"] == "enforced") & (rows["budget"] == 0.25)]
    rows = rows[rows["visibility"] == "agnostic"].set_index("task")
    words = "KVzip enforced, agnostic failed: ValueError: fake key"
    assert rows.loc["keys-prose-512", "note"] == words and np.isnan(rows.loc["keys-prose-512", "lost"])
    assert rows.loc[POOLED, "note"] == f"keys-prose-512: {words}" and rows.loc[POOLED, "tasks"] == 1
    assert rows.loc[POOLED, "lost"] == pytest.approx(rows.loc["single-prose-512", "lost"])

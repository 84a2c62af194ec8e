"""The tables against plain pandas, their files, and the verdicts of the summary."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import mannwhitneyu, spearmanr
from synthetic_instances import LABELS, METADATA, TINY, make_certificates, make_instances

from contourkv.errors import InvalidInput, InvariantBroken
from contourkv.statistics import (
    build_summary,
    build_tables,
    derive,
    merge_instances,
    read_instances,
    read_table,
    read_tables,
    write_instances,
    write_summary,
    write_tables,
)
from contourkv.statistics.summary import ABSENT, INSIDE, OUTSIDE, SECTIONS, Claim, judge
from contourkv.statistics.tables import ALL_BUDGETS, ALL_MODELS, by_model, interval, markdown, number

RUN = {
    "contourkv": "0.1.0",
    "config": ["0123456789ab"],
    "models": [{"name": "tiny-llama", "revision": "abc"}],
    "seeds": {"code": 103},
    "run": "unit",
    "statistics": {"resamples": 100, "seed": 3},
}
NAMES = [
    "ceiling",
    "kappa",
    "recovered",
    "content_arms",
    "prediction",
    "predictors",
    "edges",
    "cells",
    "certificates",
    "pools",
    "invariants",
    "kappa_quantiles",
]


@pytest.fixture(scope="module")
def frame():
    frame = make_instances(dict(list(TINY.items())[:2]))
    keys = ["model", "arm", "input", "layer", "head", "position", "s"]
    frame = frame.merge(make_certificates(frame, every=7), on=keys, how="left")
    better = frame["es_certified"] < frame["es_best"]
    frame["es_best"] = np.fmin(frame["es_best"], frame["es_certified"])
    frame["best"] = np.where(better, "certificate", frame["best"])
    return frame.fillna({"certificate": "", "certificate_proved": False})


@pytest.fixture(scope="module")
def tables(frame):
    return build_tables(frame, 100, 3)


def pick(table: pd.DataFrame, **where: str) -> pd.Series:
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table.iloc[0]


def test_all_tables_are_there_with_intervals_around_their_points(tables):
    assert list(tables) == NAMES
    for table in tables.values():
        assert len(table) and table.attrs["caption"] and "\n" not in table.attrs["caption"]
        for column in table:
            if f"{column}_low" in table:
                rows = table[[f"{column}_low", column, f"{column}_high"]].dropna()
                assert (rows.iloc[:, 0] <= rows.iloc[:, 2]).all()


def test_kappa_table_is_plain_pandas(frame, tables):
    kappa = frame["es_max_mass"] / frame["es_pool"]
    for model in sorted(set(frame["model"])):
        for s in (4, 8):
            some = kappa[(frame["model"] == model) & (frame["s"] == s)]
            row = pick(tables["kappa"], model=model, s=str(s), against="es_pool")
            assert row["n"] == len(some) and row["inputs"] == 9
            assert row["within_1.5"] == pytest.approx((some <= 1.5).mean())
            assert row["above_1.11"] == pytest.approx((some > 1.11).mean())
            assert row["attained"] == pytest.approx((some == 1).mean())
            assert row["median"] == pytest.approx(some.median())
            assert row["p90"] == pytest.approx(some.quantile(0.9))
            assert row["inside_p90"] == pytest.approx(some[some <= 1.5].quantile(0.9))
    row = pick(tables["kappa"], model=ALL_MODELS, s=ALL_BUDGETS, against="es_best")
    assert row["median"] == pytest.approx((frame["es_max_mass"] / frame["es_best"]).median())


def test_other_tables_are_plain_pandas(frame, tables):
    some = derive(frame)
    some = some[(some["model"] == "tiny-llama") & (some["s"] == 8)]
    flat = some["kappa_hat"] > 1.11
    above = some[flat]
    row = pick(tables["ceiling"], model="tiny-llama", s="8", against="es_pool")
    assert row["c"] == pytest.approx(some["c_hat"].median())
    assert row["c_above"] == pytest.approx(above["c_hat"].median()) and row["n_above"] == len(above)

    row = pick(tables["recovered"], model="tiny-llama", s="8")
    assert row["nothing_to_close"] == some["recovered"].isna().sum()
    assert row["recovered_p25"] == pytest.approx(some["recovered"].quantile(0.25))
    assert row["recovered_either"] == pytest.approx(some["recovered_either"].median())

    row = pick(tables["prediction"], model="tiny-llama", s="8", against="es_pool")
    mass = some["dropped_mass"]
    expected = mannwhitneyu(mass[flat], mass[~flat]).statistic / (flat.sum() * (~flat).sum())
    assert row["auc"] == pytest.approx(expected)
    assert row["spearman_mass"] == pytest.approx(spearmanr(mass, some["kappa_hat"]).statistic)
    assert row["spearman_phi"] == pytest.approx(spearmanr(some["phi"], some["es_pool"]).statistic)
    cells = some.groupby(["layer", "head"])[["dropped_mass", "kappa_hat"]].median()
    ranked = [cells["dropped_mass"][cells["kappa_hat"] >= 1.11], cells["dropped_mass"][cells["kappa_hat"] < 1.11]]
    assert row["cells"] == len(cells) and row["flat_cells"] == len(ranked[0])
    assert row["cell_auc"] == pytest.approx(mannwhitneyu(*ranked).statistic / (len(ranked[0]) * len(ranked[1])))

    for name in ("dropped_mass", "phi", "spectral", "absolute_bound"):
        row = pick(tables["predictors"], model="tiny-llama", arm="all arms", s="8", predictor=name)
        expected = mannwhitneyu(some[name][flat], some[name][~flat]).statistic / (flat.sum() * (~flat).sum())
        assert row["auc"] == pytest.approx(expected) and row["n"] == len(some)
        for column in ("es_max_mass", "es_pool", "kappa_hat"):
            assert row[f"spearman_{column}"] == pytest.approx(spearmanr(some[name], some[column]).statistic)
        cells = some.groupby(["layer", "head"])[[name, "kappa_hat"]].median()
        ranked = [cells[name][cells["kappa_hat"] >= 1.11], cells[name][cells["kappa_hat"] < 1.11]]
        expected = mannwhitneyu(*ranked).statistic / (len(ranked[0]) * len(ranked[1]))
        assert row["cell_auc"] == pytest.approx(expected)
        code = some[some["arm"] == "code"]
        row = pick(tables["predictors"], model="tiny-llama", arm="code", s="8", predictor=name)
        assert row["spearman_kappa_hat"] == pytest.approx(spearmanr(code[name], code["kappa_hat"]).statistic)
    cells = some.groupby(["layer", "head"])[["dropped_mass", "kappa_hat"]].median()

    shown = tables["cells"][tables["cells"]["model"] == "tiny-llama"].set_index(["layer", "head"])
    np.testing.assert_allclose(shown["kappa_hat"], cells["kappa_hat"])
    assert (shown["flat"] == (cells["kappa_hat"] >= 1.11)).all()

    code = some[some["arm"] == "code"]
    row = pick(tables["content_arms"], model="tiny-llama", arm="code", s="8", against="es_best")
    assert row["median"] == pytest.approx(code["kappa_best"].median()) and row["inputs"] == 3

    row = pick(tables["pools"], model="tiny-llama", s="8")
    gain = (1 - some["es_best"] / some["es_pool"]).to_numpy()
    assert row["beaten"] == pytest.approx((gain > 1e-9).mean()) and 0 < row["beaten"] < 1
    assert row["gain_p90"] == pytest.approx(np.quantile(gain[gain > 1e-9], 0.9))
    gain = (1 - some["es_best"] / some["es_mass_pool"]).to_numpy()
    assert row["mass_pool_beaten"] == pytest.approx((gain > 1e-9).mean())
    assert row["mass_pool_gain_median"] == pytest.approx(np.median(gain[gain > 1e-9]))
    assert row["best_balance"] == pytest.approx((some["best"] == "balance").mean())

    sampled = some[some["es_certified"].notna()]
    row = pick(tables["certificates"], model="tiny-llama", s="8")
    assert row["sampled"] == len(sampled) and row["optimal"] == (sampled["certificate"] == "optimal").sum()
    worse = sampled["es_certified"] < sampled["es_pool"] * (1 - 1e-6)
    assert row["pool_beaten"] == pytest.approx(worse.mean())
    assert row["pool_proved"] == pytest.approx((sampled["certificate_proved"].astype(bool) & ~worse).mean())
    assert 0 < row["gain_median"] <= row["gain_max"] <= 0.2 + 1e-9

    row = pick(tables["invariants"], model=ALL_MODELS, s=ALL_BUDGETS)
    assert row["largest_error_over_bound"] == pytest.approx((frame["es_max_mass"] / frame["bound"]).max())
    assert row["violations"] == 0 and row["least_kappa_hat"] >= 1


def test_edges_are_the_outer_eighths_of_the_layers():
    frame = make_instances({"m": (16, 4, 1)}, per_arm=3)
    outer = frame["layer"].isin([0, 1, 14, 15])
    # one row in two is flat at the edges, one in ten between
    flat = np.where(outer, frame["position"] == 639, (frame["layer"] % 5 == 0) & (frame["position"] == 639))
    frame["es_pool"] = frame["es_max_mass"] / np.where(flat, 1.5, 1.0)
    for name in ("es_mass_pool", "es_balance_pool", "es_balance", "es_balance_second", "es_best"):
        frame[name] = frame["es_pool"]
    frame["best"] = "pool"
    row = pick(build_tables(frame, 50, 0)["edges"], model="m", s="8")
    assert (row["layers"], row["edge_layers"]) == (16, 4)
    assert row["edge"] == row["edge_low"] == row["edge_high"] == 0.5
    assert row["interior"] == pytest.approx(2 / 12 / 2) and row["ratio"] == pytest.approx(6.0)


def test_planted_ratios_come_back():
    frame = make_instances({"m": (4, 4, 1)}, per_arm=4)
    planted = np.where(frame["layer"] < 2, 1.25, 1.0)
    frame["es_pool"] = frame["es_max_mass"] / planted
    frame["es_balance_pool"] = frame["es_mass_pool"] = frame["es_pool"]
    frame["es_balance"] = frame["es_balance_second"] = frame["es_best"] = frame["es_pool"]
    frame["best"] = "pool"
    frame["dropped_mass"] = np.where(frame["layer"] < 2, 0.6, 0.3)
    frame["bound"] = 2 * frame["spread"] * frame["dropped_mass"] + frame["es_max_mass"]
    tables = build_tables(frame, 50, 0)
    row = pick(tables["kappa"], model="m", s="8", against="es_pool")
    for end in ("", "_low", "_high"):
        assert row[f"above_1.11{end}"] == row[f"attained{end}"] == 0.5
        assert row[f"p90{end}"] == pytest.approx(1.25)
    row = pick(tables["ceiling"], model="m", s=ALL_BUDGETS, against="es_pool")
    assert row["c_above_low"] == pytest.approx(0.2) == row["c_above_high"]
    row = pick(tables["prediction"], model="m", s="8", against="es_pool")
    assert row["auc"] == row["auc_low"] == row["cell_auc"] == row["cell_auc_low"] == 1
    row = pick(tables["recovered"], model="m", s="4")
    assert row["recovered"] == pytest.approx(1) and row["nothing_to_close"] == 8 * 4 * 3 * 2
    assert pick(tables["pools"], model="m", s="4")["beaten"] == 0


def test_the_threshold_itself_is_within_and_a_cell_there_is_flat():
    frame = make_instances({"m": (2, 2, 1)}, per_arm=2)
    frame["es_max_mass"] = 1.11
    frame["bound"] = 2.0
    for name in ("es_pool", "es_mass_pool", "es_balance_pool", "es_balance", "es_balance_second", "es_best"):
        frame[name] = 1.0
    tables = build_tables(frame.assign(best="pool"), 10, 0)
    row = pick(tables["kappa"], model="m", s="8", against="es_pool")
    assert row["within_1.11"] == 1 and row["above_1.11"] == 0 and row["inside_median"] == 1.11
    assert pick(tables["ceiling"], model="m", s="8", against="es_pool")["n_above"] == 0
    assert tables["cells"]["flat"].all() and (tables["cells"]["above_1.11"] == 0).all()
    assert (tables["content_arms"]["above_1.11"] == 0).all() and (tables["prediction"]["above_1.11"] == 0).all()


def test_balance_is_compared_over_the_mass_pool_and_kappa_over_all_families():
    frame = make_instances({"m": (2, 2, 1)}, per_arm=2)
    frame["es_pool"] = frame["es_mass_pool"] * 0.5
    frame["es_best"] = np.minimum(frame["es_best"], frame["es_pool"])
    frame["best"] = np.where(frame["es_best"] == frame["es_pool"], "pool", frame["best"])
    frame["es_balance_pool"] = frame["es_mass_pool"]
    tables = build_tables(frame, 10, 0)
    row = pick(tables["recovered"], model="m", s="8")
    assert row["recovered"] == row["recovered_p25"] == pytest.approx(1)
    assert row["nothing_to_close"] == (frame[frame["s"] == 8].eval("es_max_mass == es_mass_pool")).sum()
    assert pick(tables["pools"], model="m", s="8")["mass_pool_beaten"] == 1
    assert pick(tables["kappa"], model="m", s="8", against="es_pool")["above_1.11"] == 1


def test_one_class_one_input_and_no_certificates_are_said_not_invented():
    frame = make_instances({"m": (2, 2, 1)}, per_arm=1)
    for name in ("es_pool", "es_mass_pool", "es_balance_pool", "es_balance", "es_balance_second", "es_best"):
        frame[name] = frame["es_max_mass"]
    frame["best"] = "max_mass"
    tables = build_tables(frame, 50, 0)
    row = pick(tables["prediction"], model="m", s="8", against="es_pool")
    assert np.isnan(row["auc"]) and "auc: one class only" in row["note"] and "no interval: 1 input in" in row["note"]
    assert np.isnan(row["above_1.11_low"]) and row["above_1.11"] == 0
    row = pick(tables["recovered"], model="m", s="8")
    assert row["nothing_to_close"] == row["n"] and np.isnan(row["recovered"])
    row = pick(tables["certificates"], model=ALL_MODELS, s=ALL_BUDGETS)
    assert row["sampled"] == 0 and row["note"] == "none sampled"
    text = build_summary(tables, RUN)
    assert "0.5" not in [cell.strip() for line in text.splitlines() if "AUC" in line for cell in line.split("|")]
    assert f"one class only | 24 | 3 | {ABSENT}" in text
    assert "stand without an interval" in text


def test_without_budget_8_the_smallest_stands_in_and_the_caption_says_so():
    tables = build_tables(make_instances({"m": (2, 2, 1)}, budgets=(4, 16)), 20, 0)
    assert set(tables["cells"]["s"]) == {"4"}
    assert tables["cells"].attrs["caption"].endswith("(s = 8 is not among the budgets.)")
    assert "not among" not in tables["kappa"].attrs["caption"]


def test_labels_name_and_order_the_models(frame):
    tables = build_tables(frame, 5, 0, {"tiny-qwen2": "Tiny Qwen", "unused": "x"})
    assert list(dict.fromkeys(tables["kappa"]["model"])) == ["Tiny Qwen", "tiny-llama", ALL_MODELS]
    with pytest.raises(InvalidInput, match="distinct model labels"):
        build_tables(frame, 5, 0, {"tiny-qwen2": "same", "tiny-llama": "same"})


def test_families_are_told_in_words(frame):
    families = [
        {"budget": 4, "core": 0, "pool": 70},
        {"budget": 8, "core": 6, "pool": 30},
        {"budget": 8, "free": 5, "pool": 24},
    ]
    table = build_tables(frame, 5, 0, families=families)["pools"]
    assert pick(table, model=ALL_MODELS, s="4")["families"] == "any 4 of 70"
    words = "6 heaviest + any 2 of the next 24 or balance's set with 5 keys chosen anew among 24"
    assert pick(table, model=ALL_MODELS, s="8")["families"] == words


def test_tables_refuse_broken_or_no_instances(frame):
    with pytest.raises(InvalidInput, match="no rows"):
        build_tables(frame.iloc[:0], 5, 0)
    with pytest.raises(InvariantBroken):
        build_tables(frame.assign(bound=0.0), 5, 0)


def test_files_are_the_same_bytes_again_and_read_back(frame, tables, tmp_path):
    first = write_tables(tables, tmp_path / "a", RUN)
    again = build_tables(frame.sample(frac=1, random_state=1).reset_index(drop=True), 100, 3)
    second = write_tables(again, tmp_path / "b", RUN)
    assert {path.name for path in first} == {f"{name}.{kind}" for name in NAMES for kind in ("csv", "md")}
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    back = read_tables(tmp_path / "a")
    for name, table in tables.items():
        pd.testing.assert_frame_equal(back[name], table, check_dtype=False, rtol=1e-9)
    assert build_summary(back, RUN) == build_summary(tables, RUN)
    csv = read_table(tmp_path / "a" / "kappa.csv")
    assert csv.columns[-1] == "provenance" and csv["provenance"].nunique() == 1
    text = (tmp_path / "a" / "kappa.md").read_text()
    assert text.startswith(tables["kappa"].attrs["caption"] + "\n")
    assert text.rstrip().splitlines()[-1].startswith("Provenance: contourkv 0.1.0; config 0123456789ab; models")
    with pytest.raises(InvalidInput, match=r"gone\.csv: no such table"):
        read_table(tmp_path / "gone.csv")


def test_markdown_puts_intervals_beside_points():
    table = pd.DataFrame(
        {"model": ["a", "b"], "n": [1234, 5], "x": [0.5, np.nan], "x_low": [0.25, np.nan], "x_high": [1.0, np.nan]}
    )
    lines = markdown(table.assign(note="")).splitlines()
    assert lines[0] == "| model | n | x |"
    assert lines[2:] == ["| a | 1,234 | 0.500 [0.250, 1.000] |", "| b | 5 | – |"]
    long = markdown(pd.DataFrame({"model": ["a"] * 200}), "cells").splitlines()
    assert long[-1] == "The first 80 of 200 rows; all of them are in cells.csv."


def test_numbers_are_written_for_readers():
    shown = [number(value) for value in (0.0, -1e-14, 0.1234, 12.34, 123456.0, 2e-6, np.inf, True, 12345)]
    assert shown == ["0.000", "-1e-14", "0.123", "12.3", "123,456", "2e-06", "inf", "True", "12,345"]
    assert interval(0.5, np.nan, np.nan) == "0.500"


CLAIM = Claim("A share (section 2)", 0.75, 0.95, 2, "kappa", "x", {"s": "4"})


def verdict(claim: Claim, **columns: object) -> list[str]:
    row = {"model": "m", "s": "4", "n": 10, "inputs": 6, "note": "", **columns}
    return judge(claim, {"kappa": pd.DataFrame([row])})[0][-2:]


@pytest.mark.parametrize(
    ("x", "low", "high", "expected"),
    [
        (0.80, 0.78, 0.82, [INSIDE, "within the band"]),
        (0.954, 0.94, 0.97, [INSIDE, "overlaps the band"]),
        (0.956, 0.95, 0.97, [OUTSIDE, "overlaps the band"]),
        (0.60, 0.50, 0.70, [OUTSIDE, "below the band"]),
        (0.99, 0.98, 1.00, [OUTSIDE, "above the band"]),
        (0.80, np.nan, np.nan, [INSIDE, "none"]),
        (np.nan, np.nan, np.nan, [ABSENT, "none"]),
    ],
)
def test_verdict_is_about_the_point_and_the_interval_is_told_beside_it(x, low, high, expected):
    assert verdict(CLAIM, x=x, x_low=low, x_high=high) == expected


def test_verdict_of_a_claim_about_the_interval():
    claim = Claim("Its interval", 0.75, 0.95, 2, "kappa", "x", {"s": "4"}, whole=True)
    assert verdict(claim, x=0.8, x_low=0.76, x_high=0.94)[0] == INSIDE
    assert verdict(claim, x=0.8, x_low=0.60, x_high=0.94)[0] == OUTSIDE
    assert verdict(claim, x=0.8, x_low=np.nan, x_high=np.nan)[0] == ABSENT


def test_verdict_where_the_row_or_the_budget_is_missing():
    assert judge(CLAIM, {})[0][-2:] == [ABSENT, "none"]
    assert judge(CLAIM, {"kappa": pd.DataFrame([{"model": "m", "s": "8", "x": 1.0}])})[0][-2:] == [ABSENT, "none"]


def test_verdict_of_the_arm_that_should_be_largest():
    claim = Claim("Code", 0, 1.06, 2, "content_arms", "x", {"s": "8"}, arm="code")
    table = pd.DataFrame(
        {"model": "m", "s": "8", "arm": ["code", "prose"], "n": 9, "inputs": 3, "note": "", "x": [1.05, 1.02]}
    ).assign(x_low=1.0, x_high=1.1)
    assert judge(claim, {"content_arms": table})[0][-2] == INSIDE
    line = judge(claim, {"content_arms": table.assign(x=[1.05, 1.07])})[0]
    assert line[-2] == OUTSIDE and "larger: prose 1.070" in line[3]
    assert judge(claim, {"content_arms": table.assign(x=[1.2, 1.0])})[0][-2] == OUTSIDE
    assert judge(claim, {"content_arms": table[table["arm"] == "prose"]})[0][-2] == ABSENT


def test_every_claim_has_its_line_in_the_summary(tables):
    text = build_summary(tables, RUN)
    for section in SECTIONS:
        assert f"## {section.title}" in text and section.why in text
        for claim in section.claims:
            assert f"| {claim.text} |" in text
    assert "3% too narrow" not in text and "With 3 inputs in the smallest arm" in text
    assert "tiny-llama at abc" in text and "bootstrap 3" in text
    lines = [line for line in text.splitlines() if line.startswith("| AUC of dropped mass for")]
    assert len(lines) == 2 and all("tiny-" in line for line in lines)
    # s = 16 and 32 were not measured here.
    assert sum(ABSENT in line for line in text.splitlines() if "balance recovers" in line) == 2


def test_the_whole_road_from_shards_to_summary(tmp_path):
    frame = make_instances({"smollm2-135m": (2, 3, 1)})
    shard, certificate, joined = (tmp_path / f"{name}.parquet" for name in ("shard", "certificate", "instances"))
    write_instances(shard, frame, METADATA)
    write_instances(certificate, make_certificates(frame), METADATA)
    merge_instances([shard], [certificate], joined)
    for place in ("one", "two"):
        folder = tmp_path / place
        frame, metadata = read_instances(joined)
        metadata |= {"run": "unit", "statistics": {"resamples": 20, "seed": 1}}
        tables = build_tables(frame, 20, 1, labels=LABELS)
        write_tables(tables, folder / "tables", metadata)
        write_summary(folder / "summary.md", read_tables(folder / "tables"), metadata)
    summary = (tmp_path / "one" / "summary.md").read_bytes()
    assert summary == (tmp_path / "two" / "summary.md").read_bytes()
    assert b"SmolLM2-135M" in summary and b"# Run unit" in summary


def test_all_models_together_leave_out_those_apart_but_invariants_do_not():
    frame = make_instances({"a": (2, 3, 1), "b": (3, 2, 1)})
    whole, rest = build_tables(frame, 20, 1), build_tables(frame, 20, 1, apart=["b"])
    for name, table in rest.items():
        own, other = (some[some["model"] != "all models"].reset_index(drop=True) for some in (table, whole[name]))
        pd.testing.assert_frame_equal(own, other)
    pooled, alone = (
        rest["kappa"][rest["kappa"]["model"] == model].drop(columns="model").reset_index(drop=True)
        for model in ("all models", "a")
    )
    pd.testing.assert_frame_equal(pooled, alone)
    pd.testing.assert_frame_equal(rest["invariants"], whole["invariants"])
    only = build_tables(frame[frame["model"] == "b"], 20, 1, apart=["b"])["kappa"]
    assert set(only["model"]) == {"b", "all models"}


def test_rows_by_model_keep_the_order_of_the_labels():
    frame = pd.DataFrame({"model": pd.Categorical(["x", "y", "z", "x"]), "value": [1, 2, 3, 4]})
    found = {label: list(rows["value"]) for label, rows in by_model(frame, {"y": "Y", "x": "X", "z": "Z"}, ["x"])}
    assert list(found) == ["Y", "X", "Z", "all models"]
    assert found == {"Y": [2], "X": [1, 4], "Z": [3], "all models": [2, 3]}

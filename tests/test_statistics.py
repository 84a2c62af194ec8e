"""Estimators, bootstrap, derived columns, invariants and the merged instances file."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import mannwhitneyu, spearmanr
from synthetic_instances import METADATA, make_certificates, make_instances

from contourkv.errors import ContourKVError, InvalidInput, InvariantBroken
from contourkv.statistics import (
    Scope,
    auc,
    check_invariants,
    derive,
    merge_instances,
    provenance_line,
    read_instances,
    spearman,
    weighted_auc,
    weighted_quantiles,
    weighted_share,
    weighted_spearman,
    write_instances,
)
from contourkv.statistics.estimators import auc_by_resample

# Small whole values make many ties; weights include inputs that were not drawn.
values = hnp.arrays(np.float64, st.integers(1, 60), elements=st.integers(-5, 5).map(float))


@st.composite
def resampled(draw, columns: int = 1):
    first = draw(values)
    rest = [
        draw(hnp.arrays(np.float64, first.size, elements=st.integers(-5, 5).map(float))) for _ in range(columns - 1)
    ]
    inputs = draw(st.integers(1, 5))
    codes = draw(hnp.arrays(np.int64, first.size, elements=st.integers(0, inputs - 1)))
    weights = draw(hnp.arrays(np.float64, (3, inputs), elements=st.integers(0, 3).map(float)))
    return first, *rest, codes, weights


def repeated(column: np.ndarray, codes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.repeat(column, weights[codes].astype(int))


@given(resampled(), st.floats(0, 1))
def test_weighted_quantile_is_numpy_on_repeated_rows(case, level):
    x, codes, weights = case
    found = weighted_quantiles(x, codes, weights, [level, 0.5])
    for line, drawn in zip(found, weights, strict=True):
        rows = repeated(x, codes, drawn)
        expected = np.quantile(rows, [level, 0.5]) if rows.size else [np.nan, np.nan]
        np.testing.assert_allclose(line, expected, rtol=0, atol=1e-12)


def test_weighted_quantile_over_many_blocks():
    rng = np.random.default_rng(0)
    x, codes = rng.normal(size=5000), rng.integers(0, 40, 5000)
    weights = rng.multinomial(40, np.full(40, 1 / 40), size=20).astype(float)
    found = weighted_quantiles(x, codes, weights, [0.0, 0.25, 0.9, 1.0])
    for line, drawn in zip(found, weights, strict=True):
        np.testing.assert_allclose(line, np.quantile(repeated(x, codes, drawn), [0.0, 0.25, 0.9, 1.0]), rtol=1e-14)


def test_weighted_quantile_passes_infinity_through():
    x, codes = np.array([1.0, np.inf, np.inf]), np.zeros(3, int)
    assert weighted_quantiles(x, codes, np.ones((1, 1)), [0.0, 0.75, 1.0]).tolist() == [[1.0, np.inf, np.inf]]


@given(resampled(2))
def test_weighted_auc_is_mann_whitney_on_repeated_rows(case):
    score, label, codes, weights = case
    positive = label > 0
    for found, drawn in zip(weighted_auc(score, positive, codes, weights), weights, strict=True):
        above, below = (repeated(score[some], codes[some], drawn) for some in (positive, ~positive))
        if above.size and below.size:
            assert found == pytest.approx(mannwhitneyu(above, below).statistic / (above.size * below.size), abs=1e-12)
        else:
            assert np.isnan(found)


@given(resampled(2))
def test_weighted_spearman_is_scipy_on_repeated_rows(case):
    x, y, codes, weights = case
    for found, drawn in zip(weighted_spearman(x, y, codes, weights), weights, strict=True):
        a, b = repeated(x, codes, drawn), repeated(y, codes, drawn)
        if a.size and np.ptp(a) and np.ptp(b):
            assert found == pytest.approx(spearmanr(a, b).statistic, abs=1e-9)
        else:
            assert np.isnan(found)


@given(resampled())
def test_weighted_share_is_the_mean_of_repeated_rows(case):
    x, codes, weights = case
    for found, drawn in zip(weighted_share(x > 0, codes, weights), weights, strict=True):
        rows = repeated(x > 0, codes, drawn)
        assert found == pytest.approx(rows.mean()) if rows.size else np.isnan(found)


@given(values, st.floats(0.1, 3))
def test_auc_and_spearman_depend_on_order_only(x, power):
    label = np.arange(x.size) % 3 == 0
    assert auc(np.exp(power * x), label) == pytest.approx(auc(x, label), nan_ok=True)
    assert auc(-x, label) == pytest.approx(1 - auc(x, label), nan_ok=True)
    y = np.arange(x.size, dtype=float)
    assert spearman(np.exp(power * x), y) == pytest.approx(spearman(x, y), nan_ok=True)


def test_auc_by_resample_leaves_unknown_items_out():
    score = np.array([[0.1, 0.5, 0.5, np.nan], [1.0, 2.0, 3.0, 4.0]])
    positive = np.array([[False, True, False, True], [True, True, True, True]])
    found = auc_by_resample(score, positive)
    assert found[0] == auc(score[0, :3], positive[0, :3]) == 0.75
    assert np.isnan(found[1])


def measured(per_input: int, inputs: int, seed: int, copies: int = 1, effect: float = 0.3) -> pd.DataFrame:
    """A score and a label that know nothing of each other, both shifted by the input."""
    rng = np.random.default_rng(seed)
    input_code = np.repeat(np.arange(inputs), per_input)
    shift = rng.normal(0, effect, (2, inputs))
    frame = pd.DataFrame(
        {
            "arm": "prose",
            "input": np.char.mod("prose/%03d", input_code),
            "score": rng.normal(size=input_code.size) + shift[0][input_code],
            "other": rng.normal(size=input_code.size) + shift[1][input_code],
        }
    )
    return frame.loc[frame.index.repeat(copies)].reset_index(drop=True)


def test_interval_covers_no_effect_nearly_as_often_as_it_says():
    hits = []
    for seed in range(200):
        scope = Scope(measured(30, 24, seed), 300, seed)
        estimate = scope.auc(scope["score"], scope["other"] > 0.5)
        hits.append(estimate.low <= 0.5 <= estimate.high)
    # 95% in theory, some points less from percentiles of 24 inputs; +-3 standard errors of 200 trials.
    assert 0.86 <= np.mean(hits) <= 0.99


def test_copies_of_rows_inside_an_input_do_not_narrow_the_interval():
    once = Scope(measured(10, 20, 1), 500, 3)
    copied = Scope(measured(10, 20, 1, copies=10), 500, 3)
    more = Scope(measured(100, 20, 1), 500, 3)
    widths = []
    for scope in (once, copied, more):
        estimate = scope.auc(scope["score"], scope["other"] > 0)
        widths.append(estimate.high - estimate.low)
    assert widths[1] == pytest.approx(widths[0])
    assert widths[1] > 1.2 * widths[2]


def test_inputs_are_drawn_within_their_arm_and_alike_for_the_same_seed():
    frame = make_instances(per_arm=3)
    scope = Scope(frame, 50, 5)
    assert scope.inputs == 9 and scope.weights.shape == (51, 9)
    assert (scope.weights[0] == 1).all()
    assert (scope.weights.reshape(51, 3, 3).sum(axis=2) == 3).all()
    shuffled = Scope(frame.sample(frac=1, random_state=0), 50, 5)
    assert (shuffled.weights == scope.weights).all()
    assert not (Scope(frame, 50, 6).weights == scope.weights).all()


def test_where_keeps_the_inputs_and_their_draws():
    scope = Scope(make_instances(), 20, 0)
    part = scope.where(scope["s"] == 4).where(np.array([0, 2]))
    assert len(part) == 2 and part["s"].tolist() == [4, 4]
    assert part.weights is scope.weights and part.inputs == scope.inputs


def test_one_input_in_an_arm_means_no_interval():
    frame = make_instances(per_arm=2)
    frame = frame[frame["input"] != "code/001"]
    estimate = Scope(frame, 50, 0).median(np.ones(len(frame)))
    assert estimate.value == 1 and np.isnan([estimate.low, estimate.high]).all()
    assert estimate.note == "no interval: 1 input in code"


def test_one_class_has_no_auc():
    scope = Scope(make_instances(), 50, 0)
    estimate = scope.auc(scope["dropped_mass"], np.zeros(len(scope), bool))
    assert np.isnan([estimate.value, estimate.low, estimate.high]).all()
    assert estimate.note == "one class only"


def test_resamples_with_one_class_are_counted_and_left_out():
    frame = measured(5, 3, 0)
    scope = Scope(frame, 400, 0)
    only = frame["input"].to_numpy() == "prose/000"
    estimate = scope.auc(scope["score"], only)
    # The one input with positives is missing from (2/3)^3 of all draws, and alone in (1/3)^3.
    assert estimate.degenerate / 400 == pytest.approx(8 / 27 + 1 / 27, abs=0.08)
    assert estimate.note == f"{estimate.degenerate} of 400 resamples left out: one class only"
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1


def test_scope_refuses_no_rows_and_no_resamples():
    with pytest.raises(InvalidInput, match="no rows"):
        Scope(make_instances().iloc[:0], 10, 0)
    with pytest.raises(InvalidInput, match=r"resamples.*>= 1, got 0"):
        Scope(make_instances(), 0, 0)


def test_derived_columns_of_known_errors():
    frame = make_instances().iloc[:5].copy()
    frame["es_max_mass"] = [3.0, 1.0, 0.0, 2.0, 1.0]
    frame["es_pool"] = [2.0, 1.0, 0.0, 1.0, 0.0]
    frame["es_mass_pool"] = [2.0, 1.0, 0.0, 1.5, 0.0]
    frame["es_balance_pool"] = [2.5, 1.0, 0.0, 1.5, 1.0]
    frame["es_balance"] = [2.0, 1.0, 0.0, 0.5, 1.0]
    frame["es_balance_second"] = [1.5, 1.0, 0.0, 3.0, 1.0]
    frame["es_best"] = [1.5, 1.0, 0.0, 0.5, 0.0]
    out = derive(frame)
    assert out["kappa_hat"].tolist() == [1.5, 1.0, 1.0, 2.0, np.inf]
    assert out["kappa_best"].tolist() == [2.0, 1.0, 1.0, 4.0, np.inf]
    np.testing.assert_allclose(out["c_hat"], [1 / 3, 0, 0, 0.5, 1])
    assert out["attained"].tolist() == [False, True, True, False, False]
    assert out["nothing_to_close"].tolist() == [False, True, True, False, False]
    np.testing.assert_allclose(out["recovered"], [0.5, np.nan, np.nan, 1.0, 0.0])
    np.testing.assert_allclose(out["recovered_first"], [2 / 3, np.nan, np.nan, 1.0, 0.0])
    np.testing.assert_allclose(out["recovered_second"], [1.0, np.nan, np.nan, -2 / 3, 0.0])
    np.testing.assert_allclose(out["recovered_either"], [1.0, np.nan, np.nan, 1.0, 0.0])
    assert "kappa_hat" not in frame


@settings(max_examples=20)
@given(st.floats(1e-6, 1e6))
def test_ratios_do_not_depend_on_the_unit_of_the_values(scale):
    frame = make_instances(per_arm=1)
    scaled = frame.assign(**{name: frame[name] * scale for name in frame if name.startswith("es_")})
    for name in ("kappa_hat", "kappa_best", "c_hat", "recovered", "recovered_either"):
        np.testing.assert_allclose(derive(scaled)[name], derive(frame)[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("phi", np.nan, "phi is NaN"),
        ("dropped_mass", 1.0, "outside"),
        ("dropped_mass", -0.1, "outside"),
        ("bound", 1e-3, "Lemma 2.1"),
        ("es_pool", 1e3, "kappa-hat is below 1"),
        ("es_mass_pool", 1e3, "mass pools' minimum is above max-mass"),
        ("es_mass_pool", 1e-6, "minimum over all families is above"),
        ("es_balance_pool", 1e-6, "balance is below"),
        ("es_best", 1e3, "not the least"),
        ("es_best", 1e-6, "does not attain"),
        ("best", "guess", "best must be one of"),
    ],
)
def test_each_broken_invariant_names_its_row(column, value, message):
    frame = make_instances()
    check_invariants(frame)
    frame.loc[7, column] = value
    if column == "es_best" and value < 1:
        frame.loc[7, ["es_balance", "es_balance_second"]] = 1.0
    with pytest.raises(InvariantBroken, match=message) as caught:
        check_invariants(frame)
    text = str(caught.value)
    assert "\n" not in text
    row = frame.loc[7]
    for name in ("model", "arm", "input", "layer", "head", "position", "s"):
        assert f"{name} {row[name]}" in text


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("es_max_mass", "bound"),
        ("es_pool", "es_max_mass"),
        ("es_pool", "es_mass_pool"),
        ("es_mass_pool", "es_balance_pool"),
        ("es_best", "es_balance"),
    ],
)
def test_invariants_hold_to_a_billionth(low, high):
    frame = make_instances().iloc[:200].copy()
    frame[["es_pool", "es_mass_pool", "es_balance", "es_balance_second"]] = frame[["es_max_mass"] * 4].to_numpy()
    frame["es_balance_pool"] = frame["es_best"] = frame["es_max_mass"]
    frame["best"] = "max_mass"
    frame["bound"] = frame["es_max_mass"]
    check_invariants(frame)
    frame[high] = frame[low] * (1 - 1e-7)
    with pytest.raises(InvariantBroken):
        check_invariants(frame)


def test_rounding_breaks_no_invariant():
    frame = make_instances()
    frame["es_pool"] = np.where(frame.index % 2, frame["es_pool"], frame["es_max_mass"] * (1 + 1e-13))
    frame["es_mass_pool"] = frame["es_pool"] * (1 - 1e-13)
    frame["es_balance_pool"] = np.maximum(frame["es_balance_pool"], frame["es_pool"] * (1 - 2e-13))
    frame["es_best"] = frame[["es_max_mass", "es_pool", "es_balance", "es_balance_second"]].min(axis=1)
    frame["best"] = np.where(frame["es_best"] == frame["es_max_mass"], "max_mass", frame["best"])
    frame = frame[frame["es_best"] >= frame[["es_max_mass", "es_pool"]].min(axis=1)]
    check_invariants(frame)


@pytest.fixture
def shards(tmp_path):
    frame = make_instances()
    files = []
    for number, ((model, name), rows) in enumerate(frame.groupby(["model", "input"])):
        path = tmp_path / "instances" / f"{number}.parquet"
        meta = {**METADATA, "model": {"name": model, "revision": "r1"}, "seeds": {"prose": 101}, "inputs": [name]}
        write_instances(path, rows, meta)
        files.append(path)
    certificates = []
    for s, rows in make_certificates(frame).groupby("s"):
        path = tmp_path / "certificates" / f"s{s}.parquet"
        write_instances(path, rows, {**METADATA, "config": "fedcba987654", "seeds": {"certificate": 7}})
        certificates.append(path)
    return frame, files, certificates, tmp_path / "instances.parquet"


def test_merge_joins_sorts_and_takes_over_better_certificates(shards):
    frame, files, certificates, output = shards
    merge_instances(files, certificates, output)
    merged, metadata = read_instances(output)
    keys = ["model", "arm", "input", "layer", "head", "position", "s"]
    assert len(merged) == len(frame)
    order = merged[keys].astype({"model": str, "arm": str, "input": str})
    assert order.equals(order.sort_values(keys, ignore_index=True))

    expected = frame.merge(make_certificates(frame), on=keys, how="left").sort_values(keys, ignore_index=True)
    better = (expected["certificate"] == "improved").to_numpy()
    assert better.any()
    assert (merged["best"] == "certificate").to_numpy().tolist() == better.tolist()
    np.testing.assert_array_equal(merged["es_best"], np.fmin(expected["es_best"], expected["es_certified"]))
    np.testing.assert_array_equal(merged["es_certified"], expected["es_certified"])
    without = merged["es_certified"].isna()
    assert (merged["certificate"][without].astype(str) == "").all()
    assert not merged["certificate_proved"][without].any()
    assert merged["certificate_proved"].sum() == (expected["certificate"] == "optimal").sum()

    assert metadata["config"] == ["0123456789ab", "fedcba987654"]
    assert metadata["seeds"] == {"certificate": 7, "prose": 101}
    assert {"name": "tiny-olmo2", "revision": "r1"} in metadata["models"]
    assert json.loads(pq.read_schema(output).metadata[b"contourkv"]) == metadata
    assert pq.read_schema(output).field("layer").type == "int16"


def test_merge_gives_the_same_bytes_for_any_order_of_files_and_rows(shards, tmp_path):
    _, files, certificates, output = shards
    merge_instances(files, certificates, output)
    merge_instances(files[::-1], certificates[::-1], tmp_path / "again.parquet")
    assert output.read_bytes() == (tmp_path / "again.parquet").read_bytes()


def test_merge_without_certificates(shards):
    _, files, _, output = shards
    merge_instances(files, [], output)
    merged, _ = read_instances(output)
    assert merged["es_certified"].isna().all() and set(merged["certificate"].astype(str)) == {""}
    assert not merged["certificate_proved"].any()


def test_merge_names_the_file_at_fault(shards, tmp_path):
    frame, files, certificates, output = shards

    def fails(message, instance_files=files, certificate_files=certificates):
        with pytest.raises(InvalidInput, match=message) as caught:
            merge_instances(instance_files, certificate_files, output)
        assert "\n" not in str(caught.value)
        assert not output.exists()

    fails("no instance files", [], [])
    fails(r"gone\.parquet: no such file", [*files, tmp_path / "gone.parquet"])
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(files[0].read_bytes()[:-200])
    fails(r"cut\.parquet: not a whole parquet file.*delete it", [cut])
    cut.write_bytes(b"")
    fails(r"cut\.parquet: not a whole parquet file", [cut])
    foreign = tmp_path / "foreign.parquet"
    frame.to_parquet(foreign)
    fails(r"foreign\.parquet: no provenance", [foreign])
    write_instances(foreign, frame.drop(columns=["phi", "bound"]), METADATA)
    fails(r"foreign\.parquet: columns missing: phi, bound", [foreign])
    write_instances(foreign, frame.rename(columns={"es_pool": "x"}), METADATA)
    fails(r"foreign\.parquet: columns missing: es_pool", [foreign])
    fails("comes twice", [*files, files[0]])
    fails(r"foreign\.parquet: columns missing: es_certified", certificate_files=[foreign])
    fails("certificates: model .* is not among the instances", files[1:])
    strange = make_certificates(frame).assign(certificate="maybe")
    write_instances(foreign, strange, METADATA)
    fails(r"foreign\.parquet: certificate 'maybe' is none of optimal", certificate_files=[foreign])


def test_a_column_of_words_where_numbers_belong_is_refused(tmp_path):
    import pyarrow as pa

    table = pa.Table.from_pandas(make_instances().assign(es_pool="much"), preserve_index=False)
    path = tmp_path / "words.parquet"
    pq.write_table(table.replace_schema_metadata({b"contourkv": b"{}"}), path)
    with pytest.raises(InvalidInput, match=r"words\.parquet: column es_pool is not float64"):
        read_instances(path)


def test_merge_writes_nothing_when_an_invariant_is_broken(shards):
    frame, files, _, output = shards
    write_instances(files[0], frame[frame["input"] == "code/000"].assign(bound=0.0), METADATA)
    with pytest.raises(InvariantBroken, match=r"Lemma 2\.1"):
        merge_instances([files[0]], [], output)
    assert not output.exists()


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(ContourKVError, match=r"x\.parquet: could not be written \(No space left on device\)"):
        write_instances(tmp_path / "x.parquet", make_instances(), METADATA)
    assert list(tmp_path.iterdir()) == []


def test_instances_round_trip_with_unknown_columns(tmp_path):
    frame = make_instances().assign(margin=0.5)
    write_instances(tmp_path / "x.parquet", frame, METADATA)
    back, metadata = read_instances(tmp_path / "x.parquet")
    assert metadata == METADATA and list(back.columns)[-1] == "margin"
    pd.testing.assert_frame_equal(back[frame.columns], frame, check_dtype=False, check_categorical=False)


def test_provenance_line_is_one_short_line():
    line = provenance_line(
        {
            "contourkv": "0.1.0",
            "config": ["a", "b", "c", "d"],
            "models": [{"name": "m", "revision": "r"}],
            "devices": {"capture": ["cuda (A)"], "measurement": ["cpu", "cuda (A)"]},
            "seeds": {"code": 3, "prose": [1, 2]},
            "statistics": {"resamples": 9, "seed": 1},
        }
    )
    assert line.startswith("contourkv 0.1.0; config ") and "(of 4 digests)" in line
    assert line.endswith("models m@r; computed on cpu, cuda (A); seeds code=3 prose=1+2; bootstrap 9 resamples, seed 1")


def test_statistics_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys, contourkv.statistics\n"
        "heavy = ('torch', 'numba', 'ortools', 'matplotlib', 'scipy', 'contourkv.figures')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"

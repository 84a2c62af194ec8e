"""Certificates: against brute force, cuts and bounds that are sound, outcomes that say what they mean."""

import subprocess
import sys
from fractions import Fraction
from functools import cache
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from conftest import random_row, rows
from hypothesis import given, settings
from hypothesis import strategies as st

from contourkv import Instance, forced_error, max_mass
from contourkv.enumeration import certify, certify_sample
from contourkv.enumeration.branch import Search
from contourkv.enumeration.certificate import KEYS, draw_sample
from contourkv.enumeration.outer import integer_cut, presolve
from contourkv.errors import InvalidInput

TOLERANCE = 1e-6


@cache
def all_sets(keys: int, s: int) -> np.ndarray:
    return np.array(list(combinations(range(keys), s)))


def every_error(instance: Instance, s: int) -> tuple[np.ndarray, np.ndarray]:
    """All kept sets of s keys and their forced errors, the plain way."""
    sets = all_sets(instance.size, s)
    totals = instance.g[sets].sum(axis=1)
    return sets, np.linalg.norm(totals, axis=1) / instance.p[sets].sum(axis=1)


def heavy_tailed(rng: np.random.Generator, keys: int, head_dim: int, scale: float = 1.5) -> Instance:
    """A row as captured ones are: a sink, a long tail, values around a common centre."""
    scores = scale * rng.standard_t(4, keys)
    scores[0] = scores.max() + scale
    weights = np.exp(scores - scores.max())
    values = rng.standard_normal(head_dim) + rng.standard_normal((keys, head_dim))
    values[0] *= 0.1
    return Instance(weights / weights.sum(), values)


def check_against(instance: Instance, s: int, found) -> None:
    """Status, error, bound and flags against the minimum over every set."""
    _, errors = every_error(instance, s)
    least = errors.min()
    noise = 1e-14 * np.linalg.norm(instance.v, axis=1).max()
    assert found.proved and found.repeatable
    assert found.error == forced_error(instance, found.kept)
    assert np.array_equal(found.kept, np.unique(found.kept)) and found.kept.size == s
    assert least * (1 - 1e-12) - noise <= found.error <= least / (1 - 2 * TOLERANCE) + noise
    assert found.lower_bound <= least * (1 + 1e-12) + noise
    beaten = found.error < (1 - TOLERANCE) * found.incumbent_error
    assert found.status == ("improved" if beaten else "optimal")
    if least > 1e3 * noise and least < found.incumbent_error * (1 - 2 * TOLERANCE):
        assert found.status == "improved"


# --- the optimum ------------------------------------------------------------------------------------------------


@given(rows(max_keys=13), st.data())
@settings(max_examples=150)
def test_branch_and_bound_finds_and_proves_the_minimum_over_every_set(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    incumbent = data.draw(st.permutations(range(instance.size)))[:s]
    check_against(instance, s, certify(instance, s, incumbent, 60, TOLERANCE))


@given(rows(max_keys=9), st.data())
@settings(max_examples=15)
def test_cp_sat_finds_and_proves_the_same(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    check_against(instance, s, certify(instance, s, max_mass(instance, s), 60, TOLERANCE, method="outer"))


@pytest.mark.parametrize("s", [2, 3, 4])
@pytest.mark.parametrize("keys", [30, 36])
def test_on_heavy_tailed_rows_too_large_for_a_single_leaf(keys, s, rng):
    for _ in range(4):
        instance = heavy_tailed(rng, keys, 12)
        check_against(instance, s, certify(instance, s, max_mass(instance, s), 60, TOLERANCE))


def test_the_two_methods_agree_on_longer_rows(rng):
    for s in (3, 8, 20):
        instance = heavy_tailed(rng, 60, 24, scale=3.0)
        branch = certify(instance, s, max_mass(instance, s), 60, TOLERANCE)
        outer = certify(instance, s, max_mass(instance, s), 60, TOLERANCE, method="outer")
        assert branch.proved and outer.proved and branch.status == outer.status
        assert branch.error == pytest.approx(outer.error, rel=2 * TOLERANCE)


@given(rows(min_keys=3, max_keys=12), st.data())
def test_the_order_of_keys_and_the_units_of_the_values_do_not_matter(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    order = np.array(data.draw(st.permutations(range(instance.size))))
    shuffled = Instance(instance.p[order], 7.0 * instance.v[order] + 3.0)
    one = certify(instance, s, max_mass(instance, s), 60, TOLERANCE)
    other = certify(shuffled, s, max_mass(shuffled, s), 60, TOLERANCE)
    assert other.error == pytest.approx(7.0 * one.error, rel=3 * TOLERANCE, abs=1e-13)


def test_a_planted_set_of_light_keys_is_found(rng):
    keys, s = 200, 5
    instance = heavy_tailed(rng, keys, 16)
    planted = np.sort(rng.choice(instance.order[60:], s, replace=False))
    values = np.array(instance.v)
    # Its weighted mean becomes that of all keys: the error vanishes but for a trace.
    rest = np.setdiff1d(np.arange(keys), planted)
    mean = instance.p[rest] @ values[rest] / instance.p[rest].sum()
    values[planted] += mean - instance.p[planted] @ values[planted] / instance.p[planted].sum() + 1e-3
    instance = Instance(instance.p, values)
    found = certify(instance, s, max_mass(instance, s), 10, TOLERANCE)
    assert found.status == "improved" and found.proved
    assert np.array_equal(found.kept, planted)
    assert found.improvement == pytest.approx(1 - found.error / forced_error(instance, max_mass(instance, s)))


def test_a_full_row_is_decided_at_once(rng):
    instance = heavy_tailed(rng, 1024, 64)
    for s in (4, 32):
        found = certify(instance, s, max_mass(instance, s), 20, TOLERANCE)
        assert found.proved and found.gap < 2 * TOLERANCE


# --- soundness of the parts -------------------------------------------------------------------------------------


@given(rows(max_keys=10), st.data())
def test_an_integer_cut_excludes_no_set_at_or_below_the_threshold(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    sets, errors = every_error(instance, s)
    # The threshold is met exactly by some set: the cut has nothing to spare.
    threshold = float(data.draw(st.sampled_from(sorted(errors))))
    if threshold == 0.0:
        return
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    directions = list(rng.standard_normal((4, instance.v.shape[1])))
    directions += [instance.g[kept].sum(axis=0) for kept in sets[errors <= threshold][:8]]
    for direction in directions:
        length = np.linalg.norm(direction)
        if length == 0.0:
            continue
        cut = integer_cut(instance.g, instance.p, threshold, direction / length)
        assert cut.dtype == np.int64
        assert (cut[sets[errors <= threshold]].sum(axis=1) <= 0).all()


@given(rows(max_keys=11), st.data())
@settings(max_examples=60)
def test_presolve_keeps_every_set_at_or_below_the_threshold(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    sets, errors = every_error(instance, s)
    threshold = float(errors.min()) * data.draw(st.sampled_from([1.0 + 1e-9, 1.2, 3.0]))
    start = instance.g[max_mass(instance, s)].sum(axis=0)
    decided = presolve(instance.g, instance.p, s, threshold, start / max(np.linalg.norm(start), 1e-300))
    good = sets[errors <= threshold]
    if decided is None:
        # Only rounding can be left of an error that a row of equal values has.
        assert errors.min() <= 1e-13 * np.linalg.norm(instance.v, axis=1).max()
        return
    inside, outside, _ = decided
    for kept in good:
        assert not outside[kept].any() and set(np.flatnonzero(inside)) <= set(kept)


@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.sampled_from([0.5, 1e-3, 1e-7, 1e-10, 1e-11, 1e-12]))
@settings(max_examples=100)
def test_the_lower_bound_holds_in_exact_arithmetic(seed, s, tail):
    """Also where s heavy keys cancel to many digits, so that float64 cannot resolve the tolerance."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.5, 1.0, 9) * np.where(np.arange(9) < s, 1.0, tail)
    instance = Instance(weights / weights.sum(), rng.standard_normal((9, 3)))
    found = certify(instance, s, max_mass(instance, s), 60, TOLERANCE)
    g = [[Fraction(float(x)) for x in row] for row in instance.g]
    p = [Fraction(float(x)) for x in instance.p]
    bound = Fraction(found.lower_bound) ** 2
    for kept in combinations(range(9), s):
        square = sum(sum(g[j][i] for j in kept) ** 2 for i in range(3))
        assert square >= bound * sum(p[j] for j in kept) ** 2
    assert found.proved


@given(st.integers(0, 2**32 - 1), st.integers(4, 8), st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=60)
def test_bounds_and_fixings_leave_the_one_set_at_the_threshold(seed, s, scale):
    """With t a hair above ES(s), anything that is cut off wrongly is the only set to be found."""
    instance = heavy_tailed(np.random.default_rng(seed), 18, 5, scale)
    sets, errors = every_error(instance, s)
    search = Search(instance.g, instance.p, sets[errors.argmax()], TOLERANCE)
    search.restart(errors.min() * (1 + 1e-9))
    assert search.run(np.inf, np.inf)
    assert np.array_equal(np.sort(search.kept), sets[errors.argmin()])


def test_a_search_in_pieces_is_the_search_in_one(rng):
    instance = heavy_tailed(rng, 120, 16, scale=1.0)
    order = instance.order
    kept = np.arange(8)
    whole = Search(instance.g[order], instance.p[order], kept, TOLERANCE)
    assert whole.run(np.inf, np.inf)
    pieces = Search(instance.g[order], instance.p[order], kept, TOLERANCE)
    while not pieces.finished:
        pieces.run(pieces.work + 1e5, np.inf)
    assert (whole.error, whole.nodes, whole.cuts) == (pieces.error, pieces.nodes, pieces.cuts)
    assert np.array_equal(np.sort(whole.kept), np.sort(pieces.kept))


# --- outcomes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["branch", "outer"])
def test_no_time_is_a_timeout_and_claims_nothing(method, rng):
    instance = heavy_tailed(rng, 80, 16)
    incumbent = max_mass(instance, 6)
    found = certify(instance, 6, incumbent, 0.0, TOLERANCE, method=method)
    assert found.status == "timeout" and not found.proved
    assert found.lower_bound == 0.0 and found.gap == 1.0 and found.improvement == 0.0
    assert np.array_equal(found.kept, incumbent)


def test_a_hard_row_keeps_its_time_and_has_an_honest_bound(rng):
    # Equal masses and values in all directions: nothing to prune by.
    instance = Instance(np.full(300, 1 / 300), rng.standard_normal((300, 32)))
    found = certify(instance, 12, max_mass(instance, 12), 1.0, TOLERANCE)
    assert not found.proved and found.status in ("improved", "timeout")
    assert found.seconds <= 1.2 + 0.5
    assert 0.0 <= found.lower_bound < found.error < found.incumbent_error
    if found.repeatable:
        again = certify(instance, 12, max_mass(instance, 12), 1.0, TOLERANCE)
        assert not again.repeatable or (again.error, again.lower_bound) == (found.error, found.lower_bound)


def test_the_bound_of_an_unfinished_search_is_below_the_error_of_every_set(rng):
    instance = heavy_tailed(rng, 26, 6, scale=0.3)
    _, errors = every_error(instance, 5)
    order = instance.order
    search = Search(instance.g[order], instance.p[order], np.arange(5), TOLERANCE)
    for share in (0.2, 0.5, 0.8, 0.99):
        search.restart(share * errors.min())
        assert search.run(np.inf, np.inf)
        assert search.lower_bound == share * errors.min()
    search.restart(errors.min() * (1 + 1e-9))
    search.run(np.inf, np.inf)
    assert search.error == pytest.approx(errors.min(), rel=1e-12)


def test_a_gain_within_the_tolerance_is_optimal(rng):
    instance = heavy_tailed(rng, 40, 8)
    sets, errors = every_error(instance, 3)
    second = np.argsort(errors)[1]
    gain = 1 - errors.min() / errors[second]
    assert certify(instance, 3, sets[second], 60, max(2 * gain, 1e-6)).status == "optimal"
    assert certify(instance, 3, sets[second], 60, gain / 2).status == "improved"


def test_equal_values_have_no_error_and_need_no_search():
    instance = Instance(np.full(50, 1 / 50), np.ones((50, 4)) / 3)
    found = certify(instance, 7, np.arange(7), 0.0, TOLERANCE)
    assert (found.status, found.lower_bound, found.gap, found.improvement) == ("optimal", 0.0, 0.0, 0.0)
    assert found.proved and found.error <= 1e-15


def test_a_set_without_error_ends_the_search(rng):
    half = rng.standard_normal((20, 5))
    instance = Instance(np.full(40, 1 / 40), np.concatenate([half, -half]))
    found = certify(instance, 2, [0, 1], 60, TOLERANCE)
    assert found.status == "improved" and found.proved and found.lower_bound == 0.0
    assert found.error < 1e-14 and found.kept[1] - found.kept[0] == 20


@pytest.mark.parametrize(("keys", "s"), [(2, 1), (3, 2), (12, 1), (12, 11), (300, 1), (300, 299)])
def test_the_ends_of_the_budget(keys, s, rng):
    instance = random_row(rng, keys, 6)
    check_against(instance, s, certify(instance, s, max_mass(instance, s), 60, TOLERANCE))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"s": 0}, "s: expected"),
        ({"s": 20}, "s: expected"),
        ({"incumbent": [0, 1]}, "incumbent: expected 3 keys"),
        ({"incumbent": [0, 1, 1]}, "named twice"),
        ({"incumbent": [0, 1, 20]}, "indices must lie in"),
        ({"time_limit": -1.0}, "time_limit"),
        ({"time_limit": np.inf}, "time_limit"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"workers": 0}, "workers"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**31}, "seed"),
        ({"time_limit": "long"}, "time_limit"),
        ({"tolerance": "1e-6"}, "tolerance"),
        ({"method": "guess"}, "method: expected one of branch, outer"),
    ],
)
def test_bad_arguments_are_named(change, says, rng):
    arguments = {"s": 3, "incumbent": [0, 1, 2], "time_limit": 1.0, "tolerance": TOLERANCE, **change}
    with pytest.raises(InvalidInput, match=says):
        certify(random_row(rng, 20, 4), **arguments)


# --- samples ----------------------------------------------------------------------------------------------------


def measured(layers: int = 3) -> pd.DataFrame:
    """The key columns of a small instances table."""
    grid = pd.MultiIndex.from_product(
        [["prose", "code"], [0, 1], range(layers), [0, 1], [15, 31], [3, 5]],
        names=["arm", "index", "layer", "head", "position", "s"],
    ).to_frame(index=False)
    grid["model"] = "tiny"
    grid["input"] = grid["arm"] + "/" + grid["index"].map("{:03d}".format)
    return grid.astype({"model": "category", "arm": "category", "input": "category"})


def row_of(row) -> Instance:
    place = "/".join(str(row[key]) for key in ("input", "layer", "head", "position"))
    return heavy_tailed(np.random.default_rng(list(place.encode())), row["position"] + 1, 4)


def sampled(frame: pd.DataFrame, **change) -> pd.DataFrame:
    settings = {"s": 3, "per_stratum": 4, "seed": 7, "time_limit": 10, "tolerance": TOLERANCE, **change}
    return certify_sample(frame, **settings, instance_of=row_of, incumbent=max_mass)


def test_a_sample_says_of_each_row_what_certify_says():
    table = sampled(measured())
    assert list(table.columns) == [
        *KEYS,
        "es_certified",
        "certificate",
        "certificate_lower",
        "certificate_proved",
        "certificate_mass",
        "certificate_max_rank",
    ]
    assert table.groupby("arm").size().to_dict() == {"prose": 4, "code": 4}
    assert not table.duplicated(list(KEYS)).any() and (table["s"] == 3).all()
    for row in table.to_dict("records"):
        instance = row_of(row)
        found = certify(instance, 3, max_mass(instance, 3), 10, TOLERANCE, seed=7)
        assert row["es_certified"] == found.error and row["certificate_lower"] == found.lower_bound
        assert row["certificate"] == found.status and row["certificate_proved"] == found.proved
        assert row["certificate_mass"] == instance.p[found.kept].sum()
        assert row["certificate_max_rank"] == np.flatnonzero(np.isin(instance.order, found.kept)).max()


def test_a_sample_depends_on_the_seed_and_not_on_the_order_of_rows_or_other_models():
    frame = measured()
    other = frame.assign(model=pd.Categorical(["other"] * len(frame)))
    mixed = pd.concat([other.astype(object), frame.astype(object)]).sample(frac=1.0, random_state=3)
    mixed = mixed.astype({name: int for name in ("layer", "head", "position", "s")})
    drawn = draw_sample(frame, 3, 4, 7)
    again = draw_sample(mixed, 3, 4, 7)
    pd.testing.assert_frame_equal(drawn, again[again["model"] == "tiny"].reset_index(drop=True))
    assert not drawn.equals(draw_sample(frame, 3, 4, 8))
    pd.testing.assert_frame_equal(sampled(frame), sampled(frame.iloc[::-1]))


def test_all_rows_of_a_budget_without_a_sample_size():
    assert len(draw_sample(measured(), 5, None, 7)) == len(measured()) // 2


@pytest.mark.parametrize(
    ("change", "says"), [({"s": 4}, "no row with budget s = 4"), ({"per_stratum": 99}, "per_stratum: expected 1 to 24")]
)
def test_an_impossible_sample_is_refused(change, says):
    with pytest.raises(InvalidInput, match=says):
        sampled(measured(), **change)


def test_progress_and_seconds_go_to_standard_error(capsys):
    table = sampled(measured(), per_stratum=1)
    said = capsys.readouterr().err
    assert "certify s=3: 2 of 2 rows" in said and "proved; median" in said
    assert not any("seconds" in name for name in table.columns)


def test_the_branch_method_needs_neither_torch_nor_ortools():
    script = (
        "import sys, numpy as np\n"
        "from contourkv import Instance, certify\n"
        "row = Instance(np.full(6, 1 / 6), np.arange(12.0).reshape(6, 2) ** 2)\n"
        "assert certify(row, 2, [0, 1], 1, 1e-6).proved\n"
        "print(*({'torch', 'ortools', 'pandas'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""

"""The best kept set over all keys: against brute force, against itself by three methods, against the certificate."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
import torch
from conftest import random_row, rows
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from contourkv import Instance, forced_error, max_mass
from contourkv.enumeration import best_of_all, certify
from contourkv.enumeration.branch import ROUNDING
from contourkv.enumeration.halves import mass_of, subsets
from contourkv.errors import InvalidInput

TOLERANCE = 1e-6
METHODS = ("auto", "branch", "walk", "halves")


def heavy_sets(instance: Instance, s: int, keys: int, floor: float) -> list[np.ndarray]:
    """The sets that count, as sorted key indices, the plain way."""
    order = instance.order[:keys]
    p = instance.p[order]
    least = floor * mass_of(p, np.arange(s))
    sets = (np.array(ranks) for ranks in combinations(range(order.size), s))
    return [np.sort(order[ranks]) for ranks in sets if mass_of(p, ranks) >= least]


def agrees(instance: Instance, found, least: float) -> None:
    """Proved, as good as the best error there is, and what it says of its set is true."""
    noise = 1e-14 * np.linalg.norm(instance.v, axis=1).max()
    assert found.proved
    assert found.kept.size == np.unique(found.kept).size and (np.diff(found.kept) > 0).all()
    assert found.error == forced_error(instance, found.kept)
    assert least * (1 - 1e-12) - noise <= found.error <= least / (1 - 2 * TOLERANCE) + noise


def flat_row(rng: np.random.Generator, keys: int, head_dim: int) -> Instance:
    """A row whose masses are much alike and whose values have a common centre: many light keys are equally good."""
    weights = np.exp(0.7 * rng.standard_normal(keys))
    decay = 0.8 ** np.arange(head_dim)
    return Instance(weights / weights.sum(), 1.0 + decay * rng.standard_normal((keys, head_dim)))


@st.composite
def hard_rows(draw) -> Instance:
    """Rows with masses over ten orders, values of any scale around any offset, equal and zero values."""
    keys, dim = draw(st.integers(5, 12)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = 10.0 ** -(draw(st.sampled_from([0.0, 1.0, 10.0])) * rng.random(keys))
    values = draw(st.sampled_from([1e-3, 1.0, 1e5])) * rng.standard_normal((keys, dim))
    values += draw(st.sampled_from([0.0, 1.0, 1e4]))
    kind = draw(st.sampled_from(["plain", "equal", "zero", "tiny"]))
    if kind == "equal":
        values[1:4] = values[0]
        weights[1:4] = weights[0]
    elif kind == "zero":
        values[rng.random(keys) < 0.5] = 0.0
    elif kind == "tiny":
        weights[keys // 2 :] = 1e-12 * rng.random(keys - keys // 2) + 1e-13
    return Instance(weights / weights.sum(), values)


# --- the optimum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@given(row=st.one_of(rows(min_keys=5, max_keys=12), hard_rows()), data=st.data())
@settings(max_examples=60)
def test_equals_brute_force(method, row, data):
    s = data.draw(st.sampled_from([s for s in (2, 4, 6) if s < row.size]))
    keys = data.draw(st.integers(s, row.size))
    least = min(forced_error(row, kept) for kept in heavy_sets(row, s, keys, 0.0))
    found = best_of_all(row, s, keys=keys, method=method, block=data.draw(st.sampled_from([1, 7, 10**4])))
    agrees(row, found, least)
    assert set(found.kept) <= set(row.order[:keys])
    assert found.sets == comb(keys, s) and 0 <= found.tested


@pytest.mark.parametrize("method", ["auto", "walk", "halves"])
@given(row=st.one_of(rows(min_keys=5, max_keys=11), hard_rows()), data=st.data())
@settings(max_examples=40)
def test_under_a_floor_it_equals_brute_force_over_the_heavy_sets(method, row, data):
    s = data.draw(st.sampled_from([s for s in (2, 4, 6) if s < row.size]))
    floor = data.draw(st.sampled_from([1e-6, 0.3, 0.8, 0.99, 1.0]))
    least = min(forced_error(row, kept) for kept in heavy_sets(row, s, row.size, floor))
    found = best_of_all(row, s, floor=floor, method=method)
    agrees(row, found, least)
    rank = np.argsort(row.order)
    p = row.p[row.order]
    assert mass_of(p, np.sort(rank[found.kept])) >= floor * mass_of(p, np.arange(s))


@pytest.mark.parametrize("method", ["walk", "halves"])
def test_eight_of_thirteen(method, rng):
    row = flat_row(rng, 13, 4)
    agrees(row, best_of_all(row, 8, method=method), min(forced_error(row, k) for k in heavy_sets(row, 8, 13, 0.0)))


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("method", ["auto", "walk", "halves"])
def test_a_planted_set_of_light_keys_is_found(method, offset, rng):
    keys, s = 70, 4
    row = random_row(rng, keys, 6)
    planted = np.sort(rng.choice(row.order[30:], s, replace=False))
    values = np.array(row.v)
    rest = np.setdiff1d(np.arange(keys), planted)
    mean = row.p[rest] @ values[rest] / row.p[rest].sum()
    values[planted] += mean - row.p[planted] @ values[planted] / row.p[planted].sum() + 1e-4
    row = Instance(row.p, values + offset)
    found = best_of_all(row, s, method=method)
    assert found.proved and np.array_equal(found.kept, planted)
    light = row.p[planted].sum() / row.p[max_mass(row, s)].sum()
    bounded = best_of_all(row, s, method=method, floor=min(1.01 * light, 1.0))
    assert bounded.proved and bounded.error > 10 * found.error


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e4]), st.sampled_from([1.0, 10.0]))
@settings(max_examples=25)
def test_float32_products_lose_nothing_that_float64_finds(seed, offset, orders):
    """Few directions, many sets near the threshold, masses over ten orders, values that share an offset."""
    rng = np.random.default_rng(seed)
    weights = 10.0 ** -(orders * rng.random(26))
    # Values on a lattice: a great many sets have nearly or exactly the same error.
    values = rng.integers(-2, 3, (26, 3)) + 1e-4 * rng.standard_normal((26, 3)) + offset
    row = Instance(weights / weights.sum(), values)
    one = best_of_all(row, 4, method="walk")
    agrees(row, best_of_all(row, 4, method="halves", dimensions=2, block=512), one.error)
    other = best_of_all(row, 4, method="branch")
    assert other.proved
    agrees(row, one, other.error)


def test_the_three_methods_and_the_certificate_agree_on_flat_rows(rng):
    for s, keys in ((4, 60), (4, 110), (6, 30), (8, 26)):
        row = flat_row(rng, keys, 10)
        certificate = certify(row, s, max_mass(row, s), 60, TOLERANCE)
        assert certificate.proved
        for method in ("auto", "walk", "halves"):
            agrees(row, best_of_all(row, s, method=method), certificate.error)
        heavy = [best_of_all(row, s, floor=0.8, method=method) for method in ("auto", "walk", "halves")]
        assert all(found.proved and found.error >= certificate.error * (1 - 2 * TOLERANCE) for found in heavy)
        assert heavy[0].error == pytest.approx(heavy[1].error, rel=2 * TOLERANCE)
        assert heavy[0].error == pytest.approx(heavy[2].error, rel=2 * TOLERANCE)


def test_most_of_a_flat_row_is_decided_without_looking_at_single_sets(rng):
    row = flat_row(rng, 160, 24)
    found = best_of_all(row, 4, method="walk")
    assert found.proved and found.skipped > 0.7 * found.sets and found.tested + found.skipped == found.sets


# --- what must not change it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", "walk", "halves"])
@given(row=hard_rows(), data=st.data())
@settings(max_examples=25)
def test_the_order_of_keys_and_a_bad_incumbent_do_not_matter(method, row, data):
    order = np.array(data.draw(st.permutations(range(row.size))))
    shuffled = Instance(row.p[order], row.v[order])
    worst = max(heavy_sets(shuffled, 4, row.size, 0.0), key=lambda kept: forced_error(shuffled, kept))
    one = best_of_all(row, 4, method=method)
    agrees(shuffled, best_of_all(shuffled, 4, incumbent=worst, method=method), one.error)


def test_the_same_arguments_give_the_same_answer_and_blocks_do_not_matter(rng):
    row = flat_row(rng, 50, 8)
    first = best_of_all(row, 4, method="halves", block=300)
    again = best_of_all(row, 4, method="halves", block=300)
    assert first.tested == again.tested and np.array_equal(first.kept, again.kept) and first.error == again.error
    assert best_of_all(row, 4, method="halves", block=10**5).error == first.error


def test_halves_keep_whole_float32_and_leave_the_setting_as_it_was(rng):
    torch.set_float32_matmul_precision("medium")
    try:
        row = flat_row(rng, 40, 8)
        assert best_of_all(row, 4, method="halves").error == best_of_all(row, 4, method="walk").error
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda(rng):
    row = flat_row(rng, 200, 24)
    agrees(row, best_of_all(row, 4, device="cuda"), best_of_all(row, 4).error)


# --- parts and edges --------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 4))
def test_subsets_are_all_of_them_in_colex_order(size, picked):
    assume(picked <= size)
    expected = sorted(combinations(range(size), picked), key=lambda kept: kept[::-1])
    assert [tuple(int(k) for k in kept) for kept in subsets(size, picked)] == expected


def test_work_that_runs_out_is_no_proof(rng):
    row = flat_row(rng, 120, 20)
    for method in ("walk", "halves"):
        found = best_of_all(row, 4, method=method, most_work=100)
        assert not found.proved and found.error == forced_error(row, found.kept)
        assert found.error <= forced_error(row, max_mass(row, 4)) * (1 + 8 * ROUNDING)
    assert not best_of_all(row, 4, method="branch", branch_work=1e4).proved


def test_rows_with_nothing_to_search(rng):
    row = random_row(rng, 9, 3)
    found = best_of_all(row, 4, keys=4)
    assert found.proved and found.method == "none" and np.array_equal(found.kept, max_mass(row, 4))
    equal = Instance(np.full(8, 1 / 8), np.ones((8, 3)))
    found = best_of_all(equal, 4, method="halves")
    assert found.proved and found.error == 0.0 and found.method == "none"


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"s": 3}, "s: expected one of 2, 4, 6, 8"),
        ({"s": 10}, "s: expected one of 2, 4, 6, 8"),
        ({"s": 40}, "s: expected a whole number"),
        ({"keys": 3}, "keys: "),
        ({"floor": 1.1}, "floor: "),
        ({"floor": float("nan")}, "floor: "),
        ({"tolerance": 0.0}, "tolerance: "),
        ({"method": "guess"}, "method: "),
        ({"device": "abacus", "method": "halves"}, "device: "),
        ({"incumbent": [0, 1, 2]}, "incumbent: expected 4 keys"),
        ({"incumbent": [0, 1, 2, 2]}, "kept: "),
        ({"incumbent": "lightest", "floor": 0.9}, "incumbent: it keeps"),
        ({"incumbent": "lightest", "keys": 10}, "incumbent: key"),
        ({"block": 0}, "block: "),
        ({"dimensions": 0}, "dimensions: "),
        ({"most_work": -1.0}, "most_work: expected work >= 0"),
        ({"most_work": "much"}, "most_work: "),
        ({"branch_work": "much"}, "branch_work: "),
        ({"floor": "half"}, "floor: "),
        ({"floor": np.ones(2)}, "floor: "),
        ({"tolerance": None}, "tolerance: "),
        ({"method": np.array(["auto", "walk"])}, "method: "),
    ],
)
def test_bad_arguments_are_named(arguments, named, rng):
    row = random_row(rng, 30, 4)
    given_arguments = {"s": 4, **arguments}
    if given_arguments.get("incumbent") == "lightest":
        given_arguments["incumbent"] = row.order[-4:]
    with pytest.raises(InvalidInput, match=f"^{named}"):
        best_of_all(row, **given_arguments)


def test_too_many_halves_and_too_long_rows_are_refused(rng):
    with pytest.raises(InvalidInput, match=r"^keys: 150 keys have .* halves"):
        best_of_all(random_row(rng, 150, 2), 8, method="halves")
    with pytest.raises(InvalidInput, match=r"^instance: "):
        best_of_all(random_row(rng, 4097, 1), 4)

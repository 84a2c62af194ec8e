"""Free weights: ef against non-negative least squares and all faces, EF against brute force, bounds that hold."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from conftest import random_row, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from contourkv import Instance, best_in_pool, forced_error
from contourkv.enumeration import best_free, free_error, price
from contourkv.enumeration.free import _search
from contourkv.errors import InvalidInput
from contourkv.selectors.hull import Corral, Points


def offsets(instance, kept):
    return instance.v[list(kept)] - instance.mu


def by_least_squares(x):
    """dist(0, conv x): of the cone of (1, x_j), the point nearest to (1, 0) lies over the hull's nearest point."""
    scale = np.linalg.norm(x, axis=1).max() or 1.0
    weights, _ = nnls(np.vstack([np.ones(len(x)), x.T / scale]), np.eye(1 + x.shape[1])[0])
    return float(np.linalg.norm(weights / weights.sum() @ x))


def by_faces(x):
    """The same, as the least distance over all faces whose affine hull comes nearest inside them."""
    least = np.inf
    for size in range(1, len(x) + 1):
        for face in combinations(range(len(x)), size):
            lifted = np.hstack([np.ones((size, 1)), x[list(face)]])
            weights = np.linalg.pinv(lifted @ lifted.T) @ np.ones(size)
            weights /= weights.sum()
            if (weights >= -1e-9).all():
                least = min(least, np.linalg.norm(weights @ x[list(face)]))
    return least


def brute(instance, pool, s):
    """EF(s) over the `pool` heaviest keys, all sets tried."""
    return min(by_least_squares(offsets(instance, kept)) for kept in combinations(instance.order[:pool], s))


def noise(instance):
    """Rounding of a distance between values."""
    return 1e-12 * np.abs(instance.v).max()


@st.composite
def kept_sets(draw, least=1):
    instance = draw(rows(min_keys=3, max_keys=14))
    size = draw(st.integers(least, instance.size))
    kept = draw(st.permutations(range(instance.size)))[:size]
    return instance, np.array(kept)


@given(kept_sets())
def test_the_error_is_the_distance_of_the_hull(case):
    instance, kept = case
    found = free_error(instance, kept)
    expected = by_least_squares(offsets(instance, kept))
    assert found.error == pytest.approx(expected, rel=1e-9, abs=noise(instance))
    # The weights are a certificate from above, the gap one from below.
    assert found.weights.shape == kept.shape and (found.weights >= 0).all()
    assert found.weights.sum() == pytest.approx(1.0, abs=1e-14)
    assert np.linalg.norm(found.weights @ instance.v[kept] - instance.mu) == pytest.approx(
        found.error, rel=1e-9, abs=noise(instance)
    )
    assert found.gap >= 0.0
    assert 0.0 <= found.lower_bound <= found.error
    assert found.lower_bound <= expected + noise(instance)
    assert found.lower_bound >= found.error * (1 - 1e-9) - noise(instance)


@settings(max_examples=25)
@given(kept_sets())
def test_the_error_is_that_of_the_best_face(case):
    instance, kept = case
    expected = by_faces(offsets(instance, kept[:6]))
    assert free_error(instance, kept[:6]).error == pytest.approx(expected, rel=1e-7, abs=1e-7 * noise(instance) ** 0.5)


@given(kept_sets(), st.integers(0, 2**32 - 1))
def test_any_weights_prove_a_bound(case, seed):
    instance, kept = case
    x = offsets(instance, kept)
    y = np.random.default_rng(seed).dirichlet(np.ones(kept.size)) @ x
    found = free_error(instance, kept)
    square = y @ y
    if square > noise(instance) ** 2:
        gap = square - (x @ y).min()
        assert (square - gap) / np.sqrt(square) <= found.error + noise(instance)
        assert found.error <= np.sqrt(square) + noise(instance)


@given(kept_sets(least=2))
def test_free_weights_are_never_worse_than_forced_ones_and_more_keys_never_hurt(case):
    instance, kept = case
    errors = [free_error(instance, kept[:size]).error for size in range(1, kept.size + 1)]
    assert errors[0] == pytest.approx(np.linalg.norm(instance.v[kept[0]] - instance.mu), rel=1e-13)
    assert all(b <= a * (1 + 1e-10) + noise(instance) for a, b in pairwise(errors))
    assert errors[-1] <= forced_error(instance, kept) * (1 + 1e-10) + noise(instance)


@given(kept_sets(), st.integers(0, 99), st.sampled_from([1e-120, 1e-9, 3.0, 1e120]))
def test_turning_moving_scaling_and_renaming_change_nothing(case, seed, factor):
    instance, kept = case
    error = free_error(instance, kept).error
    d = instance.v.shape[1]
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0]
    moved = Instance(instance.p, factor * (instance.v @ turn + rng.standard_normal(d)))
    near = dict(rel=1e-8, abs=10 * noise(instance))
    assert free_error(moved, kept).error / factor == pytest.approx(error, **near)
    order = rng.permutation(instance.size)
    renamed = Instance(instance.p[order], instance.v[order])
    assert free_error(renamed, np.argsort(order)[kept]).error == pytest.approx(error, **near)
    assert free_error(instance, rng.permutation(kept)).error == pytest.approx(error, **near)
    doubled = free_error(Instance(instance.p, 8.0 * instance.v), kept)
    assert doubled.error == pytest.approx(8.0 * error, rel=1e-12, abs=noise(instance))


@given(rows(), st.data())
def test_a_hull_that_holds_the_dense_output_gives_zero(instance, data):
    found = free_error(instance, data.draw(st.permutations(range(instance.size))))
    assert found.error <= noise(instance)
    assert found.lower_bound == 0.0


@pytest.mark.parametrize("offset", [0.0, 1e-15, 1e-12, 1e-9, 1e-6, 1e-3])
@pytest.mark.parametrize("seed", range(4))
def test_nearly_dependent_values(seed, offset):
    # Clusters of near copies, on a line and in a plane of a larger space, away from the dense output.
    rng = np.random.default_rng(seed)
    corners = rng.standard_normal((3, 6)) + [6, 0, 0, 0, 0, 0]
    mixed = np.vstack([corners[[0, 0, 1, 1, 2]], 0.5 * (corners[0] + corners[1]), corners[:2].mean(axis=0)])
    values = np.vstack([mixed + offset * rng.standard_normal(mixed.shape), rng.standard_normal((8, 6))])
    instance = Instance(np.full(15, 1 / 15), values)
    kept = np.arange(7)
    found = free_error(instance, kept)
    assert found.error == pytest.approx(by_least_squares(offsets(instance, kept)), rel=1e-9)
    assert found.lower_bound >= found.error * (1 - 1e-9)
    best = best_free(instance, 3, 7)
    assert best.exact
    assert best.error == pytest.approx(brute(instance, 7, 3), rel=2e-6)


@settings(max_examples=60)
@given(rows(max_keys=9), st.data())
def test_exact_equals_brute_force(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    pool = data.draw(st.integers(s, instance.size + 1))
    found = best_free(instance, s, pool, limit=10**6)
    expected = brute(instance, pool, s)
    assert found.exact and found.status == "exact"
    assert found.error == pytest.approx(expected, rel=2e-6, abs=noise(instance))
    assert found.error == free_error(instance, found.kept).error
    assert found.lower_bound <= expected * (1 + 1e-12) + noise(instance)
    assert found.lower_bound >= found.error * (1 - 2e-6) - noise(instance)
    assert found.kept.size == s and (np.diff(found.kept) > 0).all()
    assert set(found.kept) <= set(instance.order[:pool])


@pytest.mark.parametrize("s, pool, d", [(3, 14, 12), (4, 12, 3), (5, 12, 20), (7, 12, 6), (9, 12, 20)])
@pytest.mark.parametrize("sharpness", [0.3, 2.0])
def test_larger_pools_equal_brute_force(s, pool, d, sharpness):
    instance = random_row(np.random.default_rng(s), 40, d, sharpness)
    found = best_free(instance, s, pool, limit=10**6)
    assert found.exact
    assert found.error == pytest.approx(brute(instance, pool, s), rel=2e-6, abs=noise(instance))


@pytest.mark.parametrize("s, pool, d", [(1, 12, 4), (2, 14, 6), (3, 14, 9), (4, 12, 12), (6, 12, 20), (8, 12, 14)])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 2.5])
def test_the_tree_alone_finds_the_best_set(s, pool, d, sharpness):
    # Descents find most small optima by themselves: here the tree starts from the worst that a set can be.
    instance = random_row(np.random.default_rng(10 * s + pool), 40, d, sharpness)
    points = Points.of(instance, instance.order[:pool])
    expected = brute(instance, pool, s)
    corral = Corral.of(points.at, points.lift)
    for limit in (0, 5, 20, 60, 10**5):
        kept, levels, counts = np.arange(s)[::-1].copy(), np.array([np.inf, np.inf]), np.zeros(2, np.int64)
        finished = _search(
            points.at, points.gram, s, np.arange(pool), corral, kept, levels, counts, 0.0, (1 - 1e-6) ** 2, limit
        )
        assert np.sqrt(levels[1]) * points.scale <= expected * (1 + 1e-9)
        assert np.sqrt(levels[0]) * points.scale >= expected * (1 - 1e-9)
        if finished:
            best = free_error(instance, instance.order[kept[: counts[1]]]).error
            assert best == pytest.approx(expected, rel=2e-6)
    assert finished


@settings(max_examples=40)
@given(rows(min_keys=5, max_keys=10), st.data())
def test_a_search_cut_short_still_brackets_the_optimum(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    found = best_free(instance, s, instance.size, limit=data.draw(st.integers(0, 12)))
    expected = brute(instance, instance.size, s)
    assert found.lower_bound <= expected + noise(instance)
    assert found.error >= expected - noise(instance)
    if found.exact:
        assert found.error == pytest.approx(expected, rel=2e-6, abs=noise(instance))


def test_a_search_cut_short_says_so_and_repeats():
    instance = random_row(np.random.default_rng(5), 60, 30, 0.3)
    first, again = (best_free(instance, 8, 30, limit=50) for _ in range(2))
    assert first.status == "upper bound" and not first.exact
    assert 0.0 < first.lower_bound < first.error
    assert first.kept.tolist() == again.kept.tolist() and first.lower_bound == again.lower_bound
    longer = best_free(instance, 8, 30, limit=400)
    assert longer.error <= first.error
    assert longer.lower_bound >= first.lower_bound


@settings(max_examples=40)
@given(rows(min_keys=5, max_keys=12), st.data())
def test_no_set_of_the_pool_is_better_and_wider_searches_are_never_worse(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    pool = data.draw(st.integers(s, instance.size))
    error = best_free(instance, s, pool).error
    slack = 2e-6 * error + noise(instance)
    kept = data.draw(st.permutations(instance.order[:pool].tolist()))[:s]
    assert error <= free_error(instance, kept).error + slack
    assert best_free(instance, s, pool + 1).error <= error + slack
    if s < pool and s + 1 < instance.size:
        assert best_free(instance, s + 1, pool).error <= error + slack
    forced = best_in_pool(instance, s, pool)
    found = best_free(instance, s, pool, starts=[forced.kept], limit=0)
    assert found.error <= forced.error * (1 + 1e-9) + noise(instance)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_one_more_key_than_coordinates_reaches_the_dense_output(seed, d):
    # Caratheodory: d + 1 points are enough, and the whole row's hull holds mu.
    instance = random_row(np.random.default_rng(seed), 12, d, 1.0)
    found = best_free(instance, d + 1, 12)
    assert found.exact
    assert found.error <= noise(instance)
    assert found.lower_bound == 0.0


def test_one_key_is_the_nearest(rng):
    instance = random_row(rng, 30, 5)
    distance = np.linalg.norm(offsets(instance, range(30)), axis=1)
    found = best_free(instance, 1, 30)
    assert found.exact and found.kept.tolist() == [distance.argmin()]
    assert found.error == pytest.approx(distance.min(), rel=1e-13)


def test_keys_that_are_not_needed_are_the_heaviest():
    # The pool lies beyond a line, on which two light keys are nearest: three others make up the set.
    p = np.array([0.3, 0.2, 0.15, 0.1, 0.1, 0.1, 0.05])
    v = np.array([[4.0, 0.0], [3.0, 1.0], [4.0, -1.0], [1.0, 1.0], [1.0, -1.0], [2.0, 9.0], [0.0, 0.0]])
    v[6] = -(p @ v) / p[6]
    found = best_free(Instance(p, v), 5, 6)
    assert found.exact and found.error == pytest.approx(1.0, rel=1e-12)
    assert found.kept.tolist() == [0, 1, 2, 3, 4]


def test_equal_values_are_defined(rng):
    instance = Instance(random_row(rng, 30, 2).p, np.full((30, 2), 0.7))
    found = best_free(instance, 8, 24)
    assert (found.error, found.lower_bound, found.status) == (0.0, 0.0, "exact")
    assert found.kept.tolist() == sorted(instance.order[:8])
    assert free_error(instance, [3, 4]).error == 0.0


def test_a_small_error_among_long_values_is_resolved(rng):
    # A key of nearly all the mass lies 1e-9 of a value's length from the dense output.
    p = np.array([1.0, *(1e-9 * rng.random(19))])
    instance = Instance(p / p.sum(), rng.standard_normal((20, 24)))
    found = best_free(instance, 4, 12, limit=10**6)
    x = offsets(instance, instance.order[:12])
    assert found.error < 1e-7
    assert found.exact and found.lower_bound >= found.error * (1 - 1e-3)
    assert found.error <= min(free_error(instance, kept).error for kept in combinations(range(12), 4) if 0 in kept) or (
        np.linalg.norm(x, axis=1).argmin() == 0
    )


@given(st.lists(st.tuples(st.floats(0, 1e300), st.floats(0, 1e300)), min_size=1, max_size=6))
def test_price_is_the_ratio(pairs):
    es, ef = np.array(pairs).T
    for ratio, a, b in zip(price(es, ef), es, ef, strict=True):
        with np.errstate(over="ignore"):
            assert ratio == (a / b if b > 0 else 1.0 if a == 0 else np.inf)


def test_price_of_the_same_set_is_at_least_one(rng):
    kept = [rng.choice(40, 6, replace=False) for _ in range(20)]
    instance = random_row(rng, 40, 12)
    es = [forced_error(instance, keys) for keys in kept]
    ratio = price(es, [free_error(instance, keys).error for keys in kept])
    assert (ratio >= 1 - 1e-12).all() and (ratio > 1.001).any()


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"s": 20}, "s: expected a whole number from 1 to 19"),
        ({"pool_size": 3}, "pool_size: expected at least the budget 4, got 3"),
        ({"pool_size": 8.0}, "pool_size: expected a whole number"),
        ({"tolerance": 0.0}, "tolerance: expected a relative difference"),
        ({"limit": -1}, "limit: expected a whole number of at least 0"),
        ({"starts": [[0, 1, 2]]}, "starts: expected sets of 4 of the 8 heaviest keys"),
        ({"starts": [range(20)]}, "starts: expected sets of 4"),
        ({"starts": [[0, 0, 1, 2]]}, "kept: a key is named twice"),
    ],
)
def test_bad_arguments_are_named(arguments, says, rng):
    with pytest.raises(InvalidInput, match=says):
        best_free(random_row(rng, 20, 3), **{"s": 4, "pool_size": 8, **arguments})


def test_a_start_outside_the_pool_is_refused(rng):
    instance = random_row(rng, 20, 3)
    with pytest.raises(InvalidInput, match="starts: expected sets of 2 of the 8"):
        best_free(instance, 2, 8, starts=[instance.order[7:9]])


def test_bad_kept_sets_and_errors_are_named(rng):
    with pytest.raises(InvalidInput, match="kept: expected a non-empty list"):
        free_error(random_row(rng, 20, 3), [])
    with pytest.raises(InvalidInput, match=r"ef: expected errors of at least 0, got -1\.0"):
        price([1.0, 2.0], [1.0, -1.0])
    with pytest.raises(InvalidInput, match="es: expected errors of at least 0, got nan"):
        price(np.nan, 1.0)
    with pytest.raises(InvalidInput, match="expected shapes that broadcast"):
        price([1.0, 2.0], [1.0, 2.0, 3.0])

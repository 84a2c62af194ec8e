"""The pool search against brute force, its families and its edges."""

from itertools import combinations, pairwise
from math import comb

import numpy as np
import pytest
from conftest import random_row, rows
from hypothesis import given
from hypothesis import strategies as st

from contourkv import Instance, best_in_pool, forced_error, max_mass
from contourkv.enumeration import MassPool, Neighbourhood, best_in_families
from contourkv.enumeration.pool import RankedRow
from contourkv.errors import InvalidInput


def brute(instance, sets):
    """Least forced error over `sets`, and the set; the first of equals."""
    return min(((forced_error(instance, sorted(kept)), tuple(sorted(kept))) for kept in sets), key=lambda x: x[0])


def agrees(instance, result, error, kept):
    """1e-12 relative, beyond what summation order alone can do to a sum that cancels."""
    rounding = 8e-16 * np.linalg.norm(instance.g, axis=1).sum() / instance.p[list(kept)].sum()
    assert abs(result.error - error) <= 1e-12 * error + rounding
    assert result.error == pytest.approx(forced_error(instance, result.kept), rel=1e-12, abs=rounding)


@given(rows(), st.data())
def test_equals_brute_force(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    pool = data.draw(st.integers(s, instance.size + 2))
    result = best_in_pool(instance, s, pool)
    keys = instance.order[:pool]
    error, kept = brute(instance, combinations(keys, s))
    agrees(instance, result, error, kept)
    assert result.subsets == comb(len(keys), s)
    assert result.complete == (pool >= instance.size)


@given(rows(min_keys=4), st.data())
def test_families_with_a_core_equal_brute_force(instance, data):
    s = data.draw(st.integers(2, instance.size - 1))
    families = []
    for _ in range(data.draw(st.integers(1, 3))):
        core = data.draw(st.integers(0, s - 1))
        families.append(MassPool(s, core, data.draw(st.integers(s, instance.size))))
    result = best_in_families(instance, s, families)
    order = instance.order
    sets = [(*order[: f.core], *rest) for f in families for rest in combinations(order[f.core : f.pool], s - f.core)]
    error, kept = brute(instance, sets)
    agrees(instance, result, error, kept)
    assert result.subsets == len(sets)


@given(rows(min_keys=4, max_keys=11), st.data())
def test_neighbourhoods_equal_brute_force_and_hold_their_centre(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    free = data.draw(st.integers(1, s))
    pools = [MassPool(s, 0, s), Neighbourhood(s, free, data.draw(st.integers(free + 1, instance.size + 2)))]
    result = best_in_families(instance, s, pools)
    order = instance.order
    ranked = RankedRow(np.ascontiguousarray(instance.g[order]), np.ascontiguousarray(instance.p[order]))
    found = ranked.search(s, pools, instance.size)
    centre = found.balance.or_better(found.balance_second)
    core, others = pools[1].split(ranked.gram, ranked.p, centre.kept)
    assert len(core) == s - free and set(core) <= set(centre.kept) <= set(core) | set(others)
    sets = [order[:s], *(order[[*core, *rest]] for rest in combinations(others, free))]
    error, kept = brute(instance, sets)
    agrees(instance, result, error, kept)
    assert result.error <= min(found.balance.error, found.balance_second.error)
    assert result.subsets == len(sets)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("s, pool", [(1, 30), (2, 22), (4, 20), (8, 16), (11, 16), (15, 18), (17, 18)])
def test_larger_pools_equal_brute_force_to_the_set(seed, s, pool):
    instance = random_row(np.random.default_rng(seed), 40, 6)
    result = best_in_pool(instance, s, pool)
    error, kept = brute(instance, combinations(instance.order[:pool], s))
    assert result.error == pytest.approx(error, rel=1e-12)
    assert tuple(result.kept) == kept


@given(rows(min_keys=3), st.data())
def test_a_wider_pool_is_never_worse_and_kappa_is_invariant(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    errors = [best_in_pool(instance, s, pool).error for pool in range(s, instance.size + 1)]
    assert all(b <= a for a, b in pairwise(errors))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    d = instance.v.shape[1]
    turned = Instance(instance.p, 5.0 * instance.v @ np.linalg.qr(rng.standard_normal((d, d)))[0])
    noise = 1e-13 * np.linalg.norm(instance.g, axis=1).sum() / instance.p.min()
    assert best_in_pool(turned, s, instance.size).error == pytest.approx(5.0 * errors[-1], rel=1e-7, abs=5 * noise)


def test_max_mass_wins_ties():
    instance = Instance(np.full(8, 1 / 8), np.tile([[1.0, 0.0], [-1.0, 0.0]], (4, 1)))
    result = best_in_pool(instance, 2, 8)
    assert result.error == 0.0
    assert result.kept.tolist() == [0, 1]


def test_equal_values_are_defined(rng):
    instance = Instance(random_row(rng, 30, 2).p, np.full((30, 2), 0.7))
    result = best_in_pool(instance, 8, 24)
    assert result.error == 0.0
    assert result.kept.tolist() == max_mass(instance, 8).tolist()


def test_a_pool_of_the_budget_is_max_mass(rng):
    instance = random_row(rng, 30, 3)
    result = best_in_pool(instance, 5, 5)
    assert result.kept.tolist() == max_mass(instance, 5).tolist()
    assert result.subsets == 1


def test_tiny_optimum_among_large_terms():
    # The best set cancels to 1e-8 of its terms: the screen must let rounding through, the float64 check decide.
    rng = np.random.default_rng(3)
    v = rng.standard_normal((16, 2))
    p = rng.dirichlet(np.ones(16))
    v[5] = -(p[2] * v[2]) / p[5]
    v -= p @ v
    v[7] -= 1e-8
    instance = Instance(p, v)
    result = best_in_pool(instance, 4, 16)
    error, kept = brute(instance, combinations(range(16), 4))
    assert result.error == pytest.approx(error, rel=1e-10)
    assert tuple(result.kept) == kept


@pytest.mark.parametrize("s, pool", [(0, 4), (5, 4), (20, 24), (21, 24)])
def test_bad_sizes_are_named(s, pool, rng):
    with pytest.raises(InvalidInput):
        best_in_pool(random_row(rng, 20, 3), s, pool)


@pytest.mark.parametrize("core, pool", [(-1, 8), (4, 8), (0, 3)])
def test_bad_families_are_named(core, pool):
    with pytest.raises(InvalidInput, match="family: expected 0 <= core < budget <= pool"):
        MassPool(4, core, pool)


@pytest.mark.parametrize("free, pool", [(0, 8), (5, 8), (4, 4)])
def test_bad_neighbourhoods_are_named(free, pool):
    with pytest.raises(InvalidInput, match="family: expected 1 <= free <= budget and free < pool"):
        Neighbourhood(4, free, pool)


def test_families_of_another_budget_are_refused(rng):
    with pytest.raises(InvalidInput, match="each with budget 4"):
        best_in_families(random_row(rng, 20, 3), 4, [MassPool(5, 0, 10)])


def test_large_budgets_need_no_other_argument(rng):
    instance = random_row(rng, 400, 3)
    assert best_in_pool(instance, 300, 301).subsets == 301
    assert best_in_pool(random_row(rng, 5000, 3), 1, 5000).complete


@pytest.mark.parametrize("s, pool", [(8, 200), (32, 128), (64, 400)])
def test_a_pool_that_cannot_be_searched_is_refused_before_it_starts(s, pool, rng):
    with pytest.raises(InvalidInput, match="take a smaller pool"):
        best_in_pool(random_row(rng, 400, 3), s, pool)


@pytest.mark.parametrize("pool", [None, "8", 3.7, float("nan")])
def test_a_pool_size_that_is_no_number_is_named(pool, rng):
    with pytest.raises(InvalidInput, match="pool_size: expected a whole number"):
        best_in_pool(random_row(rng, 20, 3), 3, pool)

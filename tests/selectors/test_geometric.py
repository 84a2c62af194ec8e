"""Geometric: a local minimum of the free-weight error under swaps, filled with heavy keys, worse once renormalised."""

from itertools import product

import numpy as np
import pytest
from conftest import random_row, rows
from hypothesis import given
from hypothesis import strategies as st

from contourkv import Instance, forced_error, max_mass
from contourkv.enumeration import best_free, free_error
from contourkv.errors import InvalidInput
from contourkv.selectors import geometric
from contourkv.selectors.hull import REACHED


def noise(instance):
    return 1e-12 * np.abs(instance.v).max()


@given(rows(min_keys=3, max_keys=10), st.data())
def test_no_single_swap_comes_nearer(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    kept = geometric(instance, s)
    assert kept.size == s and (np.diff(kept) > 0).all()
    error = free_error(instance, kept).error
    if error <= REACHED * forced_error(instance, max_mass(instance, s)):
        return  # near enough: swaps end there
    for i, j in product(range(s), np.setdiff1d(np.arange(instance.size), kept)):
        swapped = kept.copy()
        swapped[i] = j
        assert free_error(instance, swapped).error >= error * (1 - 2e-9) - noise(instance)


@given(rows(min_keys=4), st.data())
def test_only_candidates_enter(instance, data):
    s = data.draw(st.integers(1, instance.size - 2))
    m = data.draw(st.integers(s, instance.size - 1))
    assert set(geometric(instance, s, candidates=m)) <= set(instance.order[:m])


@given(rows(min_keys=3, max_keys=10), st.data())
def test_keys_of_weight_zero_are_the_heaviest_there_are(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    kept = geometric(instance, s)
    found = free_error(instance, kept)
    others = np.setdiff1d(np.arange(instance.size), kept)
    # Where the nearest point has one set of weights only: mu outside the hull of a set of distinct values.
    if found.error > 1e-6 and np.unique(instance.v, axis=0).shape[0] == instance.size:
        for key in kept[found.weights == 0.0]:
            assert (instance.p[key] >= instance.p[others]).all()


@pytest.mark.parametrize("s", [3, 6, 10])
def test_near_the_best_set(s):
    ratios = []
    for seed in range(8):
        instance = random_row(np.random.default_rng(seed), 100, 32, 2.5)
        error = free_error(instance, geometric(instance, s, candidates=20)).error
        best = best_free(instance, s, 20)
        assert best.exact and best.error <= error * (1 + 1e-12)
        ratios.append(error / best.error)
    assert np.median(ratios) < 1.05 and max(ratios) < 1.5


def test_it_is_no_worse_than_the_heaviest_keys(rng):
    for _ in range(20):
        instance = random_row(rng, 30, 6, 1.0)
        kept = geometric(instance, 5)
        assert free_error(instance, kept).error <= free_error(instance, max_mass(instance, 5)).error * (1 + 1e-12)


def test_renormalised_it_is_worse_than_max_mass(rng):
    # Free weights like light keys about the dense output: their own masses weigh them anew.
    several = [random_row(rng, 200, 16, 2.5) for _ in range(40)]
    ratio = [forced_error(row, geometric(row, 8)) / forced_error(row, max_mass(row, 8)) for row in several]
    free = [free_error(row, geometric(row, 8)).error / free_error(row, max_mass(row, 8)).error for row in several]
    assert np.median(ratio) > 1.0
    assert max(free) <= 1.0 + 1e-9 and np.median(free) < 0.9


def test_turning_and_scaling_change_nothing(rng):
    instance = random_row(rng, 60, 8)
    turn = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    kept = geometric(instance, 6)
    assert geometric(Instance(instance.p, 1e-60 * instance.v @ turn + 0.0), 6).tolist() == kept.tolist()


def test_large_budgets_need_no_other_argument(rng):
    assert len(geometric(random_row(rng, 320, 3), 300)) == 300


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"candidates": 3}, "candidates: expected at least the budget 4, got 3"),
        ({"candidates": 5.5}, "candidates: expected a whole number"),
        ({"s": 0}, "s: expected a whole number from 1 to 19"),
    ],
)
def test_bad_arguments_are_named(arguments, says, rng):
    with pytest.raises(InvalidInput, match=says):
        geometric(random_row(rng, 20, 3), **{"s": 4, **arguments})


def test_swaps_end_near_the_dense_output(rng):
    for _ in range(5):
        instance = random_row(rng, 120, 4)  # any five values of four dimensions can surround the dense output
        assert free_error(instance, geometric(instance, 24)).error <= REACHED * forced_error(
            instance, max_mass(instance, 24)
        )

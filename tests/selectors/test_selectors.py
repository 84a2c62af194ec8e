"""Balance: never worse than where it starts, a local minimum under swaps, two starts."""

from itertools import product

import numpy as np
import pytest
from conftest import random_row, rows
from hypothesis import given
from hypothesis import strategies as st

from contourkv import Instance, balance, forced_error, max_mass
from contourkv.errors import InvalidInput


@given(rows(min_keys=3), st.data())
def test_no_single_swap_improves_what_balance_keeps(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    start = data.draw(st.sampled_from([None, "second"]))
    kept = balance(instance, s, start=start)
    error = forced_error(instance, kept)
    if start is None:
        assert error <= forced_error(instance, max_mass(instance, s)) * (1 + 1e-12) + 1e-15
    others = np.setdiff1d(np.arange(instance.size), kept)
    noise = 1e-12 * np.abs(instance.g).sum() / instance.p[kept].sum()
    for i, j in product(range(s), others):
        swapped = kept.copy()
        swapped[i] = j
        assert forced_error(instance, swapped) >= error * (1 - 1e-6) - 1e3 * noise


@given(rows(min_keys=4), st.data())
def test_only_candidates_enter(instance, data):
    s = data.draw(st.integers(1, instance.size - 2))
    m = data.draw(st.integers(s, instance.size - 1))
    assert set(balance(instance, s, candidates=m)) <= set(instance.order[:m])


def test_a_misleading_sink_is_left_by_the_second_start():
    p = np.array([26.0, 20.0, 18.0, 15.0, 12.0, 8.0])
    v = np.array([[9.0, 0.0], [-5.0, -4.0], [4.0, 0.0], [-1.0, -1.0], [-1.0, 0.0], [-1.0, 5.0]])
    instance = Instance(p / p.sum(), v)
    first = balance(instance, 2)
    second = balance(instance, 2, start="second")
    assert 0 in first and 0 not in second
    assert forced_error(instance, second) < 0.1 * forced_error(instance, first)


def test_a_given_start_is_used(rng):
    instance = random_row(rng, 40, 3)
    start = np.arange(5)
    kept = balance(instance, 5, start=start)
    assert forced_error(instance, kept) <= forced_error(instance, start)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"candidates": 3}, "candidates: expected at least the budget 4"),
        ({"start": "third"}, "start: expected None"),
        ({"start": [0, 1, 2]}, "start: expected 4 of the"),
        ({"start": "second", "candidates": 4}, "start: the second start needs more"),
    ],
)
def test_bad_arguments_are_named(arguments, says, rng):
    with pytest.raises(InvalidInput, match=says):
        balance(random_row(rng, 20, 3), 4, **arguments)


@pytest.mark.parametrize("seed", range(150))
def test_never_worse_than_the_start_on_sharp_rows(seed):
    # Past the heaviest keys so little mass is left that the Gram form cancels.
    rng = np.random.default_rng(seed)
    instance = random_row(rng, int(rng.integers(3, 13)), 4, sharpness=20.0)
    for s in range(1, instance.size):
        heaviest = max_mass(instance, s)
        rounding = 8e-16 * np.linalg.norm(instance.g, axis=1).sum() / instance.p[heaviest].sum()
        assert forced_error(instance, balance(instance, s)) <= forced_error(instance, heaviest) + rounding


def test_large_budgets_need_no_other_argument(rng):
    instance = random_row(rng, 400, 3)
    assert len(balance(instance, 300)) == 300

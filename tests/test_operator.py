"""The operator: identities of the paper's section 1, and what bad input says."""

import numpy as np
import pytest
from conftest import random_row, rows
from hypothesis import given
from hypothesis import strategies as st

from contourkv import Instance, dropped_mass, forced_error, mass_bound, max_mass, phi, spread
from contourkv.enumeration import best_free, best_in_pool, best_of_all, certify, free_error
from contourkv.errors import InvalidInput
from contourkv.operator import absolute_bound, spectral_ratio
from contourkv.selectors import balance, geometric


def definition(instance, kept):
    """||mu - m_A|| straight from p and v."""
    kept = list(kept)
    dense = instance.p @ instance.v
    return np.linalg.norm(dense - instance.p[kept] @ instance.v[kept] / instance.p[kept].sum())


@given(rows(), st.data())
def test_forced_error_is_the_distance_of_the_renormalised_output(instance, data):
    kept = data.draw(st.sets(st.integers(0, instance.size - 1), min_size=1))
    assert forced_error(instance, sorted(kept)) == pytest.approx(definition(instance, kept), rel=1e-9, abs=1e-13)


@given(rows(), st.data())
def test_error_is_unmoved_by_key_order_rotation_and_shift_and_scales_with_the_values(instance, data):
    kept = sorted(data.draw(st.sets(st.integers(0, instance.size - 1), min_size=1)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    here = forced_error(instance, kept)
    order = rng.permutation(instance.size)
    back = np.argsort(order)
    moved = Instance(instance.p[order], instance.v[order])
    assert forced_error(moved, back[kept]) == pytest.approx(here, rel=1e-9, abs=1e-13)
    d = instance.v.shape[1]
    rotation = np.linalg.qr(rng.standard_normal((d, d)))[0]
    turned = Instance(instance.p, 3.0 * instance.v @ rotation + rng.standard_normal(d))
    assert forced_error(turned, kept) == pytest.approx(3.0 * here, rel=1e-8, abs=1e-12)


@given(rows(), st.data())
def test_lemma_2_1(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    error = forced_error(instance, max_mass(instance, s))
    assert error <= mass_bound(instance, s) * (1 + 1e-12) + 1e-14
    assert mass_bound(instance, s) == pytest.approx(2 * spread(instance) * dropped_mass(instance, s))


@given(rows(), st.data())
def test_the_published_bound_is_a_bound_too(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    bound = absolute_bound(instance, s)
    assert forced_error(instance, max_mass(instance, s)) <= bound * (1 + 1e-12) + 1e-14
    assert bound == pytest.approx(2 * max(map(np.linalg.norm, instance.v)) * dropped_mass(instance, s))


@given(rows(min_keys=3), st.data())
def test_spectral_ratio_counts_directions(instance, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    found, d = spectral_ratio(instance), instance.v.shape[1]
    centred = instance.v - instance.mu
    values = np.linalg.eigvalsh((instance.p[:, None] * centred).T @ centred)
    assert found == pytest.approx(values.sum() ** 2 / np.square(values).sum(), rel=1e-6)
    assert 1 - 1e-9 <= found <= d + 1e-9
    order, rotation = rng.permutation(instance.size), np.linalg.qr(rng.standard_normal((d, d)))[0]
    moved = Instance(instance.p[order], 3.0 * instance.v[order] @ rotation + rng.standard_normal(d))
    assert spectral_ratio(moved) == pytest.approx(found, rel=1e-6)


def test_spectral_ratio_by_hand():
    """A line is one direction, a regular simplex all of them, one point none."""
    assert spectral_ratio(Instance([0.2, 0.3, 0.5], [[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])) == pytest.approx(1.0)
    assert spectral_ratio(Instance(np.full(6, 1 / 6), np.vstack([np.eye(3), -np.eye(3)]))) == pytest.approx(3.0)
    assert spectral_ratio(Instance([0.5, 0.5], np.full((2, 3), 0.1))) == 0.0


@given(rows(), st.data())
def test_phi_is_the_numerator_at_max_mass(instance, data):
    s = data.draw(st.integers(1, instance.size - 1))
    kept = max_mass(instance, s)
    assert phi(instance, s) == pytest.approx(forced_error(instance, kept) * instance.p[kept].sum(), rel=1e-9, abs=1e-14)


def test_equal_values_have_no_error():
    instance = Instance([0.5, 0.3, 0.2], np.full((3, 4), 0.1))
    assert forced_error(instance, [0]) == 0.0
    assert spread(instance) == 0.0


def test_equal_masses_keep_the_lower_index(rng):
    instance = Instance(np.full(6, 1 / 6), rng.standard_normal((6, 2)))
    assert max_mass(instance, 3).tolist() == [0, 1, 2]


def test_one_key_row_has_no_budget():
    instance = Instance([1.0], [[2.0]])
    assert forced_error(instance, [0]) == 0.0
    with pytest.raises(InvalidInput, match="s: expected"):
        max_mass(instance, 1)


@pytest.mark.parametrize(
    "p, v, says",
    [
        ([], np.zeros((0, 2)), "p: expected a non-empty"),
        ([0.5, 0.5], np.zeros((3, 2)), r"v: expected shape \(2, d\)"),
        ([0.5, 0.5], np.zeros((2, 0)), r"v: expected shape \(2, d\)"),
        ([0.5, np.nan], np.zeros((2, 2)), "p: weight 1 is not a finite"),
        ([0.5, 0.5], [[0.0], [np.inf]], "v: the value of key 1"),
        ([1.0, 0.0], np.zeros((2, 2)), "p: weight 1 is not positive"),
        ([0.5, 0.4], np.zeros((2, 2)), "p: the weights sum to 0.9"),
        ("row", np.zeros((2, 2)), "p: expected an array of real numbers"),
        ([0.5, 0.5], [[1.0, 2.0], [1.0]], "v: expected an array of real numbers"),
        ([0.5, 0.5], [[1e155], [0.0]], "v: the largest value is 1e\\+155 in size"),
        ([0.5, 0.5], [[1e-155], [0.0]], "v: the largest value is 1e-155 in size"),
    ],
)
def test_bad_rows_are_named(p, v, says):
    with pytest.raises(InvalidInput, match=says):
        Instance(p, v)


@pytest.mark.parametrize("kept", [[], [5], [-1], [0, 0], [0.5]])
def test_bad_kept_sets_are_named(kept, rng):
    with pytest.raises(InvalidInput, match="kept: "):
        forced_error(random_row(rng, 5, 2), kept)


@pytest.mark.parametrize("s", [0, -1, 5, 6, 1.5, True, "abc", None, float("nan"), [3]])
def test_bad_budgets_are_named(s, rng):
    with pytest.raises(InvalidInput, match="s: expected a whole number from 1 to 4"):
        dropped_mass(random_row(rng, 5, 2), s)


def test_instances_cannot_be_written(rng):
    with pytest.raises(ValueError):
        random_row(rng, 5, 2).p[0] = 1.0


@pytest.mark.parametrize("row", [None, "row", 3, np.full(8, 1 / 8)], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda row: dropped_mass(row, 4),
        lambda row: phi(row, 4),
        lambda row: forced_error(row, [0, 1]),
        lambda row: mass_bound(row, 4),
        spread,
        spectral_ratio,
        lambda row: absolute_bound(row, 4),
        lambda row: max_mass(row, 4),
        lambda row: balance(row, 4),
        lambda row: geometric(row, 4),
        lambda row: best_in_pool(row, 4, 6),
        lambda row: best_of_all(row, 4),
        lambda row: certify(row, 4, [0, 1, 2, 3], 1.0, 1e-6),
        lambda row: free_error(row, [0, 1]),
        lambda row: best_free(row, 4, 6),
    ],
)
def test_what_is_no_instance_is_named(call, row):
    with pytest.raises(InvalidInput, match=r"^instance: expected an Instance"):
        call(row)

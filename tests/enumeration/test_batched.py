"""The batched search against the row-by-row one, which brute force holds."""

from itertools import combinations

import numpy as np
import pytest
import torch
from conftest import random_row
from hypothesis import given
from hypothesis import strategies as st

from contourkv import Instance
from contourkv.enumeration.batched import best_in_batch, search_together
from contourkv.enumeration.pool import Asked, MassPool, RankedRow
from contourkv.errors import InvalidInput
from contourkv.selectors.swap import error_of


def stacked(instances, keys):
    rows = [RankedRow.of(instance, keys) for instance in instances]
    return torch.stack([torch.from_numpy(row.g) for row in rows]), torch.stack(
        [torch.from_numpy(row.p) for row in rows]
    )


def one_by_one(g, p, core, chosen):
    """Least error of each row by the search of `pool`, and how far rounding can move it."""
    for g_row, p_row in zip(g.numpy(), p.numpy(), strict=True):
        row, s = RankedRow(g_row, p_row), core + chosen
        found = row.best_among(Asked(np.arange(core), np.arange(core, len(p_row)), row.kept_set(np.arange(s))), s)
        yield found.error, 1e-15 * np.linalg.norm(g_row, axis=1).sum() / p_row[found.kept].sum()


@st.composite
def problems(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    keys = draw(st.integers(2, 12))
    core = draw(st.integers(0, keys - 1))
    chosen = draw(st.integers(0 if core else 1, keys - core))
    rng = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["any", "copies", "flat", "line"]))
    instances = []
    for _ in range(draw(st.integers(1, 4))):
        values = rng.normal(size=(keys + 3, 1 if kind == "line" else 5))
        if kind == "copies":
            values = values[rng.integers(0, 3, keys + 3)]
        weights = np.ones(keys + 3) if kind == "flat" else rng.exponential(size=keys + 3) + 1e-9
        instances.append(Instance(weights / weights.sum(), values))
    return (*stacked(instances, keys), core, chosen)


@given(problems(), st.sampled_from([1, 7, 2**20]), st.booleans())
def test_equals_the_search_row_by_row(problem, entries, known):
    g, p, core, chosen = problem
    expected = list(one_by_one(g, p, core, chosen))
    start = torch.full((len(g),), torch.inf, dtype=torch.float64)
    if known:  # the heaviest keys, as the workflow does
        heaviest = np.arange(core + chosen)
        start = [error_of(*row, heaviest) for row in zip(g.numpy(), p.numpy(), strict=True)]
        start = torch.tensor(start, dtype=torch.float64)
    places, errors = best_in_batch(g, p, core, chosen, start, entries)
    for row, (error, rounding) in enumerate(expected):
        assert float(errors[row]) == pytest.approx(error, rel=1e-12, abs=rounding)
        kept = places[row].numpy()
        if kept[0] < 0:
            assert known and error >= float(start[row]) * (1 - 1e-12) - rounding
            continue
        assert set(kept) >= set(range(core)) and (np.diff(kept) > 0).all() and len(kept) == core + chosen
        summed = error_of(g[row].numpy(), p[row].numpy(), kept)
        assert float(errors[row]) == pytest.approx(summed, rel=1e-12, abs=rounding)


@pytest.mark.parametrize(("keys", "s"), [(24, 4), (16, 8), (14, 12)])
def test_rows_of_real_size_equal_brute_force(rng, keys, s):
    g, p = stacked([random_row(rng, 40, 16) for _ in range(3)], keys)
    places, errors = best_in_batch(g, p, 0, s, torch.full((3,), torch.inf, dtype=torch.float64))
    for row in range(3):
        sets = np.array(list(combinations(range(keys), s)))
        every = np.linalg.norm(g[row].numpy()[sets].sum(1), axis=1) / p[row].numpy()[sets].sum(1)
        assert float(errors[row]) == pytest.approx(every.min(), rel=1e-12)
        assert set(places[row].tolist()) == set(sets[every.argmin()])


def test_one_row_of_many_can_be_done_at_once_while_another_goes_on(rng):
    g, p = stacked([random_row(rng, 30, 8) for _ in range(6)], 14)
    every = torch.full((6,), torch.inf, dtype=torch.float64)
    places, errors = best_in_batch(g, p, 0, 5, every)
    mixed = torch.where(torch.arange(6) % 2 == 0, errors, every)
    again, same = best_in_batch(g, p, 0, 5, mixed)
    assert torch.allclose(same, errors, rtol=1e-12)
    assert (again[::2] == -1).all() and (again[1::2] == places[1::2]).all()


def test_an_error_of_zero_stays(rng):
    g, p = stacked([random_row(rng, 10, 3)], 6)
    places, errors = best_in_batch(g, p, 0, 2, torch.zeros(1, dtype=torch.float64))
    assert (places == -1).all() and errors.item() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"error": torch.ones(2, dtype=torch.float64)}, "g, p, error: got shapes"),
        ({"p": torch.ones(1, 4)}, "p: got torch.float32, expected float64"),
        ({"core": 0, "chosen": 0}, "expected at least one key kept"),
        ({"core": 2, "chosen": 3}, "core, chosen: got 2 and 3 of 4 keys"),
    ],
)
def test_bad_input_is_one_line(change, message):
    given_ = {"g": torch.ones(1, 4, 2).double(), "p": torch.ones(1, 4).double(), "core": 0, "chosen": 2}
    given_["error"] = torch.ones(1).double()
    with pytest.raises(InvalidInput, match=message):
        best_in_batch(**(given_ | change))


def test_a_pool_that_is_too_large_is_refused_together_as_alone(rng):
    row = RankedRow.of(random_row(rng, 100, 4), 100)
    family = MassPool(40, 0, 100)
    for search in (row.search, lambda *asked: search_together([row], *asked, "cpu")):
        with pytest.raises(InvalidInput, match="take a smaller pool"):
            search(40, [family], 100)

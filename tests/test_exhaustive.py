"""Rows decided over all keys, and rows weighed freely: the columns against brute force, and the tables by pandas."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from conftest import random_row, rows
from hypothesis import given, settings
from test_measurement import SETTINGS, shard

from contourkv import forced_error, max_mass
from contourkv.enumeration.free import best_free, free_error
from contourkv.enumeration.pool import MassPool, best_in_pool
from contourkv.exhaustive import exact_file, exact_row
from contourkv.selectors.hull import geometric
from contourkv.statistics.columns import EXACT, WEIGHED
from contourkv.statistics.exhaustive import exact_table
from contourkv.statistics.instances import read_columns
from contourkv.statistics.weights import weights_table
from contourkv.weights import weigh_file, weigh_row

LABELS = {"a": "First", "b": "Second"}


@given(rows(min_keys=6, max_keys=11))
@settings(max_examples=40)
def test_an_exact_row_is_brute_force(instance):
    (found,) = exact_row(instance, 4, [MassPool(4, 0, 5)], instance.size, 0.6, 1e-9, 1e12)
    sets = [list(kept) for kept in combinations(range(instance.size), 4)]
    errors = np.array([forced_error(instance, kept) for kept in sets])
    masses = np.array([instance.p[kept].sum() for kept in sets])
    room = 1e-8 * errors.max() + 1e-12 * np.abs(instance.v).max()
    assert found["exact_proved"] and found["floor_proved"]
    assert found["es_exact"] == pytest.approx(errors.min(), abs=room)
    heaviest = instance.p[max_mass(instance, 4)].sum()
    clearly = masses >= 0.6 * heaviest * (1 + 1e-9)
    assert found["es_floor"] <= errors[clearly].min() + room
    assert found["floor_mass"] >= 0.6 * heaviest * (1 - 1e-9)
    assert found["es_exact"] <= found["es_floor"] + room and found["es_floor"] <= found["es_max_mass"] + room
    assert found["es_exact"] <= found["es_pool"] + room


@given(rows(min_keys=8, max_keys=14))
@settings(max_examples=30)
def test_a_weighed_row_is_what_the_public_functions_say(instance):
    (found,) = weigh_row(instance, {3: 7}, 10**6, 7)
    assert found["es_pool"] == best_in_pool(instance, 3, 7).error
    assert found["ef_pool"] == pytest.approx(best_free(instance, 3, 7).error, rel=1e-5, abs=1e-9) and found["ef_exact"]
    assert found["ef_lower"] <= found["ef_pool"] <= found["es_pool"] * (1 + 1e-9) + 1e-12
    kept = geometric(instance, 3, 7)
    assert found["es_geometric"] == forced_error(instance, kept) >= free_error(instance, kept).error * (1 - 1e-9)
    assert found["mass_geometric"] == pytest.approx(instance.p[kept].sum())


def test_files_hold_every_row_and_are_the_same_again(tmp_path, rng):
    path = shard(tmp_path / "003.safetensors", rng, window=12)
    exact = {"s": 4, "floor": 0.5, "tolerance": 1e-6, "most_work": 1e9, "rows": None, "seed": 1}
    weights = {"pools": [{"budget": 4, "pool": 9}], "limit": 1000, "candidates": 12, "rows": 5, "seed": 1}
    for name in ("one", "two"):
        exact_file([path], tmp_path / f"exact-{name}", exact, SETTINGS)
        weigh_file([path], tmp_path / f"weights-{name}", weights)
    for kind, columns, count in (("exact", EXACT, 16), ("weights", WEIGHED, 5)):
        one, two = ((tmp_path / f"{kind}-{name}").read_bytes() for name in ("one", "two"))
        frame, meta = read_columns(tmp_path / f"{kind}-one", columns)
        assert one == two and list(frame) == list(columns) and len(frame) == count
        assert meta["seeds"][kind] == 1 and meta["model"]["name"] == "tiny"
    assert frame["ef_exact"].all()


def drawn(rng, n=240):
    return pd.DataFrame(
        {
            "model": np.repeat(["a", "b"], n // 2),
            "arm": "prose",
            "input": np.tile(["0", "1", "2"], n // 3),
            "s": 4,
            "visible": 256,
            "es_max_mass": rng.uniform(1, 2, n),
        }
    )


def test_the_exact_table_is_plain_pandas(rng):
    frame = drawn(rng)
    n = len(frame)
    frame["es_pool"] = frame["es_max_mass"] * np.where(rng.random(n) < 0.3, 1.0, rng.uniform(0.7, 1, n))
    for name, less in (("floor", 0.9), ("exact", 0.8)):
        frame[f"es_{name}"] = frame["es_pool"] * np.where(rng.random(n) < 0.5, 1.0, less)
        frame[f"{name}_proved"] = rng.random(n) < 0.9
        frame[f"{name}_mass"], frame[f"{name}_max_rank"] = rng.uniform(0, 1, n), rng.integers(3, 255, n)
    table = exact_table(frame, 50, 1, LABELS)
    assert list(table["model"]) == ["First"] * 2 + ["Second"] * 2 + ["all models"] * 2
    some = frame[frame["model"] == "a"]
    for name, sets in (("exact", "all"), ("floor", "floor")):
        row = table[(table["model"] == "First") & (table["sets"] == sets)].iloc[0]
        kappa, gain = some["es_max_mass"] / some[f"es_{name}"], 1 - some[f"es_{name}"] / some["es_pool"]
        assert row["kappa"] == pytest.approx(kappa.median()) and row["kappa_p90"] == pytest.approx(kappa.quantile(0.9))
        assert row["attained"] == pytest.approx((kappa == 1).mean())
        assert row["beaten"] == pytest.approx((gain > 1e-6).mean())
        assert row["gain"] == pytest.approx(gain[gain > 1e-6].median())
        assert row["proved"] == pytest.approx(some[f"{name}_proved"].mean())
        assert row["mass"] == pytest.approx(some[f"{name}_mass"].median()) and row["n"] == len(some)


def test_the_weights_table_is_plain_pandas(rng):
    frame = drawn(rng)
    n = len(frame)
    frame["pool_keys"], frame["ef_exact"], frame["mass_geometric"] = 24, rng.random(n) < 0.8, 0.4
    frame["es_pool"] = frame["es_max_mass"] * rng.uniform(0.6, 1, n)
    frame["ef_pool"] = frame["es_pool"] * rng.uniform(0.3, 1, n)
    frame["es_balance"] = frame["es_pool"] * 1.01
    frame["es_geometric"] = frame["es_max_mass"] * rng.uniform(0.8, 2, n)
    table = weights_table(frame, 50, 1, LABELS)
    row, some = table.iloc[0], frame[frame["model"] == "a"]
    pi = some["es_pool"] / some["ef_pool"]
    assert row["pi"] == pytest.approx(pi.median()) and row["pi_p99"] == pytest.approx(pi.quantile(0.99))
    assert row["exact"] == pytest.approx(some["ef_exact"].mean())
    assert row["geometric_over_max_mass"] == pytest.approx((some["es_geometric"] / some["es_max_mass"]).median())
    assert row["geometric_worse"] == pytest.approx((some["es_geometric"] > some["es_max_mass"]).mean())
    assert list(table["model"]) == ["First", "Second", "all models"]


def test_a_row_of_one_heavy_key_has_nothing_to_weigh(rng):
    instance = random_row(rng, 12, 3, 40.0)
    (found,) = weigh_row(instance, {4: 8}, 1000, 12)
    assert found["ef_pool"] <= found["es_pool"] <= found["es_max_mass"] * (1 + 1e-12)

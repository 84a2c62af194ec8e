"""Native budgets: the columns against the public functions, the sample, and the table by plain pandas."""

import numpy as np
import pandas as pd
import pytest
from conftest import random_row, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from test_measurement import shard

from contourkv import balance, dropped_mass, forced_error, mass_bound, max_mass
from contourkv.errors import InvalidInput
from contourkv.measurement import rows_of
from contourkv.native import native_file, native_row
from contourkv.statistics.columns import NATIVE
from contourkv.statistics.instances import read_columns
from contourkv.statistics.native import native_table

SETTINGS = {"budgets": [4, 8, 16], "reference": 2, "rows": None, "seed": 3}


@given(rows(min_keys=6), st.data())
@settings(max_examples=40)
def test_columns_are_what_the_public_functions_say(instance, data):
    budgets = data.draw(st.lists(st.integers(2, instance.size - 1), min_size=1, max_size=3, unique=True))
    found = native_row(instance, budgets, 1)
    assert [record["s"] for record in found] == budgets
    for record in found:
        s = record["s"]
        assert record["es_max_mass"] == forced_error(instance, max_mass(instance, s))
        assert record["es_balance"] == pytest.approx(forced_error(instance, balance(instance, s)), rel=1e-9, abs=1e-12)
        assert record["es_balance"] <= record["es_max_mass"] <= record["bound"] * (1 + 1e-9) + 1e-12
        assert record["bound"] == pytest.approx(mass_bound(instance, s))
        assert record["reference_bound"] == pytest.approx(mass_bound(instance, 1))
        assert record["dropped_mass"] == pytest.approx(dropped_mass(instance, s))


def test_a_budget_above_the_row_is_refused(rng):
    with pytest.raises(InvalidInput, match="s: expected a whole number from 1 to 9"):
        native_row(random_row(rng, 10, 3), [10], 2)


class TestFile:
    def test_holds_every_row_at_every_budget_that_it_exceeds(self, tmp_path, rng):
        path, output = shard(tmp_path / "003.safetensors", rng, window=12), tmp_path / "native.parquet"
        native_file([path], output, SETTINGS)
        frame, meta = read_columns(output, NATIVE)
        assert list(frame) == list(NATIVE)
        # 16 rows see 20 or 32 keys, those of the sliding layer 12
        assert frame.groupby("s").size().to_dict() == {4: 16, 8: 16, 16: 8}
        assert set(frame["input"]) == {"prose/003"} and meta["seeds"]["native"] == 3
        again = tmp_path / "again.parquet"
        native_file([path], again, SETTINGS)
        assert again.read_bytes() == output.read_bytes()

    def test_a_sample_is_seeded_and_part_of_the_whole(self, tmp_path, rng):
        path = shard(tmp_path / "003.safetensors", rng)
        frames = []
        for name, change in (("all", {}), ("few", {"rows": 5}), ("other", {"rows": 5, "seed": 4})):
            native_file([path], tmp_path / name, {**SETTINGS, **change})
            frames.append(read_columns(tmp_path / name, NATIVE)[0].astype({"input": str}))
        keys = ["layer", "head", "position", "s"]
        every, few, other = (frame.set_index(keys).sort_index() for frame in frames)
        assert len(few) == len(other) == 5 * 3 and set(few.index) != set(other.index)
        pd.testing.assert_frame_equal(few, every.loc[few.index], check_categorical=False)

    def test_a_budget_that_no_row_exceeds_is_named(self, tmp_path, rng):
        path = shard(tmp_path / "003.safetensors", rng)
        with pytest.raises(InvalidInput, match=r"config key native\.budgets: no row of tiny sees more than 64 keys"):
            native_file([path], tmp_path / "native.parquet", {**SETTINGS, "budgets": [8, 64]})
        assert not (tmp_path / "native.parquet").exists()


def test_rows_can_be_picked_by_number(tmp_path, rng):
    from contourkv.capture.shard import Shard

    found = Shard(shard(tmp_path / "003.safetensors", rng))
    every = [where for where, _ in rows_of(found)]
    assert len(every) == 16 and [where for where, _ in rows_of(found, {0, 7, 8, 15})] == [
        every[i] for i in (0, 7, 8, 15)
    ]


def test_the_table_is_plain_pandas(rng):
    n = 400
    frame = pd.DataFrame(
        {
            "model": np.repeat(["b", "a"], n // 2),
            "arm": np.tile(["prose", "code"], n // 2),
            "input": [f"{i % 8:03d}" for i in range(n)],
            "s": np.tile([64, 64, 128, 128], n // 4),
            "es_max_mass": rng.uniform(0.1, 1, n),
            "dropped_mass": rng.uniform(0, 1, n),
            "reference_s": 8,
            "reference_bound": rng.uniform(4, 5, n),
        }
    )
    frame["es_balance"] = frame["es_max_mass"] * rng.uniform(0.7, 1, n)
    frame["bound"] = frame["es_max_mass"] * 2
    table = native_table(frame, 200, 1, {"a": "First", "b": "Second"})
    assert list(zip(table["model"], table["s"], strict=True)) == [
        ("First", "64"), ("First", "128"), ("Second", "64"), ("Second", "128"),
    ]  # fmt: skip
    some = frame[(frame["model"] == "a") & (frame["s"] == 64)]
    row = table.iloc[0]
    closed = 1 - some["es_balance"] / some["es_max_mass"]
    assert row["closed"] == pytest.approx(closed.median()) and row["improved"] == pytest.approx((closed >= 0.1).mean())
    assert row["cap"] == pytest.approx(some["bound"].median() / some["reference_bound"].median())
    assert row["cap_held"] == 0.5 and row["n"] == len(some) and row["inputs"] == some["input"].nunique()
    for name in ("closed", "improved", "cap"):
        assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]

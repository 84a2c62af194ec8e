"""A hub model is pinned by the first run and stays what it was; the hub here is a server on this machine."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml

from contourkv.errors import ContourKVError, InvalidInput
from contourkv.models import load_model, load_tokenizer, prepare_model
from contourkv.models.hub_source import read_lock, write_lock

REPO = "someone/tiny-llama"
FIRST, SECOND = "a" * 40, "b" * 40
SPEC = {"source": "hub", "repo": REPO, "revision": "main", "licence": "Apache-2.0", "dtype": "float32"}


class Hub:
    """What a hub repository is: a branch, commits, files of each commit."""

    def __init__(self):
        self.main, self.commits, self.asked, self.refuse = FIRST, {}, [], {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                hub.answer(self, body=False)

            def do_GET(self):
                hub.answer(self, body=True)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, request, body):
        path = request.path.partition("?")[0]
        self.asked.append(path)
        if self.refuse:
            return self.send(request, self.refuse["status"], b"", {"X-Error-Code": self.refuse["code"]}, body)
        api = f"/api/models/{REPO}/revision/"
        if path.startswith(api):
            commit = {"main": self.main}.get(path.removeprefix(api), path.removeprefix(api))
            if commit not in self.commits:
                return self.send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
            files = [{"rfilename": name, "size": len(data)} for name, data in self.commits[commit].items()]
            answer = {"id": REPO, "modelId": REPO, "sha": commit, "siblings": files, "tags": [], "private": False}
            return self.send(request, 200, json.dumps(answer).encode(), {}, body)
        _, _, rest = path.partition(f"/{REPO}/resolve/")
        commit, _, name = rest.partition("/")
        data = self.commits[commit][name]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        return self.send(request, 200, data, headers, body)

    @staticmethod
    def send(request, status, data, headers, body):
        request.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(data)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose main branch is at its first commit: one file of weights there, shards at the second."""
    hub = Hub()
    for seed, commit in ((1, FIRST), (2, SECOND)):
        folder = tmp_path / f"made{seed}"
        made = {"source": "random", "architecture": "llama", "seed": seed, "licence": "none"}
        prepare_model("tiny", made, tmp_path, folder, tmp_path / "none")
        (folder / "source.json").unlink()
        if commit == SECOND:
            load_model(folder).save_pretrained(folder, max_shard_size="200KB")
            (folder / "model.safetensors").unlink()
        hub.commits[commit] = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub.commits[commit]["original/consolidated.00.pth"] = b"not wanted"
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


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


@pytest.mark.parametrize("content", ["a/b: main", "- a", "a/b: {main: HEAD}", "a/b: {main: 7}", "a: [", "a: {b: [}"])
def test_a_lock_file_that_is_not_one_is_named(tmp_path, content):
    lock = tmp_path / "hub.lock.yaml"
    lock.write_text(content)
    with pytest.raises(InvalidInput, match=r"hub\.lock\.yaml: ") as caught:
        read_lock(lock)
    assert "\n" not in str(caught.value)

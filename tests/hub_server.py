"""A hub of one model repository, as a server on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from contourkv.models import load_model, prepare_model

REPO = "someone/tiny-llama"
FIRST, SECOND = "a" * 40, "b" * 40


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


@contextmanager
def two_commits(folder: Path) -> Iterator[Hub]:
    """A hub whose main branch is at its first commit: one file of weights there, shards at the second."""
    hub = Hub()
    for seed, commit in ((1, FIRST), (2, SECOND)):
        made = folder / f"made{seed}"
        spec = {"source": "random", "architecture": "llama", "seed": seed, "licence": "none"}
        prepare_model("tiny", spec, folder, made, folder / "none")
        (made / "source.json").unlink()
        if commit == SECOND:
            load_model(made).save_pretrained(made, max_shard_size="200KB")
            (made / "model.safetensors").unlink()
        hub.commits[commit] = {path.name: path.read_bytes() for path in made.iterdir()}
        hub.commits[commit]["original/consolidated.00.pth"] = b"not wanted"
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()

"""RULER and LongBench out of folders in the hub's format, and out of a hub that is a server on this machine."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pandas as pd
import pytest
import yaml

from contourkv.benchmark.hub import LONGBENCH, LONGBENCH_CHINESE, read_hub_task
from contourkv.benchmark.metrics import METRICS
from contourkv.benchmark.samples import read_task, write_task
from contourkv.benchmark.scoring import score_answer
from contourkv.errors import InvalidInput
from contourkv.models import load_model, load_tokenizer
from contourkv.models.random_source import SIZES, make_model

README = """---
configs:
- config_name: "4096"
  data_files:
  - split: test
    path: 4096/test-*
- config_name: "16384"
  data_files:
  - split: test
    path: 16384/test-*
---
"""
CHAT = "{{ '<bos>system: be brief\n' }}{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}bot: "
RULER = {"name": "needle", "task": "hub", "source": "ruler", "subset": "niah_single_1"}
LONG = {"name": "long", "task": "hub", "source": "longbench"}
REPO, FIRST, SECOND = "someone/ruler", "a" * 40, "b" * 40


def ruler_rows(count=6):
    """Needles, one question to a context, and one row of question answering."""
    rows = [
        {
            "context": f"Some text. One of the special magic numbers for key-{at} is: {1234560 + at}. More text.\n",
            "question": f"What is the special magic number for key-{at}?\n",
            "answer_prefix": f" The special magic number for key-{at} is",
            "answer": [str(1234560 + at)],
            "task": "niah_single_1",
            "max_new_tokens": 128,
        }
        for at in range(count)
    ]
    return [*rows, {**rows[0], "context": "Paris is in France. ", "answer": ["Paris", "paris"], "task": "qa_1"}]


def long_rows(task="hotpotqa", classes=None, answers=(["Paris"], ["Rome", "the city of Rome"], ["7"])):
    """Three questions, of which the first and the last are about one context."""
    contexts = ("Answer from the passages.\nPassage 1: Paris.\n", "Answer from the passages.\nPassage 1: Rome.\n")
    return [
        {
            "context": contexts[at % 2],
            "question": f"Question: which, {at}?\n",
            "answer_prefix": "Answer:",
            "answers": list(answers[at]),
            "all_classes": classes,
            "task": task,
            "max_new_tokens": 52,
            "length": 10,
        }
        for at in range(3)
    ]


def write(folder, rows, name="test.jsonl"):
    """One file of rows, in the format that its name says; the folder."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(rows)
    if path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_json(path, orient="records", lines=True)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model without and one with a chat template."""
    folders = {}
    for name, template in (("plain", None), ("chat", CHAT)):
        folder = tmp_path_factory.mktemp(name)
        make_model({"architecture": "llama", "seed": 1}, folder, name)
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
        folders[name] = folder
    return folders


@pytest.fixture
def model(models):
    return models["plain"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What datasets and the hub client keep."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def text_of(model, ids):
    return load_tokenizer(model).decode(ids)


def refused(settings, model, *said, lock=None):
    """Reading ends with one line that has all of `said`, and the task's name."""
    with pytest.raises(InvalidInput) as caught:
        read_hub_task(settings, model, lock)
    message = str(caught.value)
    assert "\n" not in message
    assert settings["name"] in message
    assert all(part in message for part in said), message


# --- what a task is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["plain", "chat"])
def test_tokens_are_those_of_the_pipeline_of_kvpress(models, which, tmp_path):
    from kvpress import KVPressTextGenerationPipeline

    model = models[which]
    rows = ruler_rows()[:-1]
    task = read_hub_task({**RULER, "path": write(tmp_path / "data", rows)}, model)
    pipeline = KVPressTextGenerationPipeline(model=load_model(model), tokenizer=load_tokenizer(model))
    for sample, row in zip(task.samples, rows, strict=True):
        made = pipeline.preprocess(row["context"], [row["question"]], row["answer_prefix"], 10_000)
        assert sample.ids == made["context_ids"][0].tolist()
        assert sample.questions[0].ids == made["questions_ids"][0][0].tolist()
    begin, end = ("<bos>", "\n") if which == "plain" else ("<bos>system: be brief\nuser: ", "\nbot: ")
    assert text_of(model, task.samples[0].ids) == begin + rows[0]["context"]
    assert text_of(model, task.samples[0].questions[0].ids) == rows[0]["question"] + end + rows[0]["answer_prefix"]


def test_a_ruler_task(model, tmp_path):
    folder = write(tmp_path / "data", ruler_rows())
    task = read_hub_task({**RULER, "path": folder, "length": 512}, model)
    assert (task.name, task.task, task.measure, task.rule) == ("needle", "hub", "accuracy", "all")
    assert (task.length, task.arm, task.floor, task.answer_tokens) == (512, None, 0.0, 128)
    assert [sample.index for sample in task.samples] == list(range(6))
    assert [sample.origin["rows"] for sample in task.samples] == [[at] for at in range(6)]
    (question,) = task.samples[3].questions
    assert question.answers == ["1234563"]
    assert score_answer(task.rule, " it is 1234563.", question.answers) == 1
    assert score_answer(task.rule, " it is 123456.", question.answers) == 0

    asked = read_hub_task({**RULER, "path": folder, "subset": "qa_1", "answer_tokens": 9}, model)
    assert (asked.rule, asked.answer_tokens, asked.samples[0].origin["rows"]) == ("any", 9, [6])
    assert asked.length == len(asked.samples[0].ids)
    assert score_answer(asked.rule, "In PARIS", asked.samples[0].questions[0].answers) == 1

    write_task(tmp_path / "task.json", task)
    assert read_task(tmp_path / "task.json") == task


def test_a_longbench_task_asks_all_questions_about_a_context_together(model, tmp_path):
    task = read_hub_task({**LONG, "path": write(tmp_path / "data", long_rows())}, model)
    assert (task.rule, task.answer_tokens, task.floor) == ("qa_f1", 52, 0.0)
    assert [sample.origin["rows"] for sample in task.samples] == [[0, 2], [1]]
    assert [[question.answers for question in sample.questions] for sample in task.samples] == [
        [["Paris"], ["7"]],
        [["Rome", "the city of Rome"]],
    ]
    assert METRICS[task.rule]("City of Rome!", task.samples[1].questions[0].answers) == 1


def test_classes_follow_the_right_one(model, tmp_path):
    rows = long_rows("trec", ["Date", "City", "State", "Food"], (["City"], ["Date"], ["Food"]))
    task = read_hub_task({**LONG, "path": write(tmp_path / "data", rows)}, model)
    assert task.samples[0].questions[0].answers == ["City", "Date", "State", "Food"]
    assert (task.rule, task.floor) == ("classification_first_line", 0.25)
    assert METRICS[task.rule](" City\nDate", task.samples[0].questions[0].answers) == 1


@pytest.mark.parametrize("task", sorted(LONGBENCH))
def test_every_english_task_of_longbench_can_be_read_and_scored(model, tmp_path, task):
    answers = (["Paragraph 7"], ["Paragraph 8"], ["Paragraph 9"])
    rows = long_rows(task, ["Paragraph 7", "Paragraph 8", "Paragraph 9"], answers)
    for row in rows:
        del row["max_new_tokens"]
    read = read_hub_task({**LONG, "path": write(tmp_path / "data", rows)}, model)
    assert read.answer_tokens == LONGBENCH[task].answer_tokens
    assert 0 <= read.floor < 0.5
    wanted = {"passage_count": 0}.get(task, 1)  # there the reference is the number alone
    assert METRICS[read.rule]("Paragraph 7", read.samples[0].questions[0].answers) == wanted


# --- where it comes from --------------------------------------------------------------------------------------------


def test_formats_and_layouts_give_the_same_task(model, tmp_path):
    rows = ruler_rows()[:-1]
    for row in rows:
        row["answer"] = "0" + row["answer"][0]
    rows[0]["answer_prefix"] = ""
    settings = {**RULER, "length": 300, "samples": 4, "seed": 11}
    made = {}
    for kind in ("parquet", "jsonl", "csv"):
        folder = write(tmp_path / kind, rows, f"4096/test-00000-of-00001.{kind}")
        write(tmp_path / kind, rows[:1], f"16384/test-00000-of-00001.{kind}")
        made[kind] = read_hub_task({**settings, "path": folder, "config": "4096"}, model)
        (tmp_path / kind / "README.md").write_text(README)
        made[f"{kind} with configs"] = read_hub_task({**settings, "path": folder, "config": "4096"}, model)
    made["one file"] = read_hub_task({**settings, "path": write(tmp_path / "one", rows)}, model)
    assert len({repr((task.samples, task.length, task.rule, task.answer_tokens)) for task in made.values()}) == 1
    assert made["csv"].samples[0].questions[0].answers[0].startswith("0123456")
    path = tmp_path / "parquet" / "4096" / "test-00000-of-00001.parquet"
    files = {"4096/test-00000-of-00001.parquet": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert made["parquet"].provenance["data"]["files"] == files
    assert made["parquet"].provenance["data"]["path"] == str(tmp_path / "parquet")


def test_the_seed_decides_and_more_samples_change_none(model, tmp_path):
    folder = write(tmp_path / "data", ruler_rows(12))

    def read(**more):
        return read_hub_task({**RULER, "path": folder, **more}, model)

    four = read(samples=4, seed=3)
    assert four == read(samples=4, seed=3)
    assert read(samples=9, seed=3).samples[:4] == four.samples
    assert {sample.seed for sample in four.samples} == {3}
    rows = [sample.origin["rows"][0] for sample in four.samples]
    assert rows != [0, 1, 2, 3]
    assert rows != [sample.origin["rows"][0] for sample in read(samples=4, seed=4).samples]
    every = read(samples=12, seed=3)
    assert sorted(sample.origin["rows"][0] for sample in every.samples) == list(range(12))


def test_data_that_changed_is_read_anew(model, tmp_path):
    folder = write(tmp_path / "data", ruler_rows(2))
    settings = {**RULER, "path": folder}
    before = read_hub_task(settings, model)
    write(tmp_path / "data", ruler_rows(3))
    os.utime(tmp_path / "data" / "test.jsonl", (1e9, 1e9))
    after = read_hub_task(settings, model)
    assert (len(before.samples), len(after.samples)) == (2, 3)
    assert before.provenance["data"]["files"] != after.provenance["data"]["files"]


# --- length ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "kept"), [(100, 100), (101, 100), (None, SIZES["max_position_embeddings"])])
def test_longbench_is_cut_in_the_middle(models, tmp_path, length, kept):
    rows = long_rows()[1:2]
    rows[0]["context"] = "".join(f"{at:04d} " for at in range(600))
    task = read_hub_task({**LONG, "path": write(tmp_path / "data", rows), "length": length}, models["chat"])
    (sample,) = task.samples
    whole = load_tokenizer(models["chat"]).encode(
        "<bos>system: be brief\nuser: " + rows[0]["context"], add_special_tokens=False
    )
    if length is None:
        kept = (kept - len(sample.questions[0].ids) - task.answer_tokens) // 2 * 2
    assert sample.ids == whole[: kept // 2] + whole[-kept // 2 :]
    assert sample.origin["tokens"] == len(whole)
    assert task.length == (length or kept)
    short = read_hub_task(
        {**LONG, "path": task.provenance["data"]["path"], "length": 2000, "answer_tokens": 1}, models["chat"]
    )
    assert len(short.samples[0].ids) <= 2000


def test_ruler_is_never_cut(model, tmp_path):
    folder = write(tmp_path / "data", ruler_rows())
    refused({**RULER, "path": folder, "length": 60}, model, "row 0", "79 tokens", "at most 60", "not cut")
    needed = SIZES["max_position_embeddings"] - 84
    refused({**RULER, "path": folder, "answer_tokens": needed}, model, "positions", "not cut")
    refused({**LONG, "path": write(tmp_path / "long", long_rows()), "answer_tokens": 2040}, model, "no positions")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "helmet"}, ["source", "ruler or longbench"]),
        ({"path": None}, ["path", "missing"]),
        ({"path": "/no/such/folder"}, ["path", "no folder /no/such/folder"]),
        ({"path": 3}, ["path", "expected a text"]),
        ({"revision": "main"}, ["revision", "is a folder"]),
        ({"samples": 0}, ["samples", "at least 1"]),
        ({"samples": 7}, ["samples", "7 asked for", "6 contexts"]),
        ({"samples": True}, ["samples", "whole number"]),
        ({"seed": -1}, ["seed", "at least 0"]),
        ({"length": 1.5}, ["length", "whole number"]),
        ({"answer_tokens": "8"}, ["answer_tokens", "whole number"]),
        ({"config": "4096"}, ["(4096)", "'4096' not found"]),
        ({"subset": "niah"}, ["subset", "niah_single_1, qa_1"]),
        ({"subset": None}, ["2 tasks", "set subset to one of niah_single_1, qa_1"]),
        ({"arm": "prose"}, ["arm", "no such setting"]),
    ],
)
def test_a_wrong_setting_is_named(model, tmp_path, change, said):
    refused({**RULER, "path": write(tmp_path / "data", ruler_rows()), **change}, model, *said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row.pop("context"), ["no column context"]),
        (lambda row: row.pop("answer"), ["no column answer"]),
        (lambda row: row.pop("max_new_tokens"), ["no column max_new_tokens"]),
        (lambda row: row.update(context=5), ["row 0", "context", "expected a text, got 5"]),
        (
            lambda row: row.update(context=["long"] * 99),
            ["row 0", "context", "expected a text, got ['long', 'long'", "..."],
        ),
        (lambda row: row.update(context=""), ["row 0", "context", "empty"]),
        (lambda row: row.update(question=None), ["row 0", "question", "got None"]),
        (lambda row: row.update(max_new_tokens="128"), ["row 0", "max_new_tokens", "whole number"]),
        (lambda row: row.update(max_new_tokens=0), ["row 0", "max_new_tokens", "whole number"]),
        (lambda row: row.update(answer=7), ["row 0", "answer", "got 7"]),
        (lambda row: row.update(answer=[]), ["row 0", "answer", "at least one"]),
        (lambda row: row.update(answer=[1, 2]), ["row 0", "answer", "list of texts"]),
        (lambda row: row.update(answer=["x", ""]), ["row 0", "answer", "empty reference"]),
        (lambda row: row.update(answer="['x', 'y']"), ["row 0", "answer", "list written as text"]),
    ],
)
def test_a_row_that_is_not_in_the_format_is_named(model, tmp_path, change, said):
    rows = ruler_rows(1)[:1]
    change(rows[0])
    refused({**RULER, "path": write(tmp_path / "data", rows)}, model, str(tmp_path / "data"), *said)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{**row, "task": "vcsum"} for row in long_rows()], ["vcsum is Chinese", "narrativeqa"]),
        ([{**row, "task": "squad"} for row in long_rows()], ["no task 'squad'", "narrativeqa"]),
        (long_rows("trec", None), ["all_classes", "list of texts"]),
        (long_rows("trec", ["City"]), ["answers", "one of all_classes", "Paris"]),
        (ruler_rows(), ["no column answers, all_classes"]),
    ],
)
def test_what_longbench_does_not_have_is_named(model, tmp_path, rows, said):
    refused({**LONG, "path": write(tmp_path / "data", rows)}, model, *said)


def test_chinese_tasks_are_no_english_ones():
    assert not set(LONGBENCH) & set(LONGBENCH_CHINESE)
    assert len(LONGBENCH) + len(LONGBENCH_CHINESE) == 21


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("test.jsonl", b""),
        ("test.json", b"[]"),
        ("test.csv", b"context,question,answer_prefix,answer,task,max_new_tokens\n"),
        ("test.jsonl", b"{not json\n"),
        ("test.parquet", b"PAR1"),
        ("train.jsonl", json.dumps(ruler_rows()[0]).encode()),
        ("notes.txt~", b"nothing that datasets reads"),
        ("README.md", b"---\nconfigs: [\n---\n"),
    ],
)
def test_a_folder_without_a_test_split_is_said_in_one_line(model, tmp_path, name, content):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(content)
    refused({**RULER, "path": str(folder)}, model, str(folder), "test split", "parquet, json lines or csv")


def leading_to(path):
    return f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path: {path}\n---\n"


@pytest.mark.parametrize(
    "path", ["../other/test.jsonl", "{there}/other/test.jsonl", "../other/*", "../data-2/test.jsonl"]
)
def test_the_readme_of_a_folder_leads_nowhere_else(model, tmp_path, path):
    for name in ("other", "data-2"):
        write(tmp_path / name, ruler_rows())
    folder = tmp_path / "data"
    write(folder, ruler_rows())
    (folder / "README.md").write_text(leading_to(path.format(there=tmp_path)))
    refused({**RULER, "path": str(folder)}, model, "its README names", "which is not in")


def test_the_readme_of_a_folder_leads_to_no_address(model, tmp_path):
    folder = tmp_path / "data"
    write(folder, ruler_rows())
    (folder / "README.md").write_text(leading_to("https://example.invalid/test.jsonl"))
    refused({**RULER, "path": str(folder)}, model, str(folder))


def test_a_configuration_beside_the_folder_is_not_read(model, tmp_path):
    write(tmp_path / "other", ruler_rows())
    folder = write(tmp_path / "data", ruler_rows())
    refused({**RULER, "path": str(folder), "config": "../other"}, model, "which is not in")


def test_pickles_and_scripts_are_no_rows(model, tmp_path, monkeypatch):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    # datasets takes a folder of this name, where it is given as it is, for the name of its reader of pickles
    for name in ("pandas", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.pkl").write_bytes(pickle.dumps(Runs()))
    (tmp_path / "data/data.py").write_text(f"import os; os.mkdir({str(tmp_path / 'ran')!r})\n")
    monkeypatch.chdir(tmp_path)
    for name in ("pandas", "data"):
        refused({**RULER, "path": name}, model, name)
    assert not (tmp_path / "ran").exists()


def test_only_rows_are_read(model, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "test.txt").write_text("a text\n")
    refused({**RULER, "path": str(folder)}, model, "of kind text; expected parquet, json, csv")


# --- the hub --------------------------------------------------------------------------------------------------------


class Hub:
    """One repository of data: a branch, and the files of each commit."""

    def __init__(self, commits):
        self.main, self.commits = FIRST, commits
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer(body=False)

            def do_GET(self):
                self.answer(body=True)

            def log_message(self, *_):
                pass

            def answer(self, body):
                status, data, headers = hub.found(unquote(self.path.partition("?")[0]))
                self.send_response(status)
                for key, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if body:
                    self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def found(self, path):
        kind, _, rest = path.removeprefix(f"/datasets/{REPO}/").removeprefix(f"/api/datasets/{REPO}/").partition("/")
        revision, _, name = rest.partition("/")
        commit = {"main": self.main}.get(revision, revision)
        if REPO not in path:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        if commit not in self.commits:
            return 404, b"", {"X-Error-Code": "RevisionNotFound"}
        files = self.commits[commit]
        if kind == "resolve" and name in files:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"'}
            return 200, files[name], headers
        if kind == "resolve":
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}
        entries = [
            {"type": "file", "path": each, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for each, data in files.items()
            if each.startswith(name)
        ]
        entries += [{"type": "directory", "path": config, "oid": commit} for config in ("4096", "16384") if not name]
        about = {"id": REPO, "sha": commit, "siblings": [{"rfilename": each} for each in files], "tags": []}
        answer = {"revision": about, "tree": entries}[kind]
        return 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}


@pytest.fixture
def hub(tmp_path):
    """A hub whose main branch is at its first commit, and has one needle more at the second."""
    commits = {}
    for commit, count in ((FIRST, 3), (SECOND, 4)):
        files = [f"{config}/test-00000-of-00001.parquet" for config in ("4096", "16384")]
        for file in files:
            write(tmp_path / commit, ruler_rows(count), file)
        commits[commit] = {file: (tmp_path / commit / file).read_bytes() for file in files}
        commits[commit]["README.md"] = README.encode()
    hub = Hub(commits)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


READ = """
import json, sys
from contourkv.benchmark.hub import read_hub_task
from contourkv.errors import InvalidInput

for settings, lock in map(json.loads, sys.argv[2:]):
    try:
        task = read_hub_task(settings, sys.argv[1], lock)
        found = [[sample.ids for sample in task.samples], task.provenance["data"]["revision"]]
    except InvalidInput as error:
        found = str(error)
    print(json.dumps(found))
"""


def read_from(hub, home, model, *reads, **more):
    """What a process of its own reads, one for each (settings, lock file or None): context ids and commit, or error."""
    place = {"HF_ENDPOINT": hub.address, "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READ, str(model), *(json.dumps([{**RULER, **s}, lock]) for s, lock in reads)]
    done = subprocess.run(command, env={**os.environ, **place, **more}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "examples/s" not in done.stderr  # no bars where nobody watches
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_hub_is_read_at_the_commit_that_the_first_run_found_and_from_the_cache_without_it(hub, model, tmp_path):
    home, lock = tmp_path / "home", tmp_path / "config" / "hub.lock.yaml"
    data = {"path": REPO, "config": "4096"}
    local = read_hub_task({**RULER, "path": str(tmp_path / FIRST), "config": "4096"}, model)
    first = [[sample.ids for sample in local.samples], FIRST]
    assert read_from(hub, home, model, (data, str(lock))) == [first]
    assert yaml.safe_load(lock.read_text()) == {f"datasets/{REPO}": {"main": FIRST}}

    written = lock.read_bytes()
    hub.main = SECOND
    locked, pinned, moved, *errors = read_from(
        hub,
        home,
        model,
        (data, str(lock)),
        ({**data, "revision": FIRST}, None),
        (data, None),
        ({**data, "config": "5"}, None),
        ({**data, "revision": "v9"}, None),
        ({**data, "path": "someone/else"}, None),
    )
    assert locked == pinned == first
    assert lock.read_bytes() == written
    assert moved[1] == SECOND
    assert len(moved[0]) == 4
    for error, said in zip(errors, ([f"{REPO} (5)", "'5' not found"], ["v9"], ["doesn't exist"]), strict=True):
        assert "\n" not in error
        assert all(part in error for part in said), error

    again, *errors = read_from(
        hub,
        home,
        model,
        (data, None),
        (data, str(lock)),
        ({**data, "revision": FIRST}, None),
        ({**data, "path": "someone/else"}, None),
        HF_DATASETS_OFFLINE="1",
    )
    assert again == moved
    other, absent = [FIRST, SECOND], ["the hub cannot be reached", "folder as path"]
    for error, said in zip(errors, (other, other, absent), strict=True):
        assert "\n" not in error
        assert all(part in error for part in said), error


def test_a_repository_at_its_commit_holds_all_that_is_read(hub, model, tmp_path):
    """A commit pins the README, not what lies where the README points."""
    elsewhere = leading_to("hf://datasets/someone/ruler@main/4096/test-00000-of-00001.parquet")
    hub.commits[FIRST]["README.md"] = elsewhere.encode()
    (error,) = read_from(hub, tmp_path / "home", model, ({"path": REPO}, str(tmp_path / "lock.yaml")))
    assert isinstance(error, str) and ("its README names" in error or "test split" in error)

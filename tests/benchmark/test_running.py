"""Whole jobs on tiny models: every row again alone, the same twice, killed and resumed, a failure its own."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import DynamicCache

from contourkv.benchmark import running
from contourkv.benchmark.answering import answers, nats
from contourkv.benchmark.choosing import Chooser, Chosen
from contourkv.benchmark.methods import AGNOSTIC, ENFORCED, METHODS, PUBLISHED, QUERY_AWARE, RECTANGULAR, methods_named
from contourkv.benchmark.reading import Reading
from contourkv.benchmark.records import ANSWERED
from contourkv.benchmark.running import Cell, Kept, cells, run_task
from contourkv.benchmark.samples import Question, Sample, Task, write_task
from contourkv.benchmark.scoring import score_answer
from contourkv.benchmark.storing import FullStorage, MaskedStorage, PagedStorage, RaggedStorage, RectangularStorage
from contourkv.errors import InvalidInput, InvariantBroken
from contourkv.held import held_bytes
from contourkv.models.loading import load_encoder, load_model
from contourkv.models.random_source import make_model
from contourkv.statistics.instances import read_columns
from contourkv.statistics.table_parts import TableParts

KVPRESS = importlib.util.find_spec("kvpress") is not None
needs_kvpress = pytest.mark.skipif(not KVPRESS, reason="kvpress is not installed")
logging.getLogger("kvpress").setLevel(logging.ERROR)

LAYERS, HEADS, ENTRY = 3, 2, 2 * 16 * 4  # of the tiny models: bytes of an entry
TOKENS = (110, 97)  # of the two contexts
TIMES = ["score_seconds"]
OWN = ["contour", "quest"]  # need no kvpress
EVERY = {"methods": list(METHODS), "query_aware": ["tova", "kvzip", "quest"], "budgets": [0.25, 0.5]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for architecture in ("llama", "gemma3_text"):
        made[architecture] = tmp_path_factory.mktemp("models") / f"tiny-{architecture}"
        make_model({"architecture": architecture, "seed": 3}, made[architecture], architecture)
    return made


@functools.cache
def loaded(folder: Path):
    return load_model(folder)


def drawn(length: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(folder: Path, ids: list[int], most: int) -> str:
    """What transformers generates behind `ids`, as text."""
    model, whole = loaded(folder), torch.tensor([ids])
    found = model.generate(
        whole,
        attention_mask=torch.ones_like(whole),
        past_key_values=DynamicCache(config=model.config),
        max_new_tokens=most,
        do_sample=False,
    )
    tokens = [token for token in found[0, whole.shape[1] :].tolist() if token != model.generation_config.eos_token_id]
    return load_encoder(folder).decode(tokens)


def task_of(folder: Path, measure: str = "accuracy", questions: int = 1, tokens: tuple[int, ...] = TOKENS) -> Task:
    """Two short contexts; where accuracy is measured the references are what the full cache answers, and another."""
    samples = []
    for number, length in enumerate(tokens):
        ids, asked = drawn(length, 20 + number), []
        for place in range(questions):
            question = drawn(4, 50 + 10 * number + place)
            references = [generated(folder, ids + question, 5), "not said"] if measure == "accuracy" else ["gold"]
            gold = drawn(3 + place, 90 + place) if measure == "nats" else []
            asked.append(Question(question, references, gold, [1, 5]))
        samples.append(Sample(3 * number, 70 + number, ids, asked, {"text": number}))
    return Task(
        name=f"{measure}-{questions}",
        task="niah_single",
        measure=measure,
        rule="all" if measure == "accuracy" else "",
        length=128,
        arm="prose",
        floor=0.1 if measure == "accuracy" else None,
        answer_tokens=5,
        samples=samples,
        provenance={"contourkv": "0.1.0", "config": "abc"},
    )


def run(folder: Path, task: Task, output: Path, settings: dict, **more: object) -> tuple[pd.DataFrame, dict]:
    """The answers, names as text."""
    path = output.with_suffix(".json")
    write_task(path, task)
    run_task(folder, path, output, settings, **more)
    frame, metadata = read_columns(output, ANSWERED)
    texts = [name for name, kind in ANSWERED.items() if kind == "category"]
    frame[texts] = frame[texts].astype(object)
    return frame, metadata


def settings_of(*methods: str, query_aware: tuple[str, ...] = (), budgets: tuple[float, ...] = (0.5,)) -> dict:
    return {"methods": list(methods), "query_aware": list(query_aware), "budgets": list(budgets)}


def assert_same_rows(one: pd.DataFrame, other: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(one.drop(columns=TIMES), other.drop(columns=TIMES), check_exact=True)


class TestCells:
    def test_are_counted_by_hand(self):
        methods = methods_named(["snapkv", "kvzip", "quest", "contour"])
        aware = methods_named(["snapkv", "kvzip", "quest"])
        found = cells(methods, [0.25, 0.5], aware)
        # Full once. Each budget: SnapKV twice, KVzip in three storages, Quest and ContourKV once; with the question in
        # view SnapKV and KVzip twice.
        assert len(found) == len(set(found)) == 1 + 2 * (2 + 3 + 1 + 1 + 2 + 2)
        assert [cell for cell in found if cell.method.name == "full"] == [
            Cell(METHODS["full"], PUBLISHED, AGNOSTIC, 1.0)
        ]
        assert {cell.visibility for cell in found if cell.method.name == "quest"} == {AGNOSTIC}
        assert {cell.storage for cell in found if cell.visibility == QUERY_AWARE} == {PUBLISHED, ENFORCED}

    def test_of_all_methods(self):
        found = cells(list(METHODS.values()), [0.1, 0.2, 0.3])
        # eight of equal counts, three head by head, Quest, four of ContourKV
        assert len(found) == len(set(found)) == 1 + 3 * (8 * 2 + 3 * 3 + 1 + 4)
        assert {cell.visibility for cell in found} == {AGNOSTIC}

    @pytest.mark.parametrize(
        ("name", "storage", "kind"),
        [
            ("full", PUBLISHED, FullStorage),
            ("quest", PUBLISHED, PagedStorage),
            ("snapkv", PUBLISHED, RectangularStorage),
            ("snapkv", ENFORCED, RaggedStorage),
            ("kvzip", PUBLISHED, MaskedStorage),
            ("kvzip", ENFORCED, RaggedStorage),
            ("kvzip", RECTANGULAR, RaggedStorage),
            ("contour_kvzip", ENFORCED, RaggedStorage),
        ],
    )
    def test_are_held_each_in_its_storage(self, name, storage, kind):
        assert Cell(METHODS[name], storage, AGNOSTIC, 0.5).kind is kind


@pytest.fixture(scope="module")
def everything(folders, tmp_path_factory) -> tuple[Task, pd.DataFrame, dict]:
    """All methods over the accuracy task, with the question in view too."""
    if not KVPRESS:
        pytest.skip("kvpress is not installed")
    task = task_of(folders["llama"])
    return task, *run(folders["llama"], task, tmp_path_factory.mktemp("run") / "all.parquet", EVERY)


def alone(model, sample: Sample, question: Question, cell: Cell) -> tuple[Reading, Chooser, object, list[int]]:
    """A cell's storage and question, made for it alone."""
    reading, asked = Reading.of(model, torch.tensor([sample.ids])), question.ids
    if cell.visibility == QUERY_AWARE:
        reading, asked = reading.extended(torch.tensor([asked[:-1]])), asked[-1:]
    seed = sample.seed * 10_007 + sample.index
    chooser = Chooser(reading, held_bytes(reading.full_cache()).payload, seed)
    if cell.kind is PagedStorage:
        storage = PagedStorage(reading, [cell.budget])
    elif cell.kind is FullStorage:
        storage = FullStorage(reading, [Chosen([], 0.0)])
    else:
        storage = cell.kind(reading, [chooser.choose(cell.method, cell.storage, cell.budget)])
    return reading, chooser, storage, asked


def cell_of(row: dict) -> Cell:
    return Cell(METHODS[row["method"]], row["storage"], row["visibility"], row["budget"])


@needs_kvpress
class TestAccuracy:
    def test_every_question_and_cell_has_one_row(self, everything):
        task, frame, _ = everything
        assert list(frame.columns) == list(ANSWERED)
        wanted = cells(list(METHODS.values()), [0.25, 0.5], methods_named(["tova", "kvzip"])[1:])
        assert len(wanted) == 1 + 2 * 30 + 2 * 4
        for sample in task.samples:
            rows = frame[frame["sample"] == sample.index]
            assert len(rows) == len(wanted) and {cell_of(row) for row in rows.to_dict("records")} == set(wanted)
            assert set(rows["question_id"]) == {f"accuracy-1/{sample.index}/0"}
            assert set(rows["seed"]) == {sample.seed} and set(rows["question"]) == {0}
            assert set(rows["expected"]) == {" | ".join(sample.questions[0].answers)}

    def test_says_what_the_task_says(self, everything):
        task, frame, metadata = everything
        same = {"model": "tiny-llama", "task": "accuracy-1", "generator": "niah_single", "arm": "prose", "length": 128}
        same |= {"measure": "accuracy", "rule": "all", "floor": 0.1, "status": "ok", "message": ""}
        for name, value in same.items():
            assert set(frame[name]) == {value}, name
        assert metadata["model"] == {"name": "tiny-llama", "revision": None}
        assert metadata["seeds"] == {"tasks.accuracy-1": task.samples[0].seed}

    def test_the_full_cache_answers_as_transformers_generates(self, everything):
        task, frame, _ = everything
        full = frame[frame["method"] == "full"].set_index("sample")
        for sample in task.samples:
            reference = sample.questions[0].answers[0]
            assert full.loc[sample.index, "answer"] == reference
            assert full.loc[sample.index, "score"] == 0.5  # of two references

    def test_every_cell_is_what_it_is_alone(self, folders, everything):
        """Asked in batches, but answered, scored and weighed as if it were the only one."""
        task, frame, _ = everything
        model, decode = loaded(folders["llama"]), load_encoder(folders["llama"]).decode
        samples = {sample.index: sample for sample in task.samples}
        for row in frame.to_dict("records"):
            sample, cell = samples[row["sample"]], cell_of(row)
            question = sample.questions[0]
            reading, chooser, storage, asked = alone(model, sample, question, cell)
            with storage.ready():
                held = storage.held()[0]
                assert row["entries"] == storage.entries()[0]
                found = answers(model, storage.cache, asked, reading.tokens, 1, 5, frozenset({2}))[0]
                assert row["read_bytes"] == storage.read_bytes()[0]
            assert row["answer"] == decode(found)
            assert row["score"] == score_answer("all", row["answer"], question.answers)
            booked = (held.payload, held.metadata, held.slack, held.total)
            assert tuple(row[f"{n}_bytes"] for n in ("payload", "metadata", "slack", "held")) == booked
            assert (row["context_tokens"], row["nominal_bytes"]) == (reading.tokens, chooser.nominal_bytes(cell.budget))

    def test_bytes_by_hand(self, everything):
        task, frame, _ = everything
        tokens = {sample.index: len(sample.ids) for sample in task.samples}
        for row in frame.to_dict("records"):
            read = tokens[row["sample"]] + (3 if row["visibility"] == QUERY_AWARE else 0)  # all of four but the last
            full = LAYERS * HEADS * read * ENTRY
            assert row["context_tokens"] == read and row["full_bytes"] == full
            assert row["nominal_bytes"] == int(full * row["budget"])
            assert row["held_bytes"] == row["payload_bytes"] + row["metadata_bytes"] + row["slack_bytes"]
            keeps, storage = METHODS[row["method"]].keeps, row["storage"]
            if storage != PUBLISHED:
                assert 0.9 * row["nominal_bytes"] < row["held_bytes"] <= row["nominal_bytes"]
            elif keeps == "equal":
                assert row["payload_bytes"] == row["held_bytes"] == row["entries"] * ENTRY <= row["nominal_bytes"]
            else:
                assert row["payload_bytes"] == full
                assert row["entries"] * ENTRY == full if keeps in ("all", "pages") else row["entries"] * ENTRY < full
            if keeps == "pages":
                assert row["read_bytes"] < row["payload_bytes"] and row["metadata_bytes"] > 0
            else:
                assert row["read_bytes"] == row["payload_bytes"]

    def test_what_is_chosen_makes_a_difference(self, everything):
        """Or every comparison above would be of one answer."""
        _, frame, _ = everything
        assert frame["answer"].nunique() > 10 and set(frame["score"]) == {0.0, 0.5}
        assert (frame["score_seconds"] > 0).sum() == (~frame["method"].isin(["full", "quest"])).sum()

    def test_a_draw_is_of_its_context_alone(self, folders, tmp_path):
        """The same text twice under one seed: drawn anew; what draws nothing chooses the same."""
        folder = folders["llama"]
        task = task_of(folder)
        samples = [dataclasses.replace(task.samples[0], index=index) for index in range(4)]
        settings = settings_of("random", "knorm")
        frame, _ = run(folder, dataclasses.replace(task, samples=samples), tmp_path / "drawn.parquet", settings)
        for storage in (PUBLISHED, ENFORCED):
            rows = frame[frame["storage"] == storage]
            assert rows.loc[rows["method"] == "random", "answer"].nunique() > 1
            assert rows.loc[rows["method"] == "knorm", "answer"].nunique() == 1

    def test_a_second_run_differs_in_seconds_alone(self, folders, everything, tmp_path):
        task, frame, metadata = everything
        again, made = run(folders["llama"], task, tmp_path / "again.parquet", EVERY)
        assert_same_rows(again, frame)
        assert made == metadata

    def test_a_run_of_single_cells_gives_the_same(self, folders, everything, tmp_path, monkeypatch):
        task, frame, _ = everything
        monkeypatch.setattr(running, "BATCH_BYTES", 1)
        again, _ = run(folders["llama"], task, tmp_path / "again.parquet", EVERY)
        keys = ["sample", "method", "storage", "visibility", "budget"]
        one, other = (each.sort_values(keys, ignore_index=True) for each in (again, frame))
        assert_same_rows(one, other)


class TestGroups:
    @needs_kvpress
    def test_every_cell_is_in_one_batch_of_its_storage(self, folders, monkeypatch):
        task = task_of(folders["llama"])
        reading = Reading.of(loaded(folders["llama"]), torch.tensor([task.samples[0].ids]))
        chooser = Chooser(reading, held_bytes(reading.full_cache()).payload, 1)
        kept = [running._chosen(chooser, cell) for cell in cells(list(METHODS.values()), [0.25, 0.5])]
        kept.append(Kept(Cell(METHODS["knorm"], PUBLISHED, AGNOSTIC, 0.9), message="it failed"))

        groups = list(running._groups(reading, kept, task))
        assert sorted(id(each) for group in groups for each in group) == sorted(map(id, kept))
        assert [kept[-1]] in groups
        # the full cache, Quest, masks, ragged caches, rectangles, and what failed
        assert len(groups) == 6
        assert all(len({each.cell.kind for each in group}) == 1 for group in groups)
        monkeypatch.setattr(running, "BATCH_BYTES", 2 * LAYERS * HEADS * TOKENS[0] * ENTRY)
        smaller = list(running._groups(reading, kept, task))
        assert sorted(id(each) for group in smaller for each in group) == sorted(map(id, kept))
        masked = [len(group) for group in smaller if group[0].cell.kind is MaskedStorage]
        assert masked == [2, 2, 2]
        assert max(sum(each.cell.budget for each in g) for g in smaller if g[0].cell.kind is RaggedStorage) == 2


class TestSeveralQuestions:
    @pytest.mark.parametrize("measure", ["accuracy", "nats"])
    @pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
    def test_each_is_asked_of_the_context_as_it_was(self, folders, tmp_path, measure, architecture):
        """Whether others were asked before does not show."""
        folder, settings = folders[architecture], settings_of(*OWN, query_aware=("contour",), budgets=(0.3, 0.6))
        task = task_of(folder, measure, 3)
        frame, _ = run(folder, task, tmp_path / "together.parquet", settings)
        assert len(frame) == 2 * 3 * (1 + 2 * 2)
        assert set(frame["visibility"]) == {AGNOSTIC}  # one kept set serves them all, whichever comes
        assert set(frame["question_id"]) == {f"{measure}-3/{sample}/{place}" for sample in (0, 3) for place in range(3)}
        for place in range(3):
            samples = [dataclasses.replace(s, questions=s.questions[place : place + 1]) for s in task.samples]
            single = dataclasses.replace(task, samples=samples)
            asked, _ = run(folder, single, tmp_path / f"{place}.parquet", settings_of(*OWN, budgets=(0.3, 0.6)))
            mine = frame[frame["question"] == place].reset_index(drop=True)
            keys = ["sample", "method", "budget"]
            pd.testing.assert_frame_equal(mine[keys], asked[keys])
            assert list(mine["answer"]) == list(asked["answer"])
            assert list(mine["score"]) == pytest.approx(list(asked["score"]), abs=1e-5)
            read = [
                read for read, method in zip(asked["read_bytes"], asked["method"], strict=True) if method != "quest"
            ]
            assert list(mine.loc[mine["method"] != "quest", "read_bytes"]) == read

    def test_nats_are_minus_the_loss_of_the_gold_tokens(self, folders, tmp_path):
        folder = folders["llama"]
        model, task = loaded(folder), task_of(folder, "nats", 3)
        frame, _ = run(folder, task, tmp_path / "nats.parquet", settings_of(*OWN, budgets=(0.3, 0.6)))
        assert (frame["score"] < 0).all() and set(frame["rule"]) == {""} and set(frame["answer"]) == {""}
        assert frame["floor"].isna().all() and set(frame["measure"]) == {"nats"}
        samples = {sample.index: sample for sample in task.samples}
        for row in frame.to_dict("records"):
            sample = samples[row["sample"]]
            question = sample.questions[row["question"]]
            reading, _, storage, asked = alone(model, sample, question, cell_of(row))
            with storage.ready():
                loss = nats(model, storage.cache, asked, question.gold, reading.tokens, 1)[0]
            assert row["score"] == pytest.approx(-loss, abs=1e-5)
            if row["method"] == "full":
                whole = torch.tensor([sample.ids + question.ids + question.gold])
                with torch.no_grad():
                    logits = model(whole, use_cache=False).logits[0, -len(question.gold) - 1 : -1].double()
                each = torch.log_softmax(logits, dim=-1)[torch.arange(len(question.gold)), question.gold]
                assert row["score"] == pytest.approx(float(each.mean()), abs=1e-5)

    def test_one_question_is_seen_by_contourkv_too(self, folders, tmp_path):
        """Needs no kvpress: the question in view, all but its last token."""
        folder = folders["gemma3_text"]
        task = task_of(folder)
        frame, _ = run(folder, task, tmp_path / "one.parquet", settings_of("contour", query_aware=("contour",)))
        assert len(frame) == 2 * 3 and set(frame["status"]) == {"ok"}
        aware = frame[frame["visibility"] == QUERY_AWARE]
        assert list(aware["context_tokens"]) == [length + 3 for length in TOKENS]
        model, decode = loaded(folder), load_encoder(folder).decode
        for row, sample in zip(aware.to_dict("records"), task.samples, strict=True):
            reading, _, storage, asked = alone(model, sample, sample.questions[0], cell_of(row))
            assert asked == sample.questions[0].ids[-1:]
            found = answers(model, storage.cache, asked, reading.tokens, 1, 5, frozenset({2}))[0]
            assert row["answer"] == decode(found)

    def test_a_question_of_one_token_leaves_nothing_to_see(self, folders, tmp_path):
        folder = folders["llama"]
        task = task_of(folder)
        samples = [
            dataclasses.replace(s, questions=[dataclasses.replace(s.questions[0], ids=s.questions[0].ids[:1])])
            for s in task.samples
        ]
        settings = settings_of("contour", query_aware=("contour",))
        frame, _ = run(folder, dataclasses.replace(task, samples=samples), tmp_path / "one.parquet", settings)
        parts = [frame[(frame["method"] == "contour") & (frame["visibility"] == v)] for v in (AGNOSTIC, QUERY_AWARE)]
        agnostic, aware = (part.drop(columns=["visibility"]).reset_index(drop=True) for part in parts)
        assert len(aware) == 2
        assert_same_rows(aware, agnostic)


CHILD = """
import sys, torch
torch.set_num_threads(1)
from contourkv.benchmark.running import run_task
run_task(*sys.argv[1:4], {"methods": ["contour", "quest"], "query_aware": [], "budgets": [0.3, 0.6]})
"""


class TestResuming:
    def test_a_killed_run_goes_on_where_it_stopped(self, folders, tmp_path):
        """Killed for real, in another process, when its first contexts are there."""
        folder, output = folders["llama"], tmp_path / "answers.parquet"
        task = task_of(folder, "nats", 2, tuple(range(90, 110)))
        write_task(output.with_suffix(".json"), task)
        parts = output.with_name("answers.parquet.parts")
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), str(output.with_suffix(".json")), str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
        )
        try:
            deadline = time.monotonic() + 120
            while len(list(parts.glob("[0-9]*.parquet"))) < 2 and child.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
        finally:
            child.send_signal(signal.SIGKILL)
            _, said = child.communicate()
        finished = {int(path.stem): read_columns(path, ANSWERED)[0] for path in parts.glob("[0-9]*.parquet")}
        assert not output.exists() and 2 <= len(finished) < len(task.samples), said.decode()
        (parts / ".partial-killed.parquet").write_bytes(b"half of one")
        (parts / ".DS_Store").touch()  # or whatever else a file system leaves
        settings = settings_of(*OWN, budgets=(0.3, 0.6))
        run_task(folder, output.with_suffix(".json"), output, settings)
        frame, _ = read_columns(output, ANSWERED)
        assert not parts.exists()
        assert list(frame["sample"].unique()) == [sample.index for sample in task.samples]
        for index, rows in finished.items():  # to the seconds, which no second run has again
            mine = frame[frame["sample"] == index].reset_index(drop=True)
            pd.testing.assert_frame_equal(mine, rows, check_categorical=False)
        whole, _ = run(folder, task, tmp_path / "whole.parquet", settings)
        texts = [name for name, kind in ANSWERED.items() if kind == "category"]
        frame[texts] = frame[texts].astype(object)
        assert_same_rows(frame, whole)

    @pytest.fixture
    def planted(self, folders, tmp_path):
        """A finished part with an answer that no model gave: it shows up where the part is used."""
        folder, output = folders["llama"], tmp_path / "answers.parquet"
        task, settings = task_of(folder), settings_of("contour", budgets=(0.3,))
        frame, metadata = run(folder, task, output, settings)
        part = frame[frame["sample"] == 3].assign(answer="planted")
        made_from = {key: metadata[key] for key in ("contourkv", "config", "devices")}
        with pytest.raises(KeyboardInterrupt), TableParts(output, made_from, ANSWERED) as parts:
            parts.write("00003", part)
            raise KeyboardInterrupt
        output.unlink()
        return folder, task, output, settings

    def used(self, folder: Path, task: Task, output: Path, settings: dict, **more: object) -> list[bool]:
        frame, _ = run(folder, task, output, settings, **more)
        assert not output.with_name("answers.parquet.parts").exists()
        assert len(frame) == len(task.samples) * (1 + len(settings["budgets"]) * (len(settings["methods"])))
        return [bool((frame.loc[frame["sample"] == s.index, "answer"] == "planted").all()) for s in task.samples]

    def test_a_part_of_the_same_run_is_used(self, planted):
        assert self.used(*planted) == [False, True]

    @pytest.mark.parametrize(
        "change",
        [{"budgets": [0.6]}, {"budgets": [0.3, 0.6]}, {"methods": ["contour", "quest"]}, {"query_aware": ["quest"]}],
        ids=str,
    )
    def test_a_part_of_other_settings_is_not(self, planted, change):
        folder, task, output, settings = planted
        assert self.used(folder, task, output, {**settings, **change}) == [False, False]

    def test_nor_of_another_task_code_or_model(self, planted, tmp_path):
        folder, task, output, settings = planted
        parts = output.with_name("answers.parquet.parts")
        kept = shutil.copytree(parts, tmp_path / "kept")
        longer = dataclasses.replace(task, answer_tokens=6)
        assert self.used(folder, longer, output, settings) == [False, False]
        shutil.copytree(kept, parts)
        assert self.used(folder, task, output, settings, made_by="other code") == [False, False]
        other = tmp_path / folder.name
        make_model({"architecture": "llama", "seed": 4}, other, "llama")
        shutil.copytree(kept, parts)
        assert self.used(other, task, output, settings) == [False, False]
        shutil.copytree(kept, parts)
        (parts / "00003.parquet").write_bytes((parts / "00003.parquet").read_bytes()[:100])
        assert self.used(folder, task, output, settings) == [False, False]

    def test_parts_of_samples_that_are_gone_are_removed(self, planted):
        folder, task, output, settings = planted
        fewer = dataclasses.replace(task, samples=task.samples[:1])
        assert self.used(folder, fewer, output, settings) == [False]


class TestFailures:
    @needs_kvpress
    def test_what_kvpress_refuses_is_its_own_outcome(self, folders, tmp_path, capsys):
        folder, output = folders["gemma3_text"], tmp_path / "answers.parquet"
        methods = ("kvzip", "contour_kvzip", "knorm", "adakv_snapkv", "contour_compactor", "contour", "quest")
        settings = settings_of(*methods, query_aware=("kvzip", "knorm"))
        frame, _ = run(folder, task_of(folder), output, settings)
        failed = frame["method"].isin(["kvzip", "contour_kvzip"])
        assert failed.sum() == 2 * (3 + 1 + 2) and len(frame) == 2 * (1 + 3 + 1 + 2 + 3 + 1 + 1 + 1 + 2 + 2)
        assert set(frame.loc[failed, "status"]) == {"failed"} and set(frame.loc[~failed, "status"]) == {"ok"}
        line = "scores 'kvzip': kvpress refuses: KVzipPress is not supported for Gemma3ForCausalLM"
        assert set(frame.loc[failed, "message"]) == {line} and set(frame.loc[~failed, "message"]) == {""}
        assert frame.loc[failed, "score"].isna().all() and frame.loc[~failed, "score"].notna().all()
        assert set(frame.loc[failed, "answer"]) == {""}
        assert (frame.loc[failed, ["held_bytes", "payload_bytes", "entries", "read_bytes"]] == 0).all(axis=None)
        assert (frame["full_bytes"] > 0).all() and (frame.loc[~failed, "held_bytes"] > 0).all()
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("failed:")]
        assert f"failed: kvzip, published: 4 rows, first: {line}" in said and len(said) == 4

    @needs_kvpress
    def test_a_budget_that_is_too_small(self, folders, tmp_path):
        """Enforced it pays for nothing; as published kvpress keeps one key in each head whatever it is."""
        folder = folders["llama"]
        settings = settings_of("knorm", "kvzip", "contour", "quest", budgets=(0.005, 0.5))
        frame, _ = run(folder, task_of(folder), tmp_path / "answers.parquet", settings)
        small = (frame["budget"] == 0.005) & (frame["storage"] != PUBLISHED)
        assert set(frame.loc[small, "method"]) == {"knorm", "kvzip", "contour"}
        assert set(frame.loc[small, "status"]) == {"failed"} and set(frame.loc[~small, "status"]) == {"ok"}
        for message in frame.loc[small, "message"]:
            assert "not hold one entry in each" in message and "\n" not in message
        knorm = frame[(frame["budget"] == 0.005) & (frame["method"] == "knorm") & (frame["storage"] == PUBLISHED)]
        assert set(knorm["entries"]) == {LAYERS * HEADS}

    @pytest.mark.skipif(KVPRESS, reason="kvpress is installed")
    def test_methods_of_kvpress_where_it_is_not_installed(self, folders, tmp_path):
        folder = folders["llama"]
        frame, _ = run(folder, task_of(folder), tmp_path / "answers.parquet", EVERY)
        own = frame["method"].isin(["full", *OWN])
        assert set(frame.loc[own, "status"]) == {"ok"} and set(frame.loc[~own, "status"]) == {"failed"}
        assert frame.loc[~own, "message"].str.contains("pip install 'contourkv[benchmark]'", regex=False).all()

    def test_of_a_batch_that_fails_only_the_one_at_fault(self, folders):
        """A kept set of another context among two sound ones."""
        folder = folders["llama"]
        task = task_of(folder)
        sample = task.samples[0]
        reading = Reading.of(loaded(folder), torch.tensor([sample.ids]))
        chooser = Chooser(reading, held_bytes(reading.full_cache()).payload, 1)
        cell = Cell(METHODS["contour"], ENFORCED, AGNOSTIC, 0.5)
        sound = chooser.choose(cell.method, ENFORCED, 0.5)
        broken = Chosen([keep[:, :50] for keep in sound.keep], 0.0)
        group = [Kept(cell, sound), Kept(cell, broken), Kept(cell, sound)]
        decode = load_encoder(folder).decode
        outcomes = running._ask_group(reading, group, sample.questions, task, decode, chooser)
        assert [bool(one[0].message) for one in outcomes] == [False, True, False]
        assert outcomes[1][0].message.startswith("take: keys ") and math.isnan(outcomes[1][0].score)
        wanted = running._ask_group(reading, [Kept(cell, sound)], sample.questions, task, decode, chooser)[0][0]
        assert outcomes[0][0] == outcomes[2][0] == wanted

    def test_a_cache_beyond_its_budget_stops_the_run(self, folders):
        """Not an outcome: it is what this code promises."""
        folder = folders["llama"]
        task = task_of(folder)
        reading = Reading.of(loaded(folder), torch.tensor([task.samples[0].ids]))
        full = held_bytes(reading.full_cache()).payload
        cell = Cell(METHODS["contour"], ENFORCED, AGNOSTIC, 0.5)
        chosen = Chooser(reading, full, 1).choose(cell.method, ENFORCED, 0.5)
        line = r"^contour at budget 0.5: its cache holds [\d,]+ bytes, [\d,]+ are its budget$"
        with pytest.raises(InvariantBroken, match=line):
            running._ask_group(
                reading, [Kept(cell, chosen)], task.samples[0].questions, task, str, Chooser(reading, full - 1000, 1)
            )


class TestRefused:
    def refused(self, folder: Path, task: Task, output: Path, settings: dict, line: str) -> None:
        with pytest.raises(InvalidInput, match=line) as caught:
            run(folder, task, output, settings)
        assert "\n" not in str(caught.value)
        assert not output.exists() and not output.with_name(output.name + ".parts").exists()

    @pytest.mark.parametrize("where", ["methods", "query_aware"])
    def test_an_unknown_method(self, folders, tmp_path, where):
        settings = {**settings_of("contour"), where: ["contour", "snapvk"]}
        line = rf"^benchmark.{where}: unknown method 'snapvk'; expected some of full, streaming_llm, .*, random$"
        self.refused(folders["llama"], task_of(folders["llama"]), tmp_path / "a.parquet", settings, line)

    @pytest.mark.parametrize(("measure", "more"), [("accuracy", 5), ("nats", 5)])
    def test_a_context_beyond_the_window(self, folders, tmp_path, measure, more):
        """2,048 positions: context, question of four, and five of an answer, generated or given."""
        folder, output = folders["llama"], tmp_path / "a.parquet"
        task = task_of(folder, measure)
        fits = dataclasses.replace(task.samples[1], ids=drawn(2048 - 4 - more, 1))
        running.check_task(dataclasses.replace(task, samples=[fits]), "task.json", folder)
        over = dataclasses.replace(fits, ids=[*fits.ids, 5])
        line = r"^.*a.json: sample 3 needs 2,049 positions, the model's window holds 2,048; lower the task's length$"
        task = dataclasses.replace(task, samples=[task.samples[0], over])
        self.refused(folder, task, output, settings_of("contour"), line)

    def test_a_task_of_another_model(self, folders, tmp_path):
        folder = folders["llama"]
        task = dataclasses.replace(task_of(folder), provenance={"model": "another"})
        line = rf"a.json: is in the tokens of another, the model is {folder.name}; delete it and make it again"
        self.refused(folder, task, tmp_path / "a.parquet", settings_of("contour"), line)

    def test_a_token_that_the_model_does_not_have(self, folders, tmp_path):
        task = task_of(folders["llama"])
        strange = dataclasses.replace(task.samples[0].questions[0], ids=[5, 10**6, 7])
        samples = [dataclasses.replace(task.samples[0], questions=[strange]), task.samples[1]]
        task = dataclasses.replace(task, samples=samples)
        line = r"a.json: sample \d+ holds token 1000000, the model has \d+; delete it"
        self.refused(folders["llama"], task, tmp_path / "a.parquet", settings_of("contour"), line)

    def test_a_gold_answer_beyond_the_window(self, folders, tmp_path):
        folder = folders["llama"]
        task = task_of(folder, "nats")
        long = dataclasses.replace(task.samples[0].questions[0], gold=[5] * 2048)
        task = dataclasses.replace(task, samples=[dataclasses.replace(task.samples[0], questions=[long])])
        line = r"sample 0 needs 2,162 positions, the model's window holds 2,048"
        self.refused(folder, task, tmp_path / "a.parquet", settings_of("contour"), line)

    def test_a_folder_without_a_model_and_a_task_that_is_not_there(self, folders, tmp_path):
        task = task_of(folders["llama"])
        line = r"^.*nowhere: there is no such model folder; prepare the model first$"
        self.refused(tmp_path / "nowhere", task, tmp_path / "a.parquet", settings_of("contour"), line)
        with pytest.raises(InvalidInput, match=r"none.json: there is no such file; make the task first$"):
            run_task(folders["llama"], tmp_path / "none.json", tmp_path / "b.parquet", settings_of("contour"))


def test_results_call_the_model_as_they_are_told(folders, tmp_path):
    frame, _ = run(
        folders["llama"], task_of(folders["llama"]), tmp_path / "a.parquet", settings_of("contour"), model_name="small"
    )
    assert set(frame["model"]) == {"small"}

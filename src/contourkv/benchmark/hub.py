"""RULER and LongBench as kvpress's evaluation harness reads them: rows of the hub, or of a folder in that format.

Columns, after `datasets.load_dataset(path, config, split="test")`: context, question, answer_prefix, task,
max_new_tokens, and the references: answer (RULER: a list of texts or one text) or answers and all_classes
(LongBench: lists). The harness reads them from `simonjegou/ruler` (configs "4096", "8192", "16384", thirteen tasks
in each) and `Xnhyacinth/LongBench` (a config for every task, the task's instructions put into the context).
RULER is scored by the rules all and any, LongBench by those of `metrics`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidInput
from ..models.hub_source import COMMIT, read_lock, write_lock
from ..models.loading import read_source
from ..provenance import file_sha256, record
from .samples import Question, Sample, Task
from .tasks.catalogue import refused
from .tasks.frame import Frame

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Scored:
    """How LongBench scores a task of its own: the rule, and the tokens that it lets a model answer with."""

    rule: str
    answer_tokens: int


# LongBench's English and code tasks. The column max_new_tokens, which kvpress's harness obeys, grants 20 tokens more;
# these hold where there is no such column.
LONGBENCH: dict[str, Scored] = {
    "narrativeqa": Scored("qa_f1", 128),
    "qasper": Scored("qa_f1", 128),
    "multifieldqa_en": Scored("qa_f1", 64),
    "hotpotqa": Scored("qa_f1", 32),
    "2wikimqa": Scored("qa_f1", 32),
    "musique": Scored("qa_f1", 32),
    "gov_report": Scored("rouge_l", 512),
    "qmsum": Scored("rouge_l", 512),
    "multi_news": Scored("rouge_l", 512),
    "trec": Scored("classification_first_line", 64),
    "triviaqa": Scored("qa_f1_first_line", 32),
    "samsum": Scored("rouge_l_first_line", 128),
    "passage_count": Scored("count", 32),
    "passage_retrieval_en": Scored("retrieval", 32),
    "lcc": Scored("code_similarity", 64),
    "repobench-p": Scored("code_similarity", 64),
}
# Their scores need a segmentation of Chinese into words.
LONGBENCH_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
SOURCES = ("ruler", "longbench")
SETTINGS = (
    *("name", "task", "source", "path", "revision", "config", "subset"),
    *("samples", "seed", "length", "answer_tokens"),
)
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
FORMATS = ("parquet", "json", "csv")
# What datasets raises for files that it cannot read, beside its own errors.
UNREADABLE = (ValueError, OSError, RuntimeError, StopIteration, ImportError)
TEXTS = ("context", "question", "answer_prefix", "task")


def check_hub_settings(settings: Mapping) -> None:
    """Raise `InvalidInput` unless `read_hub_task` takes these settings; reads nothing but the folder's name."""
    _Wanted.of(settings)


def read_hub_task(settings: Mapping, model_folder: str | os.PathLike, lock: str | os.PathLike | None = None) -> Task:
    """Read a task of RULER or LongBench and count it in a model's tokens.

    A sample is a context, with all the questions that the rows ask of it. Context tokens are those of template
    prefix and context together, question tokens those of question, template suffix and answer prefix.

    Parameters
    ----------
    settings : mapping
        name : the task's name.
        source : "ruler" or "longbench".
        path : a repository on the hub (owner/name), or a folder of parquet, json lines or csv files in its format.
        revision : branch, tag or commit of the repository; default main. Not for folders.
        config : a config of the repository; of a folder also one of its sub-folders. Default: the only one.
        subset : read the rows whose column task says so. RULER's configs hold thirteen tasks: name one.
        samples : how many contexts, the first of an order that `seed` shuffles; default all, in the data's order.
            Sample numbers are places in that order: a larger number adds samples and changes none.
        seed : of the shuffle, and every sample's seed; default 0.
        length : most context tokens; default what the model has positions for, question and answer left room.
            LongBench is cut in the middle to the first and last halves of that, as its own script does and
            kvpress's, which cuts the end, does not. RULER is never cut.
        answer_tokens : default the largest of max_new_tokens; LongBench's own where that column is missing.
    model_folder : path
        A prepared model; its tokenizer counts.
    lock : path, optional
        Lock file of hub revisions (`read_lock`). A revision that it does not know is resolved and written there.

    Returns
    -------
    Task
        `length` is the settings' length, or that of the longest context. `provenance["data"]` names the repository
        and its commit, or the folder and the SHA-256 of every file that was read.

    Raises
    ------
    InvalidInput
        A setting is wrong or unknown; the data cannot be reached or read, or is not in the format; several tasks at
        once; a Chinese task of LongBench; a RULER context that is too long.
    """
    wanted = _Wanted.of(settings)
    with _no_bars():
        data, origin = _read(wanted, None if lock is None else Path(lock))
        rows = _rows(data, wanted)
    name = _only_task(rows, wanted)
    rule = _rule(name, wanted)
    answer_tokens = wanted.answer_tokens or max(
        row["max_new_tokens"] if "max_new_tokens" in row else _longbench(name, wanted).answer_tokens for row in rows
    )
    answers = [_answers(row, rule, wanted) for row in rows]

    groups: dict[str, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row["context"], []).append(at)
    chosen = list(groups.values())
    if wanted.samples is not None:
        if wanted.samples > len(chosen):
            raise refused(wanted.name, "samples", f"{wanted.samples} asked for, there are {len(chosen)} contexts")
        order = np.random.default_rng(wanted.seed).permutation(len(chosen))
        chosen = [chosen[at] for at in order[: wanted.samples]]

    frame = Frame(model_folder, template=True)
    samples = []
    for index, group in enumerate(chosen):
        asked = [rows[at] for at in group]
        questions = [
            Question(frame.question(row["question"], row["answer_prefix"]), answers[at], [], [])
            for at, row in zip(group, asked, strict=True)
        ]
        room = (frame.window or sys.maxsize) - max(len(question.ids) for question in questions) - answer_tokens
        read = frame.context(asked[0]["context"]).ids
        ids = _fit(read, min(wanted.length or room, room), wanted, asked[0]["row"], frame.folder)
        source = {"source": wanted.source, "task": name, "rows": [row["row"] for row in asked], "tokens": len(read)}
        samples.append(Sample(index, wanted.seed, ids, questions, source))
    return Task(
        name=wanted.name,
        task="hub",
        measure="accuracy",
        rule=rule,
        length=wanted.length or max(len(sample.ids) for sample in samples),
        arm=None,
        floor=_floor(name, answers),
        answer_tokens=answer_tokens,
        samples=samples,
        provenance=record(
            dict(settings),
            settings=dict(settings),
            model=frame.folder.name,
            revision=read_source(frame.folder).get("revision"),
            chat_template=frame.chat,
            data={**origin, "task": name},
        ),
    )


@dataclass(frozen=True)
class _Wanted:
    """Settings, checked."""

    name: str
    source: str
    path: str
    revision: str
    config: str | None
    subset: str | None
    samples: int | None
    seed: int
    length: int | None
    answer_tokens: int | None

    @classmethod
    def of(cls, settings: Mapping) -> _Wanted:
        name = settings.get("name")
        if type(name) is not str or not name:
            raise InvalidInput(f"benchmark.tasks: every entry needs a name, got {name!r}")
        for key in settings:
            if key not in SETTINGS:
                raise refused(name, key, f"task hub takes no such setting; it takes {', '.join(SETTINGS)}")

        def text(key: str) -> str | None:
            value = settings.get(key)
            if value is not None and (type(value) is not str or not value):
                raise refused(name, key, f"expected a text, got {value!r}")
            return value

        def whole(key: str, least: int) -> int | None:
            value = settings.get(key)
            if value is not None and (type(value) is not int or value < least):
                raise refused(name, key, f"expected a whole number of at least {least}, got {value!r}")
            return value

        source, path, revision = text("source"), text("path"), text("revision")
        if source not in SOURCES:
            raise refused(name, "source", f"expected {' or '.join(SOURCES)}, got {source!r}")
        if path is None:
            raise refused(name, "path", "missing: a hub repository (owner/name), or a folder")
        if not Path(path).is_dir() and not REPOSITORY.fullmatch(path):
            raise refused(name, "path", f"there is no folder {path}; expected one, or a hub repository (owner/name)")
        if Path(path).is_dir() and revision is not None:
            raise refused(name, "revision", f"{path} is a folder; only hub repositories have revisions")
        return cls(
            name=name,
            source=source,
            path=path,
            revision=revision or "main",
            config=text("config"),
            subset=text("subset"),
            samples=whole("samples", 1),
            seed=whole("seed", 0) or 0,
            length=whole("length", 2),
            answer_tokens=whole("answer_tokens", 1),
        )

    @property
    def local(self) -> bool:
        return Path(self.path).is_dir()

    @property
    def where(self) -> str:
        """The data, for messages."""
        return f"config key benchmark.tasks[{self.name}]: {self.path}" + (f" ({self.config})" if self.config else "")

    @property
    def references(self) -> str:
        return "answer" if self.source == "ruler" else "answers"


def _read(wanted: _Wanted, lock: Path | None) -> tuple[datasets.Dataset, dict]:
    """The test split, and where it comes from."""
    import datasets
    import httpx
    import yaml

    commit = wanted.revision if COMMIT.fullmatch(wanted.revision) else None
    if commit is None and lock is not None and not wanted.local:
        commit = read_lock(lock).get(f"datasets/{wanted.path}", {}).get(wanted.revision)
    where: dict[str, str | None] = {"name": wanted.config}
    if wanted.local and wanted.config and (Path(wanted.path) / wanted.config).is_dir():
        where = {"data_dir": wanted.config}
    if not wanted.local:
        where["revision"] = commit or wanted.revision
    # in full, as a folder named after one of datasets' own readers is taken for that reader
    place = str(Path(wanted.path).resolve()) if wanted.local else wanted.path
    try:
        builder = datasets.load_dataset_builder(place, **where)
        if builder.name == "csv":
            # digits and empty cells stay the texts that they are
            texts = dict.fromkeys((*TEXTS, "answer", "answers", "all_classes"), str)
            builder = datasets.load_dataset_builder(place, **where, converters=texts)
        # "cache" gives rows that were checked when they were prepared
        if wanted.local or builder.name != "cache":
            _check_files(
                builder, wanted, f"{place}/" if wanted.local else f"hf://datasets/{wanted.path}@{builder.hash}/"
            )
        builder.download_and_prepare()
        data = builder.as_dataset(split="test")
    except InvalidInput:
        raise
    except ConnectionError as error:
        raise InvalidInput(
            f"{wanted.where}: the hub cannot be reached, and {wanted.path} is not in the cache of datasets; "
            "try again, or download it elsewhere and give the folder as path"
        ) from error
    except datasets.exceptions.DatasetNotFoundError as error:
        raise InvalidInput(
            f"{wanted.where}: {' '.join(str(error).split())} Correct path or revision, log in (hf auth login) where "
            "it is gated, or give a folder as path"
        ) from error
    except (*UNREADABLE, yaml.YAMLError, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
        raise InvalidInput(
            f"{wanted.where}: datasets cannot read its test split ({_line(error)}); expected a config that is there, "
            "and parquet, json lines or csv files with rows, named test or in a folder test"
        ) from error

    made_with = {"path": wanted.path, "config": wanted.config, "datasets": datasets.__version__}
    if wanted.local:
        files = sorted(map(Path, builder.config.data_files["test"]))
        root = Path(wanted.path).resolve()
        return data, {**made_with, "files": {os.path.relpath(path, root): file_sha256(path) for path in files}}
    found = builder.hash
    if not COMMIT.fullmatch(found) or (commit and found != commit):
        raise InvalidInput(
            f"{wanted.where}: the cache of datasets holds {found!r}, expected "
            f"{commit or 'a commit of 40 hexadecimal digits'}; read it once while the hub can be reached"
        )
    if lock is not None and commit is None:
        write_lock(lock, f"datasets/{wanted.path}", wanted.revision, found)
    return data, {**made_with, "asked_revision": wanted.revision, "revision": found}


def _check_files(builder: datasets.DatasetBuilder, wanted: _Wanted, root: str) -> None:
    """Stop before anything is read that is not rows, or lies elsewhere: a README may name any file or address."""
    if builder.name not in FORMATS:
        raise InvalidInput(f"{wanted.where}: its files are of kind {builder.name}; expected {', '.join(FORMATS)}")
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            if not (os.path.normpath(file) if wanted.local else file).startswith(root) or "/../" in file:
                raise InvalidInput(
                    f"{wanted.where}: its README names {file}, which is not in {root}; correct it, or read that instead"
                )


def _rows(data: datasets.Dataset, wanted: _Wanted) -> list[dict]:
    """Rows of the subset, their columns checked; `row` is the place in the test split."""
    columns = [*TEXTS, wanted.references, "max_new_tokens" if wanted.source == "ruler" else "all_classes"]
    missing = [column for column in columns if column not in data.column_names]
    if missing:
        raise InvalidInput(
            f"{wanted.where}: no column {', '.join(missing)}; {wanted.source} in kvpress's format has "
            f"{', '.join(columns)}, this has {', '.join(data.column_names)}"
        )
    tasks = data.select_columns("task").to_list()
    places = [at for at, row in enumerate(tasks) if wanted.subset is None or row["task"] == wanted.subset]
    if not places:
        there = sorted({str(row["task"]) for row in tasks})
        raise InvalidInput(f"{wanted.where}: subset: no row of task {wanted.subset!r}; there are {', '.join(there)}")
    if wanted.source == "longbench" and "max_new_tokens" in data.column_names:
        columns.append("max_new_tokens")
    rows = data.select_columns(columns).select(places).to_list()
    for at, row in zip(places, rows, strict=True):
        row["row"] = at
        for column in TEXTS:
            if not isinstance(row[column], str):
                raise InvalidInput(f"{wanted.where}: row {at}: {column}: expected a text, got {_shown(row[column])}")
        if not row["context"]:
            raise InvalidInput(f"{wanted.where}: row {at}: context: it is empty")
        tokens = row.get("max_new_tokens", 1)
        if type(tokens) is not int or tokens < 1:
            raise InvalidInput(
                f"{wanted.where}: row {at}: max_new_tokens: expected a whole number, got {_shown(tokens)}"
            )
    return rows


def _only_task(rows: list[dict], wanted: _Wanted) -> str:
    tasks = sorted({row["task"] for row in rows})
    if len(tasks) > 1:
        raise InvalidInput(
            f"{wanted.where}: it holds {len(tasks)} tasks, scored apart; set subset to one of {', '.join(tasks)}"
        )
    return tasks[0]


def _rule(task: str, wanted: _Wanted) -> str:
    if wanted.source == "ruler":
        return "any" if task.partition("_")[0] == "qa" else "all"
    return _longbench(task, wanted).rule


def _longbench(task: str, wanted: _Wanted) -> Scored:
    plain = task.removesuffix("-e").removesuffix("_e")  # LongBench-E: the same tasks, lengths evened out
    if plain in LONGBENCH_CHINESE:
        raise InvalidInput(
            f"{wanted.where}: LongBench's {task} is Chinese, whose words are not told apart here; "
            f"expected one of {', '.join(LONGBENCH)}"
        )
    if plain not in LONGBENCH:
        raise InvalidInput(f"{wanted.where}: LongBench has no task {task!r}; expected one of {', '.join(LONGBENCH)}")
    return LONGBENCH[plain]


def _answers(row: dict, rule: str, wanted: _Wanted) -> list[str]:
    """References of a row; a rule of classification takes the right class and then the others."""
    where = f"{wanted.where}: row {row['row']}: {wanted.references}"
    answers = row[wanted.references]
    if isinstance(answers, str):
        if answers.startswith("[") and answers.endswith("]"):
            raise InvalidInput(
                f"{where}: {_shown(answers)} is a list written as text; lists need parquet or json lines"
            )
        answers = [answers]
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise InvalidInput(f"{where}: expected a text or a list of texts, at least one, got {_shown(answers)}")
    if wanted.source == "ruler" and not all(answers):
        raise InvalidInput(f"{where}: an empty reference stands in every answer; expected none")
    if not rule.startswith("classification"):
        return answers
    classes = row["all_classes"]
    if not isinstance(classes, list) or not all(isinstance(each, str) and each for each in classes):
        raise InvalidInput(
            f"{wanted.where}: row {row['row']}: all_classes: expected a list of texts, got {_shown(classes)}"
        )
    if len(answers) != 1 or answers[0] not in classes:
        raise InvalidInput(f"{where}: expected one of all_classes, got {_shown(answers)}")
    return [*answers, *(each for each in classes if each != answers[0])]


def _floor(task: str, answers: list[list[str]]) -> float:
    """Score of one who knows only the form of the answer."""
    if task.startswith("passage_retrieval"):
        return 1 / 30  # the instructions say that there are 30 paragraphs
    return 1 / len(answers[0]) if task.startswith("trec") else 0.0


def _fit(ids: list[int], most: int, wanted: _Wanted, row: int, model: Path) -> list[int]:
    if len(ids) <= most:
        return ids
    if wanted.source == "ruler":
        raise InvalidInput(
            f"{wanted.where}: row {row}: its context has {len(ids):,} tokens of {model}, at most {most:,} fit "
            "(length, and the model's positions less question and answer); RULER is not cut: raise length, or "
            "leave this model or task out"
        )
    half = most // 2
    if half < 1:
        raise InvalidInput(
            f"{wanted.where}: row {row}: question and answer leave no positions of {model} to the context; "
            "lower answer_tokens, or leave this model or task out"
        )
    return ids[:half] + ids[-half:]


@contextmanager
def _no_bars() -> Iterator[None]:
    """No progress bars where nobody watches: in a log file each step is a line."""
    import datasets
    from huggingface_hub import utils as hub

    if sys.stderr.isatty():
        yield
        return
    shown = [(hub, hub.are_progress_bars_disabled()), (datasets, datasets.are_progress_bars_disabled())]
    for library, _ in shown:
        library.disable_progress_bars()
    try:
        yield
    finally:
        for library, off in shown:
            if not off:
                library.enable_progress_bars()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _line(error: BaseException) -> str:
    """The first line of what went wrong at the bottom."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (" ".join(str(error).split()) or type(error).__name__)[:200]

"""One benchmark job: a model, a task, every method at every budget; a row for each question and cell."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from transformers import PreTrainedModel

from ..devices import device_name
from ..errors import DamagedFile, InvalidInput, InvariantBroken
from ..held import Held
from ..models.loading import load_encoder, load_model, prepared_files, read_config, read_source
from ..press.quiet import quiet_kvpress
from ..press.scores import first_line
from ..progress import Progress
from ..provenance import file_sha256, record
from ..statistics.table_parts import TableParts
from .answering import answers, ending_tokens, most_at_once, nats
from .choosing import Chooser, Chosen
from .methods import AGNOSTIC, FULL, PUBLISHED, QUERY_AWARE, RECTANGULAR, Method, methods_named
from .reading import Reading
from .records import ANSWERED, write_answers
from .samples import Question, Sample, Task, read_task
from .scoring import score_answer
from .storing import FullStorage, MaskedStorage, PagedStorage, RaggedStorage, RectangularStorage, Storage

BATCH_BYTES = 1_500_000_000  # of caches that are asked at once


@dataclass(frozen=True)
class Cell:
    """One method under one storage, visibility and budget."""

    method: Method
    storage: str
    visibility: str
    budget: float

    @property
    def kind(self) -> type[Storage]:
        """What holds its kept set."""
        if self.method.keeps == "all":
            return FullStorage
        if self.method.keeps == "pages":
            return PagedStorage
        if self.storage != PUBLISHED:
            return RaggedStorage
        return MaskedStorage if self.method.keeps == "heads" else RectangularStorage


@dataclass
class Outcome:
    """What one question to one cell gave."""

    score: float = math.nan
    answer: str = ""
    message: str = ""


@dataclass
class Kept:
    """A cell's kept set of one context, and the bytes that it holds; `message` if there is none."""

    cell: Cell
    chosen: Chosen | None = None
    held: Held | None = None
    entries: int = 0
    read_bytes: int = 0
    message: str = ""


def cells(methods: Sequence[Method], budgets: Sequence[float], query_aware: Sequence[Method] = ()) -> list[Cell]:
    """Every cell of a run: the full cache once, the others at each budget in each of their storages.

    Quest ranks for each query token, so what it sees does not depend on when the question is read: it is run once.
    """
    found = [Cell(FULL, PUBLISHED, AGNOSTIC, 1.0)]
    for visibility, several in ((AGNOSTIC, methods), (QUERY_AWARE, query_aware)):
        for budget in budgets:
            for method in several:
                if method.keeps == "all" or (method.keeps == "pages" and visibility == QUERY_AWARE):
                    continue
                storages = [s for s in method.storages if visibility == AGNOSTIC or s != RECTANGULAR]
                found += [Cell(method, storage, visibility, budget) for storage in storages]
    return found


def run_task(
    model_folder: str | os.PathLike,
    task_path: str | os.PathLike,
    output: str | os.PathLike,
    settings: Mapping,
    *,
    device: str = "cpu",
    model_name: str | None = None,
    made_by: object = "",
) -> None:
    """Ask every question of a task to every cell; write the answers (parquet).

    Finished contexts are kept until all are there (`contourkv.parts`): a run that was killed goes on where it stopped.

    Parameters
    ----------
    model_folder : prepared model
    task_path : file that `write_task` wrote
    output : parquet, see `records.ANSWERED`
    settings : the config section `benchmark`: methods, query_aware, budgets
    device : torch device
    model_name : what results call the model; default the folder's name
    made_by : digest of the code that computes this; parts of another are not used

    Raises
    ------
    InvalidInput
        A broken task file, an unknown method, a context that the model cannot take.
    InvariantBroken
        A cache that was enforced holds more than its nominal bytes.
    """
    folder, output = Path(model_folder), Path(output)
    task = read_task(task_path)
    name = model_name or folder.name
    methods = methods_named(settings["methods"])
    later = [m for m in methods_named(settings["query_aware"], "benchmark.query_aware") if m is not FULL]
    sees_question = task.measure == "accuracy" and all(len(sample.questions) == 1 for sample in task.samples)
    wanted = cells(methods, settings["budgets"], later if sees_question else ())
    check_task(task, task_path, folder)
    made_with = record(
        {
            "task": file_sha256(task_path),
            "model": {name: found for name, found in prepared_files(folder).items() if name.endswith(".safetensors")},
            "settings": [settings[key] for key in ("methods", "query_aware", "budgets")],
            "device": device,
            "made_by": made_by,
        },
        devices={"measurement": device_name(device)},
    )
    with TableParts(output, made_with, ANSWERED) as parts:
        missing = [sample for sample in task.samples if not parts.has(f"{sample.index:05d}")]
        finished = len(task.samples) - len(missing)
        progress = Progress(len(task.samples), f"benchmark {name} on {task.name}", "contexts", before=finished)
        if missing:
            model = load_model(folder, device)
            decode = load_encoder(folder).decode
            with quiet_kvpress():
                for sample in progress.over(missing):
                    rows = pd.DataFrame(list(_rows(model, name, task, sample, wanted, decode)))
                    parts.write(f"{sample.index:05d}", rows)
        frame = pd.concat([parts.read(f"{sample.index:05d}") for sample in task.samples], ignore_index=True)
        failed = frame[frame["status"] == "failed"]
        for (method, storage), rows in failed.groupby(["method", "storage"], observed=True):
            print(f"failed: {method}, {storage}: {len(rows)} rows, first: {rows['message'].iloc[0]}", file=sys.stderr)
        meta = {
            **made_with,
            "model": {"name": name, "revision": read_source(folder).get("revision")},
            "seeds": {f"tasks.{task.name}": task.samples[0].seed},
        }
        write_answers(output, frame, meta)


def _rows(
    model: PreTrainedModel,
    name: str,
    task: Task,
    sample: Sample,
    wanted: Sequence[Cell],
    decode: Callable[[list[int]], str],
) -> Iterator[dict[str, object]]:
    """One row for each question and cell of one context."""
    reading = Reading.of(model, torch.tensor([sample.ids], device=model.device))
    agnostic = [cell for cell in wanted if cell.visibility == AGNOSTIC]
    yield from _asked(reading, name, task, sample, sample.questions, agnostic, decode)
    aware = [cell for cell in wanted if cell.visibility == QUERY_AWARE]
    if aware:
        # All but the last token of the question is in view; the last is what the answer starts from.
        for number, question in enumerate(sample.questions):
            seen, last = question.ids[:-1], question.ids[-1:]
            whole = reading.extended(torch.tensor([seen], device=model.device)) if seen else reading
            rest = Question(last, question.answers, question.gold, question.positions)
            yield from _asked(whole, name, task, sample, [rest], aware, decode, number)


def _asked(
    reading: Reading,
    name: str,
    task: Task,
    sample: Sample,
    questions: Sequence[Question],
    wanted: Sequence[Cell],
    decode: Callable[[list[int]], str],
    first_question: int = 0,
) -> Iterator[dict[str, object]]:
    full_held = FullStorage(reading, [Chosen([], 0.0)]).held()[0]
    # A draw of its own for each context.
    chooser = Chooser(reading, full_held.payload, sample.seed * 10_007 + sample.index)
    kept = [_chosen(chooser, cell) for cell in wanted]
    for group in _groups(reading, kept, task):
        outcomes = _ask_group(reading, group, questions, task, decode, chooser)
        for each, several in zip(group, outcomes, strict=True):
            for number, (question, outcome) in enumerate(zip(questions, several, strict=True), first_question):
                cell, held = each.cell, each.held or Held()
                yield {
                    "model": name,
                    "task": task.name,
                    "generator": task.task,
                    "arm": task.arm or "",
                    "length": task.length,
                    "measure": task.measure,
                    "rule": task.rule,
                    "floor": math.nan if task.floor is None else task.floor,
                    "sample": sample.index,
                    "question": number,
                    "question_id": f"{task.name}/{sample.index}/{number}",
                    "seed": sample.seed,
                    "method": cell.method.name,
                    "storage": cell.storage,
                    "visibility": cell.visibility,
                    "budget": cell.budget,
                    "status": "failed" if outcome.message else "ok",
                    "message": outcome.message,
                    "score": outcome.score,
                    "answer": outcome.answer,
                    "expected": " | ".join(question.answers),
                    "context_tokens": reading.tokens,
                    "entries": each.entries,
                    "full_bytes": full_held.payload,
                    "nominal_bytes": chooser.nominal_bytes(cell.budget),
                    "payload_bytes": held.payload,
                    "metadata_bytes": held.metadata,
                    "slack_bytes": held.slack,
                    "held_bytes": held.total,
                    "read_bytes": each.read_bytes,
                    "score_seconds": each.chosen.seconds if each.chosen else 0.0,
                }


def _chosen(chooser: Chooser, cell: Cell) -> Kept:
    """The kept set of a cell; whatever a method raises is its own outcome, and the others go on."""
    if cell.method.keeps in ("all", "pages"):
        return Kept(cell, Chosen([], 0.0))
    try:
        return Kept(cell, chooser.choose(cell.method, cell.storage, cell.budget))
    except InvariantBroken:
        raise
    except Exception as error:
        return Kept(cell, message=said(error))


def _groups(reading: Reading, kept: Sequence[Kept], task: Task) -> Iterator[list[Kept]]:
    """Cells that are asked as one batch: of one storage, within the bounds of memory."""
    batches: dict[type[Storage], list[Kept]] = {}
    for each in kept:
        if each.message:
            yield [each]
            continue
        batches.setdefault(each.cell.kind, []).append(each)
    per_token = sum(
        layer.keys.element_size() * layer.keys.shape[1] * (layer.keys.shape[-1] + layer.values.shape[-1])
        for layer in reading.layers
    )
    gold = max((len(question.gold) for question in task.samples[0].questions), default=1)
    most = most_at_once(reading.model, gold if task.measure == "nats" else 1)
    for several in batches.values():
        group, size = [], 0
        for each in several:
            share = 1.0 if each.cell.kind in (MaskedStorage, PagedStorage) else each.cell.budget
            bytes_ = int(per_token * reading.tokens * share)
            if group and (size + bytes_ > BATCH_BYTES or len(group) == most):
                yield group
                group, size = [], 0
            group.append(each)
            size += bytes_
        yield group


def _ask_group(
    reading: Reading,
    group: list[Kept],
    questions: Sequence[Question],
    task: Task,
    decode: Callable[[list[int]], str],
    chooser: Chooser,
) -> list[list[Outcome]]:
    """Outcomes of each cell, one a question. A batch that fails is asked one by one, to find whose failure it is."""
    if group[0].message:
        return [[Outcome(message=each.message) for _ in questions] for each in group]
    try:
        return _ask(reading, group, questions, task, decode, chooser)
    except InvariantBroken:
        raise
    except Exception as error:
        if len(group) > 1:
            return [_ask_group(reading, [each], questions, task, decode, chooser)[0] for each in group]
        return [[Outcome(message=said(error)) for _ in questions]]


def _ask(
    reading: Reading,
    group: list[Kept],
    questions: Sequence[Question],
    task: Task,
    decode: Callable[[list[int]], str],
    chooser: Chooser,
) -> list[list[Outcome]]:
    model, kind, count = reading.model, group[0].cell.kind, len(group)
    if kind is PagedStorage:
        storage = PagedStorage(reading, [each.cell.budget for each in group])
    else:
        storage = kind(reading, [each.chosen for each in group])
    found: list[list[Outcome]] = [[] for _ in group]
    with storage.ready():
        _weigh(storage, group, chooser)
        for question in questions:
            if task.measure == "nats":
                losses = nats(model, storage.cache, question.ids, question.gold, reading.tokens, count)
                outcomes = [Outcome(-loss) for loss in losses]
            else:
                rows = answers(
                    model, storage.cache, question.ids, reading.tokens, count, task.answer_tokens, ending_tokens(model)
                )
                texts = [decode(row) for row in rows]
                outcomes = [Outcome(score_answer(task.rule, text, question.answers), text) for text in texts]
            for several, outcome in zip(found, outcomes, strict=True):
                several.append(outcome)
            if question is questions[0]:
                for each, read in zip(group, storage.read_bytes(), strict=True):
                    each.read_bytes = read
            storage.forget()
    return found


def _weigh(storage: Storage, group: list[Kept], chooser: Chooser) -> None:
    """Note the bytes that each cell holds, before anything is asked; what is enforced must be within its budget."""
    for each, held, entries in zip(group, storage.held(), storage.entries(), strict=True):
        each.held, each.entries = held, entries
        nominal = chooser.nominal_bytes(each.cell.budget)
        if each.cell.storage != PUBLISHED and held.total > nominal:
            raise InvariantBroken(
                f"{each.cell.method.name} at budget {each.cell.budget:g}: its cache holds {held.total:,} bytes, "
                f"{nominal:,} are its budget"
            )


def check_task(task: Task, path: str | os.PathLike, folder: Path) -> None:
    """Raise `InvalidInput` unless the task in the file `path` was made for the model in `folder`, and fits it."""
    made_for = task.provenance.get("model", folder.name)
    if made_for != folder.name:
        raise DamagedFile(path, f"is in the tokens of {made_for}, the model is {folder.name}")
    config = read_config(folder)
    window = config.get("max_position_embeddings") or math.inf
    known = config.get("vocab_size") or math.inf
    for sample in task.samples:
        for question in sample.questions:
            largest = max([*sample.ids, *question.ids, *question.gold])
            if largest >= known:
                raise DamagedFile(path, f"sample {sample.index} holds token {largest}, the model has {known}")
            needed = len(sample.ids) + len(question.ids) + max(task.answer_tokens, len(question.gold))
            if needed > window:
                raise InvalidInput(
                    f"{path}: sample {sample.index} needs {needed:,} positions, the model's window holds {window:,}; "
                    "lower the task's length"
                )


def said(error: Exception) -> str:
    """One line of what went wrong with a cell."""
    return first_line(error) if isinstance(error, InvalidInput) else f"{type(error).__name__}: {first_line(error)}"

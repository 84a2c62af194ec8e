"""Task-structured contexts (paper, section 3): a context, its question and its answer in one forward pass.

The tasks of the benchmark are assembled in token space, so the tokens that an answer rests on are known. Here the
question and the gold answer follow the context, and rows are captured at two kinds of query position: RETRIEVAL rows,
whose next token is a token of the answer and is read off the planted place, and BACKGROUND rows inside the text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from .benchmark.samples import Sample, Task
from .benchmark.tasks import check_settings, make_task, wheels_of
from .contexts.storage import Context, write_contexts
from .errors import InvalidInput

LEAST_RETRIEVAL = 0.2
"""Share of a context's rows that retrieval rows must make up (paper, section 3)."""


def structured_contexts(task: Task, retrieval: int, background: int) -> list[Context]:
    """A context with its query positions for each sample of a task.

    Parameters
    ----------
    task : Task
        Of gold answers: its measure is nats. The first question of each sample is asked.
    retrieval : int
        Most retrieval rows of a context: the first tokens of its gold answer.
    background : int
        Most background rows; fewer where retrieval rows would be less than a fifth of all.

    Returns
    -------
    list of Context
        The arm is the task's name. `origin` is the sample's, with the task and `rests_on`, the tokens of the context
        that hold the answer.

    Raises
    ------
    InvalidInput
        A task without gold answers, or whose answers rest on no known place; a context too short for so many rows.
    """
    return [_context(task, sample, retrieval, background) for sample in task.samples]


def _context(task: Task, sample: Sample, retrieval: int, background: int) -> Context:
    where, question = f"config key structured.arms[{task.name}]", sample.questions[0]
    if not question.gold:
        raise InvalidInput(f"{where}: sample {sample.index} has no gold answer; expected a task that measures nats")
    if not question.positions:
        raise InvalidInput(f"{where}: sample {sample.index}: its answer rests on no known place; take another task")
    ids = [*sample.ids, *question.ids, *question.gold[:-1]]
    first = len(sample.ids) + len(question.ids) - 1
    asked = list(range(first, first + min(retrieval, len(question.gold))))
    others = min(background, int(len(asked) * (1 / LEAST_RETRIEVAL - 1)))
    # The second half of the text, as rows need keys to choose among; not the planted tokens themselves.
    free = np.setdiff1d(np.arange(len(sample.ids) // 2, len(sample.ids)), question.positions)
    if free.size < others:
        raise InvalidInput(
            f"{where}.length: {len(sample.ids)} tokens of context do not hold {others} background rows; make it longer "
            "or lower structured.background"
        )
    text = free[np.linspace(0, free.size - 1, others).round().astype(int)]
    return Context(
        arm=task.name,
        index=sample.index,
        ids=ids,
        origin={**sample.origin, "task": task.task, "seed": sample.seed, "rests_on": question.positions},
        positions=[*text.tolist(), *asked],
        retrieval=asked,
    )


def check_structured(config: Mapping) -> None:
    """Raise `InvalidInput` unless the section `structured` of a configuration can be run.

    Parameters
    ----------
    config : mapping
        The merged configuration, its schema checked.
    """
    section = config["structured"]
    names = set(config["arms"])
    for index, entry in enumerate(section["arms"]):
        if entry["name"] in names:
            raise InvalidInput(
                f"config key structured.arms[{index}].name: {entry['name']} is taken; every arm needs its own name"
            )
        names.add(entry["name"])
        with _named():
            settings = check_settings(structured_settings(entry, section["contexts"]), config["text_sources"])
        for wheel in wheels_of(settings, config["text_sources"]):
            if wheel not in config["wheel_hashes"]:
                raise InvalidInput(
                    f"config key structured.arms[{index}]: no SHA-256 for {wheel} in wheel_hashes (texts.yaml)"
                )


def make_structured_file(
    model_folder: str | os.PathLike,
    settings: Mapping,
    rows: Mapping[str, int],
    text_sources: Mapping,
    wheels: str | os.PathLike,
    hashes: Mapping[str, str],
    output: str | os.PathLike,
) -> None:
    """Make the structured contexts of one arm in one model's tokens and write them (see `contexts.write_contexts`).

    Parameters
    ----------
    settings : as `structured_settings` gives them
    rows : retrieval, background; see `structured_contexts`
    model_folder, text_sources, wheels, hashes : as of `benchmark.tasks.make_task`
    """
    with _named():
        task = make_task(model_folder, settings, text_sources, wheels, hashes)
    found = structured_contexts(task, rows["retrieval"], rows["background"])
    write_contexts(output, found, model=task.provenance["model"], seed=settings["seed"])


@contextmanager
def _named() -> Iterator[None]:
    """Errors of an entry as a task are those of an arm inside."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(str(error).replace("benchmark.tasks[", "structured.arms[", 1)) from None


def structured_settings(entry: Mapping, contexts: int) -> dict:
    """An entry of `structured.arms` as the settings of a task: gold answers, as many samples as contexts."""
    for key in ("measure", "samples"):
        if key in entry:
            raise InvalidInput(
                f"config key structured.arms[{entry.get('name')}].{key}: is set by the run; leave it out"
            )
    return {**entry, "measure": "nats", "samples": contexts}

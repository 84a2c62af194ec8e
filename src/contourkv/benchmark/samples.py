"""Tasks as they are run: contexts and questions in token ids, and the file that holds those of a model and task."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from .. import provenance
from ..errors import DamagedFile, InvalidInput
from ..plain import NotPlain, read_json
from .scoring import RULES

MEASURES = ("accuracy", "nats")


@dataclass(frozen=True)
class Question:
    """What is fed after the context, and what should follow.

    Attributes
    ----------
    ids : list of int
        Question, end of the chat template, answer prefix; at least one token.
    answers : list of str
        References.
    gold : list of int
        Tokens of the reference answer after `ids`, for its likelihood; may be empty where accuracy is measured.
    positions : list of int
        Tokens of the context that the answer rests on, ascending; empty where none can be named.
    """

    ids: list[int]
    answers: list[str]
    gold: list[int]
    positions: list[int]


@dataclass(frozen=True)
class Sample:
    """One context and the questions about it.

    Attributes
    ----------
    index : int
        Place within the task, from 0.
    seed : int
        Seed of the draw. The same seed and index is the same draw for every model.
    ids : list of int
        The context, beginning of the chat template or BOS included.
    questions : list of Question
        At least one; each is asked of the context as it was before the others.
    origin : dict
        Where the text comes from, and what was drawn.
    """

    index: int
    seed: int
    ids: list[int]
    questions: list[Question]
    origin: dict


@dataclass(frozen=True)
class Task:
    """Samples of one task in one model's tokens.

    Attributes
    ----------
    name : str
        In the configuration and in results.
    task : str
        Generator.
    measure : {"accuracy", "nats"}
        Greedy answer scored 0 to 1, or log-likelihood of the gold answer in nats a token.
    rule : str
        Scoring rule, a name in `scoring.RULES`; "" where nats are measured.
    length : int
        Tokens that the task is made for.
    arm : str or None
        Content arm of the text.
    floor : float or None
        Accuracy expected of a reader that guesses; None where nats are measured.
    answer_tokens : int
        Tokens to generate.
    samples : list of Sample
    provenance : dict
    """

    name: str
    task: str
    measure: str
    rule: str
    length: int
    arm: str | None
    floor: float | None
    answer_tokens: int
    samples: list[Sample]
    provenance: dict


def write_task(path: str | os.PathLike, task: Task) -> None:
    """Write a task as JSON, whole or not at all."""
    provenance.write_json(path, asdict(task))


def read_task(path: str | os.PathLike) -> Task:
    """Read what `write_task` wrote.

    Raises
    ------
    InvalidInput
        The file is missing, truncated or not of that form; the message names it and the key at fault.
    """
    path = Path(path)
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file; make the task first") from None
    except (OSError, NotPlain) as error:
        raise DamagedFile(path, f"is truncated or not JSON ({error})") from error
    file = _File(path)
    fields = file.fields(
        value,
        "",
        name="text",
        task="text",
        measure="text",
        rule="text",
        length="a whole number from 1",
        arm="text or null",
        floor="a number from 0 to 1 or null",
        answer_tokens="a whole number from 1",
        samples="a list",
        provenance="an object",
    )
    nats = fields["measure"] == "nats"
    file.expect(fields["measure"] in MEASURES, "measure", " or ".join(MEASURES), fields["measure"])
    rules = ("",) if nats else tuple(RULES)
    file.expect(fields["rule"] in rules, "rule", "one of " + ", ".join(rules) if not nats else "''", fields["rule"])
    file.expect(
        (fields["floor"] is None) == nats, "floor", "null where nats are measured, else 0 to 1", fields["floor"]
    )
    samples = [file.sample(entry, f"samples[{place}]", nats) for place, entry in enumerate(fields["samples"])]
    file.expect(bool(samples), "samples", "at least one", samples)
    file.expect(all(a.index < b.index for a, b in pairwise(samples)), "samples", "rising indices", "others")
    return Task(**{**fields, "samples": samples})


_KINDS = {
    "text": lambda value: type(value) is str,
    "text or null": lambda value: value is None or type(value) is str,
    "a whole number from 1": lambda value: type(value) is int and value >= 1,
    "a whole number from 0": lambda value: type(value) is int and value >= 0,
    "a number from 0 to 1 or null": lambda value: (
        value is None or (type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1)
    ),
    "a list": lambda value: type(value) is list,
    "a list of texts": lambda value: type(value) is list and all(type(each) is str for each in value),
    "a list of token ids": lambda value: type(value) is list and all(type(each) is int and each >= 0 for each in value),
    "an object": lambda value: type(value) is dict,
}


@dataclass(frozen=True)
class _File:
    path: Path

    def expect(self, holds: bool, key: str, wanted: str, found: object) -> None:
        if not holds:
            shown = "nothing" if found is ... else repr(found)
            shown = shown if len(shown) <= 60 else shown[:57] + "..."
            raise DamagedFile(self.path, f"{key}: expected {wanted}, got {shown}")

    def fields(self, value: object, where: str, **kinds: str) -> dict:
        """The fields of an object, each of its kind, and no others."""
        self.expect(type(value) is dict, where or "the file", "an object", value)
        prefix = f"{where}." if where else ""
        for key, kind in kinds.items():
            self.expect(key in value, prefix + key, kind, ...)
            self.expect(_KINDS[kind](value[key]), prefix + key, kind, value[key])
        for key in value:
            self.expect(key in kinds, prefix + key, "no such key", value[key])
        return value

    def sample(self, value: object, where: str, nats: bool) -> Sample:
        kinds = {"index": "a whole number from 0", "seed": "a whole number from 0", "ids": "a list of token ids"}
        fields = self.fields(value, where, **kinds, questions="a list", origin="an object")
        self.expect(bool(fields["ids"]), f"{where}.ids", "at least one token", [])
        self.expect(bool(fields["questions"]), f"{where}.questions", "at least one", [])
        questions = [
            self.question(entry, f"{where}.questions[{place}]", len(fields["ids"]), nats)
            for place, entry in enumerate(fields["questions"])
        ]
        return Sample(**{**fields, "questions": questions})

    def question(self, value: object, where: str, tokens: int, nats: bool) -> Question:
        ids = "a list of token ids"
        fields = self.fields(value, where, ids=ids, answers="a list of texts", gold=ids, positions=ids)
        self.expect(bool(fields["ids"]), f"{where}.ids", "at least one token", [])
        positions = fields["positions"]
        rising = all(a < b for a, b in pairwise(positions)) and positions[-1:] < [tokens]
        self.expect(rising, f"{where}.positions", f"rising positions below {tokens}", positions)
        needed = "gold" if nats else "answers"
        self.expect(bool(fields[needed]), f"{where}.{needed}", "at least one", [])
        return Question(**fields)

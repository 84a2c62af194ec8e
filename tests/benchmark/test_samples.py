"""Tasks come back as they were written; a damaged file is named, with the key that is wrong in it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contourkv.benchmark.samples import Question, Sample, Task, read_task, write_task
from contourkv.errors import InvalidInput

text = st.text(max_size=12)
token = st.integers(0, 300_000)


@st.composite
def tasks(draw) -> Task:
    nats = draw(st.booleans())

    def question(tokens: int) -> Question:
        return Question(
            draw(st.lists(token, min_size=1, max_size=4)),
            draw(st.lists(text, min_size=0 if nats else 1, max_size=3)),
            draw(st.lists(token, min_size=1 if nats else 0, max_size=3)),
            sorted(draw(st.sets(st.integers(0, tokens - 1), max_size=4))),
        )

    def sample(index: int) -> Sample:
        ids = draw(st.lists(token, min_size=1, max_size=8))
        questions = [question(len(ids)) for _ in range(draw(st.integers(1, 3)))]
        return Sample(index, draw(st.integers(0, 9)), ids, questions, draw(st.dictionaries(text, text, max_size=2)))

    return Task(
        draw(text),
        "niah",
        "nats" if nats else "accuracy",
        "" if nats else draw(st.sampled_from(["all", "any"])),
        draw(st.integers(1, 9999)),
        draw(st.none() | text),
        None if nats else draw(st.floats(0, 1)),
        draw(st.integers(1, 200)),
        [sample(index) for index in range(draw(st.integers(1, 3)))],
        {"seed": 3},
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("samples") / "task.json"


@given(tasks())
def test_what_is_read_is_what_was_written_and_the_same_bytes_again(path, task):
    write_task(path, task)
    first = path.read_bytes()
    assert read_task(path) == task
    write_task(path, read_task(path))
    assert path.read_bytes() == first
    assert not list(path.parent.glob(".partial*"))


GOOD = Task(
    "one",
    "niah",
    "accuracy",
    "all",
    64,
    "prose",
    0.25,
    16,
    [Sample(0, 7, [1, 2, 3], [Question([4], ["5"], [5], [1, 2])], {"file": "a"})],
    {},
)


def changed(*path, to):
    """Set the value under `path`, or delete it where `to` is `...`."""

    def change(value):
        for step in path[:-1]:
            value = value[step]
        if to is ...:
            del value[path[-1]]
        else:
            value[path[-1]] = to

    return change


QUESTION = ("samples", 0, "questions", 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed("name", to=...), "name: expected text, got nothing"),
        (changed("measure", to="points"), "measure: expected accuracy or nats, got 'points'"),
        (changed("rule", to="most"), "rule: expected one of all, any"),
        (changed("length", to=0), "length: expected a whole number from 1, got 0"),
        (changed("length", to=True), "length: expected a whole number from 1, got True"),
        (changed("floor", to=1.5), "floor: expected a number from 0 to 1 or null, got 1.5"),
        (changed("floor", to=None), "floor: expected null where nats are measured, else 0 to 1, got None"),
        (changed("samples", to=[]), "samples: expected at least one"),
        (changed("more", to=1), "more: expected no such key"),
        (changed("samples", 0, "ids", to=[]), r"samples\[0\]\.ids: expected at least one token"),
        (changed("samples", 0, "ids", to=[1, -2]), r"samples\[0\]\.ids: expected a list of token ids"),
        (changed("samples", 0, "questions", to=[]), r"samples\[0\]\.questions: expected at least one"),
        (changed("samples", 0, "origin", to=[]), r"samples\[0\]\.origin: expected an object"),
        (changed(*QUESTION, "ids", to=[]), r"questions\[0\]\.ids: expected at least one token"),
        (changed(*QUESTION, "answers", to=[]), r"questions\[0\]\.answers: expected at least one"),
        (changed(*QUESTION, "positions", to=[1, 3]), r"positions: expected rising positions below 3, got \[1, 3\]"),
        (changed(*QUESTION, "positions", to=[2, 1]), "positions: expected rising positions below 3"),
        (changed(*QUESTION, "gold", to=["5"]), r"gold: expected a list of token ids, got \['5'\]"),
    ],
)
def test_a_damaged_file_is_named_with_its_key(tmp_path, change, said):
    path = tmp_path / "task.json"
    write_task(path, GOOD)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(InvalidInput, match=said) as caught:
        read_task(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_nats_task_needs_gold_and_takes_no_rule(tmp_path):
    path = tmp_path / "task.json"
    write_task(path, GOOD)
    value = json.loads(path.read_text())
    value.update(measure="nats", floor=None)
    path.write_text(json.dumps(value))
    with pytest.raises(InvalidInput, match="rule: expected '', got 'all'"):
        read_task(path)
    value["rule"] = ""
    value["samples"][0]["questions"][0]["gold"] = []
    path.write_text(json.dumps(value))
    with pytest.raises(InvalidInput, match=r"questions\[0\]\.gold: expected at least one"):
        read_task(path)


def test_a_missing_and_a_truncated_file_are_named(tmp_path):
    path = tmp_path / "task.json"
    with pytest.raises(InvalidInput, match=r"task\.json: there is no such file; make the task first"):
        read_task(path)
    write_task(path, GOOD)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(InvalidInput, match="is truncated or not JSON"):
        read_task(path)

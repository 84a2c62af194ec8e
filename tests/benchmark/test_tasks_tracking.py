"""Variable tracking is RULER's: chains of hops in noise, in order, behind one worked example."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_sources import TEXTS, make_models

from contourkv.benchmark.scoring import score_answer
from contourkv.benchmark.tasks import make_task
from contourkv.benchmark.tasks.haystacks import NOISE
from contourkv.benchmark.tasks.tracking import HEAD
from contourkv.errors import InvalidInput
from contourkv.models import load_tokenizer

LINE = re.compile(r"VAR ([A-Z]+) = (?:VAR ([A-Z]+)|(\d+))")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    models = make_models(tmp_path_factory.mktemp("tracking"))
    return {"models": models, "tokenizers": {name: load_tokenizer(path) for name, path in models.items()}}


def make(source, model="bytes", **more):
    entry = {"name": "a", "task": "vt", "length": 2200, "samples": 2, "seed": 3, **more}
    return make_task(source["models"][model], entry, TEXTS, "no wheels")


def read(source, model, ids):
    return source["tokenizers"][model].decode(ids, clean_up_tokenization_spaces=False)


def assigned(text):
    """Variable -> value, following the lines in the order in which they stand."""
    held = {}
    for name, other, value in LINE.findall(text):
        assert name not in held
        held[name] = value or held[other]
    return held


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 10**6), st.sampled_from(["bytes", "chat", "pieces"]))
def test_chains_are_followed_from_their_value_in_the_order_of_the_text(source, chains, hops, seed, model):
    made = make(source, model, chains=chains, hops=hops, seed=seed, length=3200, answer_tokens=60)
    for sample in made.samples:
        _, example, context = read(source, model, sample.ids).split(HEAD)
        held = assigned(context)
        assert len(held) == chains * (hops + 1) and all(re.fullmatch("[A-Z]{5}", name) for name in held)
        assert len(set(held.values())) == chains and all(re.fullmatch(r"[1-9]\d{4}", each) for each in held.values())

        (question,) = sample.questions
        text = read(source, model, question.ids)
        value = re.search(r"assigned the value (\d+) in the text above\.", text)[1]
        assert question.answers == [name for name, each in held.items() if each == value]
        assert len(question.answers) == hops + 1
        assert text.endswith(f"{hops + 1} variables are assigned the value {value}, they are:")
        found = read(source, model, [sample.ids[place] for place in question.positions])
        lines = [line[0] for line in re.finditer(LINE, context) if line[1] in question.answers]
        assert "".join(found.split()) == "".join("".join(lines).split())

        # the example: a task of the same chains and hops with its answer, its names of three letters
        shown = assigned(example)
        assert len(shown) == chains * (hops + 1) and all(re.fullmatch("[A-Z]{3}", name) for name in shown)
        value, answer = re.search(r"the value (\d+), they are: ([A-Z ]+)\n\n$", example).groups()
        assert answer.split() == [name for name, each in shown.items() if each == value]


def test_by_default_one_chain_of_four_hops_in_noise(source):
    made = make(source)
    assert made.floor == 0
    for sample in made.samples:
        assert len(sample.origin["chains"]) == 1 and len(sample.origin["chains"][0]["names"]) == 5
        context = read(source, "bytes", sample.ids).split(HEAD)[2]
        rest = LINE.sub("", context).split()
        assert rest == ((NOISE + " ") * 40).split()[: len(rest) - 1] + rest[-1:]


@pytest.mark.parametrize("chains", [2, 3, 4])
def test_the_floor_is_what_naming_any_variables_scores(source, chains):
    made = make(source, chains=chains, hops=2, length=3000)
    names = [name for chain in made.samples[0].origin["chains"] for name in chain["names"]]
    answers = made.samples[0].questions[0].answers
    # of n names picked the expected share of the answers found is n times that of one
    expected = len(answers) * sum(score_answer("all", name, answers) for name in names) / len(names)
    assert made.floor == pytest.approx(expected)


def test_assignments_stand_between_lines_of_noise_and_between_sentences_where_it_is_short(source):
    def others(length):
        context = read(source, "bytes", make(source, samples=1, length=length).samples[0].ids).split(HEAD)[2]
        lines = context.split("\n")[:-1]
        return {line for line in lines if not LINE.fullmatch(line)}

    assert others(3500) == {NOISE}
    short = others(1300)
    assert NOISE not in short or len(short) > 1
    sentences = NOISE.split(". ")
    assert all(set(line.rstrip(".").split(". ")) <= {each.rstrip(".") for each in sentences} for line in short)
    with pytest.raises(InvalidInput, match=r"benchmark\.tasks\[a\]\.length: too short"):
        make(source, length=900)


@pytest.mark.parametrize(("length", "lines"), [(4095, 2), (4096, 10)])
def test_the_example_is_short_in_short_contexts(source, length, lines):
    example = read(source, "bytes", make(source, samples=1, length=length).samples[0].ids).split(HEAD)[1]
    assert example.count("The grass is green.") == lines

"""What holds of every task: exact lengths, the same draw for every model, positions and gold tokens that say what they
should, and one line for what is wrong."""

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_sources import PROSE, TEXTS, WINDOW, make_models, make_texts

from contourkv.benchmark.samples import read_task, write_task
from contourkv.benchmark.scoring import score_answer
from contourkv.benchmark.tasks import SETTINGS, check_settings, make_task, wheels_of
from contourkv.benchmark.tasks.catalogue import ALWAYS, QUESTIONS, RULER
from contourkv.errors import InvalidInput
from contourkv.models import load_tokenizer

MODELS = ("bytes", "bos", "chat", "pieces")
# What the tasks need in bytes, the longest tokens there are.
LENGTHS = {"cwe": 2600, "vt": 1300, "qa_1": 1200}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    models = make_models(folder / "models")
    return {
        "models": models,
        "tokenizers": {name: load_tokenizer(path) for name, path in models.items()},
        "wheels": folder / "wheels",
        "hashes": make_texts(folder / "wheels"),
    }


def entry(task, **more):
    arm = {"arm": "prose"} if "arm" in SETTINGS[task] else {}
    base = {"name": f"a-{task}", "task": task, "length": LENGTHS.get(task, 1000), "samples": 2, "seed": 3}
    return {**base, **arm, **more}


def make(source, task, model="bytes", **more):
    folder = source["models"][model]
    return make_task(folder, entry(task, **more), TEXTS, source["wheels"], source["hashes"])


def made_of(source, task, model, **more):
    """A task in a model's tokens, and what turns ids into text."""
    tokenizer = source["tokenizers"][model]
    return make(source, task, model, **more), lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_rulers_thirteen_are_there():
    assert len(RULER) == 13 and set(RULER) <= set(SETTINGS)
    generated = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
    for task in RULER:
        assert SETTINGS[task]["answer_tokens"] == generated[task.split("_")[0]]


@pytest.mark.parametrize("task", SETTINGS)
@settings(max_examples=6)
@given(data=st.data())
def test_the_length_is_exact_and_the_same_seed_is_the_same_bytes(source, task, data, tmp_path_factory):
    model = data.draw(st.sampled_from(MODELS))
    length = LENGTHS.get(task, 1000) + data.draw(st.integers(0, 700))
    seed = data.draw(st.integers(0, 2**31))
    made = make(source, task, model, length=length, seed=seed)
    for index, sample in enumerate(made.samples):
        assert (sample.index, sample.seed) == (index, seed)
        longest = max(len(question.ids) for question in sample.questions)
        if task == "continuation":
            assert len(sample.ids) == length and longest == 1
        else:
            assert len(sample.ids) + longest + made.answer_tokens == length
    folder = tmp_path_factory.mktemp("bytes")
    write_task(folder / "a.json", made)
    write_task(folder / "b.json", make(source, task, model, length=length, seed=seed))
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()
    assert read_task(folder / "a.json") == made


@pytest.mark.parametrize("task", SETTINGS)
def test_more_samples_begin_with_the_fewer_and_other_seeds_are_other_draws(source, task):
    three = make(source, task, samples=3).samples
    assert make(source, task, samples=1).samples == three[:1]
    assert three[0].ids != three[1].ids != three[2].ids
    assert make(source, task, seed=4).samples[0].ids != three[0].ids


@pytest.mark.parametrize("task", SETTINGS)
def test_every_model_gets_the_same_draw(source, task):
    # how much of the text fits, and how many other words and documents, depends on the tokens
    of_tokens = {"end_char", "conversations", "others", "words", "documents"}

    def draws(model):
        task_made = make(source, task, model, length=1600 if task in ("qa_1", "qa_2") else 3000)
        kept = [{key: each for key, each in one.origin.items() if key not in of_tokens} for one in task_made.samples]
        answers = [[question.answers for question in sample.questions] for sample in task_made.samples]
        return json.dumps([kept, answers], sort_keys=True)

    assert draws("bytes") == draws("bos") == draws("chat") == draws("pieces")


TELLING = [task for task in SETTINGS if task not in ("continuation", "cwe", "fwe", "vt", "qa_2")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", TELLING)
def test_positions_are_those_of_the_values(source, task, model):
    made, decode = made_of(source, task, model, samples=4)
    for sample in made.samples:
        for question in sample.questions:
            found = decode([sample.ids[place] for place in question.positions])
            values = question.answers[:1] if task == "qa_1" else question.answers
            for value in values:
                assert value in found
                found = found.replace(value, "", 1)
            # nothing else than blanks that a token joins to a value
            assert not found.strip()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", [task for task in SETTINGS if SETTINGS[task]["measure"] == "nats" or task in ("vt",)])
def test_gold_tokens_are_those_of_the_text(source, task, model):
    more = {"chains": 2, "measure": "nats", "answer_tokens": 60, "length": 2000} if task == "vt" else {}
    made, decode = made_of(source, task, model, **more)
    assert made.measure == "nats" and made.floor is None and made.rule == ""
    for sample in made.samples:
        for question in sample.questions:
            assert 1 <= len(question.gold) <= made.answer_tokens
            if task != "continuation":
                assert decode(question.gold) == " " + " ".join(question.answers)


@pytest.mark.parametrize("task", [task for task in SETTINGS if SETTINGS[task]["measure"] == "accuracy"])
def test_the_gold_text_scores_one_and_silence_nothing(source, task):
    made = make(source, task)
    assert made.rule == ("any" if task.startswith("qa") else "all")
    assert 0 <= made.floor < 1
    for sample in made.samples:
        for question in sample.questions:
            assert score_answer(made.rule, " ".join(question.answers), question.answers) == 1
            assert score_answer(made.rule, "", question.answers) == 0


@pytest.mark.parametrize("task", [task for task in SETTINGS if "template" in SETTINGS[task]])
def test_the_chat_template_is_around_context_and_question(source, task):
    made, decode = made_of(source, task, "chat")
    for sample in made.samples:
        assert decode(sample.ids).startswith("<s>user\n")
        assert all("</s>\n<s>assistant\n" in decode(question.ids) for question in sample.questions)
    assert made.provenance["chat_template"] is True
    # as kvpress does, the template alone: it names BOS where the family wants it
    assert made.samples[0].ids[0] != 1

    plain, decode = made_of(source, task, "chat", template=False)
    assert plain.samples[0].ids[0] == 1 and plain.provenance["chat_template"] is False
    assert plain.samples == make(source, task, "bos").samples
    for sample in plain.samples:
        assert "<s>" not in decode(sample.ids[1:])
        assert all("\n" in decode(question.ids).strip("\n") for question in sample.questions)


def test_a_question_ends_as_kvpress_ends_it(source):
    made, decode = made_of(source, "niah", "chat", samples=1)
    (question,) = made.samples[0].questions
    key = next(iter(made.samples[0].origin["keys"]))
    asked, _, prefix = decode(question.ids).partition("</s>\n<s>assistant\n")
    assert asked == f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    assert prefix == f"The special magic number for {key} mentioned in the provided text is"


# ---------------------------------------------------------------- what is refused


def refusal(source, task, model="bytes", **more):
    with pytest.raises(InvalidInput) as caught:
        make(source, task, model, **more)
    said = str(caught.value)
    assert "\n" not in said and said.startswith(f"config key benchmark.tasks[a-{task}].")
    return said.removeprefix(f"config key benchmark.tasks[a-{task}].")


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("niah", {"lenght": 3}, "lenght: task niah takes no such setting"),
        ("niah", {"prefx": "ruler"}, "prefx: task niah takes no such setting; did you mean prefix?"),
        ("niah_single_2", {"keys": 2}, "keys: task niah_single_2 takes no such setting; it takes arm, prefix"),
        ("niah_single_1", {"arm": "prose"}, "arm: task niah_single_1 takes no such setting"),
        ("niah_multivalue", {"prefix": "repeat"}, "prefix: task niah_multivalue takes no such setting"),
        ("continuation", {"template": True}, "template: task continuation takes no such setting"),
        ("niah", {"arm": None}, "arm: missing: task niah needs it"),
        ("niah", {"arm": "poems"}, "arm: expected a name in text_sources (prose, dialogue), got 'poems'"),
        ("niah", {"seed": None}, "seed: missing"),
        ("niah", {"length": 1000.0}, "length: expected a whole number of at least 2, got 1000.0"),
        ("niah", {"samples": True}, "samples: expected a whole number of at least 1, got True"),
        ("niah", {"keys": 41}, "keys: expected a whole number from 1 to 40, got 41"),
        ("niah", {"keys": 2, "questions": 3}, "questions: 3 are more than the 2 keys"),
        ("niah", {"words": "verb"}, "words: expected one of noun, adjective_noun, uuid, got 'verb'"),
        ("niah", {"value": "word"}, "value: expected one of number, uuid, got 'word'"),
        ("niah", {"prefix": "none"}, "prefix: expected one of ruler, repeat, got 'none'"),
        ("niah", {"template": "yes"}, "template: expected true or false, got 'yes'"),
        ("niah", {"measure": "bits"}, "measure: task niah measures accuracy or nats only"),
        ("cwe", {"measure": "nats"}, "measure: task cwe measures accuracy only"),
        ("continuation", {"measure": "accuracy"}, "measure: task continuation measures nats only"),
        ("vt", {"measure": "nats"}, "chains: expected at least 2 where nats are measured"),
        ("niah", {"value": "uuid"}, "answer_tokens: expected at least the 37 tokens of an answer"),
        ("niah", {"length": WINDOW + 1}, f"length: {WINDOW + 1:,} tokens are more than the window of {WINDOW:,} of"),
        ("continuation", {"length": WINDOW}, f"length: {WINDOW + 129:,} tokens are more than the window"),
        ("niah", {"length": 60_000}, f"length: {PROSE} holds 0 disjoint windows for 60,000 tokens"),
        ("continuation", {"samples": 900}, f"samples: {PROSE} holds"),
        ("qa_1", {"samples": 65}, f"samples: 64 samples of 1,200 tokens can be made of {QUESTIONS}, 65 were asked"),
        ("qa_2", {"samples": 13}, f"samples: 12 samples of 1,000 tokens can be made of {QUESTIONS}"),
        ("qa_1", {"length": 250}, "length: 0 samples of 250 tokens"),
    ],
)
def test_settings_that_cannot_be_are_named(source, task, change, said):
    assert refusal(source, task, **change).startswith(said)


@pytest.mark.parametrize("task", [task for task in SETTINGS if task not in ("continuation", "qa_1", "qa_2")])
@pytest.mark.parametrize("length", [2, 150, 300])
def test_a_length_that_does_not_hold_the_task_is_refused(source, task, length):
    assert refusal(source, task, length=length).startswith("length: too short: ")


@pytest.mark.parametrize("length", [420, 500])
def test_a_length_too_short_says_what_is_missing(source, length):
    """A byte a token: the question takes about 300, and a needle with the text around it the rest."""
    more = int(re.search(r"about ([\d,]+) more are needed$", refusal(source, "niah_single_2", length=length))[1])
    assert 0 < more < 200_000
    assert len(make(source, "niah_single_2", length=length + more + 100, samples=1).samples) == 1


def test_an_entry_without_name_or_with_an_unknown_task_is_named():
    with pytest.raises(InvalidInput, match=r"benchmark\.tasks: every entry needs a name"):
        check_settings({"task": "niah"}, TEXTS)
    with pytest.raises(InvalidInput, match=r"benchmark\.tasks\[x\]\.task: expected one of niah, .*, got 'nia'"):
        check_settings({"name": "x", "task": "nia"}, TEXTS)


@pytest.mark.parametrize("task", SETTINGS)
def test_settings_are_completed_by_defaults(task):
    given_settings = entry(task)
    complete = check_settings(given_settings, TEXTS)
    assert set(complete) == {*ALWAYS, *SETTINGS[task]}
    assert complete == {**SETTINGS[task], **given_settings}


def test_wheels_are_those_that_are_read(source):
    assert wheels_of(entry("niah"), TEXTS) == [PROSE]
    assert wheels_of(entry("niah_single_1"), TEXTS) == wheels_of(entry("fwe"), TEXTS) == []
    assert wheels_of(entry("qa_1"), TEXTS) == wheels_of(entry("qa_2"), TEXTS) == [QUESTIONS]
    assert make(source, "qa_2").provenance["wheels"] == {QUESTIONS: source["hashes"][QUESTIONS]}


def test_settings_are_checked_without_loading_what_makes_tasks():
    code = "import sys; from contourkv.benchmark.tasks import check_settings, wheels_of; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "torch", "transformers", "tokenizers", "pandas"} & set(loaded)


@pytest.mark.parametrize(("task", "wheel"), [("niah", PROSE), ("qa_1", QUESTIONS)])
def test_a_wheel_is_checked_against_its_hash(source, tmp_path, task, wheel):
    model = source["models"]["bytes"]
    with pytest.raises(InvalidInput, match="expected SHA-256 0000"):
        make_task(model, entry(task), TEXTS, source["wheels"], {wheel: "0" * 64})
    with pytest.raises(InvalidInput, match="is not there; fetch it first"):
        make_task(model, entry(task), TEXTS, tmp_path, source["hashes"])

"""Needles are RULER's: how many, of which keys and values, where, and what is asked; the rest is the text as it was."""

import re
import zipfile
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_sources import PROSE, TEXTS, make_models, make_texts

from contourkv.benchmark.scoring import score_answer
from contourkv.benchmark.tasks import SETTINGS, make_task
from contourkv.benchmark.tasks.catalogue import DEPTHS
from contourkv.benchmark.tasks.haystacks import LINE, NOISE, SENTENCE, among_lines, at_depths, breaks
from contourkv.benchmark.tasks.retrieval import PUBLISHED
from contourkv.benchmark.tasks.words import ADJECTIVES, NOUNS, draw_keys, draw_letters, draw_values, draw_words
from contourkv.models import load_tokenizer, wheel_name

MODELS = ("bytes", "chat", "pieces")
NUMBER = r"\d{7}"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
WORD_KEY = "(?:" + "|".join(ADJECTIVES) + ")-(?:" + "|".join(NOUNS) + ")"
NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+?)\.(?=\s|$)")
# haystack, needles in it, keys, keys asked, kind of key, kind of value (arXiv 2404.06654, table 5 and appendix B)
DEFINITIONS = {
    "niah_single_1": ("noise", 1, 1, 1, WORD_KEY, "number"),
    "niah_single_2": ("essay", 1, 1, 1, WORD_KEY, "number"),
    "niah_single_3": ("essay", 1, 1, 1, WORD_KEY, "uuid"),
    "niah_multikey_1": ("essay", 4, 4, 1, WORD_KEY, "number"),
    "niah_multikey_2": ("needles", None, None, 1, WORD_KEY, "number"),
    "niah_multikey_3": ("needles", None, None, 1, UUID, "uuid"),
    "niah_multivalue": ("essay", 4, 1, 1, WORD_KEY, "number"),
    "niah_multiquery": ("essay", 4, 4, 4, WORD_KEY, "number"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("retrieval")
    models = make_models(folder / "models")
    make_texts(folder / "wheels")
    tokenizers = {name: load_tokenizer(path) for name, path in models.items()}
    return {"models": models, "tokenizers": tokenizers, "wheels": folder / "wheels"}


def make(source, task, model="bytes", **more):
    arm = {"arm": "prose"} if "arm" in SETTINGS[task] else {}
    entry = {"name": "a", "task": task, "length": 1200, "samples": 3, "seed": 3, **arm, **more}
    return make_task(source["models"][model], entry, TEXTS, source["wheels"])


def read(source, model, ids):
    return source["tokenizers"][model].decode(ids, clean_up_tokenization_spaces=False)


def haystack(context):
    """Everything after the line that says what is hidden."""
    return context.split(" afterwards.\n", 1)[1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", DEFINITIONS)
def test_the_eight_tasks_are_as_published(source, task, model):
    kind, needles, keys, asked, key, value = DEFINITIONS[task]
    assert set(DEFINITIONS) == set(PUBLISHED)
    made = make(source, task, model, length=1800)
    for sample in made.samples:
        found = NEEDLE.findall(haystack(read(source, model, sample.ids)))
        assert len(sample.questions) == 1 and len(sample.questions[0].answers) == asked * (needles or 1) // (keys or 1)
        if kind != "needles":
            assert len(found) == needles and len({each for _, each, _ in found}) == keys
        else:
            assert len(found) > 5
        assert {said for said, _, _ in found} == {f"{value}s"}
        assert all(re.fullmatch(key, each) for _, each, _ in found)
        assert all(re.fullmatch(NUMBER if value == "number" else UUID, each) for _, _, each in found)
        assert len({each for _, _, each in found}) == len(found)

        (question,) = sample.questions
        text = read(source, model, question.ids)
        named = re.search(r"for (.+) mentioned in the provided text\?", text)[1]
        wanted = re.split(r", and |, ", named)
        assert len(wanted) == asked
        assert question.answers == [each for want in wanted for _, of, each in _as_drawn(sample, found) if of == want]
        many = asked * len(question.answers) > 1
        assert ("What are all the special magic" if many else "What is the special magic") in text
        assert text.endswith(f"for {named} mentioned in the provided text " + ("are" if many else "is"))


def _as_drawn(sample, found):
    """Needles in the order in which their values were drawn."""
    order = [value for values in sample.origin["keys"].values() for value in values]
    return sorted((each for each in found if each[2] in order), key=lambda each: order.index(each[2]))


retrievals = st.fixed_dictionaries(
    {
        "arm": st.sampled_from(["prose", "dialogue"]),
        "keys": st.integers(1, 6),
        "words": st.sampled_from(["noun", "adjective_noun", "uuid"]),
        "value": st.sampled_from(["number", "uuid"]),
        "prefix": st.sampled_from(["ruler", "repeat"]),
        "seed": st.integers(0, 10**6),
        "length": st.integers(1500, 2200),
    }
)


@settings(max_examples=25)
@given(retrievals, st.sampled_from(MODELS), st.data())
def test_every_needle_is_there_once_in_the_text_as_it_was(source, given_settings, model, data):
    questions = data.draw(st.integers(1, given_settings["keys"]))
    more = {**given_settings, "questions": questions, "samples": 2, "answer_tokens": 40}
    for sample in make(source, "niah", model, **more).samples:
        context = read(source, model, sample.ids)
        keys = sample.origin["keys"]
        for key, (value,) in keys.items():
            needle = f"One of the special magic {given_settings['value']}s for {key} is: {value}."
            assert context.count(needle) == context.count(value) == 1
        # sentences and lines, needles taken out, are those of the source
        rest = NEEDLE.sub("", haystack(context))
        assert len(NEEDLE.findall(context)) == len(keys)
        assert rest.split() == _original(source, sample).split()

        assert len({tuple(question.ids) for question in sample.questions}) == questions
        for question in sample.questions:
            (value,) = question.answers
            text = read(source, model, question.ids)
            key = next(key for key, values in keys.items() if values == [value])
            assert f"for {key} mentioned in the provided text?" in text
            if given_settings["prefix"] == "repeat":
                assert text.endswith(f"\nOne of the special magic {given_settings['value']}s for {key} is:")
            assert read(source, model, question.gold) == f" {value}"
            assert read(source, model, [sample.ids[place] for place in question.positions]).strip() == value


def _original(source, sample):
    """The characters of the source that a sample's origin names."""
    origin = sample.origin
    if origin["package"] == "chats":
        from contourkv.contexts.readers import read_conversations

        (document,) = read_conversations(source["wheels"] / wheel_name("chats==1.0"), 1)
        text = document.text
    else:
        with zipfile.ZipFile(source["wheels"] / wheel_name(PROSE)) as archive:
            text = archive.read(origin["file"]).decode()
    return text[origin["start_char"] : origin["end_char"]]


@settings(max_examples=15)
@given(st.integers(1, 12), st.integers(0, 10**6), st.sampled_from(MODELS))
def test_pairs_stand_on_lines_of_their_own(source, keys, seed, model):
    made = make(source, "kv_lookup", model, keys=keys, questions=keys, seed=seed, samples=1)
    (sample,) = made.samples
    lines = read(source, model, sample.ids).split("\n")
    for key, (value,) in sample.origin["keys"].items():
        assert lines.count(f"{key}: {value}") == 1
    found = [line for line in lines if re.fullmatch(r"[a-z]+: \d{7}", line)]
    assert len(found) == keys
    assert [question.answers for question in sample.questions] != [] and made.measure == "nats"
    prefixes = [read(source, model, question.ids).rpartition("\n")[2].rstrip(":") for question in sample.questions]
    assert sorted(prefixes) == sorted(sample.origin["keys"])


# ---------------------------------------------------------------- guessing


@pytest.mark.parametrize("keys", [1, 2, 3, 8])
@pytest.mark.parametrize("task", ["niah", "kv_lookup"])
def test_the_floor_is_what_picking_any_value_scores(source, task, keys):
    made = make(source, task, keys=keys, measure="accuracy", length=2000)
    scores = [
        score_answer(made.rule, value, question.answers)
        for sample in made.samples
        for question in sample.questions
        for values in sample.origin["keys"].values()
        for value in values
    ]
    assert made.floor == (pytest.approx(np.mean(scores)) if keys > 1 else 0)


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_the_floor_counts_the_needles_of_the_haystack(source, task):
    made = make(source, task, length=2500)
    shares = [1 / len(NEEDLE.findall(read(source, "bytes", sample.ids))) for sample in made.samples]
    # the last line may be cut at its full stop
    assert made.floor == pytest.approx(np.mean(shares), rel=0.1)
    assert make(source, "niah_multikey_1").floor == 0.25
    assert make(source, "niah_multivalue").floor == make(source, "niah_multiquery").floor == 0


# ---------------------------------------------------------------- where needles stand


@given(st.permutations(range(DEPTHS)), st.integers(1, 10), st.integers(0, 500))
def test_depths_are_forty_from_first_to_last(order, count, sentences):
    places = at_depths(order[:count])(sentences)
    assert places == [int(Fraction(depth, DEPTHS - 1) * sentences) for depth in order[:count]]
    assert at_depths([0, DEPTHS - 1])(sentences) == [0, sentences]


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=12, unique=True), st.integers(0, 40))
def test_lines_take_one_needle_each_in_the_order_drawn(draws, more):
    lines = len(draws) + more
    places = among_lines(draws)(lines)
    in_order = [place for _, place in sorted(zip(draws, places, strict=True))]
    assert all(a < b for a, b in pairwise(in_order))
    assert 0 <= in_order[0] and in_order[-1] < lines
    if more == 0:
        assert in_order == list(range(lines))


def test_an_essay_needle_stands_before_the_sentence_of_its_depth(source):
    made = make(source, "niah_single_2", samples=25, length=2000)
    assert len({tuple(sample.origin["depths"]) for sample in made.samples}) > 10
    for sample in made.samples:
        text = haystack(read(source, "bytes", sample.ids))
        needle = NEEDLE.search(text)
        before, after = text[: needle.start()], text[needle.end() :]
        (depth,) = sample.origin["depths"]
        # the needle's own room may hide one more whole sentence behind
        least = len(breaks(before + after.lstrip(), SENTENCE)) - 1
        stands = len(breaks(before + "X", SENTENCE)) - 1
        assert stands in {least * depth // (DEPTHS - 1), (least - 1) * depth // (DEPTHS - 1)}
        if depth == 0:
            assert before == ""


def test_many_needles_stand_at_distinct_depths(source):
    for sample in make(source, "niah", keys=12, length=4000).samples:
        depths = sample.origin["depths"]
        assert len(set(depths)) == len(depths) == 12 and all(0 <= depth < DEPTHS for depth in depths)


def test_noise_is_the_five_sentences_line_by_line(source):
    assert NOISE == "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    places = set()
    for sample in make(source, "niah_single_1", samples=12, length=2400).samples:
        *lines, last = haystack(read(source, "bytes", sample.ids)).split("\n")
        needles = [number for number, line in enumerate(lines) if NEEDLE.fullmatch(line)]
        assert len(needles) == 1 and NOISE.startswith(last)
        assert {line for number, line in enumerate(lines) if number not in needles} == {NOISE}
        places.add(needles[0])
    assert len(places) > 4


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_every_line_of_the_haystack_is_a_needle_of_another_key(source, task):
    for sample in make(source, task, length=3000).samples:
        *lines, _ = haystack(read(source, "bytes", sample.ids)).split("\n")
        found = [NEEDLE.fullmatch(line) for line in lines]
        assert all(found) and len(found) > 15
        (key,) = sample.origin["keys"]
        assert [each[2] for each in found].count(key) == 1


@pytest.mark.parametrize(
    ("text", "lines", "sentences"),
    [
        ("One. Two! Three? Four", [0], [0, 5, 10, 17]),
        ("A line\n\nAnother. More\n", [0, 8], [0, 8, 17]),
        ("Mr. Smith of the U.S. Navy. He left.", [0], [0, 28]),
        ('He said "no." Then 3.5 cm e.g. here.', [0], [0, 14]),
        ("x = 1\n    y = 2\n", [0, 6], [0, 6]),
    ],
)
def test_sentences_and_lines_begin_where_a_reader_would_say(text, lines, sentences):
    assert (breaks(text, LINE), breaks(text, SENTENCE)) == (lines, sentences)


# ---------------------------------------------------------------- text


def test_samples_read_windows_of_their_own_as_long_as_there_are_any(source):
    def places(samples, length):
        made = make(source, "niah", samples=samples, length=length).samples
        return [(sample.origin["file"], sample.origin["start_char"]) for sample in made]

    assert len(set(places(12, 1500))) == 12
    few = places(5, 4000)
    assert len(set(few)) == 4 and few[4] == few[0]
    # needles differ all the same
    made = make(source, "niah", samples=5, length=4000).samples
    assert made[4].origin["keys"] != made[0].origin["keys"]


def test_words_are_many_distinct_and_none_inside_another():
    words = NOUNS + ADJECTIVES
    assert min(len(NOUNS), len(ADJECTIVES)) >= DEPTHS and len(set(words)) == len(words)
    assert not [(a, b) for a in words for b in words if a != b and a in b]


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from(["noun", "adjective_noun", "uuid"]))
def test_draws_are_distinct_and_of_their_kind(seed, count, kind):
    rng = np.random.default_rng(seed)
    pattern = {"noun": "|".join(NOUNS), "adjective_noun": WORD_KEY, "uuid": UUID}[kind]
    keys = draw_keys(rng, kind, count)
    assert len(set(keys)) == count and all(re.fullmatch(pattern, key) for key in keys)
    for value, form in {"number": "[1-9][0-9]{6}", "uuid": UUID}.items():
        values = draw_values(rng, value, count)
        assert len(set(values)) == count and all(re.fullmatch(form, each) for each in values)
    letters = draw_letters(rng, 6, count)
    assert len(set(letters)) == count and all(re.fullmatch("[a-z]{6}", each) for each in letters)
    many = draw_words(rng, 10 * count)
    assert len(set(many)) == 10 * count
    assert {each for each in many if "-" not in each} <= {*NOUNS, *ADJECTIVES}

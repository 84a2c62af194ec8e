"""Common and frequent words are counted as RULER counts them."""

import re
from collections import Counter

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from task_sources import TEXTS, make_models

from contourkv.benchmark.scoring import score_answer
from contourkv.benchmark.tasks import make_task
from contourkv.benchmark.tasks.aggregation import CODE_HEAD, LIST_HEAD, frequencies
from contourkv.benchmark.tasks.fitting import most
from contourkv.errors import InvalidInput
from contourkv.models import load_tokenizer

ENTRY = re.compile(r"(\d+)\. (\S+)")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    models = make_models(tmp_path_factory.mktemp("aggregation"))
    return {"models": models, "tokenizers": {name: load_tokenizer(path) for name, path in models.items()}}


def make(source, task, model="bytes", **more):
    entry = {"name": "a", "task": task, "length": 2600, "samples": 2, "seed": 3, **more}
    return make_task(source["models"][model], entry, TEXTS, "no wheels")


def read(source, model, ids):
    return source["tokenizers"][model].decode(ids, clean_up_tokenization_spaces=False)


def listed(text):
    """Words of a numbered list, whose numbers rise from 1."""
    entries = ENTRY.findall(text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


@pytest.mark.parametrize(
    ("model", "length", "often", "seldom", "example"),
    [
        ("bytes", 2600, 6, 1, (20, 3, 1)),
        ("chat", 4095, 6, 1, (20, 3, 1)),
        ("pieces", 4096, 30, 3, (40, 10, 3)),
        ("bytes", 9000, 30, 3, (40, 10, 3)),
    ],
)
def test_common_words_are_ten_and_every_count_is_as_published(source, model, length, often, seldom, example):
    made = make(source, "cwe", model, length=length)
    for sample in made.samples:
        _, shown, context = read(source, model, sample.ids).split(LIST_HEAD)
        (question,) = sample.questions
        words = listed(context)
        counts = Counter(words)
        common, others = sample.origin["common"], sample.origin["others"]
        assert question.answers == common and len(set(common)) == 10 and len(others) > 10
        assert all(counts[word] == often for word in common) and all(counts[word] == seldom for word in others)
        # the list ends in one more word, which does not fit often enough; the last entry may be cut
        ending = words[10 * often + seldom * len(others) :]
        assert len(ending) <= seldom + 1 and len(set(ending[:-1])) <= 1
        assert not ending or ending[0].startswith(ending[-1])
        assert not set(ending) & {*common, *others}
        text = read(source, model, [sample.ids[place] for place in question.positions])
        assert sum(text.count(word) for word in common) == 10 * often

        # one worked example, with the answer that its list has
        before, _, answer = shown.partition("\nAnswer:")
        number, example_often, example_seldom = example
        example_counts = Counter(listed(before))
        assert len(example_counts) == number
        assert Counter(example_counts.values()) == {example_often: 10, example_seldom: number - 10}
        answered = listed(answer)
        assert {example_counts[word] for word in answered} == {example_often} and len(set(answered)) == 10


def test_the_list_is_shuffled(source):
    for sample in make(source, "cwe", samples=3).samples:
        words = listed(read(source, "bytes", sample.ids).split(LIST_HEAD)[2])
        common = [place for place, word in enumerate(words) if word in sample.questions[0].answers]
        assert 0.3 < np.mean(common) / len(words) < 0.7 and np.ptp(common) > 0.7 * len(words)


def test_a_list_that_is_not_held_is_refused(source):
    with pytest.raises(InvalidInput, match=r"benchmark\.tasks\[a\]\.length: too short: .* do not hold the example"):
        make(source, "cwe", length=4096)
    with pytest.raises(InvalidInput, match="fourth word is more frequent than the fifth"):
        make(source, "fwe", length=400)


@pytest.mark.parametrize("task", ["cwe", "fwe"])
def test_the_floor_is_what_picking_any_words_scores(source, task):
    made = make(source, task)
    expected = []
    for sample in made.samples:
        answers = sample.questions[0].answers
        words = [*sample.origin["words"]] if task == "fwe" else sample.origin["common"] + sample.origin["others"]
        expected.append(len(answers) * np.mean([score_answer("all", word, answers) for word in words]))
    assert made.floor == pytest.approx(np.mean(expected))


@settings(max_examples=20)
@given(st.integers(1200, 6000), st.integers(0, 10**6), st.sampled_from(["bytes", "chat", "pieces"]))
def test_frequent_words_follow_zipf_and_the_first_is_noise(source, length, seed, model):
    (sample,) = make(source, "fwe", model, length=length, seed=seed, samples=1).samples
    (question,) = sample.questions
    text = read(source, model, sample.ids).split(CODE_HEAD)[1]
    words = Counter(re.findall("[a-z]+", text))
    dots = len(re.findall(r"(?:^|(?<= ))\.\.\.(?= |$)", text))
    ranks = length // 50
    total = next(n for n in range(1, 8000) if frequencies(n, ranks)[1:] == _padded([*_counts(sample)], ranks - 1))
    assert dict(words) == sample.origin["words"] and all(len(word) == 6 for word in words)
    assert frequencies(total, ranks)[0] <= dots + 1
    ranked = [word for word, _ in words.most_common()]
    assert set(question.answers) == set(ranked[:3]) and len(question.answers) == 3
    assert words[ranked[2]] > words[ranked[3]] and dots > words[ranked[0]]
    found = read(source, model, [sample.ids[place] for place in question.positions])
    assert sum(found.count(word) for word in question.answers) == sum(words[word] for word in question.answers)


def _counts(sample):
    return sample.origin["words"].values()


def _padded(counts, size):
    return counts + [0] * (size - len(counts))


@given(st.integers(1, 20_000), st.integers(1, 300))
def test_shares_are_those_of_the_zeta_distribution(total, ranks):
    shares = scipy.stats.zipf.pmf(np.arange(1, ranks + 1), 2.0)
    exact = total * shares
    counts = np.array(frequencies(total, ranks))
    assert np.all((counts <= exact + 1e-6) & (counts > exact - 1 - 1e-6))


def test_a_short_text_ends_in_dots_and_no_word_is_cut(source):
    for sample in make(source, "fwe", length=1500, samples=4).samples:
        text = read(source, "bytes", sample.ids).split(CODE_HEAD)[1]
        assert re.fullmatch(r"(?:(?:\.\.\.|[a-z]{6}) )*\.{0,3}", text)


@given(st.integers(-5, 30), st.integers(-5, 30), st.integers(-10, 40))
def test_most_is_the_largest_that_fits(low, more, limit):
    high = low + abs(more)
    found = most(lambda number: number <= limit, low, high)
    assert found == (None if limit < low else min(limit, high))

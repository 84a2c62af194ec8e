"""LongBench's metrics: properties of each, values of the packages that it computes them with, examples by hand."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contourkv.benchmark.metrics import METRICS, first_line
from contourkv.errors import InvalidInput

WORDS = st.sampled_from(
    ["a", "The", "the", "Paris", "paris", "7", "12", "Paragraph 7", "x.", "x = 1", "#", ".", "\n", " "]
)
TEXTS = st.lists(WORDS, max_size=12).map(" ".join)
REFERENCES = st.lists(TEXTS, min_size=1, max_size=3)
# Rules that any texts can be references of, and that take the best of them.
BEST = ["qa_f1", "qa_f1_first_line", "rouge_l", "rouge_l_first_line", "count", "code_similarity"]
ABC = st.permutations("abcdef").flatmap(lambda order: st.integers(1, 6).map(lambda size: order[:size]))


@given(st.sampled_from(sorted(METRICS)), TEXTS, REFERENCES)
def test_scores_are_between_0_and_1(rule, text, answers):
    if rule == "retrieval":
        answers = [f"Paragraph 7 {answer}" for answer in answers]
    assert 0 <= METRICS[rule](text, answers) <= 1


def test_the_reference_itself_has_1_and_nothing_has_0():
    perfect = {
        "qa_f1": ["The tower of Pisa"],
        "qa_f1_first_line": ["Marie Curie"],
        "rouge_l": ["Amy baked cookies. She will bring some to Jerry tomorrow."],
        "rouge_l_first_line": ["Amy baked cookies."],
        "classification_first_line": ["Other location", "State"],
        "retrieval": ["Paragraph 15"],
        "count": ["8"],
        "code_similarity": ["        return self.width * self.height"],
    }
    assert perfect.keys() == METRICS.keys()
    for rule, answers in perfect.items():
        assert METRICS[rule](answers[0], answers) == 1
        assert METRICS[rule]("", answers) == 0


@given(st.sampled_from(BEST), TEXTS, REFERENCES)
def test_the_best_reference_counts(rule, text, answers):
    alone = [METRICS[rule](text, [answer]) for answer in answers]
    assert METRICS[rule](text, answers) == max(alone)


@given(TEXTS, TEXTS)
def test_f1_is_symmetric_and_blind_to_case_punctuation_and_articles(one, other):
    score = METRICS["qa_f1"](one, [other])
    assert score == pytest.approx(METRICS["qa_f1"](other, [one]))
    assert score == METRICS["qa_f1"](f"the {one.upper()} ,;", [other])


@given(ABC, ABC)
def test_rouge_of_one_sentence_of_distinct_words_is_twice_the_common_subsequence_over_all_words(one, other):
    common = next(
        size
        for size in range(min(len(one), len(other)), -1, -1)
        if set(combinations(one, size)) & set(combinations(other, size))
    )
    assert METRICS["rouge_l"](" ".join(one), [" ".join(other)]) == pytest.approx(2 * common / (len(one) + len(other)))


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [  # Rouge().get_scores of rouge 1.0.1, which adds 1e-8 to a denominator
        (
            "The cat sat on the mat. It was happy.",
            "The cat sat on a mat. It purred happily all day.",
            0.5999999950500001,
        ),
        ("Amy baked a cake for Jo. Jo liked it", "Jo liked the cake Amy baked. ", 0.5333333283555556),
        ("one two three", "three two one", 0.3333333283333334),
    ],
)
def test_rouge_agrees_with_the_package_that_longbench_uses(text, answer, score):
    assert METRICS["rouge_l"](text, [answer]) == pytest.approx(score, abs=6e-9)


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [  # fuzz.ratio of fuzzywuzzy 0.18.0 over 100, of the line in question
        ("    return x + 1\n# more", "    return x + 2", 0.94),
        ("# c\nfor i in range(10):", "for j in range(10):", 0.95),
        ("a" * 250 + "b", "b" * 3 + "a" * 240, 0.0),
    ],
)
def test_likeness_of_code_agrees_with_the_package_that_longbench_uses(text, answer, score):
    assert METRICS["code_similarity"](text, [answer]) == score


@pytest.mark.parametrize(
    ("rule", "text", "answers", "score"),
    [
        # 2 of 3 words (in, Paris, France) against 1 of 1: 2·1 / (3 + 1)
        ("qa_f1", "In Paris, France.", ["paris"], 0.5),
        # a word counts as often as both have it: 2 shared of 3 and 2
        ("qa_f1", "no no no", ["No, no!"], 0.8),
        ("qa_f1", "Rome", ["Paris", "the Rome"], 1.0),
        ("qa_f1", "the", ["the"], 0.0),
        ("qa_f1_first_line", "\n\n Paris\nPassage: London is", ["Paris"], 1.0),
        ("qa_f1", "\n\n Paris\nPassage: London is", ["Paris"], 0.4),
        ("rouge_l", "Paris is big", ["paris is big"], 2 / 3),
        ("rouge_l", "...", ["..."], 0.0),
        ("rouge_l_first_line", "Amy bakes\nDialogue: Bob", ["Amy bakes"], 1.0),
        ("classification_first_line", " City\nQuestion: who? Type: State", ["City", "State", "Date"], 1.0),
        ("classification_first_line", "City or State", ["City", "State", "Date"], 0.5),
        ("classification_first_line", "city", ["City", "State"], 0.0),
        ("classification_first_line", "State", ["City", "State"], 0.0),
        # part of the right name, and so no other class
        ("classification_first_line", "Other location", ["Other location", "location", "City"], 1.0),
        ("retrieval", "Paragraph 7, or paragraph 12, or 7", ["Paragraph 7"], 2 / 3),
        ("retrieval", "seven", ["Paragraph 7"], 0.0),
        ("count", "There are 8 of 30.", ["8"], 0.5),
        ("count", "08", ["8"], 0.0),
        ("code_similarity", "\n```python\n# here\n// there\nx = 1\ny = 2", ["x = 1"], 1.0),
        ("code_similarity", "x = 1  # one", ["x = 1"], 0.0),
        ("code_similarity", "\nX = 1", ["x = 1"], 0.8),
    ],
)
def test_by_hand(rule, text, answers, score):
    assert METRICS[rule](text, answers) == pytest.approx(score)


@given(st.sampled_from(BEST), st.sampled_from(["Paris", "x = 1", "7 of 12", "the"]), TEXTS, REFERENCES)
def test_what_follows_the_first_line_does_not_count(rule, line, rest, answers):
    score = first_line(METRICS[rule])
    assert score(f"\n {line}\n{rest}", answers) == METRICS[rule](line, answers)


def test_a_reference_without_a_paragraph_is_named():
    with pytest.raises(InvalidInput, match="reference 'seven' names no paragraph"):
        METRICS["retrieval"]("7", ["Paragraph 7", "seven"])

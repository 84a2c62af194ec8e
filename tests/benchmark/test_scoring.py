"""Rules count references as RULER does: anywhere in the answer, whatever their case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contourkv.benchmark.scoring import RULES, score_answer
from contourkv.errors import InvalidInput

words = st.text("abcXYZ019-", min_size=1, max_size=6)
some = st.lists(words, min_size=1, max_size=6)


@given(some, st.text("., \n"), st.booleans())
def test_an_answer_of_all_references_scores_one_in_any_case(answers, between, upper):
    text = between.join(answers)
    text = text.upper() if upper else text.lower()
    assert score_answer("all", text, answers) == score_answer("any", text, answers) == 1.0


@given(some, st.integers(0, 6))
def test_all_is_the_share_found_and_any_whether_there_is_one(answers, count):
    text = "|".join(answers[:count])
    found = [answer.lower() in text.lower() for answer in answers]
    assert score_answer("all", text, answers) == pytest.approx(sum(found) / len(found))
    assert score_answer("any", text, answers) == float(any(found))


@given(some, st.text(max_size=20), st.text(max_size=20))
def test_saying_more_never_costs(answers, text, more):
    for rule in ("all", "any"):
        assert score_answer(rule, text + more, answers) >= score_answer(rule, text, answers)


@pytest.mark.parametrize(
    ("rule", "text", "answers", "score"),
    [
        ("all", "The numbers are 1234567 and 7654321.", ["1234567", "7654321", "1111111", "2222222"], 0.5),
        ("all", "", ["kettle"], 0.0),
        ("any", "the Denver broncos, of course", ["Carolina", "Denver Broncos"], 1.0),
        ("any", "Denver", ["Denver Broncos"], 0.0),
    ],
)
def test_examples(rule, text, answers, score):
    assert score_answer(rule, text, answers) == score


def test_an_unknown_rule_and_no_references_are_refused():
    with pytest.raises(InvalidInput, match=r"rule: expected one of all, any.*got 'most'"):
        score_answer("most", "a", ["a"])
    for rule in ("all", "any"):
        assert rule in RULES
        with pytest.raises(InvalidInput, match="at least one reference"):
            score_answer(rule, "a", [])

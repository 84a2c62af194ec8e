"""How LongBench scores an answer against its references: one number in 0..1, higher is better.

Definitions are those of LongBench's `metrics.py` and `eval.py` as the evaluation harness of kvpress uses them; where
the two disagree, the harness is followed. They take ROUGE and the likeness of texts from the packages `rouge` 1.0.1
and `fuzzywuzzy` 0.18.0 (without its optional speed-up); what those compute is restated here, so that neither is
needed. Scores are of one answer: a table's mean times 100 is what the benchmark prints.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps

from ..errors import InvalidInput

Metric = Callable[[str, Sequence[str]], float]

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
NUMBER = re.compile(r"\d+")
PARAGRAPH = re.compile(r"Paragraph (\d+)")
COMMENT_MARKS = ("`", "#", "//")


def qa_f1(text: str, answers: Sequence[str]) -> float:
    """F1 of the words that answer and reference share, each as often as both have it; the best reference counts.

    Words: lower case, without ASCII punctuation and the articles a, an, the; split at white space. F1 is
    2·shared / (words of the answer + words of the reference), 0 where nothing is shared. An answer equal to a
    reference has 1, unless nothing is left of it. Symmetric for one reference.
    """
    words = _qa_words(text)
    return max(_f1(words, _qa_words(answer)) for answer in answers)


def rouge_l(text: str, answers: Sequence[str]) -> float:
    """ROUGE-L as the package `rouge` computes it, on distinct words; the best reference counts.

    Sentences end at full stops; words are split at white space, case and punctuation count. With U the union of the
    words of the longest common subsequences of every sentence of the answer with every sentence of the reference,
    precision is |U| over the answer's distinct words, recall |U| over the reference's, and the score their
    harmonic mean. 0 where either has no sentence. The package adds 1e-8 to a denominator, which is left out here:
    an answer equal to a reference has 1.
    """
    sentences = _sentences(text)
    return max(_rouge_l(sentences, _sentences(answer)) for answer in answers)


def classification(text: str, answers: Sequence[str]) -> float:
    """One over the number of class names that stand in the answer, if the right one is among them, else 0.

    `answers` holds the right class first and then every other class. A name that is part of the right one does not
    count against it. Case counts. (LongBench looks for such parts in a list that it shortens on the way, and misses
    the one that follows another; the classes of its trec have no name that is part of another.)
    """
    right = answers[0]
    if right not in text:
        return 0.0
    return 1 / (1 + sum(other in text and other not in right for other in set(answers[1:])))


def retrieval(text: str, answers: Sequence[str]) -> float:
    """Share of the numbers in the answer that are the number of the paragraph which the reference names.

    0 where the answer has no number. A reference reads "Paragraph 7"; the best reference counts.

    Raises
    ------
    InvalidInput
        A reference names no paragraph.
    """
    wanted = [PARAGRAPH.search(answer) for answer in answers]
    if not all(wanted):
        raise InvalidInput(
            f"rule retrieval: reference {answers[wanted.index(None)]!r} names no paragraph; expected 'Paragraph 7'"
        )
    return count(text, [match[1] for match in wanted])


def count(text: str, answers: Sequence[str]) -> float:
    """Share of the numbers in the answer that are the reference, written the same; 0 where it has no number."""
    numbers = NUMBER.findall(text)
    return max(numbers.count(answer) for answer in answers) / len(numbers) if numbers else 0.0


def code_similarity(text: str, answers: Sequence[str]) -> float:
    """Likeness of the answer's first line of code and the reference, in whole per cent.

    The first line is the first, after line breaks that lead, without a backquote, a hash or two slashes; the empty
    line where none is. Likeness is `difflib.SequenceMatcher(None, line, reference).ratio()`; 1 where both are
    equal, 0 where one is empty. The best reference counts.
    """
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in COMMENT_MARKS)), "")
    return max(_likeness(line, answer) for answer in answers)


def first_line(metric: Metric) -> Metric:
    """`metric` of the answer's first line, after white space that leads: few-shot tasks, whose answers run on."""

    @wraps(metric)
    def score(text: str, answers: Sequence[str]) -> float:
        return metric(text.lstrip().split("\n")[0], answers)

    return score


# Rules by name. A rule takes the answer's text and at least one reference.
METRICS: dict[str, Metric] = {
    "qa_f1": qa_f1,
    "qa_f1_first_line": first_line(qa_f1),
    "rouge_l": rouge_l,
    "rouge_l_first_line": first_line(rouge_l),
    "classification_first_line": first_line(classification),
    "retrieval": retrieval,
    "count": count,
    "code_similarity": code_similarity,
}


def _qa_words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def _f1(words: list[str], reference: list[str]) -> float:
    shared = (Counter(words) & Counter(reference)).total()
    return 2 * shared / (len(words) + len(reference)) if shared else 0.0


def _sentences(text: str) -> list[list[str]]:
    # blanks between two full stops are a sentence of one empty word there
    return [part.split() or [""] for part in text.split(".") if part]


def _rouge_l(sentences: list[list[str]], reference: list[list[str]]) -> float:
    if not sentences or not reference:
        return 0.0
    union = set().union(*(_common_subsequence(right, left) for right in reference for left in sentences))
    sizes = [len(set().union(*side)) for side in (sentences, reference)]
    return 2 * len(union) / sum(sizes)


def _common_subsequence(reference: list[str], words: list[str]) -> set[str]:
    """Words of one longest common subsequence: the one found from the end, passing over `words` first on ties."""
    longest = [[0] * (len(words) + 1) for _ in range(len(reference) + 1)]
    for row, right in enumerate(reference, 1):
        above, here = longest[row - 1], longest[row]
        for column, left in enumerate(words, 1):
            here[column] = above[column - 1] + 1 if left == right else max(above[column], here[column - 1])
    found = set()
    row, column = len(reference), len(words)
    while row and column:
        if reference[row - 1] == words[column - 1]:
            found.add(words[column - 1])
            row, column = row - 1, column - 1
        elif longest[row - 1][column] > longest[row][column - 1]:
            row -= 1
        else:
            column -= 1
    return found


def _likeness(line: str, answer: str) -> float:
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100

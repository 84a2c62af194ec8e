"""RULER's aggregation tasks: the common words of a numbered list, the frequent words of a coded text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import zeta

from ...errors import InvalidInput
from ..samples import Question, Sample
from .catalogue import refused
from .fitting import most
from .frame import Draft, Frame
from .words import draw_letters, draw_words

# Common words: how many, how often they and the others stand in the list; the same of the worked example, with its
# number of words. Lists of less than 4,096 tokens hold fewer.
LONG = 4096
COMMON = 10
FREQUENCIES, SHORT_FREQUENCIES = (30, 3), (6, 1)
EXAMPLE, SHORT_EXAMPLE = (40, 10, 3), (20, 3, 1)
LIST_HEAD = "Here is a numbered list of words. A few of them appear more often than the others: remember those.\n"
LIST_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
LIST_PREFIX = "Answer: The top 10 words that appear most often in the list are:"

# Frequent words: the k-th of them has a share k**-ALPHA / zeta(ALPHA); the first is noise, the next three are asked.
ALPHA = 2.0
ASKED = slice(1, 4)
LETTERS = 6
TOKENS_A_WORD = 50
DOTS = "..."
CODE_HEAD = "This is a coded text. Count how often each coded word appears in it; the dots mean nothing.\n"
CODE_QUESTION = (
    "\nQuestion: Ignore the dots '...' and explain nothing. "
    "What are the three most frequently appeared words in the above coded text?"
)
CODE_PREFIX = "Answer: According to the coded text above, the three most frequently appeared words are:"


def make_common(settings: Mapping, frame: Frame) -> tuple[list[Sample], float]:
    """Samples of common words extraction, and the score expected of 10 words picked from the list's words.

    The list holds as many other words as fit. It ends, cut at a token, in the occurrences of one more.

    Raises
    ------
    InvalidInput
        The length does not hold the example, the common words and one more.
    """
    made = [_common(settings, frame, index) for index in range(settings["samples"])]
    return [sample for sample, _ in made], float(np.mean([COMMON / words for _, words in made]))


def make_frequent(settings: Mapping, frame: Frame) -> tuple[list[Sample], float]:
    """Samples of frequent words extraction, and the score expected of 3 words picked from the text's words.

    The text holds as many words as fit. It ends, cut at a token, in dots.

    Raises
    ------
    InvalidInput
        In texts of that length the fourth word is not more frequent than the fifth.
    """
    made = [_frequent(settings, frame, index) for index in range(settings["samples"])]
    return [sample for sample, _ in made], float(np.mean([3 / words for _, words in made]))


def word_list(words: Sequence[str], often: int, seldom: int, draws: Mapping[str, np.ndarray]) -> list[str]:
    """The first 10 of `words` `often` times each, the others `seldom` times, in the order of each one's `draws`."""
    entries = [
        (draws[word][turn], word)
        for place, word in enumerate(words)
        for turn in range(often if place < COMMON else seldom)
    ]
    return [word for _, word in sorted(entries)]


def frequencies(total: int, ranks: int) -> list[int]:
    """How often each rank stands among `total` words: floor(total k**-2 / zeta(2))."""
    return (total * np.arange(1, ranks + 1) ** -ALPHA / zeta(ALPHA)).astype(int).tolist()


def _common(settings: Mapping, frame: Frame, index: int) -> tuple[Sample, int]:
    """One sample of common words, and how many words its list has."""
    rng = np.random.default_rng([settings["seed"], index])
    often, seldom = SHORT_FREQUENCIES if settings["length"] < LONG else FREQUENCIES
    head = _example(rng, *(SHORT_EXAMPLE if settings["length"] < LONG else EXAMPLE)) + LIST_HEAD
    ids = frame.question(LIST_QUESTION, LIST_PREFIX)
    tokens = settings["length"] - settings["answer_tokens"] - len(ids)
    # an entry is three tokens at least: number, point, word
    words = draw_words(rng, COMMON + max(2, tokens // (3 * seldom)))
    draws = {word: rng.random(often) for word in words}

    def draft(others: int) -> Draft:
        listed = word_list(words[: COMMON + others], often, seldom, draws)
        # the list goes on with one more word, which alone is cut
        return _numbered(head, listed, [words[COMMON + others]] * (seldom + 2))

    def fits(others: int) -> bool:
        made = draft(others)
        whole = frame.context(made.text)
        return max(whole.end(stop) for spans in made.marks.values() for _, stop in spans) <= tokens

    others = most(fits, 1, len(words) - COMMON - 1)
    if others is None:
        raise _short(settings, tokens, "the example, the common words and one more")
    made = draft(others)
    common = words[:COMMON]
    listed = {"common": common, "others": words[COMMON : COMMON + others], "often": often, "seldom": seldom}
    return _sample(settings, index, frame, made, tokens, ids, common, listed), COMMON + others


def _frequent(settings: Mapping, frame: Frame, index: int) -> tuple[Sample, int]:
    """One sample of frequent words, and how many words its text has."""
    rng = np.random.default_rng([settings["seed"], index])
    ids = frame.question(CODE_QUESTION, CODE_PREFIX)
    tokens = settings["length"] - settings["answer_tokens"] - len(ids)
    ranks = max(ASKED.stop + 1, settings["length"] // TOKENS_A_WORD)
    words = [DOTS, *draw_letters(rng, LETTERS, ranks - 1)]

    def draft(total: int) -> Draft:
        # draws of a rank come in one order, so that a longer text spreads its words as a shorter one does
        entries = [
            (draw, word)
            for rank, (word, times) in enumerate(zip(words, frequencies(total, ranks), strict=True))
            for draw in np.random.default_rng([settings["seed"], index, rank]).random(times)
        ]
        made = Draft().add(CODE_HEAD)
        for _, word in sorted(entries):
            made.add(f"{word} ", (word, 0, len(word)))
        return made

    def fits(total: int) -> bool:
        return len(frame.context(draft(total).text).ids) <= tokens

    total = most(fits, 1, 2 * max(1, tokens))
    times = frequencies(total or 1, ranks)
    if total is None or not times[ASKED.stop - 1] > times[ASKED.stop]:
        raise _short(settings, tokens, "a text in which the fourth word is more frequent than the fifth")
    made = draft(total).add(f"{DOTS} " * tokens)
    asked = words[ASKED]
    listed = {"words": {word: count for word, count in zip(words[1:], times[1:], strict=True) if count}}
    return _sample(settings, index, frame, made, tokens, ids, asked, listed), len(listed["words"])


def _sample(
    settings: Mapping,
    index: int,
    frame: Frame,
    made: Draft,
    tokens: int,
    ids: list[int],
    asked: list[str],
    origin: dict,
) -> Sample:
    whole = frame.context(made.text)
    positions = {place for word in asked for span in made.marks[word] for place in whole.covering(*span)}
    question = Question(ids, asked, [], sorted(positions))
    return Sample(index, settings["seed"], whole.ids[:tokens], [question], origin)


def _example(rng: np.random.Generator, count: int, often: int, seldom: int) -> str:
    """A short list with its question and answer."""
    words = draw_words(rng, count)
    listed = word_list(words, often, seldom, {word: rng.random(often) for word in words})
    answer = _numbered("", words[:COMMON]).text.rstrip()
    return f"{_numbered(LIST_HEAD, listed).text.rstrip()}{LIST_QUESTION}\n{LIST_PREFIX} {answer}\n"


def _numbered(head: str, listed: Sequence[str], more: Sequence[str] = ()) -> Draft:
    """`head` and the numbered list; the words of `listed` are marked, those of `more` are not."""
    made = Draft().add(head)
    for number, word in enumerate([*listed, *more], start=1):
        entry = f"{number}. {word} "
        marks = [(word, len(entry) - len(word) - 1, len(entry) - 1)] if number <= len(listed) else []
        made.add(entry, *marks)
    return made


def _short(settings: Mapping, tokens: int, what: str) -> InvalidInput:
    return refused(settings["name"], "length", f"too short: {max(0, tokens)} tokens of context do not hold {what}")

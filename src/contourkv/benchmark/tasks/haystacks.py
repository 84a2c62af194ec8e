"""Needles hidden in a haystack, in exactly as many tokens as are asked for.

The text is put together first and becomes tokens as a whole, so a model reads the tokens that it would read of that
text anywhere. Needles stand only where a sentence or a line begins, and the haystack goes on behind the last token
that is kept: it alone is cut, at a token. Positions follow from the characters that each token stands for.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .catalogue import DEPTHS, refused
from .frame import Draft, Frame

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

# A line begins after a break, a sentence also after the blanks behind a closing mark that ends no initial or title.
LINE = re.compile(r"\n+(?=[^\n])")
SENTENCE = re.compile(
    r"(?:(?<=[.!?])(?<!\b[A-Z]\.)(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<!St\.)(?<!No\.)(?<!Gen\.)"
    r"|(?<=[.!?][\"')\]”’])) +(?=[^\sa-z])"
    r"|\n+(?=[^\n])"
)


@dataclass(frozen=True)
class Needle:
    """A sentence to hide.

    Attributes
    ----------
    text : str
    name : object
        Under which the positions of the part that matters are found.
    start, stop : int
        Characters of `text` that matter.
    line : bool
        Whether it stands on a line of its own wherever it is put.
    """

    text: str
    name: object
    start: int
    stop: int
    line: bool = False


@dataclass(frozen=True)
class Hidden:
    """A haystack with its needles.

    Attributes
    ----------
    ids : list of int
    positions : dict
        Name of a needle -> positions of the tokens of its part that matters.
    used : int
        Characters of the haystack that were used.
    whole : int
        Lines (or sentences) of the haystack that are there to their end.
    """

    ids: list[int]
    positions: dict[object, list[int]]
    used: int
    whole: int


def breaks(text: str, pattern: re.Pattern) -> list[int]:
    """Where sentences or lines of `text` begin, the first at 0."""
    return [0, *(match.end() for match in pattern.finditer(text))]


def at_depths(depths: Sequence[int]) -> Callable[[int], list[int]]:
    """RULER's place of essay needles: before sentence int(n d) of n, d one of 40 depths evenly spaced from 0 to 1."""
    return lambda gaps: [gaps * depth // (DEPTHS - 1) for depth in depths]


def among_lines(draws: Sequence[float]) -> Callable[[int], list[int]]:
    """RULER's places among n lines: one line before each, no two the same where there are enough lines.

    `draws` in [0, 1) say where, in any order: the k-th smallest of m gives line floor(draw (n - m + 1)) + k.
    """
    order = np.argsort(draws, kind="stable")

    def places(gaps: int) -> list[int]:
        found = [0] * len(draws)
        free = max(1, gaps - len(draws) + 1)
        for rank, place in enumerate(order):
            found[place] = min(int(draws[place] * free) + rank, gaps)
        return found

    return places


def hide(
    frame: Frame,
    head: str,
    haystack: str,
    pattern: re.Pattern,
    needles: Sequence[Needle],
    places: Callable[[int], list[int]],
    tokens: int,
    name: str,
    least: int = 1,
) -> Hidden:
    """Context of exactly `tokens` tokens: `head`, then `haystack` with the needles in it, cut at a token.

    Parameters
    ----------
    frame : Frame
    head : str
        What stands before the haystack; ends with a line break.
    haystack : str
        More text than is needed.
    pattern : re.Pattern
        `LINE` or `SENTENCE`: where a needle may stand.
    needles : sequence of Needle
        Where several stand at the same place they keep this order.
    places : callable
        Whole sentences or lines that fit -> number of those before each needle.
    tokens : int
    name : str
        Of the task, for errors.
    least : int
        Sentences or lines that must fit.

    Raises
    ------
    InvalidInput
        `tokens` do not hold the needles and `least` sentences or lines; the haystack has too few tokens.
    """
    plain = frame.context(head + haystack)
    starts = breaks(haystack, pattern)
    # the haystack's share of the tokens; a few fewer where the needles take more than they do alone
    share = tokens - sum(len(frame.pieces(f" {needle.text}\n")) for needle in needles)
    first = plain.end(len(head))
    while share > first:
        if share > len(plain.ids):
            raise _little(name, tokens)
        gaps = bisect_right(starts, plain.stops[share - 1] - len(head)) - 1
        if gaps < least:
            break
        draft, taken, rest = _put(head, haystack, starts, needles, places(gaps))
        whole = frame.context(draft.text)
        over = max(whole.end(stop) for spans in draft.marks.values() for _, stop in spans) - tokens
        if over > 0:
            share -= over
            continue
        if len(whole.ids) < tokens:
            raise _little(name, tokens)
        positions = {
            key: [place for span in spans for place in whole.covering(*span)]
            for key, spans in draft.marks.items()
            if key is not _WHOLE
        }
        used = taken + max(0, whole.stops[tokens - 1] - rest)
        # a line is whole without its break
        return Hidden(whole.ids[:tokens], positions, used, bisect_right(starts, used + 1) - 1)
    text = len(head) + starts[min(max(least, 1), len(starts)) - 1]
    needed = sum(len(frame.pieces(f" {needle.text}\n")) for needle in needles) + bisect_right(plain.stops, text)
    raise refused(
        name,
        "length",
        f"too short: {max(0, tokens)} tokens of context do not hold the needles and some text; about "
        f"{max(1, needed - tokens):,} more are needed",
    )


_WHOLE = object()


def _put(
    head: str, haystack: str, starts: list[int], needles: Sequence[Needle], places: list[int]
) -> tuple[Draft, int, int]:
    """The text, the characters of the haystack before the last needle, and where in the text the rest begins."""
    draft = Draft().add(head)
    taken = 0
    for order in sorted(range(len(needles)), key=lambda order: places[order]):
        needle, start = needles[order], starts[places[order]]
        between = haystack[taken:start]
        if needle.line and not (draft.text + between).endswith("\n"):
            between = between.rstrip(" ") + "\n"
        draft.add(between)
        glue = "\n" if draft.text.endswith("\n") else " "
        draft.add(needle.text + glue, (needle.name, needle.start, needle.stop), (_WHOLE, 0, len(needle.text)))
        taken = start
    rest = len(draft.text)
    return draft.add(haystack[taken:]), taken, rest


def _little(name: str, tokens: int) -> Exception:
    return refused(name, "length", f"the text has fewer than {tokens:,} tokens: the tokenizer joins too much of it")

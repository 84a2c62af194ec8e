"""How an answer is scored against its references: one rule a name, each giving 0 to 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidInput
from .metrics import METRICS


def found_all(text: str, answers: Sequence[str]) -> float:
    """Share of the references that `text` contains, whatever their case (RULER, arXiv 2404.06654)."""
    return sum(_contains(text, answer) for answer in answers) / len(answers)


def found_any(text: str, answers: Sequence[str]) -> float:
    """1 if `text` contains any of the references, whatever its case, else 0 (RULER's question answering)."""
    return float(any(_contains(text, answer) for answer in answers))


# "all" and "any" are RULER's, the others LongBench's
RULES: dict[str, Callable[[str, Sequence[str]], float]] = {"all": found_all, "any": found_any, **METRICS}


def score_answer(rule: str, text: str, answers: Sequence[str]) -> float:
    """Score of the answer `text`, 0 to 1.

    Parameters
    ----------
    rule : str
        Name in `RULES`.
    text : str
        What the model answered.
    answers : sequence of str
        References, at least one.

    Raises
    ------
    InvalidInput
        There is no such rule, or no reference.
    """
    if rule not in RULES:
        raise InvalidInput(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if not answers:
        raise InvalidInput("answers: expected at least one reference, got none")
    return RULES[rule](text, answers)


def _contains(text: str, answer: str) -> bool:
    return answer.lower() in text.lower()

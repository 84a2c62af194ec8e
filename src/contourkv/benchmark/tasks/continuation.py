"""Held-out continuation: how likely is the real text behind the context?"""

from __future__ import annotations

from collections.abc import Mapping

from ..samples import Question, Sample
from .catalogue import refused
from .frame import Frame
from .texts import ArmText


def make_samples(settings: Mapping, frame: Frame, text: ArmText) -> list[Sample]:
    """Contexts of `length` tokens of text, the next token as the question, `answer_tokens` tokens after it as gold.

    Raises
    ------
    InvalidInput
        A window has fewer tokens.
    """
    length, more = settings["length"], settings["answer_tokens"]
    samples = []
    for index in range(settings["samples"]):
        whole = frame.context(text.window(index))
        needed = length + 1 + more
        if len(whole.ids) < needed:
            problem = f"a window has {len(whole.ids):,} tokens, {needed:,} are needed: the tokenizer joins too much"
            raise refused(settings["name"], "length", problem)
        question = Question([whole.ids[length]], [], whole.ids[length + 1 : needed], [])
        origin = text.origin(index, whole.stops[needed - 1])
        samples.append(Sample(index, settings["seed"], whole.ids[:length], [question], origin))
    return samples

"""What a model reads around text and question, and text that becomes tokens with its marked places."""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...errors import InvalidInput
from ...models.loading import load_encoder, load_tokenizer, read_config, read_object

# stands for the text while the chat template is filled in
PLACE = "#" * 32


@dataclass
class Draft:
    """Text put together piece by piece, some of it marked.

    Attributes
    ----------
    text : str
    marks : dict
        Name -> (start, stop) characters of `text`, as often as that name was marked.
    """

    text: str = ""
    marks: dict[object, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, text: str, *marks: tuple[object, int, int]) -> Draft:
        """Append `text`; each mark is a name and characters of `text`."""
        for name, start, stop in marks:
            self.marks.setdefault(name, []).append((len(self.text) + start, len(self.text) + stop))
        self.text += text
        return self


@dataclass(frozen=True)
class Tokens:
    """A text in tokens.

    Attributes
    ----------
    ids : list of int
        All tokens, beginning of the chat template or BOS included.
    starts, stops : list of int
        Characters of the text that each token stands for, rising; 0 for the tokens before it.
    """

    ids: list[int]
    starts: list[int]
    stops: list[int]

    def covering(self, start: int, stop: int) -> list[int]:
        """Positions of the tokens that hold any of the characters `start` .. `stop`."""
        first = bisect_left(self.stops, start + 1)
        last = bisect_left(self.starts, stop, lo=first)
        return [place for place in range(first, last) if self.starts[place] < self.stops[place]]

    def end(self, stop: int) -> int:
        """How many tokens hold the characters before `stop`."""
        return bisect_left(self.starts, stop)


class Frame:
    """A model's tokenizer, with its chat template around what it reads.

    The context begins with what the template puts before a user's message. A question ends with what comes after
    the message, up to where the assistant speaks, and the beginning of the answer, as in kvpress's pipeline. Without
    a template BOS comes first, where the tokenizer adds one, and a line break ends the question.

    Parameters
    ----------
    folder : path
        Prepared model.
    template : bool
        Whether to use the chat template, where there is one.
    """

    def __init__(self, folder: str | os.PathLike, template: bool) -> None:
        self.folder = Path(folder)
        self.window: int | None = read_config(self.folder).get("max_position_embeddings")
        self._encoder = load_encoder(folder)
        found = _around(self.folder) if template else None
        self.chat = found is not None
        self.before, self.after = found or ("", "\n")

    def context(self, text: str) -> Tokens:
        """`text` in tokens, after the beginning of the template or BOS."""
        encoding = self._encoder.encode(self.before + text, add_special_tokens=not self.chat)
        offsets = np.maximum(np.array(encoding.offsets).reshape(-1, 2) - len(self.before), 0)
        # special tokens at the end have offsets 0; theirs become those of the last text
        starts, stops = np.maximum.accumulate(offsets).T.tolist()
        return Tokens(encoding.ids, starts, stops)

    def question(self, text: str, prefix: str) -> list[int]:
        """A question and the beginning of its answer in tokens."""
        return self.pieces(text + self.after + prefix)

    def gold(self, text: str, prefix: str, answer: str) -> list[int]:
        """Tokens of `answer` after that question: those that it has there, where tokens do not straddle the two."""
        asked = self.question(text, prefix)
        both = self.question(text, prefix + answer)
        return both[len(asked) :] if both[: len(asked)] == asked else self.pieces(answer)

    def pieces(self, text: str) -> list[int]:
        """Tokens of `text` alone, nothing added."""
        return self._encoder.encode(text, add_special_tokens=False).ids


def _around(folder: Path) -> tuple[str, str] | None:
    """What the chat template puts before and after a user's message; None without a template."""
    if not _names_template(folder):
        return None
    tokenizer = load_tokenizer(folder)
    if tokenizer.chat_template is None:
        return None
    message = [{"role": "user", "content": PLACE}]
    # as kvpress asks for it: templates that know of thinking leave it out
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    before, found, after = text.partition(PLACE)
    if not found:
        raise InvalidInput(f"{folder}: the chat template does not show a user's message; set template: false")
    return before, after


def _names_template(folder: Path) -> bool:
    """Whether any file says so: transformers takes seconds to read a large tokenizer."""
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    about = folder / "tokenizer_config.json"
    return about.exists() and bool(read_object(about).get("chat_template"))

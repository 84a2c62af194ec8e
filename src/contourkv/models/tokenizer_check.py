"""Texts on which a tokenizer is compared with itself, saved and reloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InvariantBroken
from .loading import load_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHECK_TEXTS = (
    "The committee met on 14 March 1897, in the old library, and adjourned at half past nine; nobody objected.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n\t\ttotal += value  # running sum\n"
    "    return total / len(values)\n\n\n",
    "A: did you see it?\nB: haha yeah!! at 9:45, I couldn't believe it...\n",
    "na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d, \u6771\u4eac, \u0441\u043d\u0435\u0433, \U0001f389  two  spaces",
)


def check_encoder(folder: Path, tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    """Make tokenizer.json alone give the ids of `tokenizer`, loaded from the same folder.

    tokenizer_config.json may say to add a BOS that tokenizer.json does not add; then the latter is written anew.

    Raises
    ------
    InvariantBroken
        The ids differ all the same.
    """
    wanted = [tokenizer(text)["input_ids"] for text in CHECK_TEXTS]

    def same() -> bool:
        encoder = load_encoder(folder)
        return [encoder.encode(text).ids for text in CHECK_TEXTS] == wanted

    if not same():
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        if not same():
            raise InvariantBroken(f"model {name}: its tokenizer.json does not give the ids of its tokenizer")


def check_reloaded(original: PreTrainedTokenizerFast, reloaded: PreTrainedTokenizerFast, name: str) -> None:
    """Stop unless a saved tokenizer came back with the same ids, special tokens and chat template.

    Raises
    ------
    InvariantBroken
        Naming what got lost.
    """
    for text in CHECK_TEXTS:
        ids = original(text)["input_ids"]
        if reloaded(text)["input_ids"] != ids:
            raise InvariantBroken(f"model {name}: the saved tokenizer gives other ids for {text[:30]!r}")
        if reloaded.decode(ids, skip_special_tokens=True) != text:
            raise InvariantBroken(f"model {name}: the tokenizer does not give back the text {text[:30]!r}")
    for what in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "chat_template"):
        if getattr(reloaded, what) != getattr(original, what):
            raise InvariantBroken(f"model {name}: the saved tokenizer lost its {what}")

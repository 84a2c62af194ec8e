"""A byte-level BPE tokenizer trained on given texts: it has no unknown token, and every text comes back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvariantBroken
from .random_source import SPECIAL

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

PAD_ID, BOS_ID, EOS_ID = range(len(SPECIAL))
LEAST_VOCABULARY = 256 + len(SPECIAL)


def train_byte_pairs(texts: Iterable[str], vocabulary: int, window: int, adds_bos: bool) -> PreTrainedTokenizerFast:
    """Train a tokenizer; the same texts give the same tokenizer.

    Parameters
    ----------
    texts : iterable of str
    vocabulary : int
        Tokens at most: padding, BOS and EOS (`PAD_ID`, `BOS_ID`, `EOS_ID`), one a byte, then merges. Few texts may
        give fewer merges.
    window : int
        Longest input of the model, in tokens.
    adds_bos : bool
        Whether an encoded text begins with BOS.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if adds_bos:
        bos = SPECIAL[BOS_ID]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, BOS_ID)],
        )
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        model_max_length=window,
    )


def bytes_of_tokens(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Bytes of text that each token stands for: (vocabulary,) int64; padding, BOS and EOS stand for none."""
    # a byte is one character in the written form of a byte-level token
    pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return np.array([0 if piece in SPECIAL else len(piece) for piece in pieces], np.int64)


def check_saved(tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig, name: str) -> None:
    """Stop unless the tokenizer, saved beside a model of `config` and loaded again, is the same.

    Raises
    ------
    InvariantBroken
        Naming what got lost.
    """
    from .loading import load_tokenizer
    from .tokenizer_check import check_encoder, check_reloaded

    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        before = (Path(folder) / "tokenizer.json").read_bytes()
        reloaded = load_tokenizer(folder)
        check_reloaded(tokenizer, reloaded, name)
        check_encoder(Path(folder), reloaded, name)
        if (Path(folder) / "tokenizer.json").read_bytes() != before:
            raise InvariantBroken(f"model {name}: transformers loads its tokenizer.json as another tokenizer")

"""A tokenizer from the metadata of a GGUF file, with the ids that the model was trained on.

transformers builds one too, but not the right one (seen with 5.2): a SentencePiece vocabulary becomes a Unigram
model, which cuts Gemma's "world" into three pieces; a Llama with a GPT-2 vocabulary gets Code Llama's special
tokens, a BOS that the file says not to add, and `<|im_start|>` for its end of sequence. The file holds all that is
needed: pieces, scores or merges, types, and the ids of the special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPACE = "\u2581"

# How text is cut before byte-level merges, by `tokenizer.ggml.pre`. The names are llama.cpp's.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def tokenizer_from_gguf(metadata: Mapping[str, object], path: str) -> PreTrainedTokenizerFast:
    """The tokenizer that a GGUF file describes.

    Parameters
    ----------
    metadata : mapping
        The file's `tokenizer.*` fields (and `<architecture>.context_length`), name -> Python value.
    path : str
        The file, for messages.

    Returns
    -------
    PreTrainedTokenizerFast
        Adds BOS by itself where the file says so; knows BOS, EOS, unknown and padding token, and the chat template.

    Raises
    ------
    InvalidInput
        A kind of tokenizer, or a way to cut text, that is not known here.
    """
    from transformers import PreTrainedTokenizerFast

    kind = metadata.get("tokenizer.ggml.model")
    cut = metadata.get("tokenizer.ggml.pre", "default")
    if kind == "llama":
        tokenizer = _sentencepiece_bpe(metadata)
    elif kind == "gpt2":
        tokenizer = _byte_level_bpe(metadata, str(cut), path)
    else:
        raise InvalidInput(f"{path}: tokenizer.ggml.model is {kind!r}; known are 'llama' and 'gpt2'")

    tokens = metadata["tokenizer.ggml.tokens"]
    special = {}
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            special[f"{role}_token"] = tokens[index]
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or cut == "llama-bpe"))
    window = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **special,
        add_bos_token=add_bos and "bos_token" in special,
        add_eos_token=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **({"model_max_length": int(window)} if window else {}),
    )


def merges_from_scores(pieces: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """BPE merges, best first, of a SentencePiece vocabulary that only has scores.

    SentencePiece joins the adjacent pair whose join has the highest score. As a ranked list that is every split of
    every piece into two known pieces, by falling score; of equal scores, the lower id first. User-defined pieces
    come first of all: SentencePiece sets them apart before it merges, and GGUF writes a dummy score for them.

    Parameters
    ----------
    pieces, scores, types : lists, one entry a token
        `types` as in GGUF: 1 normal, 4 user-defined; only those can be the result of a merge.
    """
    known = {piece: index for index, piece in enumerate(pieces) if types[index] in (NORMAL, USER_DEFINED) and piece}
    order = sorted(known.values(), key=lambda index: (types[index] != USER_DEFINED, -scores[index], index))
    merges = []
    for index in order:
        piece = pieces[index]
        splits = [
            (piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in known and piece[cut:] in known
        ]
        merges.extend(sorted(splits, key=lambda pair: (known[pair[0]], known[pair[1]])))
    return merges


def _sentencepiece_bpe(metadata: Mapping[str, object]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    types = metadata["tokenizer.ggml.token_type"]
    # The file spells the pieces of spaces alone with spaces; the text reaches the merges with U+2581 for them.
    pieces = [
        token.replace(" ", SPACE) if token and not token.strip(" ") else token
        for token in metadata["tokenizer.ggml.tokens"]
    ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges_from_scores(pieces, metadata["tokenizer.ggml.scores"], types),
            unk_token=None if unknown is None else pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(undo)
    _add_tokens(tokenizer, pieces, types)
    return tokenizer


def _byte_level_bpe(metadata: Mapping[str, object], cut: str, path: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    cuts = {
        "gpt-2": gpt2,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "qwen2": by_pattern(QWEN_PATTERN),
        "llama-bpe": by_pattern(LLAMA3_PATTERN),
    }
    if cut not in cuts:
        raise InvalidInput(
            f"{path}: tokenizer.ggml.pre is {cut!r}; known are {', '.join(cuts)}. Use the model's own tokenizer "
            "files instead (source: hub or folder)"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]],
            ignore_merges=cut == "llama-bpe",
        )
    )
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = cuts[cut]
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Name the tokens that are found in the text before any merge: control tokens and user-defined ones."""
    from tokenizers import AddedToken

    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED and token.strip(SPACE)
        ]
    )

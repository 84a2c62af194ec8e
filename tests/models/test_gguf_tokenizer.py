"""Tokenizers out of GGUF metadata give the ids of the tokenizer that the metadata is of."""

import io
import json

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from contourkv.errors import InvalidInput
from contourkv.models.gguf_tokenizer import tokenizer_from_gguf

TEXT = [
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "when in the course of human events it becomes necessary for one people",
    "def mean(values):\n    total = 0\n    return total / len(values)",
    "in 1897 the council met 12 times; nobody objected to the 345 motions",
] * 4
TEXTS = st.text(alphabet="abdehlmnorst TQ.,(:)=\n\t0123456789é東▁", max_size=60)


def sentencepiece_metadata(prefix: bool) -> tuple[dict, sentencepiece.SentencePieceProcessor]:
    """A SentencePiece BPE model as GGUF files hold it: spaces spelt out in user-defined pieces, dummy scores."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<b>"],
        pad_id=3,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    tokens, scores, types = [], [], []
    for index in range(processor.get_piece_size()):
        piece = processor.id_to_piece(index)
        kinds = {6: processor.is_byte(index), 3: processor.is_control(index), 2: processor.is_unknown(index)}
        user = not any(kinds.values()) and processor.get_score(index) == 0 and piece in "\n\n▁▁▁▁<b>" and piece != "▁"
        types.append(next((kind for kind, holds in kinds.items() if holds), 4 if user else 1))
        tokens.append(piece.replace("▁", " ") if user else piece)
        scores.append(-1000.0 if user else processor.get_score(index))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }, processor


METADATA, PROCESSOR = sentencepiece_metadata(prefix=False)
SENTENCEPIECE = tokenizer_from_gguf(METADATA, "test")


@given(TEXTS.filter(lambda text: "▁" not in text and "     " not in text))
def test_scores_give_the_ids_of_sentencepiece(text):
    assert SENTENCEPIECE(text)["input_ids"] == [PROCESSOR.bos_id(), *PROCESSOR.encode(text)]


@given(TEXTS.filter(lambda text: "▁" not in text))
def test_text_comes_back(text):
    assert SENTENCEPIECE.decode(SENTENCEPIECE(text)["input_ids"], skip_special_tokens=True) == text


def test_a_space_before_the_text_is_added_and_taken_off_where_the_file_says_so():
    metadata, processor = sentencepiece_metadata(prefix=True)
    tokenizer = tokenizer_from_gguf(metadata, "test")
    for text in ["the other dogs", "dogs", "total / len(values)", "in 1897"]:
        ids = tokenizer(text)["input_ids"]
        assert ids == [processor.bos_id(), *processor.encode(text)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_user_defined_pieces_are_found_before_any_merge():
    tokens = SENTENCEPIECE.tokenize("a    the\n\n<b>the")
    assert "▁▁▁▁" in tokens and "\n\n" in tokens and "<b>" in tokens


def test_bos_is_added_unless_the_file_says_no():
    without = tokenizer_from_gguf({**METADATA, "tokenizer.ggml.add_bos_token": False}, "test")
    assert without("the")["input_ids"] == SENTENCEPIECE("the")["input_ids"][1:]
    assert (without.bos_token_id, without.eos_token_id) == (PROCESSOR.bos_id(), PROCESSOR.eos_id())


def byte_level() -> tuple[dict, Tokenizer]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trained.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=380,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokens = [trained.id_to_token(index) for index in range(trained.get_vocab_size())]
    merges = json.loads(trained.to_str())["model"]["merges"]
    return {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }, trained


BYTES, TRAINED = byte_level()
BYTE_LEVEL = tokenizer_from_gguf(BYTES, "test")


@given(TEXTS)
def test_merges_give_the_ids_of_the_trained_tokenizer(text):
    ids = BYTE_LEVEL(text)["input_ids"]
    assert ids == TRAINED.encode(text).ids
    assert BYTE_LEVEL.decode(ids) == text


def test_special_tokens_are_those_of_the_file():
    assert (BYTE_LEVEL.bos_token, BYTE_LEVEL.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (BYTE_LEVEL.unk_token, BYTE_LEVEL.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert BYTE_LEVEL("<|im_start|>the<|im_end|>")["input_ids"][0::2] == [1, 2]
    assert len(BYTE_LEVEL) == len(BYTES["tokenizer.ggml.tokens"])
    assert BYTE_LEVEL.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    assert BYTE_LEVEL.model_max_length == 512


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [
        ("gpt-2", ["don", "'t", "Ġ1234", "Ċ", "Ġx"]),
        ("smollm", ["don", "'t", "Ġ", "1", "2", "3", "4", "Ċ", "Ġx"]),
        ("qwen2", ["don", "'t", "Ġ", "1", "2", "3", "4", "Ċ", "Ġx"]),
        ("llama-bpe", ["don", "'t", "Ġ", "123", "4", "Ċ", "Ġx"]),
    ],
)
def test_text_is_cut_as_the_family_does(cut, pieces):
    made = tokenizer_from_gguf({**BYTES, "tokenizer.ggml.pre": cut}, "test")
    found = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str("don't 1234\n x")
    assert [piece for piece, _ in found] == pieces


@pytest.mark.parametrize(
    ("change", "said"),
    [({"tokenizer.ggml.pre": "viking"}, "viking"), ({"tokenizer.ggml.model": "rwkv"}, "rwkv")],
)
def test_an_unknown_kind_is_refused_by_name(change, said):
    with pytest.raises(InvalidInput, match=said):
        tokenizer_from_gguf({**BYTES, **change}, "file.gguf")

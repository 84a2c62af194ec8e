"""Copies in which nothing has run, or the whole workflow has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from workflow_copy import Copy


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


@pytest.fixture
def edited(finished) -> Callable[[str, str], None]:
    """Append a line to a file of the finished copy; take all such edits back at the end."""
    originals: dict[Path, tuple[bytes, os.stat_result]] = {}

    def edit(name: str, line: str) -> None:
        path = finished.folder / name
        originals.setdefault(path, (path.read_bytes(), path.stat()))
        path.write_bytes(path.read_bytes() + line.encode())

    yield edit
    for path, (content, before) in originals.items():
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

"""Finished parts of a long job, kept until the whole job is done: one that was cut off goes on from them.

Whatever starts jobs may delete what a job that was cut off had written, so the parts lie beside its output, under a
name that no rule knows. Parts are used by a job of the same inputs, settings and code alone: what is made from them is
what it would have been without the interruption, byte for byte. `statistics.table_parts` is the same for tables.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from .provenance import atomic_path, digest, write_text

MADE_FROM = "made_from"


class Parts:
    """The parts of one job; as a context, they are removed when its block succeeds and kept when it fails.

    Parameters
    ----------
    output : path
        What the job writes in the end (of several files, the first). The parts lie in a folder of its name + ".parts".
    made_from : JSON-serialisable
        All that the parts depend on: digests of the inputs, settings, device, code. Parts of anything else are removed.
    """

    def __init__(self, output: str | os.PathLike, made_from: object) -> None:
        output = Path(output)
        self.folder = output.with_name(output.name + ".parts")
        self._made_from = digest(made_from)

    def __enter__(self) -> Self:
        mark = self.folder / MADE_FROM
        if self.folder.exists() and not (mark.is_file() and mark.read_text(encoding="utf-8") == self._made_from):
            shutil.rmtree(self.folder)
        write_text(mark, self._made_from)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A job that failed before its first part leaves nothing to go on from.
        if kind is None or not any(path.name != MADE_FROM for path in self.folder.glob("*")):
            with contextlib.suppress(OSError):
                shutil.rmtree(self.folder)

    def path(self, name: str) -> Path:
        """Where the part `name` lies, or is to be written: whole, or not at all."""
        return self.folder / name

    def give(self, name: str, output: str | os.PathLike) -> None:
        """Put the part `name` under the name `output` as well: it stays, should the job be cut off right now."""
        with atomic_path(output) as temporary:
            temporary.unlink()
            try:
                os.link(self.path(name), temporary)
            except OSError:  # a file system without links
                shutil.copyfile(self.path(name), temporary)

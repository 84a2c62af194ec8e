"""A job that is cut off after some of its parts goes on from them: the same bytes, and no part made twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from contourkv.parts import Parts
from contourkv.statistics.table_parts import TableParts


class CutOff(BaseException):
    """Stands for what ends a process in the middle."""


def goes_on(job: Callable[[Path, object], None], output: Path, total: int) -> None:
    """Check that `job(output, made_by)`, of `total` tables, goes on after each cut, and not from another code's."""
    with pytest.MonkeyPatch.context() as patch:
        _goes_on(patch, job, output, total)


def _goes_on(patch: pytest.MonkeyPatch, job: Callable[[Path, object], None], output: Path, total: int) -> None:
    written: list[str] = []
    write = TableParts.write

    def until(left: int) -> Callable:
        def cut(parts: TableParts, name: str, table: object) -> None:
            if len(written) == left:
                raise CutOff
            written.append(name)
            write(parts, name, table)

        return cut

    parts = Parts(output, None).folder
    patch.setattr(TableParts, "write", until(total))
    job(output, "code")
    whole, names = output.read_bytes(), list(written)
    assert len(set(names)) == total and not parts.exists()
    output.unlink()
    for left in sorted({1, total - 1}):
        written.clear()
        patch.setattr(TableParts, "write", until(left))
        with pytest.raises(CutOff):
            job(output, "code")
        assert not output.exists() and len(list(parts.glob("*.parquet"))) == left
        written.clear()
        patch.setattr(TableParts, "write", until(total))
        job(output, "code")
        assert written == names[left:], "what was finished is made again, or not all of the rest"
        assert output.read_bytes() == whole and not parts.exists()
        output.unlink()
    written.clear()
    patch.setattr(TableParts, "write", until(1))
    with pytest.raises(CutOff):
        job(output, "code")
    written.clear()
    patch.setattr(TableParts, "write", until(total))
    job(output, "other code")
    assert written == names and output.read_bytes() == whole

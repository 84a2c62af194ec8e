"""What a result was made from, and how it gets its final name: written whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import ContourKVError

VERSION = "0.1.0"
UNWRITABLE = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EFBIG", "EIO")
    if hasattr(errno, name)
}


def digest(value: object) -> str:
    """First 12 hex digits of the SHA-256 of `value` as canonical JSON (sorted keys)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def record(config: object, **more: object) -> dict:
    """Provenance of one output: package version, digest of the config keys it was made with, and `more`."""
    return {"contourkv": VERSION, "config": digest(config), **more}


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def unwritable(error: BaseException) -> str:
    """Why nothing could be written (no space, read-only, ...), in the system's words; "" for another error.

    The Rust side of safetensors gives the system's number in words only.
    """
    said = re.search(r"os error (\d+)", str(error))
    number = int(said[1]) if said else getattr(error, "errno", None)
    if "StorageFull" in str(error):
        number = errno.ENOSPC
    return os.strerror(number) if number in UNWRITABLE else ""


def cannot_write(path: str | os.PathLike, reason: str, size: int | None = None) -> ContourKVError:
    """The error of a file that could not be written for `reason`; `size` is the bytes it needs, where known."""
    path = Path(path)
    needed = "" if size is None else f"; it needs {size / 1e6:.1f} MB"
    return ContourKVError(
        f"{path}: could not be written ({reason}){needed}; {_free(path.parent)}; make room, or write elsewhere, and "
        "give the same command again: what is finished is kept"
    )


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike, size: int | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` if the block succeeds, else remove it.

    The name ends as `path` does, so that writers which look at the suffix behave the same. A reader never
    sees half a file under the final name, whatever ends the block.

    Raises
    ------
    ContourKVError
        The block, or the renaming, found no space, a read-only file system or the like: names `path`, and `size`, the
        bytes that it needs, where that is given.
    """
    final, temporary = Path(path), None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".partial-", suffix=final.suffix, dir=final.parent)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, final)
    except Exception as error:
        reason = unwritable(error)
        if not reason or isinstance(error, ContourKVError):
            raise
        raise cannot_write(final, reason, size) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def sweep(folder: str | os.PathLike) -> list[Path]:
    """Remove what processes that were killed left half-written under `folder`: nothing may be writing there.

    Files and folders of the temporary names that this package gives; returns them.
    """
    found = []
    for place, folders, files in os.walk(folder):
        half = [name for name in [*folders, *files] if name.startswith((".partial-", ".replaced-"))]
        folders[:] = [name for name in folders if name not in half]
        found += [Path(place, name) for name in half]
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return found


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` as UTF-8 under `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, value: object) -> None:
    """Write `value` as JSON with sorted keys under `path`, whole or not at all."""
    write_text(path, json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1) + "\n")


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB are free in {folder}"
    except OSError:
        return f"{folder} cannot be looked at"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

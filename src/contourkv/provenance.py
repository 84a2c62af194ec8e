"""What a result was made from, and how it gets its final name: written whole, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

VERSION = "0.1.0"


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


@contextlib.contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it to `path` if the block succeeds, else remove it.

    The name ends as `path` does, so that writers which look at the suffix behave the same. A reader never
    sees half a file under the final name, whatever ends the block.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".partial-", suffix=final.suffix, dir=final.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write `text` as UTF-8 under `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, value: object) -> None:
    """Write `value` as JSON with sorted keys under `path`, whole or not at all."""
    write_text(path, json.dumps(value, sort_keys=True, ensure_ascii=False, indent=1) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""One run at a time over one folder."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from pathlib import Path
from typing import TextIO

from .errors import ContourKVError
from .provenance import cannot_write


def claim(lock: str | os.PathLike, what: str) -> TextIO:
    """Hold `lock` until this process ends, whatever ends it: the system lets go of it, so none is ever left over.

    Parameters
    ----------
    lock : path
        A file that only says who holds it; made if need be.
    what : what the holder writes, for the error

    Returns
    -------
    file
        The lock is held as long as it is open.

    Raises
    ------
    ContourKVError
        Another process holds it, which is named; or the file cannot be written.
    """
    lock = Path(lock)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "a+", encoding="utf-8")
    except OSError as error:
        raise cannot_write(lock, error.strerror or str(error)) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return file  # a file system without locks: nothing can be said
        file.seek(0)
        holder = file.read().strip() or "a process that has not said which"
        file.close()
        raise ContourKVError(
            f"{what}: another run is writing there ({holder}); wait until it has ended, or end it, and start this again"
        ) from None
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
    except OSError as error:
        raise cannot_write(lock, error.strerror or str(error)) from error
    return file

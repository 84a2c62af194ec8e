"""What every workflow script runs inside: its log file, one clear line on an expected error, no orphans."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from .errors import ContourKVError
from .progress import Progress
from .provenance import cannot_write, unwritable

GRACE_SECONDS = 5.0
WATCH_SECONDS = 0.2
WORKFLOW = "CONTOURKV_WORKFLOW"
"""Environment variable: process id of the workflow that starts jobs, and that they end with."""


@contextlib.contextmanager
def logged(log: str | os.PathLike) -> Iterator[None]:
    """Run the block with everything it prints, and what its child processes print, in the file `log`.

    Lines of progress go to the terminal as well. A `ContourKVError` ends the process with exit code 1 and its
    one line in the log and on the terminal; any other exception leaves its traceback in the log and one line
    on the terminal, as does a log that cannot be written. The process also ends when its parent, or the workflow
    that the environment names, does: a killed workflow leaves no job behind.

    Parameters
    ----------
    log : path
        Its folder is made if need be. It is written anew.
    """
    log = Path(log)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    echo = Progress.echo
    # the descriptors, not sys.stdout: libraries and child processes write there
    with _opened(log) as file, open(os.dup(saved[1]), "w", encoding="utf-8") as terminal:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        Progress.echo = terminal
        _end_with_parent()
        try:
            yield
        except ContourKVError as error:
            line = f"error: {error}"
            with contextlib.suppress(OSError):  # a full disk has no room for the log either
                print(line, file=sys.stderr)
            print(line, file=terminal)
            raise SystemExit(1) from None
        except Exception as error:
            with contextlib.suppress(OSError):
                traceback.print_exc()
            reason = unwritable(error)
            said = cannot_write(getattr(error, "filename", None) or log, reason) if reason else None
            print(f"error: {said or f'{type(error).__name__}: {error} (traceback in {log})'}", file=terminal)
            raise SystemExit(1) from None
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            Progress.echo = echo
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def _opened(log: Path) -> TextIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return open(log, "w", encoding="utf-8")
    except OSError as error:
        print(f"error: {cannot_write(log, error.strerror or str(error))}", file=sys.stderr)
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """End on signals and on the parent's death by an exception, so that partial files are removed."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and the like are obeyed
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    parent, workflow = os.getppid(), int(os.environ.get(WORKFLOW, 0))

    def watch() -> None:
        # The parent may have died before this began, and a shell may stand between it and the workflow.
        while os.getppid() == parent and (workflow in (0, parent) or _runs(workflow)):
            time.sleep(WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's: it runs
        return True
    return True

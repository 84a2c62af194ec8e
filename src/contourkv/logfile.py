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

from .errors import ContourKVError
from .progress import Progress

GRACE_SECONDS = 5.0


@contextlib.contextmanager
def logged(log: str | os.PathLike) -> Iterator[None]:
    """Run the block with everything it prints, and what its child processes print, in the file `log`.

    Lines of progress go to the terminal as well. A `ContourKVError` ends the process with exit code 1 and its
    one line in the log and on the terminal; any other exception leaves its traceback in the log and one line
    on the terminal. The process also ends when its parent does: a killed workflow leaves no job behind.

    Parameters
    ----------
    log : path
        Its folder is made if need be. It is written anew.
    """
    log = Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    echo = Progress.echo
    # the descriptors, not sys.stdout: libraries and child processes write there
    with open(log, "w", encoding="utf-8") as file, open(os.dup(saved[1]), "w", encoding="utf-8") as terminal:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        Progress.echo = terminal
        _end_with_parent()
        try:
            yield
        except ContourKVError as error:
            line = f"error: {error}"
            print(line, file=sys.stderr)
            print(line, file=terminal)
            raise SystemExit(1) from None
        except Exception as error:
            traceback.print_exc()
            print(f"error: {type(error).__name__}: {error} (traceback in {log})", file=terminal)
            raise SystemExit(1) from None
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            Progress.echo = echo
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def _end_with_parent() -> None:
    """End on SIGTERM and on the parent's death by an exception, so that partial files are removed."""
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""The one kind of error that a user is meant to read: file, key or argument, what was expected, what to do."""

import os

AGAIN = "CONTOURKV_AGAIN"
"""Environment variable: a command that makes a file again when the file's name is put after it."""


class ContourKVError(Exception):
    """Base of all errors raised on purpose. Its message is one line."""


class InvalidInput(ContourKVError, ValueError):
    """An argument, a config key or a file's content is not what it must be."""


class DamagedFile(InvalidInput):
    """A file that was made from others is truncated, changed, or of another kind: it must be made again.

    Parameters
    ----------
    path : path
    problem : what is wrong with it
    """

    def __init__(self, path: str | os.PathLike, problem: str) -> None:
        command = os.environ.get(AGAIN)
        again = f"make it again: {command} {os.fspath(path)}" if command else "delete it and make it again"
        super().__init__(f"{os.fspath(path)}: {problem}; {again}")


class InvariantBroken(ContourKVError):
    """A relation that holds for every instance (Lemma 2.1, kappa >= 1, ...) does not hold: the run stops."""


def said(error: BaseException | str, most: int = 200) -> str:
    """What another library said, as a part of one line: its class where it said nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__

"""The one kind of error that a user is meant to read: file, key or argument, what was expected, what to do."""


class ContourKVError(Exception):
    """Base of all errors raised on purpose. Its message is one line."""


class InvalidInput(ContourKVError, ValueError):
    """An argument, a config key or a file's content is not what it must be."""


class InvariantBroken(ContourKVError):
    """A relation that holds for every instance (Lemma 2.1, kappa >= 1, ...) does not hold: the run stops."""

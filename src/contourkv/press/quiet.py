"""kvpress's own warnings, out of the way. Loads nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_kvpress() -> Iterator[None]:
    """kvpress warns of its own cost and of models it was not tried on, once per press; inside only of errors."""
    logger = logging.getLogger("kvpress")
    former = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(former)

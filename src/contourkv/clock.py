"""Files whose time is still to come: written before a clock was set back."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

SLACK_SECONDS = 2.0
"""Less than this is the resolution of times, or of another machine's clock."""


def from_the_future(folders: Iterable[str | os.PathLike], now: float | None = None) -> list[Path]:
    """Files under `folders` that are dated later than now, sorted.

    Parameters
    ----------
    folders : those that are not there hold none
    now : seconds since the epoch, default the clock's
    """
    limit = (time.time() if now is None else now) + SLACK_SECONDS
    found = []
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                path = Path(place, name)
                try:
                    if path.stat().st_mtime > limit:
                        found.append(path)
                except FileNotFoundError:  # removed meanwhile, or a broken link
                    continue
    return sorted(found)

"""Progress of long loops: a bar on a terminal, plain lines with counts, rate and time left elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

T = TypeVar("T")


class Progress:
    """Count `total` steps of `unit`.

    Parameters
    ----------
    total : int
        Steps to come.
    label, unit : str
        What runs, and what one step is ("rows", "contexts").
    interval : float
        Seconds between plain lines. The first and the last line are always written.
    stream : text file, default standard error
    before : int
        Steps of them that an earlier run finished: they count as done, and not for the rate.

    Attributes
    ----------
    echo : text file, optional
        Class attribute: where plain lines are written as well. A workflow job sets it to the terminal, as its
        standard error is its log.
    """

    echo: TextIO | None = None

    def __init__(
        self,
        total: int,
        label: str,
        unit: str,
        interval: float = 10.0,
        stream: TextIO | None = None,
        before: int = 0,
    ) -> None:
        self.total, self.label, self.unit, self.interval = total, label, unit, interval
        self.stream = stream or sys.stderr
        self.done = self.before = before
        self.started = self.last = time.monotonic()
        self.bar = None
        if self.stream.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=before, desc=label, unit=f" {unit}", file=self.stream)

    def advance(self, steps: int = 1) -> None:
        """Count `steps` more."""
        self.done += steps
        if self.bar is not None:
            self.bar.update(steps)
            return
        now = time.monotonic()
        if now - self.last >= self.interval or self.done >= self.total:
            self.last = now
            elapsed = max(now - self.started, 1e-9)
            rate = (self.done - self.before) / elapsed
            left = (self.total - self.done) / rate if rate else float("inf")
            speed = f"{1 / rate:,.3g} s each" if 0 < rate < 1 else f"{rate:,.3g}/s"
            line = (
                f"{self.label}: {self.done:,} of {self.total:,} {self.unit}, {speed}, "
                f"{elapsed:.0f} s gone, {left:.0f} s left"
            )
            for stream in filter(None, (self.stream, self.echo)):
                print(line, file=stream, flush=True)

    def close(self) -> None:
        """End the bar, if there is one."""
        if self.bar is not None:
            self.bar.close()

    def over(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield from `steps`, counting each when it is finished."""
        for step in steps:
            yield step
            self.advance()
        self.close()

"""How much fits?"""

from __future__ import annotations

from collections.abc import Callable


def most(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number from `low` to `high` that fits, where a larger one never fits better; None if none does."""
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

"""How much of a cache may stay, said in one of four ways, and what that is in bytes."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ..errors import InvalidInput

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_UNIT_OF = {unit.lower(): factor for unit, factor in UNITS.items()}
_EXAMPLES = 'a fraction such as 0.25 or "25%", or bytes such as 67108864 or "64MiB"'


@dataclass(frozen=True, repr=False)
class Budget:
    """What the cache of one sequence may hold after compression; every sequence of a batch gets as much.

    Attributes
    ----------
    kind : {"fraction", "bytes", "entries"}
        Unit of `amount`: of the bytes that the full cache needs; bytes; entries over all layers and KV heads.
    amount : Fraction or int
        Fractions are exact in the decimal digits given: 1 - 0.9 is a tenth.
    given : (str, object)
        Argument and value that it was made of, for messages.
    """

    kind: Literal["fraction", "bytes", "entries"]
    amount: Fraction | int
    given: tuple[str, object]

    @classmethod
    def of(
        cls,
        budget: float | int | str | Budget | None = None,
        entries: int | None = None,
        compression_ratio: float | None = None,
    ) -> Budget:
        """The budget that exactly one of the arguments names.

        Parameters
        ----------
        budget : float, int or str
            A float in (0, 1] is a fraction of the bytes that the full cache needs, a whole number bytes, a string
            either: "25%", "64MiB", "1.5 GiB", "500kB", "1000000 B". Units in any case; kB is 1000 B, KiB 1024 B.
        entries : int
            Entries (one key and value of one KV head) over all layers and KV heads.
        compression_ratio : float in [0, 1)
            Fraction removed, as in kvpress: 1 - compression_ratio stays.

        Raises
        ------
        InvalidInput
            None or several given, not a number, outside its range, a unit that is none.
        """
        given = {
            name: value
            for name, value in (("budget", budget), ("entries", entries), ("compression_ratio", compression_ratio))
            if value is not None
        }
        if len(given) != 1:
            raise InvalidInput(
                "budget, entries, compression_ratio: expected exactly one of them, got "
                + (" and ".join(given) if given else f"none; give budget=, {_EXAMPLES}")
            )
        if isinstance(budget, cls):
            return budget
        if entries is not None:
            return cls("entries", _positive_whole("entries", entries), ("entries", entries))
        if compression_ratio is not None:
            removed = _exact("compression_ratio", compression_ratio)
            if not 0 <= removed < 1:
                raise InvalidInput(
                    f"compression_ratio: expected the fraction to remove, at least 0 and under 1, got "
                    f"{compression_ratio!r}" + ("; a cache that keeps nothing answers nothing" if removed == 1 else "")
                )
            return cls("fraction", 1 - removed, ("compression_ratio", compression_ratio))
        kind, amount = _text(budget) if isinstance(budget, str) else _number(budget)
        return cls(kind, amount, ("budget", budget))

    def __repr__(self) -> str:
        return f"Budget.of({self.given[0]}={self.given[1]!r})"

    def __str__(self) -> str:
        if self.kind == "fraction":
            return f"{float(100 * self.amount):.4g}% of the full cache"
        return f"{self.amount:,} {self.kind}"

    def bytes_for(self, heads: Sequence[int], available: Sequence[int], costs: Sequence[int], overhead: int = 0) -> int:
        """Bytes that one sequence's entries may take, over all layers.

        A fraction gives floor(fraction * full), at least one entry a head where there is one, so that a short
        context is never emptied. Bytes pay for the tables first, and must hold one entry a head. A count of entries
        gives their bytes exactly; where layers' entries differ in cost, that many entries of mean cost (full / all
        entries), rounded down. Whatever is more than the full cache keeps everything.

        Parameters
        ----------
        heads : KV heads of each layer
        available : entries that each of them could keep, per layer
        costs : bytes of one entry, per layer: key, value, position
        overhead : bytes of tables that are held whatever is kept

        Returns
        -------
        int
            Between one entry a head and everything.

        Raises
        ------
        InvalidInput
            Bytes or entries for less than one entry a head; says how many are needed.
        """
        layers = list(zip(heads, available, costs, strict=True))
        total = sum(count * entries for count, entries, _ in layers)
        full = sum(count * entries * cost for count, entries, cost in layers)
        least = sum(count * min(entries, 1) * cost for count, entries, cost in layers)
        runs = sum(count * min(entries, 1) for count, entries, _ in layers)
        if self.kind == "fraction":
            return max(math.floor(self.amount * full), least)
        if self.kind == "bytes":
            if self.amount - overhead < least:
                raise InvalidInput(
                    f"{self.given[0]}: {self.given[1]!r} does not hold one entry in each of {runs} KV heads; "
                    f"{least + overhead} B a sequence are the least, {full + overhead} B keep everything"
                )
            return min(self.amount - overhead, full)
        if self.amount < runs:
            raise InvalidInput(
                f"entries: {self.amount} is less than one in each of {runs} KV heads; give {runs} to {total}"
            )
        return full if self.amount >= total else max(self.amount * full // total, least)


def _number(value: object) -> tuple[str, Fraction | int]:
    if hasattr(value, "__index__") and not isinstance(value, float):
        return "bytes", _positive_whole("budget", value)
    amount = _exact("budget", value)
    if not 0 < amount <= 1:
        whole = f"; for bytes give a whole number, {int(amount)}" if amount > 1 and amount.denominator == 1 else ""
        raise InvalidInput(f"budget: expected a fraction above 0 and up to 1, got {value!r}{whole}")
    return "fraction", amount


def _text(value: str) -> tuple[str, Fraction | int]:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]+|%)\s*", value, re.ASCII)
    if not match:
        raise InvalidInput(f"budget: cannot read {value!r}; expected {_EXAMPLES}")
    amount, unit = Fraction(match[1]), match[2]
    if unit == "%":
        if not 0 < amount <= 100:
            raise InvalidInput(f"budget: expected more than 0% and up to 100%, got {value!r}")
        return "fraction", amount / 100
    if unit.lower() not in _UNIT_OF:
        raise InvalidInput(f"budget: unknown unit {unit!r} in {value!r}; expected %, {', '.join(UNITS)}")
    whole = math.floor(amount * _UNIT_OF[unit.lower()])
    if whole < 1:
        raise InvalidInput(f"budget: {value!r} is less than one byte; expected {_EXAMPLES}")
    return "bytes", whole


def _positive_whole(name: str, value: object) -> int:
    try:
        whole = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = None
    if whole is None or whole < 1:
        raise InvalidInput(f"{name}: expected a whole number of at least 1, got {value!r}")
    return whole


def _exact(name: str, value: object) -> Fraction:
    """The number in the decimal digits that it prints with: 0.1 is a tenth, not its nearest double."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidInput(f"{name}: expected a finite number, got {value!r}")
    return Fraction(repr(number))

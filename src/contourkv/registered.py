"""Bounds that are written down before the rows they are about are captured (paper, section 3)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import InvalidInput
from .plain import NotPlain, read_yaml
from .provenance import file_sha256

NAMES = ("pooled_c_hat", "margin_ratio_p90", "value_aware_share", "auc")
"""What can be bounded; `statistics.structured` computes each."""


@dataclass(frozen=True)
class Bound:
    """One registered bound.

    Attributes
    ----------
    name : one of NAMES
    says : str
        What is bounded, in words.
    limit : float
    at_most : bool
        The value must not exceed the limit; else it must reach it.
    paper : str
        What the paper saw.
    """

    name: str
    says: str
    limit: float
    at_most: bool
    paper: str

    def held(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    @property
    def printed(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


def read_bounds(path: str | os.PathLike) -> list[Bound]:
    """The bounds of a file, in the order of NAMES.

    Raises
    ------
    InvalidInput
        A file that is missing or no YAML; a bound that is missing, unknown or without its words and one limit.
    """
    try:
        value = read_yaml(path)
    except (OSError, NotPlain) as error:
        raise InvalidInput(f"{path}: cannot be read as YAML ({error})") from error
    given = value.get("bounds") if isinstance(value, dict) else None
    if not isinstance(given, dict) or set(given) != set(NAMES):
        raise InvalidInput(f"{path}: bounds: expected an object with the keys {', '.join(NAMES)}")
    bounds = []
    for name in NAMES:
        entry = given[name]
        sides = {"at_most", "at_least"} & set(entry) if isinstance(entry, dict) else set()
        if len(sides) != 1 or set(entry) - sides != {"says", "paper"}:
            raise InvalidInput(f"{path}: bounds.{name}: expected says, paper and one of at_most and at_least")
        (side,) = sides
        limit = entry[side]
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise InvalidInput(f"{path}: bounds.{name}.{side}: expected a number, got {limit!r}")
        bounds.append(Bound(name, str(entry["says"]), float(limit), side == "at_most", str(entry["paper"])))
    return bounds


def registered(path: str | os.PathLike) -> str:
    """SHA-256 of a file of bounds that may be captured under.

    Raises
    ------
    InvalidInput
        See `read_bounds`; in a git checkout, a file that is not committed as it is. Elsewhere a line on stderr says
        that this could not be looked at.
    """
    read_bounds(path)
    path = Path(path)
    try:
        inside = _git(path, "rev-parse", "--is-inside-work-tree")
    except OSError:  # no git here: an unpacked archive
        inside = None
    if inside is None or inside.returncode:
        print(f"{path}: no git checkout here, so nothing tells whether these bounds were changed", file=sys.stderr)
    else:
        known = _git(path, "ls-files", "--error-unmatch", path.name)
        if known.returncode or _git(path, "diff", "--quiet", "HEAD", "--", path.name).returncode:
            raise InvalidInput(
                f"{path}: is not committed as it is; bounds are registered before rows are captured: commit the file, "
                "then run again"
            )
    return file_sha256(path)


def _git(path: Path, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *command], cwd=path.resolve().parent, capture_output=True, check=False)

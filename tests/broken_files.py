"""Files that are not what they should be: cut, flipped, foreign, or whole and lying."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st

from contourkv.errors import ContourKVError

# What no field expects, or only another field does.
STRANGE = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**63, 10**18, -(10**12), 10**40),
    *(0.5, 1e308, float("nan"), float("inf"), "", "x", "../../x", "/etc/passwd", "caf\u00e9", "a\nb", "x" * 300),
    *([], {}, [[]], [0, 1], {"a": 1}, ["a"], "F64", "BF16", "I64", [0, 0], [8, 8], [10**9, 10**9]),
]

FOREIGN = [
    b"",
    b"\0" * 64,
    b"\xff" * 64,
    b"PK\x03\x04" + bytes(60),
    b"PAR1" + bytes(60) + b"PAR1",
    b"GGUF\x03\0\0\0" + b"\xff" * 40,
    b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",  # a pickle that runs `true`
    b"<html><body>404</body></html>",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b"9" * 6_000,
    b'{"a": 1, "a": 2}',
    b'{"a": "\\ud800"}',
    '{"a": "caf\u00e9"}'.encode("latin-1"),
    "\ufeff{}".encode(),
    b"null",
    b"[]",
    b"{}",
    b"3",
    b"a: &a [*a]\n",
    (8).to_bytes(8, "little") + b'{"a":{}}',
    (2).to_bytes(8, "little") + b"{}",
    (2**63).to_bytes(8, "little") + b"{}",
]


KINDS = ["cut", "flip", "flip", "flip", "lose", "double", "overwrite", "insert", "zero", "foreign"]


def damages() -> st.SearchStrategy[tuple]:
    """What `broken` does to a file: kind, places as shares of its length, a length, bytes."""
    places = st.lists(st.floats(0, 1), min_size=1, max_size=3)
    foreign = st.integers(0, len(FOREIGN) - 1)
    return st.tuples(st.sampled_from(KINDS), places, st.integers(1, 40), st.binary(max_size=40), foreign)


def broken(content: bytes, damage: tuple) -> bytes:
    """`content` cut, with bits flipped, a stretch lost, doubled, overwritten or put in; or another kind of file."""
    kind, places, length, other, foreign = damage
    at = round(places[0] * (len(content) - 1))
    if kind == "foreign":
        return FOREIGN[foreign]
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        changed = bytearray(content)
        for place in places:
            changed[round(place * (len(content) - 1))] ^= 1 << length % 8
        return bytes(changed)
    new = {
        "lose": b"",
        "double": content[at : at + length] * 2,
        "overwrite": other,
        "insert": other + content[at : at + length],
        "zero": bytes(length),
    }[kind]
    return content[:at] + new + content[at + length :]


strange = st.sampled_from(STRANGE)


@st.composite
def lying(draw, value: object) -> object:
    """A JSON value, whole and well-formed, of which one to three parts say something else."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        part, path = value, []
        while isinstance(part, dict | list) and part and (not path or draw(st.integers(0, 3))):
            path.append(draw(st.sampled_from(sorted(part) if isinstance(part, dict) else range(len(part)))))
            part = part[path[-1]]
        if not path:
            return copy.deepcopy(draw(strange))
        holder = value
        for step in path[:-1]:
            holder = holder[step]
        what = draw(st.sampled_from(["replace", "replace", "replace", "lose", "add"]))
        if what == "lose":
            del holder[path[-1]]
        elif what == "add" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["x", "../x", "__metadata__", "000.p"]))] = copy.deepcopy(draw(strange))
        else:
            holder[path[-1]] = copy.deepcopy(draw(strange))
    return value


def with_header(content: bytes, header: object) -> bytes:
    """A safetensors file with another header over the same data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + int.from_bytes(content[:8], "little") :]


def header_of(content: bytes) -> dict:
    """The header of a safetensors file."""
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def read_or_refused(read: Callable[[Path], object], path: Path) -> ContourKVError | None:
    """Read the file; what may come out of it is a result, or one line that names it."""
    try:
        read(path)
    except ContourKVError as error:
        assert path.name in str(error) or path.parent.name in str(error), str(error)
        assert "\n" not in str(error) and len(str(error)) < 1500, str(error)
        return error
    return None

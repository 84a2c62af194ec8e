"""Tables, figures, commands and folds of the page."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..errors import DamagedFile
from ..statistics.tables import is_text, text_columns
from .markup import Markup, tag

LONG = 40
"""Characters from which a text takes several lines."""
PNG = b"\x89PNG\r\n\x1a\n"


def data_table(table: pd.DataFrame, name: str, rows: int) -> Markup:
    """The first `rows` of `table`, with headers that sort and intervals beside their points.

    Parameters
    ----------
    table : DataFrame
    name : str
        What a screen reader calls it.
    rows : int
    """
    columns = text_columns(table, rows)
    kinds = [_kind(is_text(table[column]), texts) for column, texts in columns.items()]
    head = [header(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    body = [
        tag("tr", [tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)])
        for row in zip(*columns.values(), strict=True)
    ]
    return sortable(head, body, name)


def _kind(text: bool, cells: Sequence[str]) -> str | None:
    """Class of a column's cells: numbers to the right, long texts on several lines."""
    if not text:
        return "n"
    return "w" if max(map(len, cells), default=0) > LONG else None


def sortable(head: Sequence[Markup], body: Sequence[Markup], name: str, id_: str | None = None) -> Markup:
    """A table of ready rows inside a part of the page that scrolls, by keyboard too."""
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", body), id=id_)
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {name}")


def header(name: str, kind: str | None = None) -> Markup:
    """The header of a column that sorts; `kind` is "n" for numbers."""
    return tag("th", tag("button", name, type="button"), scope="col", class_=kind)


def pairs(rows: Sequence[tuple[str, str]], heads: tuple[str, str], name: str) -> Markup:
    """A plain table of two columns, the first naming the row."""
    head = tag("tr", [tag("th", head, scope="col", class_="plain") for head in heads])
    body = [tag("tr", tag("th", first, scope="row"), tag("td", second)) for first, second in rows]
    table = tag("table", tag("thead", head), tag("tbody", body), class_="pairs")
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=f"Table: {name}")


def figure(path: str | os.PathLike, title: str, caption: str) -> Markup:
    """A png that opens large on a click, with its caption.

    Raises
    ------
    InvalidInput
        `path` is no png.
    """
    content = Path(path).read_bytes()
    if not content.startswith(PNG) or len(content) < 24:
        raise DamagedFile(path, "not a png")
    # At 200 dots an inch, two of them a point of the page stay sharp on fine screens.
    width, height = (size // 2 for size in struct.unpack(">II", content[16:24]))
    source = "data:image/png;base64," + base64.b64encode(content).decode()
    image = tag("img", src=source, alt=caption, width=width, height=height)
    button = tag("button", image, type="button", class_="zoom", data_title=title, aria_label=f"Enlarge: {title}")
    return tag("figure", button, tag("figcaption", caption))


def command(text: str) -> Markup:
    """A command to copy."""
    return tag("code", text, class_="again", tabindex="0")


def fold(title: str | Markup | Sequence[str], *children: Markup) -> Markup:
    """What opens on a click."""
    return tag("details", tag("summary", title), *children)


def link(path: str) -> Markup:
    """A file of the run, as it lies beside the page."""
    return tag("a", tag("code", path), href=path)

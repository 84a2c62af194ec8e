"""HTML that cannot be broken into: text is escaped wherever it comes from, only `Markup` is taken as it stands."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = {"meta", "link", "img", "input", "br"}
RAW = {"style", "script"}
"""Elements whose text a browser takes as it stands, up to their end tag."""


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, *children: str | Iterable[str] | None, **attributes: str | int | bool | None) -> Markup:
    """One element.

    Parameters
    ----------
    name : str
    children : text, `Markup`, or lists of them
        Text is escaped; None is nothing.
    attributes : text or numbers
        A final underscore is dropped from a name (`class_`, `name_`), others become hyphens; True stands without a
        value, False and None are left out.

    Examples
    --------
    >>> tag("p", "a < b", tag("br"), class_="note")
    '<p class="note">a &lt; b<br></p>'
    """
    shown = ""
    for key, value in attributes.items():
        if value is True:
            shown += f" {key.rstrip('_').replace('_', '-')}"
        elif value is not False and value is not None:
            shown += f' {key.rstrip("_").replace("_", "-")}="{html.escape(_plain(str(value)))}"'
    if name in VOID:
        return Markup(f"<{name}{shown}>")
    if name in RAW:
        (text,) = children
        if f"</{name}" in text.lower() or "<!--" in text:
            raise ValueError(f"{name}: text would end the element")
        return Markup(f"<{name}{shown}>{text}</{name}>")
    return Markup(f"<{name}{shown}>{joined(children)}</{name}>")


def joined(children: str | Iterable[str] | None) -> Markup:
    """Children one after another, text among them escaped."""
    if children is None:
        return Markup()
    if isinstance(children, Markup):
        return children
    if isinstance(children, str):
        return Markup(html.escape(_plain(children), quote=False))
    return Markup("".join(joined(child) for child in children))


def _plain(text: str) -> str:
    """`text` with what HTML has no character for replaced."""
    return re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]", "\ufffd", text)

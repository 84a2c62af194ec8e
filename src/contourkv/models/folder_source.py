"""A model folder in the Hugging Face layout: what of it is used, and what it must hold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

from ..errors import InvalidInput
from ..plain import NotPlain, parse_json, read_json
from ..provenance import file_sha256
from .loading import load_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json")
OPTIONAL = (
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "LICENSE*",
    "NOTICE*",
)


def choose(names: Iterable[str], where: str) -> tuple[list[str], list[str]]:
    """Names of the side files and of the weight files to take from a listing.

    Parameters
    ----------
    names : iterable of str
        File names, relative; those in subfolders are passed over.
    where : str
        The folder or repository, for messages.

    Returns
    -------
    side, weights : lists of str
        `weights` is the single file, or the index alone where the weights come in shards.

    Raises
    ------
    InvalidInput
        Naming what is missing.
    """
    names = sorted(name for name in names if "/" not in name)
    for name in REQUIRED:
        if name not in names:
            raise InvalidInput(f"{where}: no {name}; expected a model in the Hugging Face layout")
    weights = [name for name in (SINGLE, INDEX) if name in names][:1]
    if not weights:
        other = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
        only = f"; {other[0]} cannot be used: convert it to safetensors" if other else ""
        raise InvalidInput(f"{where}: no {SINGLE} (or {INDEX} and its shards){only}")
    side = [name for name in names if any(fnmatch(name, pattern) for pattern in (*REQUIRED, *OPTIONAL))]
    return side, weights


def files_of(folder: str | os.PathLike) -> list[str]:
    """Paths of the files in a model folder that `copy_model` may read, sorted; none where there is no folder."""
    wanted = (*REQUIRED, *OPTIONAL, INDEX, "*.safetensors")
    files = [path for path in Path(folder).glob("*") if path.is_file()]
    return sorted(str(path) for path in files if any(fnmatch(path.name, pattern) for pattern in wanted))


def copy_model(source: Path, folder: Path) -> dict:
    """Copy the model in `source` into `folder`, its weights as one file.

    Returns
    -------
    dict
        What source.json says of the source: its path and a revision made of the files' SHA-256.

    Raises
    ------
    InvalidInput
        The folder, or a file in it, is missing or damaged.
    """
    if not source.is_dir():
        raise InvalidInput(f"{source}: there is no such folder; correct the path of the model")
    side, weights = choose((path.name for path in source.iterdir() if path.is_file()), str(source))
    check_geometry(source)
    for name in side:
        shutil.copyfile(source / name, folder / name)
    if weights == [INDEX]:
        join_shards([source / shard for shard in shards_of(source / INDEX)], folder / SINGLE)
    else:
        shutil.copyfile(source / SINGLE, folder / SINGLE)
    read_header(folder / SINGLE)
    digest = file_sha256(folder / SINGLE)
    return {"path": str(source), "weights_sha256": digest, "revision": f"sha256:{digest[:12]}"}


def check_geometry(folder: Path) -> None:
    """Refuse, by its config.json alone, a model whose attention cannot be captured."""
    load_config(folder)


def shards_of(index: Path) -> list[str]:
    """Shard names in an index of weights, sorted.

    Raises
    ------
    InvalidInput
        The index is not one, or names a path outside its folder.
    """
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidInput(f"{index}: is not an index of weights ({error})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InvalidInput(f"{index}: names {name!r}; expected a .safetensors file beside it")
    return names


def read_header(path: Path) -> tuple[dict, int]:
    """Header of a safetensors file, and the offset where its data begins.

    Raises
    ------
    InvalidInput
        It is not whole.
    """
    if not path.is_file():
        raise InvalidInput(f"{path.parent}: no {path.name}, which the index of weights names")
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start = 8 + length
        try:
            header = parse_json(file.read(length)) if start <= size else None
            edges = [_edges(entry) for key, entry in header.items() if key != "__metadata__"]
        except (NotPlain, AttributeError, KeyError, TypeError, ValueError):
            header, edges = None, []
    # one after the other, from the first byte to the last
    places = [0, *(edge for pair in sorted(edges) for edge in pair), size - start]
    if header is None or places[::2] != places[1::2]:
        raise InvalidInput(f"{path}: is not a whole safetensors file; fetch it again")
    return header, start


def _edges(entry: dict) -> tuple[int, int]:
    """Where a tensor's bytes begin and end, counted from the end of the header."""
    begin, end = entry["data_offsets"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError("offsets that are none")
    return begin, end


def join_shards(shards: list[Path], target: Path, advance: Callable[[int], None] = lambda count: None) -> None:
    """Write the tensors of several safetensors files into one, without loading them.

    Parameters
    ----------
    shards : list of Path
    target : Path
    advance : callable
        Told the bytes written.

    Raises
    ------
    InvalidInput
        A shard is damaged, or two hold the same tensor.
    """
    whole: dict = {"__metadata__": {"format": "pt"}}
    offset = 0
    starts = []
    for path in shards:
        header, start = read_header(path)
        starts.append(start)
        size = path.stat().st_size - start
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            if key in whole:
                raise InvalidInput(f"{path}: tensor {key} is in another shard as well")
            whole[key] = {**entry, "data_offsets": [offset + edge for edge in entry["data_offsets"]]}
        offset += size
    text = json.dumps(whole, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for path, start in zip(shards, starts, strict=True):
            with open(path, "rb") as shard:
                shard.seek(start)
                while piece := shard.read(1 << 24):
                    out.write(piece)
                    advance(len(piece))

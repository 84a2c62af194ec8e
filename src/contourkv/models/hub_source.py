"""A model on the Hugging Face hub, at a commit that config/hub.lock.yaml remembers."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import ContourKVError, InvalidInput
from ..plain import NotPlain, read_json, read_yaml
from ..progress import Progress
from ..provenance import write_json, write_text
from .folder_source import INDEX, SINGLE, check_geometry, choose, join_shards, read_header, shards_of

COMMIT = re.compile(r"[0-9a-f]{40}")
LOCK_HEADER = (
    "# Commit that each revision of a hub repository was resolved to, by the first run that asked for it.\n"
    "# Later runs use these; remove a line to resolve it anew.\n"
)


def download(spec: Mapping, folder: Path, lock: Path, name: str) -> dict:
    """Bring a hub model into `folder`, its weights as one safetensors file.

    Parameters
    ----------
    spec : mapping
        `repo` (owner/name), `revision` (branch, tag or commit; default main).
    folder : Path
        Exists; is filled.
    lock : Path
        Lock file: repository -> revision -> commit. A revision it does not know is resolved and written there.
    name : str
        The model's name, for messages.

    Returns
    -------
    dict
        What source.json says of the source; `revision` is the commit.

    Raises
    ------
    InvalidInput
        No such repository or revision, a gated one, no safetensors, an architecture that cannot be captured.
    ContourKVError
        The hub cannot be reached.
    """
    from huggingface_hub import HfApi

    repo, revision = spec["repo"], str(spec.get("revision", "main"))
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    commit = read_lock(lock).get(repo, {}).get(revision)
    with _explained(repo, revision, commit, name):
        info = api.model_info(repo, revision=commit or revision, files_metadata=True)
        if not COMMIT.fullmatch(info.sha or "") or (commit and info.sha != commit):
            raise InvalidInput(
                f"model {name}: the hub answers commit {info.sha!r} for {repo} at {commit or revision}; "
                "expected " + (commit or "40 hexadecimal digits")
            )
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
        side, weights = choose(sizes, f"model {name}: hub repository {repo}")

        def fetch(files: list[str]) -> list[Path]:
            progress = Progress(sum(sizes.get(file, 0) for file in files), f"fetch {repo}", "bytes")
            bar = _bar(progress)
            paths = [Path(api.hf_hub_download(repo, file, revision=info.sha, tqdm_class=bar)) for file in files]
            progress.close()
            return paths

        for path in fetch(side):
            shutil.copyfile(path, folder / path.name)
        check_geometry(folder)
        if commit is None:
            write_lock(lock, repo, revision, info.sha)

        paths = fetch(weights)
        if weights == [INDEX]:
            paths = fetch(shards_of(paths[0]))
    if weights == [INDEX]:
        joined = Progress(sum(path.stat().st_size for path in paths), f"join the weights of {name}", "bytes")
        join_shards(paths, folder / SINGLE, joined.advance)
        joined.close()
    else:
        _link(paths[0], folder / SINGLE)
    read_header(folder / SINGLE)
    return {"repo": repo, "asked_revision": revision, "revision": info.sha}


def read_lock(lock: Path) -> dict[str, dict[str, str]]:
    """The lock file: repository -> revision -> commit. Empty where there is none.

    Raises
    ------
    InvalidInput
        The file is not of that form.
    """
    if not lock.exists():
        return {}
    try:
        value = read_yaml(lock)
    except (NotPlain, OSError) as error:
        raise InvalidInput(
            f"{lock}: expected repository -> revision -> commit ({error}); restore or delete it"
        ) from error
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(revisions, dict) for revisions in value.values()):
        raise InvalidInput(f"{lock}: expected repository -> revision -> commit; restore or delete it")
    for repo, revisions in value.items():
        for revision, commit in revisions.items():
            if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
                raise InvalidInput(
                    f"{lock}: {repo} at {revision} has {commit!r}; expected a commit of 40 hexadecimal digits"
                )
            if not isinstance(repo, str) or not isinstance(revision, str):
                raise InvalidInput(f"{lock}: {repo!r} at {revision!r}: expected both as text; put them in quotes")
    return value


def write_lock(lock: Path, repo: str, revision: str, commit: str) -> None:
    """Add one resolved revision to the lock file; several jobs may do so at a time."""
    import yaml

    lock.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        known = read_lock(lock)
        known.setdefault(repo, {})[revision] = commit
        write_text(lock, LOCK_HEADER + yaml.safe_dump(known, sort_keys=True))
    finally:
        os.close(folder)


def planned_commit(lock: Path, repo: str, revision: str, note: Path) -> str:
    """What a rule is told of the commit that it will read: another text than at its last run exactly if it is to run.

    The lock alone cannot tell, as the first run writes it: a result that is at the lock's commit is told what it was
    told when it was made.

    Parameters
    ----------
    lock : Path
        Lock file.
    repo, revision : str
    note : Path
        What `write_note` left beside the result.
    """
    locked = read_lock(lock).get(repo, {}).get(revision) or (revision if COMMIT.fullmatch(revision) else None)
    made, told = _read_note(note)
    if made is None:
        return revision
    if made == locked:
        return told
    return f"{locked or revision}, no longer {made}"


def write_note(note: Path, commit: str, told: str) -> None:
    """Leave beside a result its commit and what its rule was told; see `planned_commit`."""
    write_json(note, {"commit": commit, "told": told})


def _read_note(note: Path) -> tuple[str | None, str]:
    try:
        value = read_json(note)
        return str(value["commit"]), str(value["told"])
    except (OSError, NotPlain, KeyError, TypeError):
        return None, ""


def _link(cached: Path, target: Path) -> None:
    """Have weights of the hub's cache at `target` without a second copy, unless that is another disk."""
    real = cached.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def _bar(progress: Progress) -> type:
    from tqdm import tqdm

    class Bytes(tqdm):
        """Passes a download's bytes on to `progress`, which says them in lines."""

        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            progress.advance(int(n or 0))

    return Bytes


@contextmanager
def _explained(repo: str, revision: str, commit: str | None, name: str) -> Iterator[None]:
    """One line, and what to do, for what the hub client raises."""
    import httpx
    from huggingface_hub import errors

    at = commit or revision
    try:
        yield
    except errors.GatedRepoError as error:
        raise InvalidInput(
            f"model {name}: {repo} is gated; accept its licence on its hub page, then log in (hf auth login)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InvalidInput(f"model {name}: {repo} has no revision {at}; correct revision, or the hub lock") from error
    except errors.RepositoryNotFoundError as error:
        raise InvalidInput(
            f"model {name}: there is no {repo} on the hub, or it is private and you are not logged in"
        ) from error
    except (httpx.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        line = " ".join(str(error).split())[:200]
        raise ContourKVError(
            f"model {name}: the hub cannot be reached for {repo} ({line}); try again, or download the model "
            "elsewhere and use source: folder"
        ) from error

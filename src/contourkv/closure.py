"""What a workflow script depends on: the contourkv modules it imports, and the pinned packages those import.

Snakemake sees the time stamp of a script, and nothing of the modules behind it. So each rule carries the digest of its
script and of its import closure as a parameter: an edit in `figures.py` plans the figures again and nothing else, and
taking the edit back plans nothing. Modules are parsed, never imported.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .errors import InvalidInput

# import name -> name on the package index, where the two differ
_DISTRIBUTION = {"yaml": "pyyaml", "PIL": "pillow", "google": "protobuf"}
# shows progress and changes no result
_NO_MATTER = {"tqdm"}


@dataclass(frozen=True)
class Closure:
    """Import closure of one script.

    Attributes
    ----------
    modules : dict of str to Path
        Modules of the package, by dotted name, sorted; the `__init__` of each package on the way included.
    outside : tuple of str
        Top-level names imported from elsewhere, without the standard library and tqdm, sorted.
    """

    modules: dict[str, Path]
    outside: tuple[str, ...]


def closure(script: Path, package: Path) -> Closure:
    """Follow the imports of `script` through the modules of `package`.

    Imports count wherever they stand, in functions too. `from package.x import y` follows `y` where that is a
    module, or where the table `_HOME` of `x` says which module `y` loads from on first use. Other dynamic
    imports are not seen.

    Parameters
    ----------
    script : Path
    package : Path
        Folder of the package, such as `src/contourkv`.

    Raises
    ------
    InvalidInput
        The script, or a module of the package that is imported by name, does not exist or does not parse.
    """
    if not (package / "__init__.py").is_file():
        raise InvalidInput(f"{package}: is not a Python package: there is no __init__.py")
    modules: dict[str, Path] = {}
    outside: set[str] = set()
    todo = list(_imports(script, "", False))
    while todo:
        name = todo.pop()
        top = name.partition(".")[0]
        if top != package.name:
            outside.add(top)
            continue
        # importing a.b.c runs a, a.b and a.b.c; `c` may be a name defined in a.b instead
        path = package
        parts = name.split(".")
        for depth, part in enumerate(parts):
            path = path / part if depth else package
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            dotted = ".".join(parts[: depth + 1])
            if not file.is_file():
                if depth < len(parts) - 1:
                    raise InvalidInput(f"{script}: imports {name}, but there is no {file}")
                home = ".".join(parts[:depth])
                if part in _homes(modules[home]):
                    todo.append(f"{home}.{_homes(modules[home])[part]}")
                break
            if dotted not in modules:
                modules[dotted] = file
                todo.extend(_imports(file, dotted, file.name == "__init__.py"))
    known = sys.stdlib_module_names | {"snakemake"}
    return Closure(dict(sorted(modules.items())), tuple(sorted(outside - known - _NO_MATTER)))


def code_digest(script: Path, package: Path, found: Closure | None = None) -> str:
    """First 12 hex digits of the SHA-256 over the bytes of `script`, and names and bytes of the modules behind it.

    Snakemake would compare the script's time stamp, which a checkout or a copy moves. `found` is the closure, where it
    is known already.
    """
    total = hashlib.sha256(_source(script))
    for name, file in (found or closure(script, package)).modules.items():
        total.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()[:12]


def pins(script: Path, package: Path, lock: Path, found: Closure | None = None) -> dict[str, str]:
    """Versions that `lock` pins for the packages which the modules behind `script` import, sorted by name.

    Parameters
    ----------
    lock : Path
        Lines `name==version`.
    found : Closure, optional
        The script's, where it is known already.
    """
    pinned = _pinned(lock)
    names = (_normal(_DISTRIBUTION.get(name, name)) for name in (found or closure(script, package)).outside)
    return {name: pinned[name] for name in sorted(names) if name in pinned}


def _imports(file: Path, module: str, is_package: bool) -> tuple[str, ...]:
    """Dotted names that `file` imports, relative ones resolved against its own name `module`."""
    found: list[str] = []
    for level, home, name in _parsed(_source(file), str(file))[0]:
        if level:
            up = module.split(".")
            up = up[: len(up) - level + is_package]
            home = ".".join([*up, home] if home else up)
        found.append(home)
        if name:
            found.append(f"{home}.{name}")
    return tuple(found)


def _homes(file: Path) -> dict[str, str]:
    """The table `_HOME` of a module: name -> submodule that it is loaded from on first use."""
    return _parsed(_source(file), str(file))[1]


@cache
def _parsed(source: bytes, name: str) -> tuple[tuple[tuple[int, str, str], ...], dict[str, str]]:
    """Imports as (level, module, name) and the table `_HOME`; cached by content, as scripts share modules."""
    try:
        tree = ast.parse(source, filename=name)
    except SyntaxError as error:
        raise InvalidInput(f"{name}, line {error.lineno}: is not valid Python: {error.msg}") from error
    found: list[tuple[int, str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.extend((0, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = ("" if alias.name == "*" else alias.name for alias in node.names)
            found.extend((node.level, node.module or "", each) for each in names)
    tables = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "_HOME" for target in node.targets)
    )
    return tuple(found), next(tables, {})


def _source(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{file}: cannot be read: {error.strerror}") from error


def _pinned(lock: Path) -> dict[str, str]:
    """Package -> version of the lines `name==version`."""
    lines = _source(lock).decode().splitlines()
    pairs = (line.split(";")[0].split("#")[0].split("==") for line in lines if "==" in line)
    return {_normal(name.strip()): version.strip() for name, version in pairs}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

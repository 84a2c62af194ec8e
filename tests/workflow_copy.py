"""A copy of the repository in which the workflow runs, and what it plans there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PARTS = ["Snakefile", "workflow", "profiles", "config", "src", "envs", "requirements.lock"]


@dataclass(frozen=True)
class Change:
    """A change of a copy: what becomes of files, and keys that are merged over the configuration."""

    files: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    keys: dict | None = None


def appended(file: str, text: str = "\n# a comment counts as well\n") -> Change:
    """Text at the end of a file, which may be a new one."""
    return Change({file: lambda content: content + text.encode()})


def replaced(file: str, old: str, new: str) -> Change:
    """`new` where `old` stood, once."""

    def edit(content: bytes) -> bytes:
        assert content.count(old.encode()) == 1
        return content.replace(old.encode(), new.encode())

    return Change({file: edit})


def touched(*files: str) -> Change:
    """The same content, written again now."""
    return Change(dict.fromkeys(files, bytes))


def keys(**more: object) -> Change:
    """Keys over those of the configuration."""
    return Change(keys=more)


@dataclass(frozen=True)
class Copy:
    """A copy of the workflow and the package in a folder of its own."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, original: Path = ROOT) -> Copy:
        folder.mkdir(parents=True)
        for part in PARTS:
            source = original / part
            if source.is_dir() and not source.is_symlink():
                # with __pycache__ and its time stamps: numba need not compile again
                shutil.copytree(source, folder / part, symlinks=True)
            else:
                shutil.copy2(source, folder / part, follow_symlinks=False)
        return cls(folder)

    def run(self, *arguments: str) -> subprocess.CompletedProcess:
        """Call snakemake in the copy; the copy's package is the one that is imported."""
        return subprocess.run(stdout=subprocess.PIPE, text=True, **self._call(arguments))

    def start(self, *arguments: str, log: Path) -> subprocess.Popen:
        """The same without waiting for it, in a session of its own; what it says goes to `log`."""
        with open(log, "w", encoding="utf-8") as file:
            # Where the tests run in the background SIGINT is ignored, which children would inherit.
            heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
            return subprocess.Popen(stdout=file, start_new_session=True, preexec_fn=heard, **self._call(arguments))

    def processes(self) -> dict[int, str]:
        """Command lines of all processes that run in the copy, by process id."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if place.joinpath("cwd").resolve(strict=True) == self.folder.resolve():
                    found[int(place.name)] = place.joinpath("cmdline").read_text().replace("\0", " ")
            except OSError:  # ended meanwhile, or a zombie, which runs no more
                continue
        return found

    def _call(self, arguments: Sequence[str]) -> dict[str, object]:
        return {
            "args": [sys.executable, "-m", "snakemake", *arguments],
            "cwd": self.folder,
            "env": {**os.environ, "PYTHONPATH": str(self.folder / "src")},
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
        }

    def plan(self, *configs: str, more: dict | None = None, targets: Sequence[str] = ()) -> dict[str, int]:
        """Jobs that a run would do, by rule; `more` is merged over the config files."""
        if more is not None:
            (self.folder / "more.yaml").write_text(yaml.safe_dump(more))
            configs = (*configs, "more.yaml")
        done = self.run("-n", *targets, *(["--configfile", *configs] if configs else []))
        assert done.returncode == 0, done.stdout
        table = re.search(r"^job +count\n-+ +-+\n((?:\w+ +\d+\n)+)", done.stdout, re.MULTILINE)
        if table is None:
            assert "Nothing to be done" in done.stdout, done.stdout
            return {}
        jobs = {name: int(count) for name, count in (line.split() for line in table[1].splitlines())}
        return {name: count for name, count in jobs.items() if name not in ("all", "total")}

"""The machine that results are made on, and the versions that are installed there."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path

MATTER = [
    *("numpy", "pandas", "scipy", "pyarrow", "numba", "matplotlib", "torch", "transformers", "tokenizers"),
    *("safetensors", "ortools", "kvpress", "snakemake"),
]
"""Packages that numbers, figures or their cost depend on."""


def machine(root: str | os.PathLike = "/") -> str:
    """Processor, cores, memory, accelerators and system in one line.

    Parameters
    ----------
    root : path
        Where `proc` lies.
    """
    proc = Path(root) / "proc"
    processor = _first(proc / "cpuinfo", r"model name\s*: *(.+)") or platform.processor() or platform.machine()
    kilobytes = _first(proc / "meminfo", r"MemTotal: *(\d+) kB")
    parts = [processor, f"{cores()} core{'s' * (cores() != 1)}"]
    parts += [f"{int(kilobytes) / 2**20:.0f} GiB of memory"] if kilobytes else []
    parts += [
        model
        for path in sorted(proc.glob("driver/nvidia/gpus/*/information"))
        if (model := _first(path, r"Model: *(.+)"))
    ]
    return ", ".join([*parts, f"{platform.system()} {platform.machine()}"])


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages among `MATTER`; nothing is imported."""
    found = {"Python": platform.python_version()}
    for name in MATTER:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _first(path: Path, pattern: str) -> str:
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[1].strip() if found else ""

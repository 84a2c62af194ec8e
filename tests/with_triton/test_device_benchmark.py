"""`benchmarks/device.py --dry`: every line that needs no GPU runs, and what it compares agrees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/device.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_dry(tmp_path: Path) -> None:
    done = run("--dry", "--out", str(tmp_path / "device.json"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("PASS")
    rows = json.loads((tmp_path / "device.json").read_text(encoding="utf-8"))["rows"]
    assert {
        "decode steps without a wait",
        "Steps give what the model gives",
        "evicted",
        "allocation",
        "pools together",
        "all keys as the walk",
        "all keys, s = 4",
        "capture",
    } <= {row["name"] for row in rows}
    compared = [row for row in rows if "passed" in row]
    assert {"comparison", "replay with other lengths", "same as padded SDPA with a mask"} <= {
        r["name"] for r in compared
    }
    assert all(row["passed"] and row.get("error", 0) <= 1 for row in compared)
    timed = [row for row in rows if "kept_bytes" in row]
    assert {row["name"] for row in timed if "problem" in row} <= {"varlen_attn, lognormal"}
    assert sum(row["name"].startswith("contourkv") for row in timed) == 9
    assert all(0 < row["low"] <= row["median"] <= row["high"] for row in timed if "problem" not in row)


def test_no_gpu_is_said() -> None:
    done = run(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "--dry" in done.stderr

"""The kernels compiled for GPUs: the interpreter does not see what the compiler refuses or does badly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REGISTERS = 65536  # of a multiprocessor
SHARED = {"hopper": 227 * 1024, "small": 99 * 1024}  # bytes, of a program; a multiprocessor has 1 KiB more


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {kernel["name"]: kernel for kernel in map(json.loads, done.stdout.splitlines())}


@pytest.fixture
def hopper(kernels: dict[str, dict]) -> dict[str, dict]:
    """The first kernel."""
    chosen = {name: kernel for name, kernel in kernels.items() if not name.startswith("join") and "small" not in name}
    assert len(chosen) == 9
    return chosen


def test_keys_and_values_come_in_16_bytes_a_thread_while_others_are_used(hopper: dict[str, dict]) -> None:
    for name, kernel in hopper.items():
        assert kernel["wide copies"] >= 24, kernel
        # positions come in what they take
        assert kernel["copies"] == kernel["wide copies"] or "options" in name, kernel


def test_products_are_made_by_the_tensor_cores(hopper: dict[str, dict]) -> None:
    for kernel in hopper.values():
        assert kernel["HMMA"] + kernel["HGMMA"] >= 20, kernel


def test_as_many_programs_fit_as_the_grid_counts_on(kernels: dict[str, dict]) -> None:
    for name, kernel in kernels.items():
        threads = 32 * kernel["warps"] * kernel["programs"]
        assert -(-kernel["registers"] // 8) * 8 * threads <= REGISTERS, kernel
        shared = SHARED["small" if "small" in name else "hopper"]
        assert (kernel["shared"] + 1024) * kernel["programs"] <= shared + 1024, kernel


def test_nothing_is_spilled_but_where_it_is_said(hopper: dict[str, dict]) -> None:
    assert {name for name, kernel in hopper.items() if kernel["stack"]} <= {"fp32 256 256 x1"}


def test_the_second_kernel_waits_for_the_first(kernels: dict[str, dict]) -> None:
    assert kernels["join bf16"]["ACQBULK"] == 1

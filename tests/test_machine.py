"""The machine and its versions, as the page and the costs name them."""

import platform

import numpy as np

from contourkv.machine import cores, machine, versions


def test_processor_memory_and_accelerators_are_named(tmp_path):
    proc = tmp_path / "proc"
    card = proc / "driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (proc / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Some  CPU @ 2GHz\nprocessor\t: 1\nmodel name\t: other\n"
    )
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\n")
    (card / "information").write_text("Model: \t\t NVIDIA X1\nIRQ: 7\n")
    line = machine(tmp_path)
    assert line.startswith("Some  CPU @ 2GHz, ")
    assert f"{cores()} core" in line and "16 GiB of memory, NVIDIA X1, " in line
    assert line.endswith(f"{platform.system()} {platform.machine()}")


def test_a_system_without_proc_is_named_by_what_python_knows(tmp_path):
    assert "GiB" not in machine(tmp_path) and platform.machine() in machine(tmp_path)


def test_versions_are_those_that_are_installed():
    found = versions()
    assert found["Python"] == platform.python_version() and found["numpy"] == np.__version__
    assert all(found.values())

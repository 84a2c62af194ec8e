"""Devices by name: what is refused, and what falls back to the CPU."""

import subprocess
import sys

import pytest
import torch

from contourkv import devices
from contourkv.devices import checked_device, device_name, usable_device
from contourkv.errors import InvalidInput


def test_a_device_that_is_there():
    assert checked_device("cpu") == torch.device("cpu")
    assert usable_device("cpu") == "cpu" and usable_device("cpu:0") == "cpu:0"


@pytest.mark.parametrize("name", ["abacus", "cuda:-1", "", 3.5, "xla"])
def test_what_cannot_be_used_is_refused(name):
    with pytest.raises(InvalidInput, match=r"^device: "):
        checked_device(name)


def test_without_a_gpu_a_job_runs_on_the_cpu_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert usable_device("cuda") == usable_device("cuda:1") == "cpu"
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and said[1] == (
        "device: cuda:1 was asked for and there is no CUDA device here: computed on the CPU"
    )
    with pytest.raises(InvalidInput, match="abacus"):
        usable_device("abacus")


def test_results_name_which_gpu_it_is(monkeypatch):
    monkeypatch.setattr(devices, "checked_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Abacus {torch.device(device).index or 0}")
    assert device_name("cuda") == "cuda (Abacus 0)"
    assert device_name(torch.device("cuda:1")) == "cuda:1 (Abacus 1)"
    assert device_name("cpu") == device_name(torch.device("cpu")) == "cpu"


def test_a_gpu_that_is_not_there_has_no_name():
    with pytest.raises(InvalidInput, match=r"device: cuda:99 was asked for"):
        device_name("cuda:99")


def test_the_cpu_costs_no_torch():
    script = (
        "import sys; from contourkv.devices import *; device_name(usable_device('cpu')); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"

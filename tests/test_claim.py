"""A claim is held by one process, named to the others, and gone with it, whatever ends it."""

import os
import signal
import subprocess
import sys

import pytest

from contourkv.claim import claim
from contourkv.errors import ContourKVError

HOLD = """
import sys, time
from contourkv.claim import claim
held = claim(sys.argv[1], "it")
print(1, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_another_holder_is_named_and_none_is_left_after_a_kill(tmp_path, number):
    lock = tmp_path / "deep" / ".claimed"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"1\n"
    with pytest.raises(ContourKVError, match=rf"results/x: another run .* \(process {holder.pid} on .*\)"):
        claim(lock, "results/x")
    holder.send_signal(number)
    holder.wait(20)
    holder.stdout.close()
    with claim(lock, "results/x"):
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(ContourKVError, match=f"process {os.getpid()} "):
            claim(lock, "results/x")
    claim(lock, "results/x").close()


def test_a_place_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    def refuse(*arguments, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ContourKVError, match=r"\.claimed: could not be written \(Read-only file system\)"):
        claim(tmp_path / ".claimed", "it")

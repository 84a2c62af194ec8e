"""A run that is killed over and over, at moments that nobody chose, ends with what an undisturbed one makes.

`make test-kill`; CONTOURKV_KILL_SEED=... takes other moments, CONTOURKV_KILLS=... another number of them.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from itertools import count
from pathlib import Path

import pytest
from workflow_copy import Copy
from workflow_results import assert_same_results

RUN = ("--cores", "2", "--configfile", "config/test.yaml")
SEED = int(os.environ.get("CONTOURKV_KILL_SEED", 1))
KILLS = int(os.environ.get("CONTOURKV_KILLS", 20))
# Most moments are counted from a run's first script on, which most jobs outlive; some from the run's own start.
STARTING = 1 / 6
IN_START, IN_JOBS = 5.0, 15.0
# As much as a job that is stuck outside of Python may take to notice that its workflow is gone.
GRACE = 60.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A copy in which the workflow has run without being disturbed, and all is done with one thread a job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        copy = Copy.make(tmp_path_factory.mktemp("kill") / "undisturbed")
        done = copy.run(*RUN)
        assert done.returncode == 0, done.stdout[-5000:]
        yield copy


def wait_for_nobody(copy: Copy) -> None:
    limit = time.monotonic() + GRACE
    while left := copy.processes():
        assert time.monotonic() < limit, f"still running: {left}"
        time.sleep(0.1)


def state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def hit(process: int, number: int) -> bool:
    """Send a signal to a process that is alive: it is stopped first, to be sure. False if it has ended."""
    try:
        os.kill(process, signal.SIGSTOP)
        limit = time.monotonic() + GRACE
        while (found := state(process)) not in ("T", "Z", "X", "") and time.monotonic() < limit:
            time.sleep(0.001)
        if found != "T":
            return False
        os.kill(process, number)
        os.kill(process, signal.SIGCONT)
    except ProcessLookupError:  # SIGKILL leaves nothing to continue
        pass
    return found == "T"


def scripts(copy: Copy) -> list[int]:
    return sorted(process for process, command in copy.processes().items() if ".snakemake/scripts/" in command)


def disturb(copy: Copy, run: subprocess.Popen, number: int, whom: str, draw: random.Random) -> str:
    """Send a signal to the run, or to one of its scripts, and say when; "" if the run had ended before."""
    starting, moment, which = draw.random() < STARTING, draw.random(), draw.random()
    while not starting and run.poll() is None and not scripts(copy):
        time.sleep(0.01)
    seconds = moment * (IN_START if starting else IN_JOBS)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(seconds)
    while run.poll() is None:
        found = scripts(copy) if whom == "script" else [run.pid]
        if found and hit(found[int(which * len(found))], number):
            return f"{seconds:.1f} s after {'its start' if starting else 'its first script'}"
        time.sleep(0.01)
    return ""


def test_a_run_that_is_killed_anywhere_ends_with_the_same_bytes(undisturbed, tmp_path):
    print(f"CONTOURKV_KILL_SEED={SEED}")
    draw = random.Random(SEED)
    plan = [(signal.SIGKILL, whom) for whom in ("main", "script") for _ in range(KILLS // 2)]
    plan += [(number, "main") for number in (signal.SIGINT, signal.SIGTERM) for _ in range(1 + (KILLS >= 10))]
    draw.shuffle(plan)
    copy = Copy.make(tmp_path / "killed-0")
    for attempt in count(1):
        log = tmp_path / f"{attempt:03d}.log"
        run = copy.start(*RUN, log=log)
        if not plan:
            break
        number, whom = plan[-1]
        happened = disturb(copy, run, number, whom, draw)
        run.wait(3600)
        said = log.read_text()
        print(
            f"{signal.Signals(number).name} to {whom}, {happened or 'ended before'}: exit {run.returncode}", flush=True
        )
        for words in ("Traceback", "cannot be locked", "another run"):
            assert words not in said, said[-5000:]
        if not happened:
            # It ended by itself, and so must have ended well. The moments that are left are those of another run.
            assert run.returncode == 0, said[-5000:]
            assert_same_results(undisturbed, copy)
            copy = Copy.make(tmp_path / f"killed-{attempt}")
            continue
        plan.pop()
        killed = whom == "main" and number == signal.SIGKILL
        assert run.returncode == (-signal.SIGKILL if killed else 1), said[-5000:]
        wait_for_nobody(copy)
    assert run.wait(7200) == 0, log.read_text()[-5000:]
    assert_same_results(undisturbed, copy)
    assert not [path for name in (".partial-*", ".replaced-*", "*.parts") for path in copy.folder.rglob(name)]
    assert copy.plan("config/test.yaml") == {}
